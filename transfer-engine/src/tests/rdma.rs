//! RDMA, if there are devices: `scripts/test-rdma.sh` runs these in a virtual machine with two
//! Soft-RoCE rails, `v0` and `v1`.

use std::process::Command;
use std::time::{Duration, Instant};

use super::checks;
use super::harness::{LONG, TestNode, config, pair_over, span, whole};
use crate::{
    Arrival, BatchOptions, RefusalReason, SegmentDescriptor, SpanPair, TransferConfig, TransferError, TransportChoice,
    TransportKind,
};

const RDMA: TransportChoice = TransportChoice::Only(TransportKind::Rdma);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn rdma_is_chosen_before_all_others_and_uses_every_rail() {
    let bytes = 8u64 << 20;
    let (writer, mut owner) = pair_over(TransportChoice::Auto, bytes as usize).await;
    let rails = owner.descriptor.transports.iter().filter(|t| t.kind == TransportKind::Rdma).count();
    assert_eq!(rails, 2, "{:?}", owner.descriptor);
    let grant = owner.grant(1, &writer, vec![0..bytes]);
    let report = writer.write(&owner.descriptor, grant, whole(bytes)).await.unwrap();
    assert_eq!((report.bytes, report.transport), (bytes, TransportKind::Rdma));
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes: b, tag: 7, .. } if b == bytes));
    assert!(owner.bytes(0..bytes as usize) == writer.bytes(0..bytes as usize));
    assert_eq!(writer.engine.paths()[0].lanes, 2);
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn random_spans_equal_a_plain_copy_over_rdma() {
    let runtime = runtime();
    let (writer, owner) = runtime.block_on(pair_over(RDMA, 1 << 20));
    checks::check_writes_against_a_copy(&writer, owner, &runtime, 1 << 20);
}

