//! Prompts for a trace that has none: tokens that depend on the block's id, so that equal ids are
//! equal prefixes.

use baton_types::TokenId;

use super::engine::VOCABULARY;
use crate::trace::TraceRequest;

/// The prompt of a request. Hashes are chained, so that the first tokens of each of the trace's
/// blocks tell it from others.
pub(super) fn prompt(request: &TraceRequest, block_tokens: u32) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(request.input_length as usize);
    for &id in &request.hash_ids {
        let end = tokens.len() + block_tokens as usize;
        tokens.extend([(id % u64::from(VOCABULARY)) as TokenId, (id / u64::from(VOCABULARY)) as TokenId % VOCABULARY]);
        tokens.push((id >> 62) as TokenId);
        tokens.resize(end, 0);
    }
    // The last id is of all that is left.
    tokens.resize(request.input_length as usize, 0);
    tokens
}
