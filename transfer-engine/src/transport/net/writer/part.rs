//! What a batch is cut into, and what becomes of it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use baton_memory::MemoryRegion;
use baton_types::GrantId;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::lane::Lane;
use super::route::Route;
use crate::batch::Op;
use crate::error::{Refusal, RefusalReason};
use crate::fence_guard::FenceGuard;
use crate::path::InFlight;
use crate::transport::net::shm::Armed;
use crate::transport::net::wire::payload::Cursor;
use crate::transport::net::wire::{Commit, PartId, Target};
use crate::{SegmentId, SpanPair, TransportKind};

/// A part of a batch.
pub(crate) struct Part {
    pub(crate) op: Op,
    pub(crate) id: PartId,
    /// Parts of the batch.
    pub(crate) parts: u32,
    pub(crate) grant: GrantId,
    /// The owner's segment.
    pub(crate) segment: SegmentId,
    pub(crate) tag: u64,
    /// This side's memory, and its name here.
    pub(crate) local: Arc<MemoryRegion>,
    pub(crate) local_segment: SegmentId,
    pub(crate) fence: Arc<FenceGuard>,
    pub(crate) spans: Vec<SpanPair>,
    pub(crate) bytes: u64,
}

impl Part {
    pub(crate) fn target(&self) -> Target {
        Target { id: self.id, grant: self.grant, segment: self.segment }
    }

    pub(crate) fn trailer(&self) -> Commit {
        Commit { target: self.target(), parts: self.parts, bytes: self.bytes, tag: self.tag }
    }
}

/// What a part is answered with whose remote spans the owner's memory has not.
pub(crate) fn too_short(segment: SegmentId) -> Refusal {
    let message = format!("the owner's segment {segment} is shorter than its descriptor says");
    Refusal::new(RefusalReason::OutOfRange, message)
}

/// What became of a part that was given to a lane. A part whose batch is over has none.
pub(crate) enum Outcome {
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
pub(crate) struct Loss {
    pub(crate) part: u32,
    pub(crate) lane: u64,
    pub(crate) route: Arc<Route>,
    /// When the lane ended.
    pub(crate) at: Instant,
    /// Whether some of the part may have left.
    pub(crate) begun: bool,
    pub(crate) end: LaneEnd,
}

/// What became of sending a part.
pub(crate) enum Carried {
    /// It is on its way, and will be answered.
    Sent,
    /// Its batch is over and the peer knows, or it was answered here. Nothing more comes of it.
    Over,
}

/// What a part under way has, by what carries it.
pub(crate) enum CarriedPart {
    Nothing,
    /// The owner may fetch it as long as this lives (shm).
    Armed(#[expect(dead_code, reason = "held for its end")] Armed),
    /// How much of a read has come (tcp).
    Landing(Cursor),
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
pub(crate) struct Sending {
    pub(crate) part: Arc<Part>,
    /// Connections that earlier attempts failed on.
    pub(crate) fences: Vec<u64>,
    /// Unbounded, but for each part there is at most one outcome per attempt.
    pub(crate) outcome: mpsc::UnboundedSender<Outcome>,
    /// Room among the bytes in flight to this peer, until there is an outcome.
    pub(crate) _in_flight: (OwnedSemaphorePermit, InFlight),
    /// Its share of its lane's load, until there is an outcome.
    pub(crate) load: Option<LaneLoad>,
    pub(crate) in_hand: CarriedPart,
}

/// Counts a part among a lane's load.
pub(crate) struct LaneLoad {
    lane: Arc<Lane>,
    bytes: u64,
}

impl LaneLoad {
    pub(crate) fn new(lane: &Arc<Lane>, part: &Part) -> Self {
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
    pub(crate) fn resolve(self, outcome: Outcome) {
        // The batch may be over.
        let _ = self.outcome.send(outcome);
    }
}
