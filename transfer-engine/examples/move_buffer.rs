//! Moves a buffer between two processes: `cargo run --release --example move_buffer -p baton-transfer-engine`.
//!
//! The owner of the target memory starts this program once more, as the writer, and gives it descriptor and grant on the command line.

#![allow(clippy::single_range_in_vec_init)] // a grant of one range is a list of one range

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_runtime::{TaskSet, new_generation};
use baton_transfer_engine::{
    Arrival, BatchOptions, GrantSpec, SegmentDescriptor, SpanPair, TransferConfig, TransferEngine,
};
use baton_types::{GrantId, NodeId};

const BYTES: usize = 256 << 20;
const MINUTE: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    match std::env::args().nth(1) {
        None => owner().await,
        Some(descriptor) => writer(&descriptor).await,
    }
}

async fn owner() -> Result<(), Failure> {
    let (tasks, region) = (TaskSet::new(), Arc::new(MemoryRegion::allocate(BYTES)?));
    let config = TransferConfig::new(NodeId::new("owner")?, new_generation(), "127.0.0.1:0".parse()?);
    let (engine, mut arrivals) = TransferEngine::bind(config, &tasks).await?;
    let (segment, descriptor) = engine.register(region)?;
    let (id, expires) = (GrantId(1), Instant::now() + MINUTE);
    engine.grant(GrantSpec { id, segment, ranges: vec![0..BYTES as u64], writer: None, expires })?;

    let hex: String = descriptor.encode().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut child = Command::new(std::env::current_exe()?).arg(hex).spawn()?;
    if let Some(Arrival::Batch { bytes, from, tag, .. }) = arrivals.recv().await {
        println!("owner: batch {tag} of node {from} is here, {bytes} bytes");
    }
    engine.revoke(id).await;
    println!("owner: fenced; the writer ended with {}", child.wait()?);
    Ok(tasks.join(MINUTE).await?)
}

async fn writer(hex: &str) -> Result<(), Failure> {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
    let descriptor: Option<Vec<u8>> = hex.as_bytes().chunks(2).map(byte).collect();
    let remote = SegmentDescriptor::decode(&descriptor.ok_or("the descriptor is not hexadecimal")?)?;
    let (tasks, region) = (TaskSet::new(), Arc::new(MemoryRegion::allocate(BYTES)?));
    let config = TransferConfig::new(NodeId::new("writer")?, new_generation(), "127.0.0.1:0".parse()?);
    let (engine, _arrivals) = TransferEngine::bind(config, &tasks).await?;
    let (segment, _) = engine.register(region)?;

    let all = SpanPair { local_offset: 0, remote_offset: 0, len: remote.length };
    let options = BatchOptions::new(Instant::now() + MINUTE).tag(42);
    let report = engine.write(segment, &remote, GrantId(1), vec![all], options).await?;
    let seconds = (report.completed - report.started).as_secs_f64();
    println!(
        "writer: {} bytes over {} in {seconds:.3} s, {:.2} GB/s",
        report.bytes,
        report.transport,
        report.bytes as f64 / seconds / 1e9
    );
    Ok(tasks.join(MINUTE).await?)
}
