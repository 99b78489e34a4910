//! The end that owns the memory.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use baton_types::Generation;
use tokio::net::TcpListener;

use crate::control::{ANSWER_TIMEOUT, Control, GREETING_TIMEOUT, Reply, Request, VERSION};
use crate::copy_loop::CopyTarget;
use crate::engine::EngineTarget;
use crate::memory::Memory;
use crate::plan::{Method, Op, Plan};
use crate::process::LISTENING;
use crate::{BenchError, usage};

/// Longest wait for an initiator.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(600);
/// How often bytes on their way are looked for.
const POLL: Duration = Duration::from_millis(1);

/// Serves one run.
pub async fn serve(listen: SocketAddr) -> Result<(), BenchError> {
    let listener = TcpListener::bind(listen)
        .await
        .map_err(|error| BenchError::invalid("--listen", format!("cannot listen on {listen}: {error}")))?;
    writeln!(std::io::stdout(), "{LISTENING}{}", listener.local_addr()?)?;
    let accepted = tokio::time::timeout(ACCEPT_TIMEOUT, greeted(&listener)).await;
    let (mut control, first) =
        accepted.map_err(|_| BenchError::control("initiator", format!("none came within {ACCEPT_TIMEOUT:?}")))??;
    let result = run(&mut control, first).await;
    let Err(error) = result else { return Ok(()) };
    // If the connection is what failed, the initiator knows already; and the parent of this process
    // may not read its stdout.
    let _ = control.send(&Reply::Failed { reason: error.to_string() }).await;
    let _ = writeln!(std::io::stdout(), "FAILED {error}");
    Err(BenchError::Reported)
}

/// The first connection that says something: others may only look whether the port is open.
async fn greeted(listener: &TcpListener) -> Result<(Control, Request), BenchError> {
    loop {
        let (stream, from) = listener.accept().await?;
        let mut control = Control::new(stream, "initiator")?;
        match control.receive(GREETING_TIMEOUT).await {
            Ok(first) => return Ok((control, first)),
            Err(error) => writeln!(std::io::stderr(), "a connection from {from} is no initiator's: {error}")?,
        }
    }
}

async fn run(control: &mut Control, first: Request) -> Result<(), BenchError> {
    let (plan, writer) = hello(control, first)?;
    control.send(&Reply::Welcome).await?;
    let memory = match plan.op {
        Op::Write => Memory::cleared(&plan)?,
        Op::Read => Memory::filled(&plan)?,
    };
    let side = Side::start(&plan, control, &memory, writer).await?;
    control.send(&side.ready()).await?;
    let patience = plan.duration() + ANSWER_TIMEOUT;
    loop {
        match control.receive(patience).await? {
            Request::End => return side.stop().await,
            request => control.send(&answer(&plan, &memory, &side, request).await?).await?,
        }
    }
}

fn hello(control: &Control, first: Request) -> Result<(Plan, Generation), BenchError> {
    match first {
        Request::Hello { version: VERSION, plan, writer_generation } => {
            plan.check()?;
            Ok((plan, Generation(writer_generation)))
        }
        Request::Hello { version, .. } => {
            let problem = format!("speaks version {version}, this is {VERSION}: take the same build on both hosts");
            Err(BenchError::control("initiator", problem))
        }
        other => Err(control.unexpected(&other)),
    }
}

async fn answer(plan: &Plan, memory: &Memory, side: &Side, request: Request) -> Result<Reply, BenchError> {
    match request {
        Request::Mark { bytes } => {
            side.wait_for(bytes).await?;
            return Ok(Reply::Marked { cpu_s: usage::cpu_seconds()? });
        }
        Request::Clear => memory.clear(),
        Request::Verify { first, blocks } => memory.verify(plan, first, blocks)?,
        Request::Hello { .. } | Request::End => {
            return Err(BenchError::control("initiator", "sent a request out of turn"));
        }
    }
    Ok(Reply::Done)
}

/// What receives.
enum Side {
    Engine(Box<EngineTarget>),
    CopyLoop(CopyTarget),
}

impl Side {
    async fn start(plan: &Plan, control: &Control, memory: &Memory, writer: Generation) -> Result<Self, BenchError> {
        let ip = control.local_ip();
        match plan.carrier {
            Method::Memcpy => Err(BenchError::invalid("--baseline", "memcpy has no target")),
            Method::CopyLoop => Ok(Self::CopyLoop(CopyTarget::start(plan, ip, memory.clone()).await?)),
            Method::Engine(_) => {
                let target = EngineTarget::start(plan, SocketAddr::new(ip, 0), memory, writer).await?;
                Ok(Self::Engine(Box::new(target)))
            }
        }
    }

    fn ready(&self) -> Reply {
        match self {
            Self::Engine(target) => Reply::Segment { descriptor: target.descriptor() },
            Self::CopyLoop(target) => Reply::Stream { address: target.address },
        }
    }

    fn arrived(&self) -> u64 {
        match self {
            Self::Engine(target) => target.arrived(),
            Self::CopyLoop(target) => target.arrived(),
        }
    }

    async fn wait_for(&self, bytes: u64) -> Result<(), BenchError> {
        let began = baton_runtime::now();
        while self.arrived() < bytes && began.elapsed() < ANSWER_TIMEOUT / 2 {
            baton_runtime::sleep(POLL).await;
        }
        match self.arrived() {
            arrived if arrived == bytes => Ok(()),
            arrived => Err(BenchError::control("target", format!("{arrived} bytes have arrived of {bytes} sent"))),
        }
    }

    async fn stop(self) -> Result<(), BenchError> {
        match self {
            Self::Engine(target) => target.stop().await,
            Self::CopyLoop(_) => Ok(()),
        }
    }
}
