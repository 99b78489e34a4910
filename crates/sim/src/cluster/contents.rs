//! What blocks hold, while something may go wrong: for each layer a hash of every token up to the
//! block's last one. So a lost, stale, swapped or overwritten block is noticed as soon as a step
//! reads it.

use std::collections::HashMap;

use baton_scheduler::{StepPlan, StepSequence};
use baton_types::{BlockId, RequestId, TokenId};

/// What a layer's attention finds of the positions before the step's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Past {
    /// Their KV.
    Here,
    /// No KV: everything from there on means nothing.
    Wrong,
}

/// The arenas of all nodes.
#[derive(Debug)]
pub(super) struct Contents {
    arenas: Vec<HashMap<(u32, BlockId), u64>>,
    block_tokens: usize,
    /// Of each request, the hashes up to the ends of its blocks.
    chains: HashMap<RequestId, Vec<u64>>,
}

/// FNV-1a, enough to tell contents apart.
fn hash(state: u64, tokens: &[TokenId]) -> u64 {
    tokens.iter().fold(state, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3))
}

impl Contents {
    pub(super) fn new(nodes: usize, block_tokens: u32) -> Self {
        let arenas = std::iter::repeat_with(HashMap::new).take(nodes).collect();
        Self { arenas, block_tokens: block_tokens as usize, chains: HashMap::new() }
    }

    /// A process ends.
    pub(super) fn clear(&mut self, node: usize) {
        self.arenas[node].clear();
    }

    pub(super) fn read(&self, node: usize, layer: u32, block: BlockId) -> u64 {
        self.arenas[node].get(&(layer, block)).copied().unwrap_or(0)
    }

    pub(super) fn write(&mut self, node: usize, layer: u32, block: BlockId, value: u64) {
        self.arenas[node].insert((layer, block), value);
    }

    /// What a block of a layer holds once `len` tokens of the sequence are computed.
    fn expected(&mut self, sequence: &StepSequence, layer: u32, len: usize) -> u64 {
        let chain = self.chains.entry(sequence.key.request).or_insert_with(|| vec![1]);
        let size = self.block_tokens;
        while chain.len() * size <= len {
            let begin = (chain.len() - 1) * size;
            chain.push(hash(chain[chain.len() - 1], &sequence.tokens[begin..begin + size]));
        }
        let whole = len / size;
        hash(chain[whole], &sequence.tokens[whole * size..len]) ^ u64::from(layer)
    }

    /// A layer of a sequence's part of a step.
    ///
    /// # Panics
    /// If a block does not hold what it should.
    pub(super) fn compute(&mut self, node: usize, sequence: &StepSequence, layer: u32, past: Past) {
        let range = &sequence.range;
        let size = self.block_tokens;
        if past == Past::Here {
            for index in 0..range.start.div_ceil(size) {
                let len = range.start.min((index + 1) * size);
                let found = self.read(node, layer, sequence.block_table[index]);
                let block = sequence.block_table[index];
                assert_eq!(
                    found,
                    self.expected(sequence, layer, len),
                    "node {node}, layer {layer}: {block:?}, block {index} of {:?}, does not hold its {len} tokens",
                    sequence.key
                );
            }
        }
        for index in range.start / size..range.end.div_ceil(size) {
            let len = range.end.min((index + 1) * size);
            let value = if past == Past::Here { self.expected(sequence, layer, len) } else { 0xbad };
            self.write(node, layer, sequence.block_table[index], value);
        }
    }

    /// All layers of a step, as far as they are in it.
    pub(super) fn compute_step(&mut self, node: usize, plan: &StepPlan, num_layers: u32) {
        for layer in 0..num_layers {
            for sequence in &plan.sequences {
                self.compute(node, sequence, layer, Past::Here);
            }
            if let Some(slice) = plan.slice.as_ref().filter(|slice| slice.layers.contains(&layer)) {
                self.compute(node, &slice.sequence, layer, Past::Here);
            }
        }
    }
}
