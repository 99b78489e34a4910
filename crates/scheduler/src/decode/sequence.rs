//! What a decode node knows about one request whose tokens are here.
//!
//! ```text
//!   a grant:      Granted ─ on_handoff ─▶ Receiving ─ all bytes ─▶ Waiting ─┐
//!   a migration:  Fetching ─────────────▶ Waiting, or Loading ──────────────┼─▶ Running ─▶ ended
//!   a prompt:     Preempted ─ room ─────▶ Loading, if the tier has some ────┘
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockHasher;
use baton_types::{ConductorId, FinishReason, RequestKey, SamplingParams, TokenId};

use super::grant::Grant;
use super::kv::SequenceKv;
use super::local::LocalPrompt;
use super::migration::Fetch;
use super::partial_prefill::PartialPrefill;
use crate::step::{LogitsWanted, StepSequence};

/// A request that was handed off or submitted. Before its handoff it is a
/// [`super::grant::Granted`].
#[derive(Debug)]
pub(super) struct Sequence {
    /// Its number among those that came: the lower, the older.
    pub turn: u64,
    pub origin: Origin,
    pub conductor: ConductorId,
    pub lengths: Lengths,
    /// Prompt and output so far; the KV of the last one is not computed yet.
    pub tokens: Arc<Vec<TokenId>>,
    pub sampling: Arc<SamplingParams>,
    pub hasher: BlockHasher,
    pub kv: SequenceKv,
    pub phase: Phase,
    /// When it was handed off, until it is in a step. Only if its first token comes from there.
    pub queued_since: Option<Instant>,
    /// The time from the handoff to the first step, until it is told.
    pub queue: Option<Duration>,
    /// When its conductor was last told that another decode node may take it.
    pub last_migration_request: Option<Instant>,
    /// When its conductor last heard of its compute.
    pub last_progress: Instant,
}

/// Where a sequence comes from.
#[derive(Debug)]
pub(super) enum Origin {
    /// A prefill node computed its prompt, all or the first part of it.
    Granted(Grant),
    /// Its prompt is computed here.
    Submitted(LocalPrompt),
    /// Another decode node, which had some of its output.
    Migrated,
}

/// What does not change while a sequence grows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lengths {
    pub prompt_tokens: usize,
    /// Of prompt and output, those that came with the grant or the job: computed before the first
    /// token is drawn here.
    pub given_tokens: usize,
    /// Most tokens of prompt and output together.
    pub max_total_tokens: usize,
}

/// Where a sequence stands on its way into the batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Bytes are missing that a prefill node writes under the grant.
    Receiving,
    /// All is here; it joins the batch when there is a place.
    Waiting,
    /// These of its blocks come from the tier; it joins the batch when they are here.
    Loading(Range<usize>),
    /// It has no blocks, any more or yet: its tokens are computed when there is room for them.
    Preempted,
    /// Its blocks come from another decode node: `migration.rs`.
    Fetching(Fetch),
    /// In the running batch.
    Running,
}

impl Sequence {
    pub(super) fn grant(&self) -> Option<&Grant> {
        let Origin::Granted(grant) = &self.origin else { return None };
        Some(grant)
    }

    pub(super) fn grant_mut(&mut self) -> Option<&mut Grant> {
        let Origin::Granted(grant) = &mut self.origin else { return None };
        Some(grant)
    }

    /// The part of its prompt that is computed here while a prefill node computes the rest, if
    /// there is one, and no token was drawn yet.
    pub(super) fn partial_prefill(&self) -> Option<&PartialPrefill> {
        self.grant().and_then(|grant| grant.partial_prefill.as_ref())
    }

    /// Whether its KV is of another KV compatibility class: its blocks do not become cache.
    pub(super) fn is_other_class(&self) -> bool {
        self.grant().is_some_and(|grant| grant.is_other_class)
    }

    /// Whether the prompt is computed here, and no token was drawn yet.
    pub(super) fn is_prompt(&self) -> bool {
        matches!(self.origin, Origin::Submitted(_)) && self.tokens.len() == self.lengths.given_tokens
    }

    /// Whether it has its blocks, and waits for others or runs.
    pub(super) fn has_blocks(&self) -> bool {
        matches!(self.phase, Phase::Waiting | Phase::Loading(_) | Phase::Running)
    }

    /// Tokens to be computed before the next one is drawn; one in ordinary decoding.
    pub(super) fn remaining_tokens(&self) -> usize {
        self.tokens.len() - self.kv.num_computed_tokens
    }

    /// Full blocks that may come from the cache: the last token is always computed, and all are if
    /// the log-probabilities of the prompt are wanted.
    pub(super) fn reusable_blocks(&self, block_tokens: usize) -> usize {
        if self.wants_prompt_logprobs() {
            return 0;
        }
        let full = self.tokens.len().saturating_sub(1) / block_tokens;
        full.min(self.kv.hashes.len())
    }

    fn wants_prompt_logprobs(&self) -> bool {
        self.is_prompt() && self.sampling.prompt_logprobs.is_some()
    }

    /// Its part of a step: its next `share` tokens.
    pub(super) fn step_sequence(&self, key: RequestKey, share: usize) -> StepSequence {
        let range = self.kv.num_computed_tokens..self.kv.num_computed_tokens + share;
        let is_last_chunk = range.end == self.tokens.len();
        let logits = if self.wants_prompt_logprobs() {
            LogitsWanted::All
        } else if is_last_chunk {
            LogitsWanted::Last
        } else {
            LogitsWanted::None
        };
        StepSequence {
            key,
            tokens: Arc::clone(&self.tokens),
            prompt_tokens: self.lengths.prompt_tokens,
            range,
            block_table: Arc::clone(&self.kv.blocks),
            logits,
            zero_tail: None,
            sampling: Arc::clone(&self.sampling),
            is_last_chunk,
            awaits_prefix: false,
        }
    }

    /// Appends a token that was drawn; tells why it is the last one, if it is.
    pub(super) fn push_token(&mut self, token: TokenId) -> Option<FinishReason> {
        Arc::make_mut(&mut self.tokens).push(token);
        if self.sampling.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() >= self.lengths.max_total_tokens).then_some(FinishReason::Length)
    }
}
