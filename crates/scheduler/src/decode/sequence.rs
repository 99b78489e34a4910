//! What a decode node knows about one request.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::{BlockHasher, Reservation};
use baton_types::{BlockHash, BlockId, ConductorId, FinishReason, GrantId, SamplingParams, TokenId};

use super::local::LocalPrompt;
use super::migration::Fetch;
use super::partial_prefill::PartialPrefill;
use crate::prefill::PushId;
use crate::step::{LogitsWanted, StepSequence};

/// A request that has a grant or more.
#[derive(Debug)]
pub(super) struct Sequence {
    /// `None` if the prompt is computed here.
    pub grant: Option<GrantId>,
    /// Its prompt was computed by a node of another KV compatibility class: its blocks do not
    /// become cache.
    pub is_other_class: bool,
    /// Its number among those that came: the lower, the older.
    pub turn: u64,
    pub prompt_tokens: usize,
    /// Of prompt and output, those that came with the grant or the job: computed before the first
    /// token is drawn here.
    pub given_tokens: usize,
    pub max_tokens: u32,
    /// Most tokens of prompt and output together.
    pub max_total_tokens: usize,
    /// Chained hashes of the full blocks, of the prompt and then of the output.
    pub hashes: Vec<BlockHash>,
    /// Of the prompt, and of the output as it grows; none while it is preempted.
    pub blocks: Arc<Vec<BlockId>>,
    /// Leading blocks that were here before; the rest of the prefill node's part arrives under the
    /// grant.
    pub held_blocks: usize,
    /// Leading blocks that a prefill node computes: of the tokens given, or of those before the
    /// partial prefill.
    pub head_blocks: usize,
    /// Room promised for some of the output.
    pub reservation: Reservation,
    /// Batches that arrived, so that one that is told twice counts once.
    pub pushes: BTreeSet<PushId>,
    pub arrived_bytes: u64,
    pub expected_bytes: u64,
    pub handed_off: Option<HandedOff>,
    pub phase: Phase,
    /// Tokens whose KV is in the arena.
    pub num_computed_tokens: usize,
    /// Leading blocks that are hashed.
    pub num_complete_blocks: usize,
    /// If the prompt is computed here.
    pub local: Option<LocalPrompt>,
    /// If the last part of the prompt is computed here (partial prefill), and no token was drawn
    /// yet.
    pub tail: Option<PartialPrefill>,
    /// Blocks that come from the tier; it joins the batch when they are here.
    pub loading: Option<Range<usize>>,
    /// Blocks that come from the decode node that it was on before.
    pub fetch: Option<Fetch>,
    /// When its conductor was last told that another decode node may take it.
    pub offered: Option<Instant>,
    /// When its conductor last heard of its compute.
    pub told: Instant,
    /// The engine works on it.
    pub in_step: bool,
    /// Its outcome is told; it stays only until the step is over.
    pub ended: bool,
}

/// Where a sequence stands on its way into the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Bytes or the handoff are missing.
    Granted,
    /// All is here; it joins the batch when there is a place.
    Waiting,
    /// It has no blocks, any more or yet: its tokens are computed when there is room for them.
    Preempted,
    /// Its blocks come from another decode node: `migration.rs`.
    Fetching,
    /// In the running batch.
    Running,
}

/// What comes with the handoff.
#[derive(Debug)]
pub(super) struct HandedOff {
    pub conductor: ConductorId,
    pub at: Instant,
    /// Prompt and output so far; the KV of the last one is not computed yet.
    pub tokens: Arc<Vec<TokenId>>,
    pub sampling: Arc<SamplingParams>,
    pub hasher: BlockHasher,
    /// When it first was in a step; told with its first token.
    pub first_step: Option<Instant>,
    pub first_token_told: bool,
}

impl HandedOff {
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
        self.handed_off.is_some() && self.arrived_bytes == self.expected_bytes
    }

    /// Whether neither the engine, nor the tier, nor a fetch has anything to do with its blocks.
    pub(super) fn is_untouched(&self) -> bool {
        !self.in_step && self.loading.is_none() && self.fetch.is_none()
    }

    /// Tokens known; 0 before the handoff.
    pub(super) fn num_tokens(&self) -> usize {
        self.handed_off.as_ref().map_or(0, |handed_off| handed_off.tokens.len())
    }

    /// Whether the prompt is computed here, and no token was drawn yet.
    pub(super) fn is_prompt(&self) -> bool {
        self.local.is_some() && self.num_tokens() == self.given_tokens
    }

    /// Tokens to be computed before the next one is drawn; one in ordinary decoding.
    pub(super) fn remaining_tokens(&self) -> usize {
        self.num_tokens() - self.num_computed_tokens
    }

    /// Full blocks that may come from the cache: the last token is always computed, and all are if
    /// the log-probabilities of the prompt are wanted.
    pub(super) fn reusable_blocks(&self, block_tokens: usize) -> usize {
        let wants_all = self.wants_prompt_logprobs() && self.is_prompt();
        let full = self.num_tokens().saturating_sub(1) / block_tokens;
        if wants_all { 0 } else { full.min(self.hashes.len()) }
    }

    fn wants_prompt_logprobs(&self) -> bool {
        self.handed_off.as_ref().is_some_and(|handed_off| handed_off.sampling.prompt_logprobs.is_some())
    }

    /// Its part of a step: its next `share` tokens.
    pub(super) fn step_sequence(&self, key: baton_types::RequestKey, share: usize) -> Option<StepSequence> {
        let handed_off = self.handed_off.as_ref()?;
        let range = self.num_computed_tokens..self.num_computed_tokens + share;
        let is_last_chunk = range.end == handed_off.tokens.len();
        let logits = match (self.is_prompt() && self.wants_prompt_logprobs(), is_last_chunk) {
            (true, _) => LogitsWanted::All,
            (false, true) => LogitsWanted::Last,
            (false, false) => LogitsWanted::None,
        };
        Some(StepSequence {
            key,
            tokens: Arc::clone(&handed_off.tokens),
            prompt_tokens: self.prompt_tokens,
            range,
            block_table: Arc::clone(&self.blocks),
            logits,
            zero_tail: None,
            sampling: handed_off.sampling.clone(),
            is_last_chunk,
            awaits_prefix: false,
        })
    }
}
