//! Many peers: many engines in a few processes, all connected to one.

use std::time::{Duration, Instant};

use baton_transfer_engine::{
    Batch, BatchOptions, SegmentDescriptor, SpanPair, TransferConfig, TransportChoice, TransportKind,
};
use baton_types::{GrantId, NodeId};
use tokio::time::sleep;

use crate::node::{LONG, Node};
use crate::other_process::{from_hex, to_hex};
use crate::peer::{Peer, Usage};

/// What each peer writes once.
const BYTES: u64 = 4096;
/// The grant of all peers.
const GRANT: GrantId = GrantId(1);
const PROCESSES: u64 = 4;
/// The target of issue 3: memory of one idle peer, bytes.
const PEER_BYTES: u64 = 64 << 10;
/// And its file descriptors.
const PEER_FILES: u64 = 2;

/// The engines of a process beside its first one.
pub struct Crowd {
    config: TransferConfig,
    nodes: Vec<Node>,
}

impl Crowd {
    pub fn new(config: TransferConfig) -> Self {
        Self { config, nodes: Vec::new() }
    }

    /// Starts so many engines; returns their segments.
    pub async fn gather(&mut self, count: &str) -> String {
        for index in 0..count.parse::<u64>().unwrap() {
            let node = NodeId::new(&format!("{}-{index}", self.config.node)).unwrap();
            let node = Node::start(TransferConfig { node, ..self.config.clone() }, BYTES as usize).await;
            node.grant_to_all(GRANT, BYTES);
            self.nodes.push(node);
        }
        let descriptors: Vec<_> = self.nodes.iter().map(|node| to_hex(&node.descriptor)).collect();
        descriptors.join(" ")
    }

    /// Each writes once.
    pub async fn write(&self, target: &SegmentDescriptor) -> String {
        finish(self.nodes.iter().map(|node| write_once(node, target)).collect()).await
    }
}

/// One engine writes once to each.
pub async fn write_to_all(node: &Node, descriptors: &str) -> String {
    finish(descriptors.split(' ').map(|descriptor| write_once(node, &from_hex(descriptor))).collect()).await
}

fn write_once(node: &Node, target: &SegmentDescriptor) -> Batch {
    let span = SpanPair { local_offset: 0, remote_offset: 0, len: BYTES };
    node.engine.write(node.segment, target, GRANT, vec![span], BatchOptions::new(Instant::now() + LONG))
}

async fn finish(batches: Vec<Batch>) -> String {
    for batch in batches {
        if let Err(error) = batch.await {
            return error.to_string();
        }
    }
    "ok".to_owned()
}

/// What one of so many peers costs.
fn per_peer(before: Usage, after: Usage, peers: u64) -> (u64, f64) {
    (
        after.resident.saturating_sub(before.resident) / peers,
        after.files.saturating_sub(before.files) as f64 / peers as f64,
    )
}

/// A hub that so many peers have written to, and that has written to each of them.
/// Without work for `idle`, connections are closed.
pub async fn idle_peers(transport: TransportChoice, peers: u64, idle: Duration) {
    let per_process = peers / PROCESSES;
    let idle_ms = idle.as_millis();
    let settings = format!(" idle_timeout={idle_ms} connect_timeout=20000 max_connections=1024");
    let mut hub = Peer::start_with("hub", transport, BYTES, &settings).await;
    hub.grant(GRANT.0, ("-", 0), 0..BYTES, LONG).await;
    let target = hub.descriptor().await;
    let mut processes = Vec::new();
    let mut crowd = Vec::new();
    let mut quiet = Vec::new();
    for index in 0..PROCESSES {
        let mut process = Peer::start_with(&format!("p{index}"), transport, BYTES, &settings).await;
        process.aim(&target).await;
        // What the first one costs, both ways, is the process's.
        let first = process.ask("crowd 1").await;
        assert_eq!(process.ask("crowd-writes").await, "ok");
        assert_eq!(hub.ask(&format!("write-to-all {first}")).await, "ok");
        crowd.push(process.ask(&format!("crowd {per_process}")).await);
        quiet.push(process.usage().await);
        processes.push(process);
    }
    let before = hub.usage().await;
    for process in &mut processes {
        assert_eq!(process.ask("crowd-writes").await, "ok");
    }
    let heard = hub.usage().await;
    let in_crowd = usage_of(&mut processes).await;
    assert_eq!(hub.ask(&format!("write-to-all {}", crowd.join(" "))).await, "ok");
    let spoken = hub.usage().await;
    let others = usage_of(&mut processes).await;
    let quiet_all = total(&quiet);
    report((transport, peers), "owner, written to by each", per_peer(before, heard, peers));
    report((transport, peers), "a writer of one", per_peer(quiet_all, in_crowd, peers));
    report((transport, peers), "writer to each and owner", per_peer(before, spoken, peers));
    report((transport, peers), "a peer of one, both ways", per_peer(quiet_all, others, peers));

    let started = Instant::now();
    let mut all_before = vec![(hub, before)];
    all_before.extend(processes.into_iter().zip(quiet));
    for (process, before) in &mut all_before {
        while process.usage().await.files > before.files {
            assert!(started.elapsed() < 2 * idle, "connections outlive the idle timeout");
            sleep(Duration::from_millis(100)).await;
        }
    }
    println!(
        "{peers} peers over {transport}: all connections closed {:.1?} after the last measurement",
        started.elapsed()
    );
}

/// Over rdma each way has a queue pair of its own. Of fewer peers than the target speaks of, each
/// bears more of what processes grow by.
fn limit((transport, peers): (TransportChoice, u64), files: f64) -> u64 {
    let both_ways = transport == TransportChoice::Only(TransportKind::Rdma) && files > 1.5;
    let limit = if both_ways { 2 * PEER_BYTES } else { PEER_BYTES };
    if peers < 1000 { limit * 3 / 2 } else { limit }
}

async fn usage_of(processes: &mut [Peer]) -> Usage {
    let mut all = Vec::new();
    for process in processes {
        all.push(process.usage().await);
    }
    total(&all)
}

fn total(all: &[Usage]) -> Usage {
    Usage { resident: all.iter().map(|usage| usage.resident).sum(), files: all.iter().map(|usage| usage.files).sum() }
}

fn report((transport, peers): (TransportChoice, u64), who: &str, (bytes, files): (u64, f64)) {
    println!("{peers} peers over {transport}: {who}: {bytes} bytes and {files:.2} file descriptors per idle peer");
    assert!(bytes <= limit((transport, peers), files) && files <= PEER_FILES as f64);
    // Each process's first peer is in what this is compared with, and on a slow machine it may have
    // been idle for long enough to be disconnected since.
    let let_go = PROCESSES as f64 / peers as f64;
    assert!(files >= 1.0 - let_go, "the peers are not connected");
}
