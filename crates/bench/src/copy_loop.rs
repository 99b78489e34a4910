//! Baseline: the bare loop. Blocking `write` and `read` of one block at a time on one connection,
//! over the same working set as the engine's.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::BenchError;
use crate::layout::Layout;
use crate::memory::Memory;
use crate::plan::Plan;
use crate::stats::TransferStats;

/// Longest wait for the initiator's connection.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(30);

/// The reading end.
pub struct CopyTarget {
    /// Where the initiator connects to.
    pub address: SocketAddr,
    arrived: Arc<AtomicU64>,
}

impl CopyTarget {
    /// Listens, and reads whatever the first connection carries into the memory, block after block.
    pub async fn start(plan: &Plan, ip: IpAddr, memory: Memory) -> Result<Self, BenchError> {
        let listener = TcpListener::bind((ip, 0)).await?.into_std()?;
        listener.set_nonblocking(false)?;
        let address = listener.local_addr()?;
        let arrived = Arc::new(AtomicU64::new(0));
        let plan = *plan;
        let count = Arc::clone(&arrived);
        // A thread of its own, as a bare loop has; it ends with its connection, or with the
        // process.
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            let layout = Layout::new(&plan);
            for k in 0.. {
                memory.receive(layout.places(k).1, plan.block_bytes, &mut stream)?;
                count.fetch_add(plan.block_bytes, Relaxed);
            }
            Ok::<(), std::io::Error>(())
        });
        Ok(Self { address, arrived })
    }

    /// Bytes of blocks that have arrived.
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Relaxed)
    }
}

/// The writing end.
pub struct CopyInitiator {
    stream: std::net::TcpStream,
    plan: Plan,
    memory: Memory,
    /// Blocks of all phases: the target counts on.
    sent: u64,
}

impl CopyInitiator {
    /// Connects.
    pub async fn connect(plan: &Plan, address: SocketAddr, memory: Memory) -> Result<Self, BenchError> {
        let connected = tokio::time::timeout(ACCEPT_TIMEOUT, TcpStream::connect(address)).await;
        let stream = connected.map_err(|_| BenchError::control("target", format!("{address} does not answer")))??;
        stream.set_nodelay(true)?;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(Self { stream, plan: *plan, memory, sent: 0 })
    }

    /// Writes blocks for some time. The number of the first is returned too.
    pub async fn run(&mut self, duration: Duration) -> Result<(TransferStats, u64), BenchError> {
        let mut stream = self.stream.try_clone()?;
        let plan = self.plan;
        let memory = self.memory.clone();
        let first = self.sent;
        let (done, result) = oneshot::channel();
        std::thread::spawn(move || {
            // The receiver is gone if the bench was interrupted.
            let _ = done.send(send_for(duration, &plan, &memory, first, &mut stream));
        });
        let stats = result.await.map_err(|_| BenchError::control("initiator", "its thread panicked"))??;
        self.sent += stats.batches;
        Ok((stats, first))
    }
}

fn send_for(
    duration: Duration,
    plan: &Plan,
    memory: &Memory,
    first: u64,
    stream: &mut std::net::TcpStream,
) -> Result<TransferStats, BenchError> {
    let layout = Layout::new(plan);
    let mut stats = TransferStats::default();
    let began = baton_runtime::now();
    let mut now = began;
    while now - began < duration {
        memory.send(layout.places(first + stats.batches).0, plan.block_bytes, stream)?;
        let after = baton_runtime::now();
        stats.add(plan.block_bytes, after - now);
        now = after;
    }
    stats.elapsed = now - began;
    Ok(stats)
}
