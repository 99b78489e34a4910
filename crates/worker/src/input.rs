//! What a node's loop takes in, from wherever it comes.

use std::sync::Arc;

use baton_proto::v1;
use baton_types::{
    BlockHash, ConductorId, GrantId, GrantRequest, Handoff, LeaseRelease, LeaseRequest, Load, NodeStart, PrefillJob,
    Refused, RequestKey, Reselect,
};
use tokio::sync::oneshot;

use crate::engine_thread::EngineEvent;
use crate::fetch::FetchEvent;
use crate::lease_desk::LeaseAnswer;
use crate::ssd::SsdEvent;

/// The answer to a grant request, once the transfer engine has the grant too.
pub type GrantAnswer = Result<v1::GrantReply, Refused>;

/// One input. `E` is what only this role knows (a push's report, an arrival).
#[derive(Debug)]
pub enum Input<E> {
    /// A conductor's session is open.
    SessionOpened(ConductorId),
    /// It closed: the requests of that conductor are aborted.
    SessionClosed(ConductorId),
    /// A conductor wants a snapshot of the prefix cache.
    KvSnapshot(ConductorId),
    /// Free what is cached and not in use.
    ClearCache,
    /// These blocks, and those that follow them, are no good.
    ForgetPrefix(Arc<[BlockHash]>),
    /// Ask this decode node for room, in place of one that refused.
    Reselect(Reselect),
    /// That start of another node is gone.
    NodeLost(NodeStart),
    /// Compute a prompt.
    Prefill(PrefillJob),
    /// End a request.
    Abort(RequestKey),
    /// Another node wants to write here.
    Grant(GrantRequest, oneshot::Sender<GrantAnswer>),
    /// It does not any more.
    ReleaseGrant(RequestKey, GrantId),
    /// Another node wants to read here.
    Lease(LeaseRequest, oneshot::Sender<LeaseAnswer>),
    /// It does not any more.
    ReleaseLease(LeaseRelease),
    /// Another node hands a sequence off.
    Handoff(Handoff, oneshot::Sender<Result<(), Refused>>),
    /// Prove that each block is accounted for.
    CheckIntegrity(oneshot::Sender<Result<IntegrityReport, Refused>>),
    /// From the engine's thread.
    Engine(EngineEvent),
    /// About blocks that are fetched from another node.
    Fetch(FetchEvent),
    /// About blocks that are read from the SSD.
    SsdRead(FetchEvent),
    /// About the SSD itself.
    Ssd(SsdEvent),
    /// Finish what is here, take nothing new.
    Drain,
    /// Take requests again.
    Undrain,
    /// Of this role alone.
    Role(E),
}

/// Whether each block is accounted for.
#[derive(Debug, Clone)]
pub struct IntegrityReport {
    /// What is wrong; `None` if nothing is.
    pub problem: Option<String>,
    /// The load at that moment.
    pub load: Load,
}

baton_scheduler::named!(Input<E>:
    SessionOpened, SessionClosed, KvSnapshot, ClearCache, ForgetPrefix, Reselect, NodeLost, Prefill, Abort, Grant,
    ReleaseGrant, Lease, ReleaseLease, Handoff, CheckIntegrity, Engine, Fetch, SsdRead, Ssd, Drain, Undrain, Role);
