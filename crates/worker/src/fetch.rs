//! Fetches a prefix from another node: a lease of its blocks, and one read per layer, a few at a
//! time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::{PROTOCOL_VERSION, v1};
use baton_runtime::{Clock, Waited};
use baton_scheduler::{FetchedBytes, LAYER_DEADLINE, LEASE_DEADLINE, RequestKey};
use baton_transfer_engine::{BatchOptions, BatchReport, SegmentId, SpanPair, TransferEngine, TransferError};
use baton_types::{BlockId, ErrorKind, FetchSource, GrantId, KvLayout, LeaseRequest, NodeInfo, Refused};
use futures::future::{BoxFuture, FutureExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::input::Input;
use crate::layer_barrier::{LayerBarrier, LayerBarrierKeeper, layer_barrier};
use crate::node::NodeParts;
use crate::pacer::{Direction, LinkPacer, PacedCancel, paced};
use crate::peers::{Peers, refused};
use crate::remote::RemoteArena;

/// A fetch is over within this time, however slow the holder is: it must end before the lease does.
const FETCH_DEADLINE: Duration = Duration::from_secs(30);
/// Reads under way at once: the next layers come while one is told.
const READS_AHEAD: usize = 4;
/// How often a lease that is not needed any more is given back; one that is forgotten expires by
/// itself.
const RELEASE_ATTEMPTS: u32 = 2;

/// What a fetch, or a read from the SSD, tells the node's loop, in this order.
#[derive(Debug)]
pub enum FetchEvent {
    /// So many of the blocks asked for are still there.
    Begun(RequestKey, usize),
    /// One layer is here.
    Layer(RequestKey, u32),
    /// Everything is here, or the rest will not come. Always told, and last: nothing is written any
    /// more.
    Done(RequestKey, Result<FetchedBytes, Refused>),
}

/// Blocks on their way here, as their request sees them.
pub struct Fetching {
    /// Where the engine waits for their layers.
    pub barrier: LayerBarrier,
    /// Ends it early.
    pub cancel: CancellationToken,
}

/// One layer on its way.
type Read = BoxFuture<'static, Result<BatchReport, TransferError>>;
/// The holder's answer, on its way.
type LeaseCall = BoxFuture<'static, Result<v1::LeaseReply, Refused>>;

/// What is still open when a fetch ends, however it does.
#[derive(Default)]
struct Open {
    /// A question whose answer is not waited for any more; the holder may give a lease all the
    /// same.
    asked: Option<LeaseCall>,
    lease: Option<GrantId>,
    /// They may still write into the destinations.
    reads: VecDeque<(Read, PacedCancel)>,
}

impl Open {
    /// Returns once nothing is written any more.
    async fn end_reads(&mut self) {
        self.reads.iter().for_each(|(_, stop)| stop.cancel());
        for (read, _) in self.reads.drain(..) {
            // It only has to be over.
            let _ = read.await;
        }
    }
}

/// What a fetch needs, apart from the node.
struct Fetch<E> {
    key: RequestKey,
    source: FetchSource,
    lease: LeaseRequest,
    destinations: Vec<BlockId>,
    /// Of each layer: when the link that a mock node pretends to have would have carried it.
    dues: Vec<Option<Instant>>,
    info: Arc<NodeInfo>,
    layout: KvLayout,
    segment: SegmentId,
    transfer: TransferEngine,
    peers: Peers,
    clock: Arc<dyn Clock>,
    inputs: mpsc::Sender<Input<E>>,
}

/// Where leased blocks are.
struct Leased {
    lease: GrantId,
    blocks: Vec<BlockId>,
    arena: RemoteArena,
}

/// Starts fetching a prefix into `destinations`; the answers go to the node's loop.
pub fn start_fetch<E: Send + 'static>(
    parts: &mut NodeParts<E>,
    peers: &Peers,
    source: FetchSource,
    lease: LeaseRequest,
    destinations: Vec<BlockId>,
) -> Fetching {
    let (keeper, barrier) = layer_barrier();
    let cancel = CancellationToken::new();
    let layer_bytes = (parts.model.layout.block_bytes() * destinations.len()) as u64;
    let now = parts.clock.now();
    let due = |link: &mut LinkPacer| link.reserve(now, Direction::Receive, layer_bytes);
    let dues = (0..parts.model.layout.num_layers).map(|_| parts.pacer.as_mut().map(due)).collect();
    let fetch = Fetch {
        dues,
        key: lease.key,
        source,
        lease,
        destinations,
        info: Arc::clone(&parts.info),
        layout: parts.model.layout.clone(),
        segment: parts.segment,
        transfer: parts.transfer.clone(),
        peers: peers.clone(),
        clock: Arc::clone(&parts.clock),
        inputs: parts.inputs.clone(),
    };
    let cancelled = cancel.clone();
    parts.tasks.spawn_request("prefix fetch", async move { fetch.run(keeper, cancelled).await });
    Fetching { barrier, cancel }
}

