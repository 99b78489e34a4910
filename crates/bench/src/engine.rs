//! Batches through the transfer engine.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use baton_runtime::{TaskSet, new_generation};
use baton_transfer_engine::{
    Arrival, ArrivalReceiver, Batch, BatchOptions, BatchReport, GrantSpec, SegmentDescriptor, SegmentId, SpanPair,
    TransferConfig, TransferEngine, TransferError,
};
use baton_types::{Generation, GrantId, NodeId, NodeStart};
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use crate::BenchError;
use crate::layout::Layout;
use crate::memory::Memory;
use crate::plan::{Op, Plan};
use crate::stats::TransferStats;

/// Name of the writing engine; grants are for it alone.
const INITIATOR: &str = "bench-initiator";
/// Name of the owning engine.
const TARGET: &str = "bench-target";
/// Writes under one grant: an owner remembers each, up to a bound.
const BATCHES_PER_GRANT: u64 = 4096;
/// Grants open ahead. The owner opens the next when all batches of the first have arrived. It is
/// never further behind than its arrival queue is long, which is less than the three others hold.
const GRANTS_AHEAD: u64 = 4;
/// What all reads are under.
const LEASE: GrantId = GrantId(0);
/// A grant outlives every measurement.
const GRANT_LIFE: Duration = Duration::from_secs(2 * 3600);
/// A batch that takes longer is a failure.
const BATCH_DEADLINE: Duration = Duration::from_secs(30);
/// Longest wait for the engine's tasks.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Default settings for a name.
pub fn config(node: &str, listen: SocketAddr) -> TransferConfig {
    #[allow(clippy::expect_used)] // constants of this file
    let node = NodeId::new(node).expect("a node's name is letters and dashes");
    TransferConfig::new(node, new_generation(), listen)
}

fn planned(plan: &Plan, node: &str, listen: SocketAddr) -> TransferConfig {
    let transport = plan.carrier.choice();
    TransferConfig { transport, lanes_per_peer: plan.lanes as usize, ..config(node, listen) }
}

/// What both ends have.
struct End {
    engine: TransferEngine,
    tasks: TaskSet,
    generation: Generation,
    segment: SegmentId,
    descriptor: SegmentDescriptor,
}

impl End {
    async fn start(config: TransferConfig, memory: &Memory) -> Result<(Self, ArrivalReceiver), BenchError> {
        let tasks = TaskSet::new();
        let generation = config.generation;
        let (engine, arrivals) = TransferEngine::bind(config, &tasks).await?;
        let (segment, descriptor) = engine.register(memory.region())?;
        Ok((Self { engine, tasks, generation, segment, descriptor }, arrivals))
    }

    async fn stop(self) -> Result<(), BenchError> {
        self.engine.shutdown();
        self.tasks.join(STOP_TIMEOUT).await.map_err(|failure| BenchError::control("engine", failure.to_string()))
    }
}

/// The end that owns the memory.
pub struct EngineTarget {
    end: End,
    arrived: Arc<AtomicU64>,
}

impl EngineTarget {
    /// Binds, registers the memory, and grants it to the initiator of this generation.
    pub async fn start(
        plan: &Plan,
        listen: SocketAddr,
        memory: &Memory,
        writer: Generation,
    ) -> Result<Self, BenchError> {
        let (end, arrivals) = End::start(planned(plan, TARGET, listen), memory).await?;
        let grants = Grants { engine: end.engine.clone(), segment: end.segment, bytes: plan.working_set, writer };
        match plan.op {
            Op::Write => (0..GRANTS_AHEAD).try_for_each(|number| grants.open(number))?,
            Op::Read => end.engine.lease(grants.spec(LEASE)?)?,
        }
        let arrived = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&arrived);
        let cancelled = end.tasks.token();
        end.tasks.spawn("bench arrivals", async move {
            tokio::select! {
                result = grants.follow(arrivals, &count) => result,
                () = cancelled.cancelled() => Ok(()),
            }
        });
        Ok(Self { end, arrived })
    }

    /// Bytes of batches that have arrived.
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Relaxed)
    }

    /// The descriptor in hexadecimal digits.
    pub fn descriptor(&self) -> String {
        self.end.descriptor.encode().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Ends its engine.
    pub async fn stop(self) -> Result<(), BenchError> {
        self.end.stop().await
    }
}

/// A row of grants of the whole segment, each good for some batches.
struct Grants {
    engine: TransferEngine,
    segment: SegmentId,
    bytes: u64,
    writer: Generation,
}

