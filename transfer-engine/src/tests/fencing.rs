//! What must not land, does not.

use std::time::{Duration, Instant};

use baton_types::{Generation, GrantId, NodeStart};

use super::harness::{LONG, TestNode, config, pair, span, whole};
use super::raw::{RawWriter, raw_identity};
use crate::transport::net::wire::{PROTOCOL_VERSION, PartId, Rejection, Reply};
use crate::{Arrival, GrantSpec, RefusalReason, SegmentId, TransferError};

fn reason(error: TransferError) -> RefusalReason {
    match error {
        TransferError::Refused { reason, .. } => reason,
        other => panic!("not a refusal: {other}"),
    }
}

#[tokio::test]
async fn grant_violations_are_refused_and_leave_memory_unchanged() {
    let (writer, mut owner) = pair(1 << 20).await;
    let untouched = owner.bytes(0..1 << 20);
    let remote = owner.descriptor.clone();
    let narrow = owner.grant(1, &writer, vec![0..4096, 8192..16384]);
    let others = GrantSpec {
        id: GrantId(2),
        segment: owner.segment,
        ranges: vec![0..4096],
        writer: Some(NodeStart { generation: Generation(1), ..owner.identity.clone() }),
        expires: Instant::now() + LONG,
    };
    owner.engine.grant(others.clone()).unwrap();
    let older = Some(NodeStart { generation: Generation(0), ..writer.identity.clone() });
    owner.engine.grant(GrantSpec { id: GrantId(3), writer: older, ..others.clone() }).unwrap();
    let revoked = owner.grant(4, &writer, vec![0..4096]);
    owner.engine.revoke(revoked).await;
    let brief =
        GrantSpec { id: GrantId(5), writer: None, expires: Instant::now() + Duration::from_millis(20), ..others };
    owner.engine.grant(brief).unwrap();
    assert_eq!(owner.arrival().await, Arrival::GrantExpired { grant: GrantId(5) });

    let write = |grant, spans| writer.write(&remote, grant, spans);
    // The second span of two, and one that begins inside.
    let two = vec![span(0, 0, 4096), span(0, 4097, 1)];
    assert_eq!(reason(write(narrow, two).await.unwrap_err()), RefusalReason::OutOfRange);
    assert_eq!(reason(write(narrow, vec![span(0, 16000, 100_000)]).await.unwrap_err()), RefusalReason::OutOfRange);
    for (grant, expected) in [
        (GrantId(99), RefusalReason::UnknownGrant),
        (GrantId(2), RefusalReason::WrongWriter),
        (GrantId(3), RefusalReason::WrongWriter),
        (revoked, RefusalReason::Revoked),
        (GrantId(5), RefusalReason::Expired),
    ] {
        assert_eq!(reason(write(grant, whole(4096)).await.unwrap_err()), expected);
        assert_eq!(reason(write(grant, vec![]).await.unwrap_err()), expected, "a notification needs the grant, too");
    }
    let mut elsewhere = remote.clone();
    elsewhere.id = SegmentId(1);
    assert_eq!(reason(writer.write(&elsewhere, narrow, whole(1)).await.unwrap_err()), RefusalReason::WrongSegment);
    assert!(owner.bytes(0..1 << 20) == untouched);
    assert_eq!(owner.arrivals.try_recv(), None);
    write(narrow, whole(4096)).await.unwrap();
}

#[tokio::test]
async fn fence_takes_effect_in_the_middle_of_a_frame() {
    let owner = TestNode::bind(config("o", 1), 1 << 16).await;
    let spec = |id| GrantSpec {
        id: GrantId(id),
        segment: owner.segment,
        ranges: vec![0..1 << 16],
        writer: Some(raw_identity()),
        expires: Instant::now() + LONG,
    };
    owner.engine.grant(spec(1)).unwrap();
    let raw = RawWriter::open(&owner, 1).await;
    raw.data(1, GrantId(1), 0, 1 << 16).await;
    raw.send(&[0xaa; 1000]).await;
    while owner.bytes(999..1000) != [0xaa] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::timeout(Duration::from_secs(1), owner.engine.revoke(GrantId(1)))
        .await
        .expect("needs nothing of the writer");
    owner.fill(9);
    let after = owner.bytes(0..1 << 16);
    raw.send(&vec![0xbb; (1 << 16) - 1000]).await;
    raw.commit(1, GrantId(1), 1 << 16).await;
    let Some(Reply::Refuse(id, refusal)) = raw.reply().await else { panic!("not a refusal") };
    assert_eq!((id, refusal.reason), (PartId { batch: 1, part: 0 }, RefusalReason::Revoked));
    assert!(owner.bytes(0..1 << 16) == after);

    // The connection goes on with other grants.
    owner.engine.grant(spec(2)).unwrap();
    raw.data(2, GrantId(2), 0, 5).await;
    raw.send(&[1, 2, 3, 4, 5]).await;
    raw.commit(2, GrantId(2), 5).await;
    assert_eq!(raw.reply().await, Some(Reply::Ack(PartId { batch: 2, part: 0 })));
    assert_eq!(owner.bytes(0..5), [1, 2, 3, 4, 5]);
}

