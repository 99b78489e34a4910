//! What a decode node's core asks its shell to do.

use std::sync::Arc;

use baton_types::{
    BlockHash, BlockId, ConductorId, DecodeEvent, FetchReport, FetchSource, GrantId, GrantReply, NodeStart,
    PrefillEvent, Refused, RequestKey,
};

use crate::{LeaseEffect, StepPlan, TierEffect, named};

/// What the shell carries out. Every effect that names an answer gets it exactly once, whatever
/// happens.
#[derive(Debug, Clone, PartialEq)]
pub enum DecodeEffect {
    /// Register the grant with the transfer engine, then give `reply` to the prefill node. If that
    /// fails, answer the prefill node with the error and call `on_release_grant`.
    OpenGrant {
        /// The request.
        key: RequestKey,
        /// Who may write.
        prefill: NodeStart,
        /// Grant, destinations and what is cached already; the destinations may be empty.
        reply: GrantReply,
    },
    /// Tell the prefill node that it gets no grant.
    RefuseGrant {
        /// The request.
        key: RequestKey,
        /// Why.
        refused: Refused,
    },
    /// Close the grant in the transfer engine. Answer: `on_grant_fenced`, once nothing can land
    /// under it any more.
    RevokeGrant {
        /// The grant.
        grant: GrantId,
    },
    /// Answer the prefill node's handoff.
    HandoffReply {
        /// The request.
        key: RequestKey,
        /// Whether the sequence is this node's now.
        result: Result<(), Refused>,
    },
    /// Run a step: one token per sequence, and layers of a partial prefill, or chunks of what is to
    /// be computed here. Answer: `on_step_done`.
    RunStep(StepPlan),
    /// About other nodes that read here.
    Lease(LeaseEffect),
    /// About the tier below the arena.
    Tier(TierEffect),
    /// Tell a conductor everything that one step gave for its requests. No answer.
    Emit {
        /// The conductor.
        conductor: ConductorId,
        /// In the order of the step's sequences.
        events: Vec<(RequestKey, DecodeEvent)>,
    },
    /// Tell a conductor that another decode node may take this sequence, after all that it was told
    /// of it. No answer; the sequence stays until it is aborted.
    RequestMigration {
        /// The conductor.
        conductor: ConductorId,
        /// The request.
        key: RequestKey,
        /// Of its output, all of which were told.
        output_tokens: u32,
    },
    /// Fetch blocks from another node, as many of them as that still has. Answers:
    /// `on_fetch_begun`, unless it fails before, and `on_fetch_done`.
    Fetch {
        /// The request.
        key: RequestKey,
        /// Who has them.
        source: FetchSource,
        /// Of consecutive blocks.
        block_hashes: Arc<[BlockHash]>,
        /// Where they go, in the order of the hashes.
        destinations: Vec<BlockId>,
    },
    /// Tell the conductor whether a sequence of another decode node is this node's now, and what
    /// was fetched of it. No answer.
    AnswerMigration {
        /// The conductor.
        conductor: ConductorId,
        /// The request.
        key: RequestKey,
        /// Refused: it stays at its node.
        result: Result<FetchReport, Refused>,
    },
    /// End the request's fetch early. The answer is that of the fetch.
    CancelFetch {
        /// The request.
        key: RequestKey,
    },
    /// Tell a conductor about a prompt that is computed here. No answer.
    EmitPrefill {
        /// The conductor.
        conductor: ConductorId,
        /// The request.
        key: RequestKey,
        /// What happened.
        event: PrefillEvent,
    },
}

named!(DecodeEffect:
    OpenGrant, RefuseGrant, RevokeGrant, HandoffReply, RunStep, Lease, Tier, Emit, RequestMigration, Fetch, AnswerMigration,
    CancelFetch, EmitPrefill);
