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
use crate::config::ModelConfig;
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
    pub last_token: LastToken,
    /// Whether it is not to be in a step before the mask of its next token is made: `mask.rs`.
    pub awaits_mask: bool,
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
    /// Most tokens of prompt and output together that this node holds.
    pub max_total_tokens: usize,
    /// Most that the request asks for, in the model's context.
    wanted_total_tokens: usize,
}

/// So many tokens before a sequence outgrows its node, a larger one is asked for.
pub(crate) const OUTGROWN_MARGIN: usize = 64;

impl Lengths {
    /// What a node of this model and arena can give a request.
    pub(super) fn new(model: &ModelConfig, prompt_tokens: usize, given_tokens: usize, max_tokens: u32) -> Self {
        let context = model.context_length as usize;
        let wanted_total_tokens = prompt_tokens.saturating_add(max_tokens as usize).min(context);
        let most = model.layout.max_sequence_tokens(model.context_length) as usize;
        Self { prompt_tokens, given_tokens, max_total_tokens: wanted_total_tokens.min(most), wanted_total_tokens }
    }

    /// Whether the request wants more tokens than this node can hold.
    fn exceeds_node(&self) -> bool {
        self.wanted_total_tokens > self.max_total_tokens
    }
}

/// What a sequence that outgrows its node does at the last token that the node can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastToken {
    /// The sequence has not come to it yet.
    Ahead,
    /// The sequence waits until then for a node that can hold more.
    HeldUntil(Instant),
    /// No node took it in time: the output ends with this token.
    Released,
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

    /// Whether it will soon have more tokens than this node can hold.
    pub(super) fn is_outgrowing(&self) -> bool {
        self.lengths.exceeds_node() && self.tokens.len() + OUTGROWN_MARGIN >= self.lengths.max_total_tokens
    }

    /// Holds the last token that this node can give until a larger node has had time to take the
    /// sequence: an output that has ended cannot go on elsewhere. Tells whether it is held.
    pub(super) fn hold_last_token(&mut self, until: Instant) -> bool {
        let is_next = self.lengths.exceeds_node() && self.tokens.len() + 1 >= self.lengths.max_total_tokens;
        if is_next && !self.is_prompt() && self.last_token == LastToken::Ahead {
            self.last_token = LastToken::HeldUntil(until);
        }
        matches!(self.last_token, LastToken::HeldUntil(_))
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