#[tokio::test]
async fn fenced_connection_cannot_land_bytes_it_still_carries() {
    let mut owner = TestNode::bind(config("o", 1), 1 << 12).await;
    let grant = GrantId(1);
    let ranges = vec![0..1 << 12];
    let writer = Some(raw_identity());
    let spec = GrantSpec { id: grant, segment: owner.segment, ranges, writer, expires: Instant::now() + LONG };
    owner.engine.grant(spec).unwrap();
    let old = RawWriter::open(&owner, 1).await;
    old.data(1, grant, 0, 4096).await;
    old.send(&[0xaa; 100]).await;
    let new = RawWriter::open(&owner, 2).await;
    new.fence(1).await;
    new.data(1, grant, 0, 4096).await;
    new.send(&[0xbb; 4096]).await;
    new.commit(1, grant, 4096).await;
    assert_eq!(new.reply().await, Some(Reply::Ack(PartId { batch: 1, part: 0 })));
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes: 4096, .. }));
    // The owner uses the block; the grant is still open.
    owner.fill(3);
    let after = owner.bytes(0..4096);
    // Writing into a closed connection may or may not fail.
    let _ = tokio::time::timeout(Duration::from_millis(100), old.stream.write_all(&[0xaa; 3996])).await;
    assert_eq!(old.reply().await, None);
    assert!(owner.bytes(0..4096) == after);
    // A repetition of the complete batch is acknowledged, and neither lands nor counts again.
    new.data(1, grant, 0, 4096).await;
    new.send(&[0xcc; 4096]).await;
    new.commit(1, grant, 4096).await;
    assert_eq!(new.reply().await, Some(Reply::Ack(PartId { batch: 1, part: 0 })));
    assert!(owner.bytes(0..4096) == after);
    assert_eq!(owner.arrivals.try_recv(), None);
    // Fencing oneself makes no sense.
    new.fence(2).await;
    assert!(matches!(new.reply().await, Some(Reply::Fault(message)) if message.contains("fence itself")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_never_changes_after_a_fence_at_any_moment() {
    let bytes = 4 << 20;
    let (writer, owner) = pair(bytes).await;
    for round in 0..20u64 {
        writer.fill(round + 10);
        let grant = owner.grant(round, &writer, vec![0..bytes as u64]);
        let batch = writer.write(&owner.descriptor, grant, whole(bytes as u64));
        tokio::time::sleep(Duration::from_micros(round * 150)).await;
        owner.engine.revoke(grant).await;
        let after = owner.bytes(0..bytes);
        let complete = after == writer.bytes(0..bytes);
        match batch.await {
            Ok(_) => assert!(complete),
            Err(error) => assert_eq!(reason(error), RefusalReason::Revoked),
        }
        assert!(owner.bytes(0..bytes) == after, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_that_expires_in_mid_transfer_is_fenced_before_its_report() {
    let mut owner = TestNode::bind(config("o", 1), 1 << 16).await;
    let grant = GrantId(1);
    let ranges = vec![0..1 << 16];
    let expires = Instant::now() + Duration::from_millis(50);
    owner.engine.grant(GrantSpec { id: grant, segment: owner.segment, ranges, writer: None, expires }).unwrap();
    let raw = RawWriter::open(&owner, 1).await;
    raw.data(1, grant, 0, 1 << 16).await;
    raw.send(&[0xaa; 1000]).await;
    assert_eq!(owner.arrival().await, Arrival::GrantExpired { grant });
    owner.fill(4);
    let after = owner.bytes(0..1 << 16);
    raw.send(&vec![0xbb; (1 << 16) - 1000]).await;
    assert!(matches!(raw.reply().await, Some(Reply::Refuse(..))));
    assert!(owner.bytes(0..1 << 16) == after);
}

#[tokio::test]
async fn handshake_of_wrong_version_node_or_generation_is_refused() {
    let owner = TestNode::bind(config("o", 7), 4096).await;
    let first = RawWriter::open(&owner, 1).await;
    let answer = async |version, connection| {
        let raw = RawWriter::connect(&owner).await;
        raw.hello(&owner, version, connection).await;
        raw.reply().await
    };
    for version in [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 9] {
        let refused = Reply::Reject(Rejection::Version(PROTOCOL_VERSION));
        assert_eq!(answer(version, 2).await, Some(refused), "version {version}");
    }
    assert_eq!(answer(PROTOCOL_VERSION, 1).await, Some(Reply::Reject(Rejection::InUse)));
    let stranger = RawWriter::connect(&owner).await;
    stranger.send(b"GET / HTTP/1.1\r\n\r\n").await;
    assert_eq!(stranger.reply().await, None);
    drop(first);

    let writer = TestNode::bind(config("w", 1), 4096).await;
    let grant = owner.grant(1, &writer, vec![0..4096]);
    let mut other = owner.descriptor.clone();
    other.generation = Generation(6);
    let stale = writer.write(&other, grant, whole(1)).await.unwrap_err();
    let expected = TransferError::StaleGeneration {
        node: owner.identity.node.clone(),
        expected: Generation(6),
        found: Generation(7),
    };
    assert_eq!(stale, expected);
    other.node = writer.identity.node.clone();
    let wrong = writer.write(&other, grant, whole(1)).await.unwrap_err();
    assert!(
        matches!(&wrong, TransferError::PeerUnreachable { reason, .. } if reason.contains("node o listens there")),
        "{wrong}"
    );
}

#[tokio::test]
async fn earlier_generation_of_a_writer_is_refused_after_a_later_one() {
    let owner = TestNode::bind(config("o", 1), 4096).await;
    let old = TestNode::bind(config("w", 1), 4096).await;
    let new = TestNode::bind(config("w", 2), 4096).await;
    let first = owner.grant(1, &old, vec![0..10]);
    let second = owner.grant(2, &new, vec![10..20]);
    old.write(&owner.descriptor, first, whole(10)).await.unwrap();
    new.write(&owner.descriptor, second, vec![span(0, 10, 10)]).await.unwrap();
    let stale = old.write(&owner.descriptor, first, whole(10)).await.unwrap_err();
    assert_eq!(
        stale,
        TransferError::StaleGeneration {
            node: old.identity.node.clone(),
            expected: Generation(1),
            found: Generation(2)
        }
    );
    new.write(&owner.descriptor, second, vec![span(0, 10, 10)]).await.unwrap();
}

#[tokio::test]
async fn invalid_frames_end_the_connection_with_a_reason() {
    let owner = TestNode::bind(config("o", 1), 4096).await;
    let writer = Some(raw_identity());
    let spec = GrantSpec {
        id: GrantId(1),
        segment: owner.segment,
        ranges: vec![0..4096],
        writer,
        expires: Instant::now() + LONG,
    };
    owner.engine.grant(spec).unwrap();
    let fault = async |raw: RawWriter| match raw.reply().await {
        Some(Reply::Fault(message)) => {
            assert_eq!(raw.reply().await, None);
            message
        }
        other => panic!("{other:?}"),
    };
    let raw = RawWriter::open(&owner, 1).await;
    raw.send(&[77, 0, 0, 0, 0, 0, 0, 0]).await;
    assert_eq!(fault(raw).await, "a frame of unknown kind 77");
    let raw = RawWriter::open(&owner, 1).await;
    raw.send(&[2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).await;
    assert!(fault(raw).await.contains("at most 8192 are taken"));
    let raw = RawWriter::open(&owner, 1).await;
    raw.data(1, GrantId(1), 0, 10).await;
    raw.send(&[1; 10]).await;
    raw.commit(1, GrantId(1), 11).await;
    assert_eq!(fault(raw).await, "part 0 of batch 1 has 11 bytes, but 10 came");
}
