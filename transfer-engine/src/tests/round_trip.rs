//! Batches that nothing disturbs, and bounds.

use std::collections::HashMap;
use std::time::Duration;

use super::checks::check_writes_against_a_copy;
use super::harness::{LONG, TestNode, config, pair, span, whole};
use super::proxy::{Fault, Proxy};
use crate::{Arrival, FakeNetwork, TransferConfig, TransferError, TransportKind};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_arrives_whole_and_is_reported_on_both_sides() {
    let (writer, mut owner) = pair(1 << 20).await;
    let grant = owner.grant(1, &writer, vec![0..1 << 20]);
    let report = writer.write(&owner.descriptor, grant, whole(1 << 20)).await.unwrap();
    assert_eq!((report.bytes, report.spans, report.transport.as_str()), (1 << 20, 1, "tcp"));
    let from = writer.identity.node.clone();
    // There already: the writer hears of completion after the owner.
    assert_eq!(owner.arrivals.try_recv(), Some(Arrival::Batch { grant, tag: 7, bytes: 1 << 20, from }));
    assert!(owner.bytes(0..1 << 20) == writer.bytes(0..1 << 20));
    writer.stop().await;
    owner.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs IPv6 on loopback"]
async fn batches_are_written_and_read_over_ipv6() {
    let config = |name| TransferConfig { listen: "[::1]:0".parse().unwrap(), ..config(name, 1) };
    let writer = TestNode::bind(config("w"), 1 << 20).await;
    let owner = TestNode::bind(config("o"), 1 << 20).await;
    assert!(owner.descriptor.address(TransportKind::Tcp).unwrap().starts_with("[::1]:"));
    writer.fill(1);
    let grant = owner.grant(1, &writer, vec![0..1 << 20]);
    let lease = owner.lease(2, &writer, vec![0..1 << 20]);
    writer.write(&owner.descriptor, grant, whole(1 << 20)).await.unwrap();
    assert!(owner.bytes(0..1 << 20) == writer.bytes(0..1 << 20));
    writer.fill(2);
    writer.read(&owner.descriptor, lease, whole(1 << 20)).await.unwrap();
    assert!(owner.bytes(0..1 << 20) == writer.bytes(0..1 << 20));
}

#[tokio::test]
async fn batch_without_spans_arrives_as_a_notification() {
    let (writer, mut owner) = pair(4096).await;
    let grant = owner.grant(1, &writer, vec![]);
    let report = writer.write(&owner.descriptor, grant, vec![span(0, 0, 0)]).await.unwrap();
    assert_eq!((report.bytes, report.spans), (0, 0));
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes: 0, tag: 7, .. }));
}

#[test]
fn random_spans_equal_a_plain_copy_over_tcp() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let region = 1 << 20;
    let (writer, owner) = runtime.block_on(pair(region));
    check_writes_against_a_copy(&writer, owner, &runtime, region as u64);
}

