//! A fake engine and arena: the KV of a block is a hash of every token up to its last one, so that a lost, stale, swapped or overwritten block is noticed.

use std::collections::BTreeMap;

use baton_types::{BlockId, FinishReason, SamplingParams, TokenId};

use crate::{StepOutput, StepPlan, StepSequence, StepSlice};

pub const BLOCK_TOKENS: usize = 4;
pub const NUM_LAYERS: u32 = 3;
pub const VOCAB: u32 = 50;

/// FNV-1a, enough to tell contents apart.
pub fn hash(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| (hash ^ value).wrapping_mul(0x0100_0000_01b3))
}

/// What a layer of the block of position `len - 1` holds once `len` tokens are known.
fn content(layer: u32, tokens: &[TokenId], len: usize) -> u64 {
    hash([u64::from(layer)].into_iter().chain(tokens[..len].iter().map(|token| u64::from(*token))))
}

/// The token that the model draws after `tokens`.
pub fn next_token(tokens: &[TokenId]) -> TokenId {
    (content(99, tokens, tokens.len()) >> 7) as u32 % VOCAB
}

/// The whole output of a request, by the definition.
pub fn reference(prompt: &[TokenId], sampling: &SamplingParams, context: usize) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = prompt.to_vec();
    loop {
        let token = next_token(&tokens);
        tokens.push(token);
        let output = tokens.len() - prompt.len();
        let length = output == sampling.max_tokens as usize || tokens.len() == context;
        if sampling.stop_token_ids.contains(&token) {
            return (tokens.split_off(prompt.len()), FinishReason::Stop);
        }
        if length {
            return (tokens.split_off(prompt.len()), FinishReason::Length);
        }
    }
}

/// What a layer's compute finds of the positions before the step's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Past {
    /// Their KV.
    Here,
    /// Their KV is still coming: the layer's own K and V do not depend on it.
    Coming,
    /// An earlier layer's attention read what was no KV: everything from there on means nothing.
    Wrong,
}

/// One node's memory.
#[derive(Debug, Default)]
pub struct Arena {
    bytes: BTreeMap<(u32, BlockId), u64>,
}

impl Arena {
    pub fn read(&self, layer: u32, block: BlockId) -> u64 {
        self.bytes.get(&(layer, block)).copied().unwrap_or(0)
    }

    pub fn write(&mut self, layer: u32, block: BlockId, value: u64) {
        self.bytes.insert((layer, block), value);
    }

    /// One layer of a step: checks the KV of every earlier position, then writes that of the step's.
    pub fn compute_layer(&mut self, plan: &StepPlan, layer: u32) {
        for sequence in &plan.sequences {
            self.compute_sequence(sequence, layer, Past::Here);
        }
        if let Some(slice) = plan.slice.as_ref().filter(|slice| slice.layers.contains(&layer)) {
            let before = if slice.layers.start == 0 { Vec::new() } else { hidden(slice, slice.layers.start) };
            assert_eq!(slice.hidden, before, "{:?}", slice.sequence.key);
            self.compute_sequence(&slice.sequence, layer, Past::Here);
        }
    }

    /// One sequence's part of it.
    pub fn compute_sequence(&mut self, sequence: &StepSequence, layer: u32, past: Past) {
        if past == Past::Here {
            self.check_past(sequence, layer);
        }
        self.write_range(sequence, layer);
        if past == Past::Wrong {
            for index in sequence.range.start / BLOCK_TOKENS..sequence.range.end.div_ceil(BLOCK_TOKENS) {
                self.write(layer, sequence.block_table[index], 0xbad);
            }
        }
    }

    fn check_past(&self, sequence: &StepSequence, layer: u32) {
        let start = sequence.range.start;
        for index in 0..start.div_ceil(BLOCK_TOKENS) {
            let len = start.min((index + 1) * BLOCK_TOKENS);
            let expected = content(layer, &sequence.tokens, len);
            let found = self.read(layer, sequence.block_table[index]);
            assert_eq!(found, expected, "layer {layer} of block {index} of {:?} at {start}", sequence.key);
        }
    }

    fn write_range(&mut self, sequence: &StepSequence, layer: u32) {
        let range = &sequence.range;
        for index in range.start / BLOCK_TOKENS..range.end.div_ceil(BLOCK_TOKENS) {
            let len = range.end.min((index + 1) * BLOCK_TOKENS);
            self.write(layer, sequence.block_table[index], content(layer, &sequence.tokens, len));
        }
    }
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
    };
    let slice = plan.slice.iter().map(|slice| {
        let is_last = slice.layers.end == NUM_LAYERS;
        let hidden = if is_last { Vec::new() } else { hidden(slice, slice.layers.end) };
        StepOutput { sampled: output(&slice.sequence).sampled.filter(|_| is_last), hidden, ..output(&slice.sequence) }
    });
    plan.sequences.iter().map(output).chain(slice).collect()
}

/// What a tail's tokens are between two layers.
fn hidden(slice: &StepSlice, layer: u32) -> Vec<f32> {
    slice.sequence.tokens[slice.sequence.range.clone()]
        .iter()
        .map(|token| (token * NUM_LAYERS + layer) as f32)
        .collect()
}
