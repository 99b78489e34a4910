//! What a decode node knows about one request.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::{BlockHasher, Reservation};
use baton_types::{BlockHash, BlockId, ConductorId, FinishReason, GrantId, SamplingParams, TokenId};

use crate::prefill::PushId;
use crate::step::{LogitsWanted, StepSequence};

/// A request that has a grant or more.
#[derive(Debug)]
pub(super) struct Sequence {
    pub grant: GrantId,
    pub prompt_tokens: usize,
    pub max_tokens: u32,
    /// Most tokens of prompt and output together.
    pub max_total_tokens: usize,
    /// Chained hashes of the prompt's full blocks.
    pub prompt_hashes: Arc<[BlockHash]>,
    /// Of the prompt, and of the output as it grows.
    pub blocks: Vec<BlockId>,
    /// Leading blocks that were here before; the rest of the prompt's arrives under the grant.
    pub held_blocks: usize,
    /// Room for the rest of the output.
    pub reservation: Reservation,
    /// Batches that arrived, so that one that is told twice counts once.
    pub pushes: BTreeSet<PushId>,
    pub arrived_bytes: u64,
    pub expected_bytes: u64,
    pub handed_over: Option<HandedOver>,
    pub phase: Phase,
    /// The engine works on it.
    pub in_step: bool,
    /// Its outcome is told; it stays only until the step is over.
    pub ended: bool,
}

/// Where a sequence stands on its way into the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Bytes or the hand-over are missing.
    Granted,
    /// All is here; it joins the batch when there is a place.
    Waiting,
    /// In the running batch.
    Running,
}

/// What the hand-over brings.
#[derive(Debug)]
pub(super) struct HandedOver {
    pub conductor: ConductorId,
    pub at: Instant,
    /// Prompt and output so far; the KV of the last one is not computed yet.
    pub tokens: Vec<TokenId>,
    pub sampling: Arc<SamplingParams>,
    pub hasher: BlockHasher,
    /// Of the last full block.
    pub last_hash: Option<BlockHash>,
    /// When it first was in a step; told with its first token.
    pub first_step: Option<Instant>,
    pub first_token_told: bool,
}

impl HandedOver {
    /// Why the last token ends the output, if it does.
    pub(super) fn finish(&self, max_total_tokens: usize) -> Option<FinishReason> {
        let last = self.tokens.last()?;
        if self.sampling.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() >= max_total_tokens).then_some(FinishReason::Length)
    }
}

impl Sequence {
    pub(super) fn is_complete(&self) -> bool {
        self.handed_over.is_some() && self.arrived_bytes == self.expected_bytes
    }

    /// Tokens known; 0 before the hand-over.
    pub(super) fn num_tokens(&self) -> usize {
        self.handed_over.as_ref().map_or(0, |handed_over| handed_over.tokens.len())
    }

    /// Its part of a step: the last token.
    pub(super) fn step_sequence(&self, key: baton_types::RequestKey) -> Option<StepSequence> {
        let handed_over = self.handed_over.as_ref()?;
        let len = handed_over.tokens.len();
        Some(StepSequence {
            key,
            tokens: handed_over.tokens.as_slice().into(),
            prompt_tokens: self.prompt_tokens,
            range: len - 1..len,
            block_table: self.blocks.as_slice().into(),
            logits: LogitsWanted::Last,
            zero_tail: None,
            sampling: handed_over.sampling.clone(),
            is_last_chunk: true,
            awaits_prefix: false,
        })
    }
}