#[test]
fn random_spans_equal_a_plain_copy_over_the_fake_network() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let network = FakeNetwork::new();
    let region = 1 << 20;
    let writer = TestNode::fake(&network, config("w", 1), region);
    let owner = TestNode::fake(&network, config("o", 1), region);
    check_writes_against_a_copy(&writer, owner, &runtime, region as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_batches_of_many_spans_share_the_lanes() {
    let (writer, mut owner) = pair(16 << 20).await;
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::None]).await;
    let remote = proxy.via(&owner.descriptor);
    let batches: Vec<_> = (0..16u64)
        .map(|i| {
            let grant = owner.grant(i, &writer, vec![i << 20..(i + 1) << 20]);
            // Every second block, so that nothing can be joined.
            let spans = (0..200).map(|s| span((i << 20) + s * 5000, (i << 20) + s * 5000, 4096)).collect();
            writer.write(&remote, grant, spans)
        })
        .collect();
    for batch in batches {
        let report = batch.await.unwrap();
        assert_eq!((report.bytes, report.spans), (200 * 4096, 200));
    }
    let mut arrived = HashMap::new();
    while let Some(Arrival::Batch { grant, bytes, .. }) = owner.arrivals.try_recv() {
        *arrived.entry(grant).or_insert(0) += bytes;
    }
    assert!(arrived.len() == 16 && arrived.values().all(|&bytes| bytes == 200 * 4096), "{arrived:?}");
    for start in (0..16).flat_map(|i| (0..200).map(move |s| (i << 20) + s * 5000)) {
        assert!(owner.bytes(start..start + 4096) == writer.bytes(start..start + 4096));
        assert!(owner.bytes(start + 4096..start + 5000).iter().all(|&byte| byte == 0));
    }
    assert!((1..=4).contains(&proxy.accepted()), "{} connections", proxy.accepted());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_kept_between_batches_and_closed_when_idle() {
    let quick = TransferConfig { idle_timeout: Duration::from_millis(150), ..config("w", 1) };
    let writer = TestNode::bind(quick, 1 << 16).await;
    let owner = TestNode::bind(config("o", 1), 1 << 16).await;
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::None]).await;
    let remote = proxy.via(&owner.descriptor);
    let grant = owner.grant(1, &writer, vec![0..1 << 16]);
    for _ in 0..100 {
        writer.write(&remote, grant, whole(1 << 16)).await.unwrap();
    }
    assert_eq!(proxy.accepted(), 1);
    tokio::time::timeout(LONG, async {
        while proxy.open() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("an idle connection is closed");
    writer.write(&remote, grant, whole(1 << 16)).await.unwrap();
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_batch_is_striped_over_lanes_and_completes_once() {
    let bytes = 16 << 20;
    let (writer, mut owner) = pair(bytes).await;
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::None]).await;
    let grant = owner.grant(1, &writer, vec![0..bytes as u64]);
    writer.write(&proxy.via(&owner.descriptor), grant, whole(bytes as u64)).await.unwrap();
    assert_eq!(proxy.accepted(), 4);
    assert!(matches!(owner.arrivals.try_recv(), Some(Arrival::Batch { bytes: b, .. }) if b == bytes as u64));
    assert_eq!(owner.arrivals.try_recv(), None);
    assert!(owner.bytes(0..bytes) == writer.bytes(0..bytes));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_in_flight_to_a_peer_are_bounded() {
    let limit = 512 << 10;
    let small = TransferConfig { max_bytes_in_flight_per_peer: limit, progress_timeout: LONG, ..config("w", 1) };
    let writer = TestNode::bind(small, 4 << 20).await;
    let mut owner = TestNode::bind(config("o", 1), 4 << 20).await;
    // The welcome comes through, no acknowledgement does.
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::StallRepliesAfter(10)]).await;
    let remote = proxy.via(&owner.descriptor);
    let grant = owner.grant(1, &writer, vec![0..4 << 20]);
    let batches: Vec<_> = (0..4).map(|i| writer.write(&remote, grant, vec![span(i << 20, i << 20, 1 << 20)])).collect();
    tokio::time::sleep(Duration::from_millis(150)).await;
    let sent = proxy.sent_by_writer();
    assert!((limit..limit + 8192).contains(&sent), "{sent} bytes are on their way");
    proxy.release();
    for batch in batches {
        batch.await.unwrap();
        owner.arrival().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_arrival_queue_slows_writers_down_and_blocks_nothing_else() {
    let narrow = TransferConfig { arrival_queue: 2, ..config("o", 1) };
    let patient = TransferConfig { progress_timeout: LONG, ..config("w", 1) };
    let writer = TestNode::bind(patient, 1 << 20).await;
    let mut owner = TestNode::bind(narrow, 1 << 20).await;
    let grants: Vec<_> = (0..40).map(|i| owner.grant(i, &writer, vec![i * 4096..(i + 1) * 4096])).collect();
    let mut batches: Vec<_> =
        grants.iter().map(|&g| Box::pin(writer.write(&owner.descriptor, g, vec![span(0, g.0 * 4096, 4096)]))).collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let last = batches.last_mut().unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(50), last).await.is_err(), "the queue is full");
    tokio::time::timeout(Duration::from_secs(1), owner.engine.revoke(grants[39]))
        .await
        .expect("a fence needs no queue");
    for _ in 0..39 {
        assert!(matches!(owner.arrival().await, Arrival::Batch { .. }));
    }
    let last = batches.pop().unwrap().await;
    assert!(matches!(last, Err(TransferError::Refused { .. })), "{last:?}");
    for batch in batches {
        batch.await.unwrap();
    }
    assert_eq!(owner.arrivals.try_recv(), None);
}

