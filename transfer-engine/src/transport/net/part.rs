//! What a batch is cut into, and what becomes of it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use baton_memory::MemoryRegion;
use baton_types::GrantId;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::lane::Lane;
use super::payload::Cursor;
use super::route::Route;
use super::shm::Armed;
use super::wire::{Commit, PartId, Target};
use crate::batch::Op;
use crate::error::{Refusal, RefusalReason};
use crate::fence_guard::FenceGuard;
use crate::path::InFlight;
use crate::{SegmentId, SpanPair, TransportKind};

/// A part of a batch.
pub(crate) struct Part {
    pub(super) op: Op,
    pub(super) id: PartId,
    /// Parts of the batch.
    pub(super) parts: u32,
    pub(super) grant: GrantId,
    /// The owner's segment.
    pub(super) segment: SegmentId,
    pub(super) tag: u64,
    /// This side's memory, and its name here.
    pub(super) local: Arc<MemoryRegion>,
    pub(super) local_segment: SegmentId,
    pub(super) fence: Arc<FenceGuard>,
    pub(super) spans: Vec<SpanPair>,
    pub(super) bytes: u64,
}

impl Part {
    pub(super) fn target(&self) -> Target {
        Target { id: self.id, grant: self.grant, segment: self.segment }
    }

    pub(super) fn trailer(&self) -> Commit {
        Commit { target: self.target(), parts: self.parts, bytes: self.bytes, tag: self.tag }
    }
}

/// What a part is answered with whose remote spans the owner's memory has not.
pub(super) fn too_short(segment: SegmentId) -> Refusal {
    let message = format!("the owner's segment {segment} is shorter than its descriptor says");
    Refusal::new(RefusalReason::OutOfRange, message)
}

/// What became of a part that was given to a lane. A part whose batch is over has none.
pub(super) enum Outcome {
    /// Its bytes are visible at the owner. What carried them.
    Acknowledged { by: TransportKind, bytes: u64 },
    /// The owner does not want it.
    Refused(Refusal),
    /// This kind of lane cannot carry it; the lane goes on.
    Unable { part: u32, by: TransportKind, reason: String },
    /// The lane ended before.
    Lost(Loss),
}

/// A part was given to a lane that has ended.
#[derive(Clone)]
pub(super) struct Loss {
    pub(super) part: u32,
    pub(super) lane: u64,
    pub(super) route: Arc<Route>,
    /// When the lane ended.
    pub(super) at: Instant,
    /// Whether some of the part may have left.
    pub(super) begun: bool,
    pub(super) end: LaneEnd,
}

/// Why a lane ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LaneEnd {
    /// Nothing was to do.
    Idle,
    /// The engine shuts down.
    Closing,
    /// The network, or the peer, failed.
    Failed(String),
    /// The peer broke the protocol, or says that this end did.
    Protocol(String),
}

impl From<io::Error> for LaneEnd {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Protocol(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// A part on its way through a lane.
pub(super) struct Sending {
    pub(super) part: Arc<Part>,
    /// Connections that earlier attempts failed on.
    pub(super) fences: Vec<u64>,
    /// Unbounded, but for each part there is at most one outcome per attempt.
    pub(super) outcome: mpsc::UnboundedSender<Outcome>,
    /// Room among the bytes in flight to this peer, until there is an outcome.
    pub(super) _in_flight: (OwnedSemaphorePermit, InFlight),
    /// Its share of its lane's load, until there is an outcome.
    pub(super) load: Option<LaneLoad>,
    /// The owner may fetch it as long as this lives (shm).
    pub(super) armed: Option<Armed>,
    /// How much of a read has come (tcp).
    pub(super) landing: Option<Cursor>,
}

/// Counts a part among a lane's load.
pub(super) struct LaneLoad {
    lane: Arc<Lane>,
    bytes: u64,
}

impl LaneLoad {
    pub(super) fn new(lane: &Arc<Lane>, part: &Part) -> Self {
        // One more, so that parts without bytes count too.
        let bytes = part.bytes + 1;
        lane.add_load(bytes);
        Self { lane: Arc::clone(lane), bytes }
    }
}

impl Drop for LaneLoad {
    fn drop(&mut self) {
        self.lane.sub_load(self.bytes);
    }
}

impl Sending {
    pub(super) fn resolve(self, outcome: Outcome) {
        // The batch may be over.
        let _ = self.outcome.send(outcome);
    }
}
