//! An engine with memory, in this process.

#![allow(unsafe_code)] // fills and reads memory that peers may write at the same time: that is what is tested

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_runtime::TaskSet;
use baton_transfer_engine::{
    Arrival, ArrivalReceiver, GrantSpec, SegmentDescriptor, SegmentId, TransferConfig, TransferEngine, TransportChoice,
};
use baton_types::{Generation, GrantId, NodeId, NodeStart};

use crate::pattern::fill;

/// Longer than any test takes.
pub const LONG: Duration = Duration::from_secs(120);
/// No grant ends by itself, however long the machine takes.
const GRANT_LIFE: Duration = Duration::from_secs(3600);

/// Small frames and parts, so that small tests have many; many retries, so that a batch lives
/// through many failures.
pub fn config(name: &str, transport: TransportChoice) -> TransferConfig {
    let mut config = TransferConfig::new(NodeId::new(name).unwrap(), Generation(1), "127.0.0.1:0".parse().unwrap());
    config.transport = transport;
    config.stripe_bytes = 32 << 10;
    config.frame_bytes = 8 << 10;
    config.retries = 8;
    config
}

/// An engine with one segment.
pub struct Node {
    pub engine: TransferEngine,
    pub arrivals: ArrivalReceiver,
    pub memory: Memory,
    pub segment: SegmentId,
    pub descriptor: SegmentDescriptor,
    tasks: TaskSet,
}

impl Node {
    pub async fn start(config: TransferConfig, bytes: usize) -> Self {
        let tasks = TaskSet::new();
        let memory = Memory(Arc::new(MemoryRegion::allocate_shared(bytes).unwrap()));
        let (engine, arrivals) = TransferEngine::bind(config, &tasks).await.unwrap();
        let (segment, descriptor) = engine.register(Arc::clone(&memory.0)).unwrap();
        Self { engine, arrivals, memory, segment, descriptor, tasks }
    }

    /// Gives node `writer`, in generation 1, a right to write.
    pub fn grant(&self, id: u64, writer: &str, range: Range<u64>) -> GrantId {
        self.granter(writer, range)(id)
    }

    /// Gives that right under one id after the other.
    pub fn granter(&self, writer: &str, range: Range<u64>) -> impl Fn(u64) -> GrantId + Send + Sync + use<> {
        let engine = self.engine.clone();
        let segment = self.segment;
        let writer = Some(NodeStart { node: NodeId::new(writer).unwrap(), generation: Generation(1) });
        move |id| {
            let id = GrantId(id);
            let ranges = vec![range.clone()];
            let expires = Instant::now() + GRANT_LIFE;
            engine.grant(GrantSpec { id, segment, ranges, writer: writer.clone(), expires }).unwrap();
            id
        }
    }

    /// Gives any peer the right to write the first bytes.
    pub fn grant_to_all(&self, id: GrantId, bytes: u64) {
        let segment = self.segment;
        let ranges = vec![0..bytes];
        let expires = Instant::now() + GRANT_LIFE;
        self.engine.grant(GrantSpec { id, segment, ranges, writer: None, expires }).unwrap();
    }

    /// The next arrival.
    pub async fn arrival(&mut self) -> Arrival {
        tokio::time::timeout(LONG, self.arrivals.recv()).await.expect("an arrival in time").expect("the engine lives")
    }

    /// Ends the engine; none of its tasks is left.
    pub async fn stop(self) {
        self.tasks.join(Duration::from_secs(20)).await.unwrap();
    }
}

/// Memory of a node.
#[derive(Clone)]
pub struct Memory(Arc<MemoryRegion>);

impl Memory {
    /// A copy.
    pub fn bytes(&self, range: Range<u64>) -> Vec<u8> {
        let range = range.start as usize..range.end as usize;
        assert!(self.0.contains(&range));
        let mut copy = vec![0u8; range.len()];
        // SAFETY: inside the region (asserted). A peer may write at the same time; the bytes are
        // only compared.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr().add(range.start), copy.as_mut_ptr(), copy.len()) };
        copy
    }

    /// Writes pattern `tag` as it stands at `pattern_offset` to `at`.
    pub fn fill(&self, at: u64, len: u64, tag: u64, pattern_offset: u64) {
        // SAFETY: the caller is between transfers of these bytes.
        fill(unsafe { self.0.slice_mut(at as usize..(at + len) as usize) }, tag, pattern_offset);
    }
}
