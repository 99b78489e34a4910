//! The engine: a node's handle to everything it moves.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_runtime::TaskSet;
use baton_types::{GrantId, NodeStart};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::batch::{Op, normalize, total};
use crate::fence_guard::FenceGuard;
use crate::grant::{Access, GrantTable};
use crate::metrics::Metrics;
use crate::path::PathReport;
use crate::transport::net::NetTransport;
use crate::transport::net::rdma::Devices;
use crate::transport::{Job, Transport, fake};
use crate::{
    ArrivalReceiver, Batch, BatchOptions, BatchReport, FakeNetwork, GrantSpec, SegmentDescriptor, SegmentId, SpanPair,
    TransferConfig, TransferError, TransportKind,
};

/// Most segments of one engine: a node has a few arenas.
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// What every transport of an engine shares: who this is, what is registered, what is granted.
pub(crate) struct Host {
    pub(crate) config: TransferConfig,
    pub(crate) grants: Arc<GrantTable>,
    pub(crate) metrics: Metrics,
    /// Set if this host has RDMA devices that may be used.
    pub(crate) rdma: OnceLock<Arc<Devices>>,
    pub(crate) tasks: TaskSet,
    /// Cancelled when the engine, or its process, shuts down.
    pub(crate) closed: CancellationToken,
    segments: RwLock<HashMap<SegmentId, Arc<MemoryRegion>>>,
}

impl Host {
    pub(crate) fn new(config: TransferConfig, tasks: &TaskSet) -> Result<(Arc<Self>, ArrivalReceiver), TransferError> {
        config.validate()?;
        let metrics = Metrics::new();
        let (grants, arrivals) = GrantTable::new(config.max_grants, config.arrival_queue, metrics.grants.clone());
        let host = Arc::new(Self {
            config,
            grants: Arc::new(grants),
            metrics,
            rdma: OnceLock::new(),
            tasks: tasks.clone(),
            closed: tasks.token().child_token(),
            segments: RwLock::default(),
        });
        let expiring = Arc::clone(&host);
        tasks.spawn_request("transfer grant expiry", async move {
            tokio::select! {
                () = expiring.grants.expire() => {}
                () = expiring.closed.cancelled() => {}
            }
        });
        Ok((host, arrivals))
    }

    /// This engine as a writer.
    pub(crate) fn writer(&self) -> NodeStart {
        NodeStart { node: self.config.node.clone(), generation: self.config.generation }
    }

    pub(crate) fn region(&self, segment: SegmentId) -> Result<Arc<MemoryRegion>, TransferError> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let region = segments.get(&segment).cloned();
        region.ok_or_else(|| TransferError::invalid("segment", format!("{segment} is not registered")))
    }
}

struct Inner {
    host: Arc<Host>,
    transport: Arc<dyn Transport>,
    local_addr: SocketAddr,
    next_batch: AtomicU64,
    load: Arc<WriteLoad>,
}

/// Moves bytes between this node's registered memory and other nodes'. Cheap to clone; works until
/// [`TransferEngine::shutdown`] or the end of its tasks.
#[derive(Clone)]
pub struct TransferEngine(Arc<Inner>);

impl TransferEngine {
    /// Listens, and starts. Needs a tokio runtime, as all methods do.
    pub async fn bind(config: TransferConfig, tasks: &TaskSet) -> Result<(Self, ArrivalReceiver), TransferError> {
        let choice = config.transport;
        let (host, arrivals) = Host::new(config, tasks)?;
        let (transport, local_addr) = NetTransport::bind(Arc::clone(&host), choice).await?;
        Ok((Self::new(host, transport, local_addr), arrivals))
    }

    /// An engine on a network within this process, with faults as wanted: for tests of what stands
    /// above.
    pub fn fake(
        network: &FakeNetwork,
        config: TransferConfig,
        tasks: &TaskSet,
    ) -> Result<(Self, ArrivalReceiver), TransferError> {
        let local_addr = config.listen;
        let (host, arrivals) = Host::new(config, tasks)?;
        let transport = fake::FakeTransport::join(network, &host);
        Ok((Self::new(host, transport, local_addr), arrivals))
    }

