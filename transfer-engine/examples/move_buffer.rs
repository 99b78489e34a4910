//! Moves a buffer between two processes: `cargo run --release --example move_buffer -p
//! baton-transfer-engine`.
//!
//! The owner of the target memory starts this program once more, as the writer, and gives it the
//! descriptor on the command line.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(unsafe_code)] // fills and reads registered memory; see the SAFETY notes
#![allow(clippy::single_range_in_vec_init)] // a grant of one range is a list of one range

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_runtime::{TaskSet, new_generation};
use baton_transfer_engine::{BatchOptions, GrantSpec, SegmentDescriptor, SpanPair, TransferConfig, TransferEngine};
use baton_types::{GrantId, NodeId};

const BYTES: usize = 256 << 20;
const MINUTE: Duration = Duration::from_secs(60);
const GRANT: GrantId = GrantId(1);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let peer = std::env::args().nth(1);
    let tasks = TaskSet::new();
    let expires = Instant::now() + MINUTE;
    let node = NodeId::new(if peer.is_none() { "owner" } else { "writer" })?;
    let config = TransferConfig::new(node, new_generation(), "127.0.0.1:0".parse()?);
    let (engine, mut arrivals) = TransferEngine::bind(config, &tasks).await?;
    let memory = Arc::new(MemoryRegion::allocate_shared(BYTES)?);
    let (segment, descriptor) = engine.register(Arc::clone(&memory))?;
    if let Some(hex) = peer {
        let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2).unwrap_or_default(), 16);
        let remote = SegmentDescriptor::decode(&(0..hex.len()).step_by(2).map(byte).collect::<Result<Vec<_>, _>>()?)?;
        // SAFETY: nothing is under way yet.
        unsafe { memory.slice_mut(0..BYTES) }.fill(42);
        let all = SpanPair { local_offset: 0, remote_offset: 0, len: remote.length };
        let report = engine.write(segment, &remote, GRANT, vec![all], BatchOptions::new(expires)).await?;
        let bytes = report.bytes;
        let took = report.completed - report.started;
        println!("writer: {bytes} bytes over {} in {took:?}", report.transport);
    } else {
        engine.grant(GrantSpec { id: GRANT, segment, ranges: vec![0..BYTES as u64], writer: None, expires })?;
        let hex: String = descriptor.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut writer = Command::new(std::env::current_exe()?).arg(hex).spawn()?;
        println!("owner: {:?}", arrivals.recv().await);
        engine.revoke(GRANT).await;
        // SAFETY: the grant has ended, so no peer writes here any more.
        let arrived = unsafe { memory.slice(0..BYTES) }.iter().all(|&byte| byte == 42);
        println!("owner: fenced; every byte is there: {arrived}; the writer ended with {}", writer.wait()?);
    }
    Ok(tasks.join(MINUTE).await?)
}