#[test]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
fn reads_equal_a_plain_copy_over_rdma() {
    let runtime = runtime();
    let (reader, holder) = runtime.block_on(pair_over(RDMA, 1 << 20));
    checks::check_reads_against_a_copy(&runtime, &reader, &holder);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn grant_violations_over_rdma_are_refused_with_their_reasons() {
    let (writer, mut owner) = pair_over(RDMA, 1 << 16).await;
    let reason = |error| match error {
        TransferError::Refused { reason, .. } => reason,
        other => panic!("{other}"),
    };
    let grant = owner.grant(1, &writer, vec![0..1000]);
    let before = owner.bytes(0..1 << 16);
    let outside = writer.write(&owner.descriptor, grant, vec![span(0, 500, 501)]).await.unwrap_err();
    assert_eq!(reason(outside), RefusalReason::OutOfRange);
    let others = owner.grant(2, &owner, vec![0..1000]);
    let wrong = writer.write(&owner.descriptor, others, vec![span(0, 500, 10)]).await.unwrap_err();
    assert_eq!(reason(wrong), RefusalReason::WrongWriter);
    assert!(owner.bytes(0..1 << 16) == before);
    writer.write(&owner.descriptor, grant, vec![span(0, 500, 500)]).await.unwrap();
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes: 500, .. }));
    owner.engine.revoke(grant).await;
    let late = writer.write(&owner.descriptor, grant, vec![span(0, 500, 500)]).await.unwrap_err();
    assert_eq!(reason(late), RefusalReason::Revoked);
    checks::check_refusals(TransportKind::Rdma).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn memory_never_changes_after_a_fence_over_rdma() {
    checks::check_fence(RDMA, 4 << 20, Duration::from_millis(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn cancelled_batch_never_arrives_with_later_bytes_over_rdma() {
    checks::check_cancel(RDMA, 4 << 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn bytes_changed_after_the_lease_are_not_delivered_over_rdma() {
    checks::check_changing_bytes(TransportKind::Rdma, 2 << 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn read_survives_lost_connections_over_rdma() {
    checks::check_lost_connections(TransportKind::Rdma).await;
}

/// A stream of batches, each checked at the moment of its arrival.
struct Stream {
    writer: TestNode,
    owner: TestNode,
    remote: SegmentDescriptor,
    next: u64,
}

const BATCH_BYTES: usize = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(10);

impl Stream {
    /// As between hosts: without shared memory.
    async fn new() -> Self {
        let config = |name| TransferConfig {
            transport: TransportChoice::Auto,
            retries: 16,
            progress_timeout: Duration::from_secs(3),
            ..config(name, 1)
        };
        let writer = TestNode::bind(config("w"), BATCH_BYTES).await;
        let owner = TestNode::bind(config("o"), BATCH_BYTES).await;
        let mut remote = owner.descriptor.clone();
        remote.transports.retain(|transport| transport.kind != TransportKind::Shm);
        Self { writer, owner, remote, next: 0 }
    }

    /// One batch of 64 KiB spans, each somewhere else; verified. What carried it.
    async fn batch(&mut self) -> TransportKind {
        self.next += 1;
        let number = self.next;
        let owner = &mut self.owner;
        self.writer.fill(number);
        let pieces = BATCH_BYTES as u64 / (64 << 10);
        let place = |i| (i * 5 + number) % pieces * (64 << 10);
        let spans: Vec<SpanPair> = (0..pieces).map(|i| span(place(i + 3), place(i), 64 << 10)).collect();
        let grant = owner.grant(number, &self.writer, vec![0..BATCH_BYTES as u64]);
        let options = BatchOptions::new(Instant::now() + DEADLINE).tag(number);
        let engine = &self.writer.engine;
        let segment = self.writer.segment;
        let started = Instant::now();
        let report = engine.write(segment, &self.remote, grant, spans.clone(), options).await;
        let report = report.unwrap_or_else(|error| panic!("batch {number}: {error}"));
        assert!(started.elapsed() < DEADLINE, "batch {number} took {:?}", started.elapsed());
        let arrived = owner.arrivals.try_recv();
        assert!(matches!(arrived, Some(Arrival::Batch { tag, .. }) if tag == number), "batch {number}: {arrived:?}");
        for s in &spans {
            let from = s.local_offset as usize;
            let to = s.remote_offset as usize;
            let len = s.len as usize;
            assert!(owner.bytes(to..to + len) == self.writer.bytes(from..from + len), "batch {number} at {to}");
        }
        owner.engine.revoke(grant).await;
        assert_eq!(owner.arrivals.try_recv(), None, "batch {number} arrived twice");
        report.transport
    }

    /// Batches until `seen` has gone over `kind` in a row; the number of batches that took.
    async fn until(&mut self, kind: TransportKind, seen: u32) -> u32 {
        let mut row = 0;
        let mut all = 0;
        let started = Instant::now();
        while row < seen {
            row = if self.batch().await == kind { row + 1 } else { 0 };
            all += 1;
            assert!(started.elapsed() < LONG * 3, "not back on {kind} after {all} batches");
        }
        all
    }

    /// Batches until the writer has so many lanes to the owner: one per rail, and a TCP one if all
    /// rails were lost once.
    async fn until_whole(&mut self, lanes: usize) {
        let limit = Instant::now() + Duration::from_secs(10);
        // There is no path before the first batch.
        while self.writer.engine.paths().first().is_none_or(|path| path.lanes < lanes) {
            assert!(Instant::now() < limit, "a rail did not come back: {:?}", self.writer.engine.paths());
            self.batch().await;
        }
    }

    /// Bytes per second of eight unverified batches: the engine's rate, not the check's.
    async fn rate(&mut self) -> f64 {
        self.next += 1;
        let grant = self.owner.grant(self.next, &self.writer, vec![0..BATCH_BYTES as u64]);
        let started = Instant::now();
        for _ in 0..8 {
            let options = BatchOptions::new(Instant::now() + DEADLINE);
            let spans = whole(BATCH_BYTES as u64);
            self.writer.engine.write(self.writer.segment, &self.remote, grant, spans, options).await.unwrap();
            self.owner.arrival().await;
        }
        let rate = (8 * BATCH_BYTES) as f64 / started.elapsed().as_secs_f64();
        self.owner.engine.revoke(grant).await;
        rate
    }
}

fn link(interface: &str, state: &str) {
    assert!(Command::new("ip").args(["link", "set", interface, state]).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn rdma_rails_fail_and_recover_and_no_batch_is_lost() {
    let mut stream = Stream::new().await;
    assert_eq!(stream.batch().await, TransportKind::Rdma);
    link("v0", "down");
    let one = stream.until(TransportKind::Rdma, 10).await;
    link("v0", "up");
    stream.until(TransportKind::Rdma, 10).await;
    link("v0", "down");
    link("v1", "down");
    let none = stream.until(TransportKind::Tcp, 10).await;
    link("v0", "up");
    link("v1", "up");
    let back = stream.until(TransportKind::Rdma, 10).await;
    stream.until_whole(3).await;
    println!(
        "{} batches, none lost or wrong; {one} until rdma with rail 0 down, {none} until tcp with both down, {back} until rdma again",
        stream.next
    );
    // Beside a stream that never lost a rail, in turns: the machine's rate differs from second to
    // second.
    let mut fresh = Stream::new().await;
    fresh.until_whole(2).await;
    let mut ratios = Vec::new();
    for _ in 0..41 {
        let fresh = fresh.rate().await;
        let recovered = stream.rate().await;
        ratios.push(recovered / fresh);
    }
    ratios.sort_by(f64::total_cmp);
    let low = ratios[10];
    let ratio = ratios[20];
    let high = ratios[30];
    println!("rate after recovery : of a new stream: {ratio:.2}, half of the rounds between {low:.2} and {high:.2}");
    assert!(ratio >= 0.95, "{ratios:.2?}; {:?}", stream.writer.engine.paths());
}