#[tokio::test]
async fn batches_and_spans_under_way_are_bounded() {
    let small = TransferConfig { max_batches: 2, max_spans: 10, ..config("w", 1) };
    let writer = TestNode::bind(small, 4096).await;
    let owner = TestNode::bind(config("o", 1), 4096).await;
    let grant = owner.grant(1, &writer, vec![0..4096]);
    let spans = writer.write(&owner.descriptor, grant, vec![span(0, 0, 0); 11]).await.unwrap_err();
    assert_eq!(spans, TransferError::Overloaded { what: "spans under way", limit: 10 });
    let [first, second, third] = [0, 0, 0].map(|i| writer.write(&owner.descriptor, grant, vec![span(0, i, 1)]));
    assert_eq!(third.await.unwrap_err(), TransferError::Overloaded { what: "batches under way", limit: 2 });
    first.await.unwrap();
    second.await.unwrap();
    writer.write(&owner.descriptor, grant, whole(1)).await.unwrap();
}

#[tokio::test]
async fn impossible_write_is_refused_at_once() {
    let (writer, owner) = pair(4096).await;
    let grant = owner.grant(1, &writer, vec![0..4096]);
    let outside = writer.write(&owner.descriptor, grant, whole(4097)).await.unwrap_err();
    assert_eq!(outside.to_string(), "local span: 4097 bytes at 0 of a segment of 4096 bytes");
    let options = crate::BatchOptions::new(std::time::Instant::now() + LONG);
    let nothing =
        writer.engine.write(crate::SegmentId(9), &owner.descriptor, grant, whole(1), options).await.unwrap_err();
    assert_eq!(nothing.to_string(), "segment: 9 is not registered");
    let network = FakeNetwork::new();
    let fake = TestNode::fake(&network, config("f", 1), 4096);
    let no_way = writer.write(&fake.descriptor, grant, whole(1)).await.unwrap_err();
    assert!(no_way.to_string().contains("node f cannot be reached by tcp"), "{no_way}");
    writer.engine.shutdown();
    assert_eq!(writer.write(&owner.descriptor, grant, whole(1)).await.unwrap_err(), TransferError::Closed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_batches_and_grants_leave_no_tasks() {
    let (writer, mut owner) = pair(1 << 20).await;
    for round in 0..300u64 {
        let grant = owner.grant(round, &writer, vec![0..1 << 20]);
        let batches: Vec<_> =
            (0..8).map(|i| writer.write(&owner.descriptor, grant, vec![span(i << 17, i << 17, 4096)])).collect();
        for (i, batch) in batches.into_iter().enumerate() {
            if (round + i as u64).is_multiple_of(5) {
                batch.cancel();
            }
            // Either may win.
            let _ = batch.await;
        }
        owner.engine.revoke(grant).await;
        while owner.arrivals.try_recv().is_some() {}
    }
    // Accept and expiry here and there, and a task per end of each lane.
    assert!(writer.tasks.len() <= 2 + 4 && owner.tasks.len() <= 2 + 4, "{} {}", writer.tasks.len(), owner.tasks.len());
    assert_eq!((owner.engine.live_grants(), writer.engine.batches_under_way()), (0, 0));
}