    fn new(host: Arc<Host>, transport: Arc<dyn Transport>, local_addr: SocketAddr) -> Self {
        Self(Arc::new(Inner { host, transport, local_addr, next_batch: AtomicU64::new(1), load: Arc::default() }))
    }

    /// Where the engine listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr
    }

    /// Registers memory: as a source of writes, and, with the descriptor, as a target of peers'
    /// writes under grants.
    pub fn register(&self, region: Arc<MemoryRegion>) -> Result<(SegmentId, SegmentDescriptor), TransferError> {
        let host = &self.0.host;
        let transport = &self.0.transport;
        let mut segments = host.segments.write().unwrap_or_else(PoisonError::into_inner);
        if segments.len() >= MAX_SEGMENTS {
            return Err(TransferError::Overloaded { what: "segments", limit: MAX_SEGMENTS });
        }
        // Segments are never taken back, so their number is the next id.
        let id = SegmentId(segments.len() as u32);
        let length = region.len() as u64;
        let transports = transport.register(id, &region)?;
        segments.insert(id, region);
        let node = host.config.node.clone();
        let generation = host.config.generation;
        Ok((id, SegmentDescriptor { id, node, generation, length, transports }))
    }

    /// Gives a right to write. Until the grant ends, the caller lets nothing else use its ranges.
    pub fn grant(&self, spec: GrantSpec) -> Result<(), TransferError> {
        self.open_grant(spec, Access::Write)
    }

    /// Gives a right to read. Until the lease ends, the owner lets nothing change its ranges; what
    /// is read while it ends is not delivered to the reader.
    pub fn lease(&self, spec: GrantSpec) -> Result<(), TransferError> {
        self.open_grant(spec, Access::Read)
    }

    fn open_grant(&self, spec: GrantSpec, access: Access) -> Result<(), TransferError> {
        let host = &self.0.host;
        if host.closed.is_cancelled() {
            return Err(TransferError::Closed);
        }
        let region = host.region(spec.segment)?;
        host.grants.open(spec, access, region)
    }

    /// Ends a grant or a lease. It takes effect with the call: nothing new is accepted. The future
    /// resolves once the grant is fenced: nothing can land under it any more. A grant that is not
    /// known any more is fenced already.
    pub fn revoke(&self, grant: GrantId) -> impl Future<Output = ()> + Send + use<> {
        self.0.host.grants.revoke(grant)
    }

    /// Writes spans of a local segment into a remote one, under a grant of its owner. The batch
    /// starts at once and ends without being polled.
    ///
    /// Spans may come in any order and may touch, but not overlap. Without any span the batch is a
    /// mere notification. Until the batch resolves, the caller leaves the local spans unchanged.
    pub fn write(
        &self,
        local: SegmentId,
        remote: &SegmentDescriptor,
        grant: GrantId,
        spans: Vec<SpanPair>,
        options: BatchOptions,
    ) -> Batch {
        self.batch(Op::Write, local, remote, grant, spans, options)
    }

    /// Reads spans of a remote segment into a local one, under a lease of its owner. The batch
    /// starts at once and ends without being polled.
    ///
    /// Spans may come in any order; where they go to may touch, but not overlap. Until the batch
    /// resolves, the caller keeps off the local spans; if it fails, they hold any mixture. The
    /// owner is not notified.
    pub fn read(
        &self,
        local: SegmentId,
        remote: &SegmentDescriptor,
        lease: GrantId,
        spans: Vec<SpanPair>,
        options: BatchOptions,
    ) -> Batch {
        self.batch(Op::Read, local, remote, lease, spans, options)
    }

    fn batch(
        &self,
        op: Op,
        local: SegmentId,
        remote: &SegmentDescriptor,
        grant: GrantId,
        spans: Vec<SpanPair>,
        options: BatchOptions,
    ) -> Batch {
        match self.job(op, local, remote, grant, spans, options) {
            Ok((job, slot)) => self.start(job, slot, options.deadline),
            Err(error) => {
                self.0.host.metrics.on_batch(Duration::ZERO, Err(&error));
                Batch::failed(error)
            }
        }
    }

    fn job(
        &self,
        op: Op,
        local: SegmentId,
        remote: &SegmentDescriptor,
        grant: GrantId,
        spans: Vec<SpanPair>,
        options: BatchOptions,
    ) -> Result<(Job, Slot), TransferError> {
        let host = &self.0.host;
        if host.closed.is_cancelled() {
            return Err(TransferError::Closed);
        }
        let slot = self.0.load.take(spans.len(), &host.config)?;
        let region = host.region(local)?;
        let spans = normalize(op, spans, region.len() as u64, remote.length)?;
        let job = Job {
            op,
            owner: NodeStart { node: remote.node.clone(), generation: remote.generation },
            addresses: remote.transports.clone(),
            segment: remote.id,
            grant,
            batch: self.0.next_batch.fetch_add(1, Relaxed),
            tag: options.tag,
            local: region,
            local_segment: local,
            spans,
            fence: Arc::new(FenceGuard::default()),
        };
        Ok((job, slot))
    }

    fn start(&self, job: Job, slot: Slot, deadline: Instant) -> Batch {
        let (sender, receiver) = oneshot::channel();
        let batch = Batch::new(receiver, Arc::clone(&job.fence));
        let host = Arc::clone(&self.0.host);
        let transport = Arc::clone(&self.0.transport);
        let started = baton_runtime::now();
        let bytes = total(&job.spans);
        let spans = job.spans.len();
        self.0.host.tasks.spawn_request("transfer batch", async move {
            let result = run_job(&host, transport, job, deadline).await;
            let completed = baton_runtime::now();
            drop(slot);
            host.metrics.on_batch(completed - started, result.as_ref().copied());
            // The caller may have dropped the batch.
            let _ = sender.send(result.map(|transport| BatchReport { bytes, spans, transport, started, completed }));
        });
        batch
    }

    /// How each owner written to is reached, and how well.
    pub fn paths(&self) -> Vec<PathReport> {
        self.0.transport.paths()
    }

    /// Closes every connection to owners at once. Batches under way are sent again over new ones:
    /// for tests of that, and for operators who move a network.
    pub fn disconnect(&self) {
        self.0.transport.disconnect();
    }

    /// Ends all grants, batches and connections. Batches under way resolve to
    /// [`TransferError::Closed`].
    pub fn shutdown(&self) {
        self.0.host.closed.cancel();
        self.0.host.grants.close_all();
    }
}

