//! A small model, and an engine for it: any token follows from those before it.

use baton_types::{Attempt, DecodeTarget, Generation, KvDtype, KvLayout, NodeId, RequestId, RequestKey, TokenId};

use crate::{ModelConfig, StepOutput, StepPlan, StepSequence, StepSlice};

pub const BLOCK_TOKENS: usize = 4;
pub const NUM_LAYERS: u32 = 3;
pub const VOCAB: u32 = 50;
pub const CONTEXT: u32 = 60;

pub fn model(num_blocks: u32) -> ModelConfig {
    let layout = KvLayout {
        model: 7,
        num_layers: NUM_LAYERS,
        num_kv_heads: 1,
        head_dim: 1,
        block_tokens: BLOCK_TOKENS as u32,
        dtype: KvDtype::F32,
        num_blocks,
    };
    ModelConfig { layout, context_length: CONTEXT, vocab_size: VOCAB }
}

pub fn key(n: u64) -> RequestKey {
    RequestKey { request: RequestId(n.into()), attempt: Attempt(0) }
}

pub fn target() -> DecodeTarget {
    DecodeTarget { node: NodeId::new("d0").unwrap(), generation: Generation(1), address: String::new(), tbt: None }
}

/// The token that the model draws after `tokens`.
fn next_token(tokens: &[TokenId]) -> TokenId {
    // FNV-1a, enough to tell contents apart.
    let hash = |hash: u64, token: &TokenId| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3);
    (tokens.iter().fold(0xcbf2_9ce4_8422_2325, hash) >> 7) as u32 % VOCAB
}

/// What sampling gives at the end of a step.
pub fn outputs(plan: &StepPlan) -> Vec<StepOutput> {
    let output = |sequence: &StepSequence| StepOutput {
        key: sequence.key,
        sampled: sequence.is_last_chunk.then(|| (next_token(&sequence.tokens[..sequence.range.end]), None)),
        prompt_logprobs: match sequence.logits {
            crate::LogitsWanted::All => vec![Default::default(); sequence.range.len()],
            _ => Vec::new(),
        },
        hidden: Vec::new(),
        failed: None,
        is_mask_late: false,
    };
    let slice = plan.slice.iter().map(|slice| {
        let is_last = slice.layers.end == NUM_LAYERS;
        let hidden = if is_last { Vec::new() } else { hidden(slice, slice.layers.end) };
        StepOutput { sampled: output(&slice.sequence).sampled.filter(|_| is_last), hidden, ..output(&slice.sequence) }
    });
    plan.sequences.iter().map(output).chain(slice).collect()
}

/// What a partial prefill's tokens are between two layers.
fn hidden(slice: &StepSlice, layer: u32) -> Vec<f32> {
    slice.sequence.tokens[slice.sequence.range.clone()]
        .iter()
        .map(|token| (token * NUM_LAYERS + layer) as f32)
        .collect()
}
