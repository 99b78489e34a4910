//! What each transport keeps. A new one calls all of these.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::harness::{LONG, TestNode, config, pair_over, span, whole};
use crate::{Arrival, RefusalReason, SpanPair, TransferConfig, TransferError, TransportChoice, TransportKind};

/// Disjoint spans in random order, with random sources.
fn writes(region: u64) -> impl Strategy<Value = Vec<SpanPair>> {
    let pieces = prop::collection::vec((0u64..5_000, 1u64..90_000, any::<u64>()), 0..40);
    let placed = pieces.prop_map(move |pieces| {
        let mut at = 0;
        let mut spans = Vec::new();
        for (gap, len, local) in pieces {
            at += gap % 3 * gap;
            if at + len > region {
                break;
            }
            spans.push(span(local % (region - len), at, len));
            at += len;
        }
        spans
    });
    placed.prop_shuffle()
}

/// Writes each list and compares the owner's whole region with the naive model.
pub(super) fn check_writes_against_a_copy(
    writer: &TestNode,
    owner: TestNode,
    runtime: &tokio::runtime::Runtime,
    region: u64,
) {
    let next = Cell::new(0);
    let owner = RefCell::new(owner);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&writes(region), |spans| {
        next.set(next.get() + 1);
        let owner = &mut *owner.borrow_mut();
        writer.fill(next.get());
        let source = writer.bytes(0..region as usize);
        let mut expected = owner.bytes(0..region as usize);
        for s in &spans {
            let from = s.local_offset as usize;
            let to = s.remote_offset as usize;
            let len = s.len as usize;
            expected[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        let ranges = spans.iter().map(|s| s.remote_offset..s.remote_offset + s.len).collect();
        runtime.block_on(async {
            let grant = owner.grant(next.get(), writer, ranges);
            let bytes: u64 = spans.iter().map(|s| s.len).sum();
            let report = writer.write(&owner.descriptor, grant, spans).await.unwrap();
            prop_assert_eq!(report.bytes, bytes);
            let arrived = matches!(owner.arrivals.try_recv(), Some(Arrival::Batch { bytes: b, .. }) if b == bytes);
            prop_assert!(arrived);
            owner.engine.revoke(grant).await;
            Ok(())
        })?;
        prop_assert!(owner.bytes(0..region as usize) == expected);
        Ok(())
    });
    result.unwrap();
}

/// Pieces of the reader's region, each from somewhere in the holder's.
fn reads(region: u64) -> impl Strategy<Value = Vec<SpanPair>> {
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

pub(super) fn check_reads_against_a_copy(runtime: &tokio::runtime::Runtime, reader: &TestNode, holder: &TestNode) {
    holder.fill(7);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 16,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let mut id = Cell::new(100);
    let result = runner.run(&reads(1 << 20), |spans| {
        id.set(id.get() + 1);
        runtime.block_on(read_like_a_copy(reader, holder, spans, id.get()));
        Ok(())
    });
    result.unwrap();
    assert!(*id.get_mut() > 100);
}

/// Revokes a grant at many moments of a batch, reuses the memory at once, and looks whether it
/// stays as it is.
pub(super) async fn check_fence(transport: TransportChoice, bytes: usize, step: Duration) {
    let (writer, owner) = pair_over(transport, bytes).await;
    let sample = || (0..bytes).step_by(1 << 18).map(|at| owner.bytes(at..at + 8)).collect::<Vec<_>>();
    for round in 0..20u32 {
        let grant = owner.grant(round.into(), &writer, vec![0..bytes as u64]);
        let batch = writer.write(&owner.descriptor, grant, whole(bytes as u64));
        tokio::time::sleep(step * round).await;
        owner.engine.revoke(grant).await;
        owner.fill(u64::from(round) + 99);
        let reused = sample();
        let _ = batch.await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(sample() == reused, "round {round}");
    }
}

/// Waits more exactly than the runtime's clock does.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

pub(super) async fn check_cancel(transport: TransportChoice, bytes: usize) {
    // No connection is given up for want of progress: what a cancelled batch holds must come back
    // by itself.
    let patient = |name| TransferConfig { transport, progress_timeout: LONG, ..config(name, 1) };
    let writer = TestNode::bind(patient("w"), bytes).await;
    let mut owner = TestNode::bind(patient("o"), bytes).await;
    let mut complete = 0;
    let mut cancelled = 0;
    let mut whole_takes = Duration::from_secs(1);
    for round in 0..1000u32 {
        // If the machine is busy with something else, cancelling may come too late again and again.
        if round >= 100 && complete > 5 && cancelled > 5 {
            break;
        }
        writer.fill(round.into());
        let first = writer.bytes(bytes - 8..bytes);
        let grant = owner.grant(round.into(), &writer, vec![0..bytes as u64]);
        let batch = writer.write(&owner.descriptor, grant, whole(bytes as u64));
        // The first ones may go on, so that the others can be cancelled all along the way.
        if round >= 5 {
            spin(whole_takes * (round % 20) / 8);
            batch.cancel();
        }
        let result = batch.await;
        if let Ok(report) = &result {
            whole_takes = whole_takes.min(report.completed - report.started);
        }
        // From here on the source is the test's again.
        writer.fill(u64::from(round) + 1_000_000);
        let later = writer.bytes(bytes - 8..bytes);
        tokio::time::sleep(Duration::from_millis(2)).await;
        while let Some(Arrival::Batch { grant: arrived, .. }) = owner.arrivals.try_recv() {
            // It may have become complete before it was cancelled, unheard; then with the bytes it
            // had.
            assert_eq!(arrived, grant);
            assert!(owner.bytes(bytes - 8..bytes) == first && first != later, "round {round}: torn");
            complete += 1;
        }
        cancelled += u32::from(result.is_err());
        owner.engine.revoke(grant).await;
    }
    println!("{complete} complete, {cancelled} cancelled");
    let freed = async {
        while writer.engine.paths().iter().any(|path| path.in_flight_bytes > 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG / 4, freed).await.expect("nothing of a cancelled batch stays in flight");
    assert!(cancelled > 5 && complete > 5, "{complete} complete, {cancelled} cancelled: both must happen");
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

pub(super) async fn check_changing_bytes(kind: TransportKind, bytes: usize) {
    let (reader, holder) = pair_over(TransportChoice::Only(kind), bytes).await;
    let mut whole_takes = LONG;
    let mut delivered = 0;
    let mut refused = 0;
    for round in 0..60u32 {
        holder.fill(round.into());
        let leased = holder.bytes(bytes - 8..bytes);
        let lease = holder.lease(round.into(), &reader, vec![0..bytes as u64]);
        let read = reader.read(&holder.descriptor, lease, whole(bytes as u64));
        if round >= 5 {
            spin(whole_takes * (round % 20) / 8);
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
