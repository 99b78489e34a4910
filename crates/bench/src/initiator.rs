//! The end that starts the batches, keeps the time and reports.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::net::TcpStream;

use crate::control::{Control, Reply, Request, VERSION};
use crate::copy_loop::CopyInitiator;
use crate::engine::{EngineInitiator, Unconnected};
use crate::memory::Memory;
use crate::plan::{Method, Op, Plan};
use crate::process::Target;
use crate::report::{Measured, Report};
use crate::stats::TransferStats;
use crate::{BenchError, memcpy, usage};

/// Before the clock starts: connections open, both ends' caches and windows settle.
pub const WARM_UP: Duration = Duration::from_millis(500);
/// Longest wait for the target's control connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the plan against a target at `connect`, or one of its own.
pub async fn run(plan: &Plan, connect: Option<&str>, progress: bool) -> Result<Report, BenchError> {
    let _progress = Progress::new(plan, progress);
    if plan.carrier == Method::Memcpy {
        let plan = *plan;
        let copied = tokio::task::spawn_blocking(move || memcpy::run(&plan)).await;
        return copied.map_err(|error| BenchError::control("memcpy", error.to_string()))?;
    }
    let Some(address) = connect else {
        let target = Target::start().await?;
        let report = measure(plan, &target.address.to_string()).await?;
        target.ended().await?;
        return Ok(report);
    };
    measure(plan, address).await
}

async fn measure(plan: &Plan, address: &str) -> Result<Report, BenchError> {
    // First, as it takes its time: the target waits for a greeting.
    let memory = match plan.op {
        Op::Write => Memory::filled(plan)?,
        Op::Read => Memory::cleared(plan)?,
    };
    let refused = |reason: String| BenchError::control("target", format!("cannot connect to {address}: {reason}"));
    let stream = match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
        Ok(stream) => stream.map_err(|error| refused(error.to_string()))?,
        Err(_) => return Err(refused(format!("no answer within {CONNECT_TIMEOUT:?}"))),
    };
    let mut control = Control::new(stream, "target")?;
    let mut side = Side::start(plan, &mut control, &memory).await?;
    let report = phases(plan, &mut control, &memory, &mut side).await?;
    side.stop().await?;
    control.send(&Request::End).await?;
    Ok(report)
}

/// Warm-up, measurement, comparison.
async fn phases(plan: &Plan, control: &mut Control, memory: &Memory, side: &mut Side) -> Result<Report, BenchError> {
    let warm = side.run(WARM_UP.min(plan.duration())).await?.stats.bytes;
    let target_before = mark(plan, control, warm).await?;
    match plan.op {
        _ if !plan.verify => {}
        Op::Write => done(control, &Request::Clear).await?,
        Op::Read => memory.clear(),
    }
    let before = usage::cpu_seconds()?;
    let Phase { stats, carried, first } = side.run(plan.duration()).await?;
    let initiator_cpu_s = usage::cpu_seconds()? - before;
    let target_cpu_s = mark(plan, control, warm + stats.bytes).await? - target_before;
    let blocks = stats.batches * u64::from(plan.spans);
    match plan.op {
        _ if !plan.verify => {}
        Op::Write => done(control, &Request::Verify { first, blocks }).await?,
        Op::Read => memory.verify(plan, first, blocks)?,
    }
    Ok(Report::new(plan, carried, &Measured { stats, initiator_cpu_s, target_cpu_s }))
}

/// CPU seconds of the target once this many bytes have arrived. Reads arrive here, and have.
async fn mark(plan: &Plan, control: &mut Control, bytes: u64) -> Result<f64, BenchError> {
    let bytes = match plan.op {
        Op::Write => bytes,
        Op::Read => 0,
    };
    match control.ask(&Request::Mark { bytes }).await? {
        Reply::Marked { cpu_s } => Ok(cpu_s),
        other => Err(control.unexpected(&other)),
    }
}

async fn done(control: &mut Control, request: &Request) -> Result<(), BenchError> {
    match control.ask(request).await? {
        Reply::Done => Ok(()),
        other => Err(control.unexpected(&other)),
    }
}

/// What one phase did.
struct Phase {
    stats: TransferStats,
    /// What carried the blocks.
    carried: &'static str,
    /// Number of the first block.
    first: u64,
}

/// What sends.
enum Side {
    Engine(Box<EngineInitiator>),
    CopyLoop(CopyInitiator),
}

impl Side {
    async fn start(plan: &Plan, control: &mut Control, memory: &Memory) -> Result<Self, BenchError> {
        let hello = |writer_generation| Request::Hello { version: VERSION, plan: *plan, writer_generation };
        if plan.carrier.is_baseline() {
            return match control.greet(&hello(0)).await? {
                Reply::Stream { address } => {
                    Ok(Self::CopyLoop(CopyInitiator::connect(plan, address, memory.clone()).await?))
                }
                other => Err(control.unexpected(&other)),
            };
        }
        let engine = Unconnected::start(plan, SocketAddr::new(control.local_ip(), 0), memory).await?;
        match control.greet(&hello(engine.generation())).await? {
            Reply::Segment { descriptor } => Ok(Self::Engine(Box::new(engine.connect(plan, &descriptor)?))),
            other => Err(control.unexpected(&other)),
        }
    }

    async fn run(&mut self, duration: Duration) -> Result<Phase, BenchError> {
        match self {
            Self::Engine(initiator) => {
                let (stats, carried) = initiator.run(duration).await?;
                Ok(Phase { stats, carried, first: 0 })
            }
            Self::CopyLoop(initiator) => {
                let (stats, first) = initiator.run(duration).await?;
                Ok(Phase { stats, carried: Method::CopyLoop.as_str(), first })
            }
        }
    }

    async fn stop(self) -> Result<(), BenchError> {
        match self {
            Self::Engine(initiator) => initiator.stop().await,
            Self::CopyLoop(_) => Ok(()),
        }
    }
}

/// A line on stderr while a person waits; gone when dropped.
struct Progress(Option<ProgressBar>);

impl Progress {
    fn new(plan: &Plan, wanted: bool) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let carrier = plan.carrier.as_str();
        let op = plan.op.as_str();
        let message = format!("{carrier} {op}, {} bytes x {}, {} s", plan.block_bytes, plan.spans, plan.seconds);
        let bar = ProgressBar::new_spinner().with_message(message);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
            bar.set_style(style);
        }
        // Twice a second, so that it costs nothing that could be measured.
        bar.enable_steady_tick(Duration::from_millis(500));
        Self(Some(bar))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
