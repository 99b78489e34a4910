//! Brings a prefix from another node: a lease of its blocks, and one read per layer, a few at a time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_proto::{PROTOCOL_VERSION, v1};
use baton_scheduler::{FetchedBytes, RequestKey};
use baton_transfer_engine::{BatchOptions, BatchReport, SegmentId, SpanPair, TransferEngine, TransferError};
use baton_types::{BlockId, ErrorKind, FetchSource, GrantId, KvLayout, LeaseRequest, Refused};
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::input::Input;
use crate::layer_gate::{LayerGate, LayerGateKeeper, layer_gate};
use crate::node::NodeParts;
use crate::pacer::{LinkPacer, PacedCancel, paced};
use crate::peers::{Peers, refused};
use crate::remote::RemoteArena;

/// A fetch is over within this time, however slow the holder is: it must end before the lease does.
const FETCH_DEADLINE: Duration = Duration::from_secs(30);
/// One layer takes no longer than this once it is its turn: the engine may be waiting for it.
const LAYER_DEADLINE: Duration = Duration::from_secs(5);
/// Reads under way at once: the next layers come while one is told.
const READS_AHEAD: usize = 4;
/// How often a lease that is not needed any more is given back; one that is forgotten expires by itself.
const RELEASE_ATTEMPTS: u32 = 2;

/// A fetch under way, as its request sees it.
pub struct Fetching {
    /// Where the engine waits for its layers.
    pub gate: LayerGate,
    /// Ends it early.
    pub cancel: CancellationToken,
}

/// What a fetch tells the node's loop, in this order.
#[derive(Debug)]
pub enum FetchEvent {
    /// The holder agreed, and has so many of the blocks asked for.
    Begun(RequestKey, usize),
    /// One layer is here.
    Layer(RequestKey, u32),
    /// Everything is here, or the rest will not come. Always told, and last: nothing is written any more.
    Done(RequestKey, Result<FetchedBytes, Refused>),
}

/// One layer on its way.
type Read = BoxFuture<'static, Result<BatchReport, TransferError>>;

/// What a fetch needs, apart from the node.
struct Fetch<E> {
    key: RequestKey,
    source: FetchSource,
    lease: LeaseRequest,
    destinations: Vec<BlockId>,
    /// Of each layer: when the link that a mock node pretends to have would have carried it.
    dues: Vec<Option<Instant>>,
    layout: KvLayout,
    segment: SegmentId,
    transfer: TransferEngine,
    peers: Peers,
    inputs: mpsc::Sender<Input<E>>,
}

/// Where leased blocks are.
struct Leased {
    lease: GrantId,
    blocks: Vec<BlockId>,
    arena: RemoteArena,
}

/// Starts bringing a prefix into `destinations`; the answers go to the node's loop.
pub fn start_fetch<E: From<FetchEvent> + Send + 'static>(
    parts: &mut NodeParts<E>,
    peers: &Peers,
    source: FetchSource,
    lease: LeaseRequest,
    destinations: Vec<BlockId>,
) -> Fetching {
    let (keeper, gate) = layer_gate();
    let cancel = CancellationToken::new();
    let layer_bytes = (parts.model.layout.block_bytes() * destinations.len()) as u64;
    let due = |link: &mut LinkPacer| link.reserve(Instant::now(), layer_bytes);
    let dues = (0..parts.model.layout.num_layers).map(|_| parts.pacer.as_mut().map(due)).collect();
    let fetch = Fetch {
        dues,
        key: lease.key,
        source,
        lease,
        destinations,
        layout: parts.model.layout.clone(),
        segment: parts.segment,
        transfer: parts.transfer.clone(),
        peers: peers.clone(),
        inputs: parts.inputs.clone(),
    };
    let cancelled = cancel.clone();
    parts.tasks.spawn_request("prefix fetch", async move { fetch.run(keeper, cancelled).await });
    Fetching { gate, cancel }
}

fn failed(kind: ErrorKind, message: String) -> Refused {
    Refused { kind, message }
}

