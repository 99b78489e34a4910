//! What carries bytes. Each transport writes batches for its engine, and lets peers' batches land under the engine's grants.

pub(crate) mod fake;
pub(crate) mod tcp;

use std::pin::Pin;
use std::sync::Arc;

use baton_memory::MemoryRegion;
use baton_types::GrantId;

use crate::gate::Gate;
use crate::grant::Writer;
use crate::{SegmentId, SpanPair, TransferError, TransportKind};

/// A batch, checked and normalized.
pub(crate) struct WriteJob {
    /// The owner of the remote segment.
    pub(crate) target: Writer,
    /// Where this transport reaches it.
    pub(crate) address: String,
    pub(crate) segment: SegmentId,
    pub(crate) grant: GrantId,
    /// Unique within this engine; the same in a retry.
    pub(crate) batch: u64,
    pub(crate) tag: u64,
    pub(crate) source: Arc<MemoryRegion>,
    /// Sorted by remote offset, disjoint, inside both segments.
    pub(crate) spans: Vec<SpanPair>,
    /// Closed when the batch is over. Whoever reads the source holds a pass, and gives it back at once when the gate closes.
    pub(crate) gate: Arc<Gate>,
}

pub(crate) type WriteFuture = Pin<Box<dyn Future<Output = Result<(), TransferError>> + Send>>;

pub(crate) trait Transport: Send + Sync {
    fn kind(&self) -> TransportKind;

    /// Where peers reach this engine.
    fn address(&self) -> String;

    /// Carries a batch. Resolves to `Ok` when every byte is visible at the target and acknowledged. May be dropped at any await, after which the closed
    /// gate stops what is left.
    fn write(self: Arc<Self>, job: WriteJob) -> WriteFuture;
}
