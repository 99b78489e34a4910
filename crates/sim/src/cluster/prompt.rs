//! Prompts for a trace that has none: tokens that depend on the block's id, so that equal ids are
//! equal prefixes.

use baton_types::TokenId;

use super::engine::VOCABULARY;
use crate::trace::{BLOCK_TOKENS, TraceRequest};

/// The prompt of a request. Hashes are chained, so that the first tokens of each of the trace's
/// blocks tell it from others.
pub(super) fn prompt(request: &TraceRequest) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(request.hash_ids.len() * BLOCK_TOKENS as usize);
    for &id in &request.hash_ids {
        let end = tokens.len() + BLOCK_TOKENS as usize;
        tokens.extend([(id % u64::from(VOCABULARY)) as TokenId, (id / u64::from(VOCABULARY)) as TokenId % VOCABULARY]);
        tokens.push((id >> 62) as TokenId);
        tokens.resize(end, 0);
    }
    tokens.truncate(request.input_length as usize);
    tokens
}