#[cfg(test)]
impl TransferEngine {
    pub(crate) fn live_grants(&self) -> usize {
        self.0.host.grants.len()
    }

    pub(crate) fn batches_under_way(&self) -> usize {
        self.0.load.batches.load(Relaxed)
    }
}

/// Runs a job until it is done, cancelled or late, and then until its source is not read any more.
async fn run_job(
    host: &Host,
    transport: Arc<dyn Transport>,
    job: Job,
    deadline: Instant,
) -> Result<TransportKind, TransferError> {
    let fence = Arc::clone(&job.fence);
    let result = tokio::select! {
        biased;
        result = transport.carry_batch(job) => result,
        () = fence.closed() => Err(TransferError::Cancelled),
        () = host.closed.cancelled() => Err(TransferError::Closed),
        () = baton_runtime::sleep_until(deadline) => Err(TransferError::Deadline),
    };
    fence.close();
    fence.drained().await;
    result
}

/// Batches and spans under way.
#[derive(Default)]
struct WriteLoad {
    batches: AtomicUsize,
    spans: AtomicUsize,
}

impl WriteLoad {
    fn take(self: &Arc<Self>, spans: usize, config: &TransferConfig) -> Result<Slot, TransferError> {
        let batches = self.batches.fetch_add(1, Relaxed) + 1;
        let all_spans = self.spans.fetch_add(spans, Relaxed) + spans;
        let slot = Slot { load: Arc::clone(self), spans };
        if batches > config.max_batches {
            return Err(TransferError::Overloaded { what: "batches under way", limit: config.max_batches });
        }
        if all_spans > config.max_spans {
            return Err(TransferError::Overloaded { what: "spans under way", limit: config.max_spans });
        }
        Ok(slot)
    }
}

/// The place of one batch in the bounds.
struct Slot {
    load: Arc<WriteLoad>,
    spans: usize,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.load.batches.fetch_sub(1, Relaxed);
        self.load.spans.fetch_sub(self.spans, Relaxed);
    }
}