impl<E: From<FetchEvent> + Send + 'static> Fetch<E> {
    async fn run(self, keeper: LayerGateKeeper, cancel: CancellationToken) {
        let deadline = Instant::now() + FETCH_DEADLINE;
        let (lease, result) = match self.ask(&cancel).await {
            Ok(leased) => (Some(leased.lease), self.read(&leased, &keeper, &cancel, deadline).await),
            Err(refused) => (None, Err(refused)),
        };
        // The core first: what the engine computes after a failure must not count.
        self.tell(FetchEvent::Done(self.key, result)).await;
        keeper.finish();
        if let Some(lease) = lease {
            self.give_back(lease).await;
        }
    }

    async fn tell(&self, event: FetchEvent) {
        // The loop is gone only when the process ends.
        let _ = self.inputs.send(Input::Role(event.into())).await;
    }

    /// Asks the holder which of the blocks it still has.
    async fn ask(&self, cancel: &CancellationToken) -> Result<Leased, Refused> {
        let request = v1::LeaseRequest {
            protocol_version: PROTOCOL_VERSION,
            key: Some(self.key.into()),
            reader_node: self.lease.reader.to_string(),
            reader_generation: self.lease.reader_generation.to_string(),
            target_generation: self.source.generation.to_string(),
            layout: Some((&self.layout).into()),
            block_hashes: baton_proto::hashes_to_bytes(&self.lease.block_hashes),
        };
        let mut client = self.peers.client(&self.source.address)?;
        let reply = tokio::select! {
            reply = client.lease(request) => reply.map_err(|status| refused(&self.source.address, &status))?.into_inner(),
            () = cancel.cancelled() => return Err(failed(ErrorKind::Cancelled, "the request ended".into())),
        };
        let leased = self.check(reply)?;
        self.tell(FetchEvent::Begun(self.key, leased.blocks.len())).await;
        Ok(leased)
    }

    fn check(&self, reply: v1::LeaseReply) -> Result<Leased, Refused> {
        let (arena, blocks) =
            RemoteArena::new(&self.source.node, &self.layout, &reply.segment, reply.num_blocks, reply.blocks)?;
        let (leased, asked) = (blocks.len(), self.destinations.len());
        if leased == 0 || leased > asked {
            let message = format!("{}: leased {leased} blocks where {asked} were asked for", self.source.node);
            return Err(failed(ErrorKind::Internal, message));
        }
        Ok(Leased { lease: GrantId(reply.lease), blocks, arena })
    }

    /// One read per layer, told in order. Returns only once nothing is written into the destinations any more.
    async fn read(
        &self,
        leased: &Leased,
        keeper: &LayerGateKeeper,
        cancel: &CancellationToken,
        deadline: Instant,
    ) -> Result<FetchedBytes, Refused> {
        let (layers, mut reads) = (self.layout.num_layers, VecDeque::new());
        let (mut asked, mut bytes, mut transport, mut failure) = (0, 0, "", None);
        for layer in 0..layers {
            while asked < layers && reads.len() < READS_AHEAD && failure.is_none() {
                reads.push_back(self.read_layer(leased, asked, deadline));
                asked += 1;
            }
            let Some((read, stop)) = reads.pop_front() else { break };
            let due = self.dues.get(layer as usize).copied().flatten();
            let until = due.map_or_else(Instant::now, |due| due.max(Instant::now())) + LAYER_DEADLINE;
            match (cancellable(read, &stop, cancel, until).await, &failure) {
                (Ok(report), None) => {
                    bytes += report.bytes;
                    transport = report.transport.as_str();
                    self.tell(FetchEvent::Layer(self.key, layer)).await;
                    // The last one is passed when the core knows that all is here.
                    if layer + 1 < layers {
                        keeper.open(layer + 1);
                    }
                }
                (Err(error), None) => {
                    reads.iter().for_each(|(_, stop)| stop.cancel());
                    failure = Some(failed(error.kind(), format!("reading from {}: {error}", self.source.node)));
                }
                // The rest only has to be over.
                (_, Some(_)) => {}
            }
        }
        failure.map_or(Ok(FetchedBytes { bytes, transport: transport.to_owned() }), Err)
    }

    fn read_layer(&self, leased: &Leased, layer: u32, deadline: Instant) -> (Read, PacedCancel) {
        let len = self.layout.block_bytes() as u64;
        let pair = |(&to, &from): (&BlockId, &BlockId)| SpanPair {
            local_offset: self.layout.offset(layer, to) as u64,
            remote_offset: leased.arena.layout.offset(layer, from) as u64,
            len,
        };
        let pairs = self.destinations.iter().zip(&leased.blocks).map(pair).collect();
        let (transfer, segment, remote, lease) =
            (self.transfer.clone(), self.segment, leased.arena.segment.clone(), leased.lease);
        let due = self.dues.get(layer as usize).copied().flatten();
        paced(due, move || transfer.read(segment, &remote, lease, pairs, BatchOptions::new(deadline)))
    }

    async fn give_back(&self, lease: GrantId) {
        for attempt in 1..=RELEASE_ATTEMPTS {
            let Ok(mut client) = self.peers.client(&self.source.address) else { return };
            let Err(status) = client.release_lease(v1::ReleaseLeaseRequest { lease: lease.0 }).await else { return };
            tracing::debug!(node = %self.source.node, attempt, reason = status.message(), "cannot give a lease back; it will expire");
        }
    }
}

async fn cancellable(
    mut read: Read,
    stop: &PacedCancel,
    cancel: &CancellationToken,
    until: Instant,
) -> Result<BatchReport, TransferError> {
    tokio::select! {
        report = &mut read => return report,
        () = cancel.cancelled() => {}
        () = tokio::time::sleep_until(until.into()) => {}
    }
    stop.cancel();
    read.await
}