impl Grants {
    fn open(&self, number: u64) -> Result<(), TransferError> {
        self.engine.grant(self.spec(GrantId(number))?)
    }

    fn spec(&self, id: GrantId) -> Result<GrantSpec, TransferError> {
        let node = NodeId::new(INITIATOR).map_err(|error| TransferError::Protocol(error.to_string()))?;
        let writer = NodeStart { node, generation: self.writer };
        let ranges = std::iter::once(0..self.bytes).collect();
        let expires = baton_runtime::now() + GRANT_LIFE;
        Ok(GrantSpec { id, segment: self.segment, ranges, writer: Some(writer), expires })
    }

    /// Counts what arrives, and replaces a grant that is used up.
    async fn follow(self, mut arrivals: ArrivalReceiver, arrived: &AtomicU64) -> Result<(), TransferError> {
        let mut used = std::collections::BTreeMap::<u64, u64>::new();
        while let Some(arrival) = arrivals.recv().await {
            let Arrival::Batch { grant, bytes, .. } = arrival else { continue };
            arrived.fetch_add(bytes, Relaxed);
            let batches = used.entry(grant.0).or_default();
            *batches += 1;
            if *batches == BATCHES_PER_GRANT {
                used.remove(&grant.0);
                self.engine.revoke(grant).await;
                self.open(grant.0 + GRANTS_AHEAD)?;
            }
        }
        Ok(())
    }
}

/// The end that starts the batches.
pub struct EngineInitiator {
    end: End,
    plan: Plan,
    layout: Layout,
    remote: SegmentDescriptor,
    /// Batches of all phases.
    started: u64,
}

/// An engine of the initiator that knows no target yet.
pub struct Unconnected(End);

impl Unconnected {
    /// Binds and registers the memory.
    pub async fn start(plan: &Plan, listen: SocketAddr, memory: &Memory) -> Result<Self, BenchError> {
        let (end, _) = End::start(planned(plan, INITIATOR, listen), memory).await?;
        Ok(Self(end))
    }

    /// Of this engine.
    pub fn generation(&self) -> u64 {
        self.0.generation.0
    }

    /// Takes the target's descriptor, in hexadecimal digits.
    pub fn connect(self, plan: &Plan, descriptor: &str) -> Result<EngineInitiator, BenchError> {
        let bytes = unhex(descriptor).ok_or_else(|| BenchError::control("target", "its descriptor is malformed"))?;
        let remote = SegmentDescriptor::decode(&bytes)?;
        Ok(EngineInitiator { end: self.0, plan: *plan, layout: Layout::new(plan), remote, started: 0 })
    }
}

impl EngineInitiator {
    /// Keeps the planned number of batches under way for some time, and waits for the last.
    pub async fn run(&mut self, duration: Duration) -> Result<(TransferStats, &'static str), BenchError> {
        let mut stats = TransferStats::default();
        let mut carried = self.plan.carrier.as_str();
        let mut under_way = FuturesUnordered::new();
        let began = baton_runtime::now();
        let mut next = 0;
        let mut ended = began;
        loop {
            while under_way.len() < self.plan.depth as usize && began.elapsed() < duration {
                under_way.push(self.start(next));
                next += 1;
            }
            let Some(result) = under_way.next().await else { break };
            let report: BatchReport = result?;
            stats.add(report.bytes, report.completed - report.started);
            ended = ended.max(report.completed);
            carried = report.transport.as_str();
        }
        stats.elapsed = ended - began;
        Ok((stats, carried))
    }

    fn start(&mut self, batch: u64) -> Batch {
        let blocks = batch * u64::from(self.plan.spans)..(batch + 1) * u64::from(self.plan.spans);
        let len = self.plan.block_bytes;
        let places = self.layout.all(blocks);
        let options = BatchOptions::new(baton_runtime::now() + BATCH_DEADLINE).tag(self.started);
        let grant = GrantId(self.started / BATCHES_PER_GRANT);
        self.started += 1;
        let End { engine, segment, .. } = &self.end;
        match self.plan.op {
            Op::Write => {
                let span = |(local_offset, remote_offset)| SpanPair { local_offset, remote_offset, len };
                engine.write(*segment, &self.remote, grant, places.map(span).collect(), options)
            }
            Op::Read => {
                let span = |(remote_offset, local_offset)| SpanPair { local_offset, remote_offset, len };
                engine.read(*segment, &self.remote, LEASE, places.map(span).collect(), options)
            }
        }
    }

    /// Ends its engine.
    pub async fn stop(self) -> Result<(), BenchError> {
        self.end.stop().await
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}
