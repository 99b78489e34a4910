//! Engines with memory, in two lines.

#![allow(unsafe_code)] // fills and reads regions in tests

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_runtime::TaskSet;
use baton_types::{Generation, GrantId, NodeId, NodeStart};

use crate::{
    Arrival, ArrivalReceiver, Batch, BatchOptions, FakeNetwork, GrantSpec, SegmentDescriptor, SegmentId, SpanPair,
    TransferConfig, TransferEngine, TransportChoice, TransportKind,
};

/// Longer than any test takes.
pub(super) const LONG: Duration = Duration::from_secs(20);

/// An engine with one segment.
pub(super) struct TestNode {
    pub(super) engine: TransferEngine,
    pub(super) arrivals: ArrivalReceiver,
    pub(super) region: Arc<MemoryRegion>,
    pub(super) segment: SegmentId,
    pub(super) descriptor: SegmentDescriptor,
    pub(super) tasks: TaskSet,
    pub(super) identity: NodeStart,
}

pub(super) fn config(name: &str, generation: u64) -> TransferConfig {
    let mut config =
        TransferConfig::new(NodeId::new(name).unwrap(), Generation(generation), "127.0.0.1:0".parse().unwrap());
    config.transport = TransportChoice::Only(TransportKind::Tcp);
    // Small, so that small tests have many frames and parts.
    config.stripe_bytes = 256 << 10;
    config.frame_bytes = 32 << 10;
    config.connect_timeout = Duration::from_secs(2);
    config.progress_timeout = Duration::from_millis(400);
    config.retries = 1;
    config
}

impl TestNode {
    pub(super) async fn bind(config: TransferConfig, bytes: usize) -> Self {
        let tasks = TaskSet::new();
        let identity = NodeStart { node: config.node.clone(), generation: config.generation };
        let (engine, arrivals) = TransferEngine::bind(config, &tasks).await.unwrap();
        Self::new(engine, arrivals, bytes, tasks, identity)
    }

    pub(super) fn fake(network: &FakeNetwork, config: TransferConfig, bytes: usize) -> Self {
        let tasks = TaskSet::new();
        let identity = NodeStart { node: config.node.clone(), generation: config.generation };
        let (engine, arrivals) = TransferEngine::fake(network, config, &tasks).unwrap();
        Self::new(engine, arrivals, bytes, tasks, identity)
    }

    fn new(
        engine: TransferEngine,
        arrivals: ArrivalReceiver,
        bytes: usize,
        tasks: TaskSet,
        identity: NodeStart,
    ) -> Self {
        let region = Arc::new(MemoryRegion::allocate_shared(bytes).unwrap());
        let (segment, descriptor) = engine.register(Arc::clone(&region)).unwrap();
        Self { engine, arrivals, region, segment, descriptor, tasks, identity }
    }

    /// Gives a grant to a writer.
    pub(super) fn grant(&self, id: u64, writer: &Self, ranges: Vec<Range<u64>>) -> GrantId {
        self.engine.grant(self.spec(id, writer, ranges)).unwrap();
        GrantId(id)
    }

    /// Gives a lease to a reader.
    pub(super) fn lease(&self, id: u64, reader: &Self, ranges: Vec<Range<u64>>) -> GrantId {
        self.engine.lease(self.spec(id, reader, ranges)).unwrap();
        GrantId(id)
    }

    fn spec(&self, id: u64, peer: &Self, ranges: Vec<Range<u64>>) -> GrantSpec {
        let writer = Some(peer.identity.clone());
        let expires = Instant::now() + LONG;
        GrantSpec { id: GrantId(id), segment: self.segment, ranges, writer, expires }
    }

    pub(super) fn read(&self, from: &SegmentDescriptor, lease: GrantId, spans: Vec<SpanPair>) -> Batch {
        self.engine.read(self.segment, from, lease, spans, BatchOptions::new(Instant::now() + LONG))
    }

    pub(super) fn write(&self, to: &SegmentDescriptor, grant: GrantId, spans: Vec<SpanPair>) -> Batch {
        self.write_within(LONG, to, grant, spans)
    }

    pub(super) fn write_within(
        &self,
        time: Duration,
        to: &SegmentDescriptor,
        grant: GrantId,
        spans: Vec<SpanPair>,
    ) -> Batch {
        self.engine.write(self.segment, to, grant, spans, BatchOptions::new(Instant::now() + time).tag(7))
    }

    /// Fills the region with bytes that depend on place and seed.
    pub(super) fn fill(&self, seed: u64) {
        self.fill_first(self.region.len(), seed);
    }

    /// Fills the first bytes of the region.
    pub(super) fn fill_first(&self, bytes: usize, seed: u64) {
        let words = bytes / 8;
        // SAFETY: the test does this while nothing moves.
        let bytes = unsafe { self.region.slice_mut(0..words * 8) };
        for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
            // Fibonacci hashing: no two words of a region are alike, and none is zero by chance.
            word.copy_from_slice(&((i as u64 ^ seed << 32) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
    }

    /// A copy of some bytes.
    pub(super) fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        assert!(self.region.contains(&range));
        let from = self.region.as_ptr();
        // SAFETY: inside the region. Another task may be receiving here; reads are volatile, and
        // what they yield is only compared.
        range.map(|i| unsafe { from.add(i).read_volatile() }).collect()
    }

    /// The next arrival.
    pub(super) async fn arrival(&mut self) -> Arrival {
        tokio::time::timeout(LONG, self.arrivals.recv()).await.expect("an arrival in time").expect("the engine lives")
    }

    pub(super) async fn stop(self) {
        self.tasks.join(LONG).await.unwrap();
    }
}

pub(super) fn span(local_offset: u64, remote_offset: u64, len: u64) -> SpanPair {
    SpanPair { local_offset, remote_offset, len }
}

/// A span from the start of one region to the start of the other.
pub(super) fn whole(len: u64) -> Vec<SpanPair> {
    vec![span(0, 0, len)]
}

/// Writer `w` and owner `o`, over TCP.
pub(super) async fn pair(bytes: usize) -> (TestNode, TestNode) {
    pair_over(TransportChoice::Only(TransportKind::Tcp), bytes).await
}

/// Writer `w` and owner `o`.
pub(super) async fn pair_over(transport: TransportChoice, bytes: usize) -> (TestNode, TestNode) {
    let config = |name| TransferConfig { transport, ..config(name, 1) };
    let writer = TestNode::bind(config("w"), bytes).await;
    writer.fill(1);
    (writer, TestNode::bind(config("o"), bytes).await)
}
