//! Reads under leases.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::harness::{LONG, TestNode, config, pair_over, span, whole};
use crate::{FakeNetwork, RefusalReason, SpanPair, TransferConfig, TransferError, TransportChoice, TransportKind};

const KINDS: [TransportKind; 2] = [TransportKind::Tcp, TransportKind::Shm];

/// Pieces of the reader's region, each from somewhere in the holder's.
fn spans(region: u64) -> impl Strategy<Value = Vec<SpanPair>> {
    let pieces = prop::collection::vec((0u64..3_000, 1u64..60_000, any::<u64>()), 0..300);
    pieces.prop_map(move |pieces| {
        let mut at = 0;
        let mut spans = Vec::new();
        for (gap, len, from) in pieces {
            at += gap % 3 * gap;
            if at + len > region {
                break;
            }
            spans.push(span(at, from % (region - len), len));
            at += len;
        }
        spans
    })
}

async fn read_like_a_copy(reader: &TestNode, holder: &TestNode, spans: Vec<SpanPair>, id: u64) {
    reader.fill(id);
    let region = reader.region.len();
    let mut expected = reader.bytes(0..region);
    let source = holder.bytes(0..region);
    for s in &spans {
        let from = s.remote_offset as usize;
        let to = s.local_offset as usize;
        let len = s.len as usize;
        expected[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    let ranges = spans.iter().map(|s| s.remote_offset..s.remote_offset + s.len).collect();
    let lease = holder.lease(id, reader, ranges);
    let bytes: u64 = spans.iter().map(|s| s.len).sum();
    let report = reader.read(&holder.descriptor, lease, spans).await.unwrap();
    assert_eq!(report.bytes, bytes);
    assert!(reader.bytes(0..region) == expected);
    holder.engine.revoke(lease).await;
}

#[test]
fn reads_equal_a_plain_copy_over_each_transport() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let network = FakeNetwork::new();
    let fake = |name| TestNode::fake(&network, config(name, 1), 1 << 20);
    let over = |kind| runtime.block_on(pair_over(TransportChoice::Only(kind), 1 << 20));
    for (reader, holder) in [over(TransportKind::Tcp), over(TransportKind::Shm), (fake("r"), fake("h"))] {
        check_against_a_copy(&runtime, &reader, &holder);
    }
}

pub(super) fn check_against_a_copy(runtime: &tokio::runtime::Runtime, reader: &TestNode, holder: &TestNode) {
    holder.fill(7);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 16,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let mut id = std::cell::Cell::new(100);
    let result = runner.run(&spans(1 << 20), |spans| {
        id.set(id.get() + 1);
        runtime.block_on(read_like_a_copy(reader, holder, spans, id.get()));
        Ok(())
    });
    result.unwrap();
    assert!(*id.get_mut() > 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_not_allowed_by_its_lease_is_refused() {
    for kind in KINDS {
        check_refusals(kind).await;
    }
}

pub(super) async fn check_refusals(kind: TransportKind) {
    let (reader, holder) = pair_over(TransportChoice::Only(kind), 1 << 16).await;
    let reason = async |lease, spans| match reader.read(&holder.descriptor, lease, spans).await {
        Err(TransferError::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let lease = holder.lease(1, &reader, vec![100..200]);
    assert_eq!(reason(lease, vec![span(0, 99, 2)]).await, RefusalReason::OutOfRange, "{kind}");
    let grant = holder.grant(2, &reader, vec![100..200]);
    assert_eq!(reason(grant, vec![span(0, 100, 2)]).await, RefusalReason::WrongAccess, "{kind}");
    let others = holder.lease(3, &holder, vec![100..200]);
    assert_eq!(reason(others, vec![span(0, 100, 2)]).await, RefusalReason::WrongWriter, "{kind}");
    let write = reader.write(&holder.descriptor, lease, vec![span(0, 100, 2)]).await.unwrap_err();
    assert!(matches!(write, TransferError::Refused { reason: RefusalReason::WrongAccess, .. }), "{write}");
    holder.engine.revoke(lease).await;
    assert_eq!(reason(lease, vec![span(0, 100, 2)]).await, RefusalReason::Revoked, "{kind}");
    let overlap = reader.read(&holder.descriptor, lease, vec![span(0, 0, 9), span(8, 50, 9)]).await.unwrap_err();
    assert!(overlap.to_string().contains("overlap"), "{overlap}");
}

/// A lease that ends while it is read under: whatever the reader is told, it never takes changed
/// bytes for the leased ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_changed_after_the_lease_are_not_delivered() {
    for kind in KINDS {
        check_changing_bytes(kind, 16 << 20).await;
    }
}

pub(super) async fn check_changing_bytes(kind: TransportKind, bytes: usize) {
    let (reader, holder) = pair_over(TransportChoice::Only(kind), bytes).await;
    let mut whole_takes = LONG;
    let mut delivered = 0;
    let mut refused = 0;
    for round in 0..60u32 {
        holder.fill(round.into());
        let leased = holder.bytes(bytes - 8..bytes);
        let lease = holder.lease(round.into(), &reader, vec![0..bytes as u64]);
        let started = Instant::now();
        let read = reader.read(&holder.descriptor, lease, whole(bytes as u64));
        if round >= 5 {
            while started.elapsed() < whole_takes * (round % 20) / 8 {
                std::hint::spin_loop();
            }
            holder.engine.revoke(lease).await;
            holder.fill(u64::from(round) + 1_000_000);
        }
        match read.await {
            Ok(report) => {
                whole_takes = whole_takes.min(report.completed - report.started);
                assert!(reader.bytes(bytes - 8..bytes) == leased, "{kind} round {round}: changed bytes");
                delivered += 1;
            }
            Err(error) => {
                assert!(matches!(error, TransferError::Refused { .. }), "{error}");
                refused += 1;
            }
        }
        holder.engine.revoke(lease).await;
    }
    println!("{kind}: {delivered} delivered, {refused} refused");
    assert!(delivered > 5 && refused > 5, "{kind}: {delivered} delivered, {refused} refused: both must happen");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_survives_lost_connections() {
    for kind in KINDS {
        check_lost_connections(kind).await;
    }
}

pub(super) async fn check_lost_connections(kind: TransportKind) {
    let config = |name| TransferConfig { transport: TransportChoice::Only(kind), retries: 20, ..config(name, 1) };
    let reader = TestNode::bind(config("r"), 8 << 20).await;
    let holder = TestNode::bind(config("h"), 8 << 20).await;
    for round in 0..20 {
        holder.fill(round);
        let lease = holder.lease(round, &reader, vec![0..8 << 20]);
        let read = reader.read(&holder.descriptor, lease, whole(8 << 20));
        tokio::time::sleep(Duration::from_micros(round * 100)).await;
        reader.engine.disconnect();
        read.await.unwrap();
        assert!(reader.bytes(8_000_000..8_100_000) == holder.bytes(8_000_000..8_100_000), "{kind} round {round}");
    }
}
