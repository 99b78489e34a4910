//! What carries bytes. Each transport carries batches for its engine, and lets peers' batches read
//! and write under the engine's grants.

pub(crate) mod fake;
pub(crate) mod net;

use std::pin::Pin;
use std::sync::Arc;

use baton_memory::MemoryRegion;
use baton_types::{GrantId, NodeStart};

use crate::batch::Op;
use crate::fence_guard::FenceGuard;
use crate::path::PathReport;
use crate::{SegmentId, SpanPair, TransferError, TransportAddress, TransportKind};

/// A batch, checked and normalized.
pub(crate) struct Job {
    pub(crate) op: Op,
    /// The owner of the remote segment.
    pub(crate) owner: NodeStart,
    /// Where it can be reached.
    pub(crate) addresses: Vec<TransportAddress>,
    pub(crate) segment: SegmentId,
    pub(crate) grant: GrantId,
    /// Unique within this engine; the same in a retry.
    pub(crate) batch: u64,
    pub(crate) tag: u64,
    /// The local memory: where a write comes from, where a read goes to.
    pub(crate) local: Arc<MemoryRegion>,
    pub(crate) local_segment: SegmentId,
    /// Sorted by where they go to, disjoint there, inside both segments.
    pub(crate) spans: Vec<SpanPair>,
    /// Closed when the batch is over. A task that touches the local memory holds a pass, and gives
    /// it back at once when the fence guard closes.
    pub(crate) fence: Arc<FenceGuard>,
}

pub(crate) type CarryFuture = Pin<Box<dyn Future<Output = Result<TransportKind, TransferError>> + Send>>;

pub(crate) trait Transport: Send + Sync {
    /// Makes memory known. Where peers reach it, best first.
    fn register(&self, segment: SegmentId, region: &Arc<MemoryRegion>) -> Result<Vec<TransportAddress>, TransferError>;

    /// Carries a batch. Resolves to what carried it (its last part, if several did) when every byte
    /// is visible at the owner and acknowledged. May be dropped at any await, after which the
    /// closed fence guard stops what is left.
    fn carry_batch(self: Arc<Self>, job: Job) -> CarryFuture;

    /// How each owner written to is reached.
    fn paths(&self) -> Vec<PathReport> {
        Vec::new()
    }

    /// Closes every connection for writing; what is under way is sent again.
    fn disconnect(&self) {}
}