fn failed(kind: ErrorKind, message: String) -> Refused {
    Refused { kind, message }
}

impl<E: Send + 'static> Fetch<E> {
    async fn run(self, keeper: LayerBarrierKeeper, cancel: CancellationToken) {
        let mut open = Open::default();
        // Whatever happens, the core hears the end, and the holder gets its lease back.
        let (result, panic) = match AssertUnwindSafe(self.bring(&keeper, &cancel, &mut open)).catch_unwind().await {
            Ok(result) => (result, None),
            Err(panic) => (Err(failed(ErrorKind::Internal, "fetching the prefix panicked".into())), Some(panic)),
        };
        open.end_reads().await;
        // The core first: what the engine computes after a failure must not count.
        self.tell(FetchEvent::Done(self.key, result)).await;
        keeper.end();
        self.give_back(open).await;
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    async fn bring(
        &self,
        keeper: &LayerBarrierKeeper,
        cancel: &CancellationToken,
        open: &mut Open,
    ) -> Result<FetchedBytes, Refused> {
        let deadline = self.clock.now() + FETCH_DEADLINE;
        let leased = self.ask(cancel, open).await?;
        self.read(&leased, keeper, cancel, deadline, &mut open.reads).await
    }

    async fn tell(&self, event: FetchEvent) {
        // The loop is gone only when the process ends.
        let _ = self.inputs.send(Input::Fetch(event)).await;
    }

    /// Asks the holder which of the blocks it still has.
    async fn ask(&self, cancel: &CancellationToken, open: &mut Open) -> Result<Leased, Refused> {
        let request = v1::LeaseRequest {
            protocol_version: PROTOCOL_VERSION,
            key: Some(self.key.into()),
            reader_node: self.lease.reader.to_string(),
            reader_generation: self.lease.reader_generation.to_string(),
            target_generation: self.source.generation.to_string(),
            layout: Some((&self.layout).into()),
            block_hashes: baton_proto::hashes_to_bytes(&self.lease.block_hashes),
            kv_class: self.info.kv_class.clone(),
        };
        let mut client = self.peers.client(&self.source.address)?;
        let address = self.source.address.clone();
        let mut call: LeaseCall = async move {
            let reply = client.lease(request).await;
            reply.map(|reply| reply.into_inner()).map_err(|status| refused(&address, &status))
        }
        .boxed();
        let answer = tokio::select! {
            reply = &mut call => Ok(reply?),
            () = cancel.cancelled() => Err(failed(ErrorKind::Cancelled, "it is not needed any more".into())),
            () = self.clock.sleep(LEASE_DEADLINE) => {
                let message = format!("{} did not answer within {LEASE_DEADLINE:?}", self.source.node);
                Err(failed(ErrorKind::DeadlineExceeded, message))
            }
        };
        let reply = answer.inspect_err(|_| open.asked = Some(call))?;
        open.lease = Some(GrantId(reply.lease));
        let leased = self.check(reply)?;
        self.tell(FetchEvent::Begun(self.key, leased.blocks.len())).await;
        Ok(leased)
    }

    fn check(&self, reply: v1::LeaseReply) -> Result<Leased, Refused> {
        let (arena, blocks) =
            RemoteArena::new(&self.source.node, &self.layout, &reply.segment, reply.num_blocks, reply.blocks)?;
        let leased = blocks.len();
        let asked = self.destinations.len();
        if leased == 0 || leased > asked {
            let message = format!("{}: leased {leased} blocks, but {asked} were asked for", self.source.node);
            return Err(failed(ErrorKind::Internal, message));
        }
        Ok(Leased { lease: GrantId(reply.lease), blocks, arena })
    }

    /// One read per layer, told in order. Those that are left in `reads` may still write into the
    /// destinations.
    async fn read(
        &self,
        leased: &Leased,
        keeper: &LayerBarrierKeeper,
        cancel: &CancellationToken,
        deadline: Instant,
        reads: &mut VecDeque<(Read, PacedCancel)>,
    ) -> Result<FetchedBytes, Refused> {
        let layers = self.layout.num_layers;
        let mut asked = 0;
        let mut bytes = 0;
        let mut transport = "";
        for layer in 0..layers {
            while asked < layers && reads.len() < READS_AHEAD {
                reads.push_back(self.read_layer(leased, asked, deadline));
                asked += 1;
            }
            let Some((read, stop)) = reads.front_mut() else { break };
            let due = self.dues.get(layer as usize).copied().flatten();
            let now = self.clock.now();
            let until = due.map_or(now, |due| due.max(now)) + LAYER_DEADLINE;
            let read = cancellable(read, stop, cancel, self.clock.sleep_until(until)).await;
            reads.pop_front();
            let report = read.map_err(|error| {
                failed(error.kind(), format!("reading layer {layer} from {}: {error}", self.source.node))
            })?;
            bytes += report.bytes;
            transport = report.transport.as_str();
            self.tell(FetchEvent::Layer(self.key, layer)).await;
            // The last one is passed when the core knows that all is here.
            if layer + 1 < layers {
                keeper.open(layer + 1);
            }
        }
        Ok(FetchedBytes { bytes, transport: transport.to_owned() })
    }

    fn read_layer(&self, leased: &Leased, layer: u32, deadline: Instant) -> (Read, PacedCancel) {
        let len = self.layout.block_bytes() as u64;
        let pair = |(&to, &from): (&BlockId, &BlockId)| SpanPair {
            local_offset: self.layout.offset(layer, to) as u64,
            remote_offset: leased.arena.layout.offset(layer, from) as u64,
            len,
        };
        let pairs = self.destinations.iter().zip(&leased.blocks).map(pair).collect();
        let transfer = self.transfer.clone();
        let segment = self.segment;
        let remote = leased.arena.segment.clone();
        let lease = leased.lease;
        let due = self.dues.get(layer as usize).copied().flatten();
        // The transfer engine keeps the machine's clock.
        let left = deadline.saturating_duration_since(self.clock.now());
        let options = BatchOptions::new(baton_runtime::now() + left);
        paced(&self.clock, due, move || transfer.read(segment, &remote, lease, pairs, options))
    }

    async fn give_back(&self, open: Open) {
        let lease = match (open.lease, open.asked) {
            (Some(lease), _) => lease.0,
            // The call has a time limit of its own.
            (None, Some(asked)) => match asked.await {
                Ok(reply) => reply.lease,
                Err(_) => return,
            },
            (None, None) => return,
        };
        let request = v1::ReleaseLeaseRequest {
            lease,
            reader_node: self.lease.reader.to_string(),
            reader_generation: self.lease.reader_generation.to_string(),
            target_generation: self.source.generation.to_string(),
        };
        for attempt in 1..=RELEASE_ATTEMPTS {
            let Ok(mut client) = self.peers.client(&self.source.address) else { return };
            let Err(status) = client.release_lease(request.clone()).await else { return };
            tracing::debug!(node = %self.source.node, attempt, reason = status.message(), "cannot give a lease back; it will expire");
        }
    }
}

/// Ends with the read, or before if it is cancelled or takes too long.
async fn cancellable(
    read: &mut Read,
    stop: &PacedCancel,
    cancel: &CancellationToken,
    late: Waited,
) -> Result<BatchReport, TransferError> {
    let error = tokio::select! {
        report = &mut *read => return report,
        () = cancel.cancelled() => TransferError::Cancelled,
        () = late => TransferError::Deadline,
    };
    stop.cancel();
    // It may have been complete before.
    read.await.map_err(|_| error)
}
