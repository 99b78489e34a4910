//! What a prefill node's core asks its shell to do.

use std::time::{Duration, Instant};

use baton_types::{
    BlockId, ConductorId, DecodeTarget, FetchSource, GrantId, GrantRequest, Handoff, LeaseRequest, PrefillEvent,
    RequestKey,
};

use crate::{LeaseEffect, StepPlan, TierEffect, named};

/// One batch of writes of one request; travels as the batch's tag. It has its number among those of
/// the request, and the number of leading layers that this batch and those before it complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PushId(pub u64);

impl PushId {
    const LAYER_BITS: u32 = 16;

    pub(crate) fn new(number: u32, layers: u32) -> Self {
        Self(u64::from(number) << Self::LAYER_BITS | u64::from(layers.min((1 << Self::LAYER_BITS) - 1)))
    }

    /// From 0.
    pub(crate) fn number(self) -> u64 {
        self.0 >> Self::LAYER_BITS
    }

    pub(crate) fn layers(self) -> u32 {
        (self.0 & ((1 << Self::LAYER_BITS) - 1)) as u32
    }
}

/// One layer of one block on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PushSpan {
    /// The layer.
    pub layer: u32,
    /// In this node's arena.
    pub source: BlockId,
    /// In the decode node's arena.
    pub destination: BlockId,
}

/// A batch of writes is complete: every byte is visible at the decode node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushReport {
    /// Bytes written.
    pub bytes: u64,
    /// What carried them.
    pub transport: String,
    /// When the batch was started.
    pub started: Instant,
    /// When its last byte was acknowledged.
    pub completed: Instant,
}

/// A prefix has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedBytes {
    /// Bytes read.
    pub bytes: u64,
    /// What carried them.
    pub transport: String,
}

/// What the shell carries out. Every effect that names an answer gets it exactly once, whatever
/// happens.
#[derive(Debug, Clone, PartialEq)]
pub enum PrefillEffect {
    /// Ask the decode node for a grant. Answer: `on_grant_reply`.
    RequestGrant {
        /// The decode node.
        target: DecodeTarget,
        /// What to ask.
        request: GrantRequest,
        /// How long to wait before: a node that had no room is not asked again at once.
        delay: Duration,
    },
    /// Run a step. Answers: `on_kv_ready` per layer, `on_prefix_late` if a prefix does not come in
    /// time, then `on_step_done`.
    RunStep(StepPlan),
    /// Lease blocks of another node and read them into this node's arena, one layer after the
    /// other. Answers: `on_fetch_begun` once the holder agreed, `on_fetched` per layer, then
    /// `on_fetch_done`; or `on_fetch_done` with an error at any point. Until the last one the
    /// destinations are left alone.
    Fetch {
        /// The holder.
        source: FetchSource,
        /// What to ask it.
        lease: LeaseRequest,
        /// Where the blocks go, in the order of the hashes asked for.
        destinations: Vec<BlockId>,
    },
    /// About the tier below the arena. What it reads answers as `Fetch` does.
    Tier(TierEffect),
    /// Stop the request's fetch. It still answers `on_fetch_done`.
    CancelFetch {
        /// The request.
        key: RequestKey,
    },
    /// About other nodes that read here.
    Lease(LeaseEffect),
    /// Write blocks into the decode node's arena. Answer: `on_push_done`, and until then the source
    /// blocks are left alone.
    Push {
        /// The request.
        key: RequestKey,
        /// Names the batch.
        push: PushId,
        /// The decode node.
        target: DecodeTarget,
        /// The right to write.
        grant: GrantId,
        /// Sorted by layer, then by position in the sequence.
        spans: Vec<PushSpan>,
    },
    /// Stop the request's batches. Each still answers `on_push_done`, once the transfer engine
    /// reads its blocks no more.
    CancelPushes {
        /// The request.
        key: RequestKey,
    },
    /// Hand the sequence over. Answer: `on_handoff_reply`.
    Handoff {
        /// The decode node.
        target: DecodeTarget,
        /// The message.
        handoff: Handoff,
    },
    /// Tell the decode node that a grant is not needed, or that the attempt under it has failed. No
    /// answer: a grant that is forgotten expires.
    ReleaseGrant {
        /// The request.
        key: RequestKey,
        /// The decode node.
        target: DecodeTarget,
        /// The grant.
        grant: GrantId,
    },
    /// Tell a request's conductor. No answer.
    Emit {
        /// The conductor.
        conductor: ConductorId,
        /// The request.
        key: RequestKey,
        /// What happened.
        event: PrefillEvent,
    },
}

named!(PrefillEffect:
    RequestGrant, RunStep, Fetch, Tier, CancelFetch, Lease, Push, CancelPushes, Handoff, ReleaseGrant, Emit);
