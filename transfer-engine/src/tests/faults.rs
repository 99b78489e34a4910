//! Connections that break, stall and crawl; peers that go and come back; batches given up.

use std::time::{Duration, Instant};

use baton_types::ErrorKind;
use tokio::net::TcpListener;

use super::harness::{LONG, TestNode, config, pair, span, whole};
use super::proxy::{Fault, Proxy};
use crate::{Arrival, FakeNetwork, TransferConfig, TransferEngine, TransferError};

/// Of the batches below: one part of 3 frames, so that faults hit the handshake, heads, payloads
/// and the trailer.
const BYTES: usize = 80_000;

async fn faulty(faults: &[Fault]) -> (TestNode, TestNode, Proxy) {
    let (writer, owner) = pair(BYTES).await;
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, faults).await;
    (writer, owner, proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_cut_at_any_byte_is_retried_and_batch_arrives_once() {
    let handshake = 60;
    let after_the_last = handshake + BYTES as u64 + 400;
    let cuts = [
        0,
        5,
        30,
        handshake,
        100,
        200,
        20_000,
        32_800,
        32_900,
        70_000,
        BYTES as u64 + 100,
        BYTES as u64 + 200,
        after_the_last,
    ];
    for cut in cuts {
        let (writer, mut owner, proxy) = faulty(&[Fault::CutAfter(cut), Fault::None]).await;
        let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
        let report = writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64)).await;
        assert_eq!(report.unwrap_or_else(|error| panic!("cut after {cut}: {error}")).bytes, BYTES as u64);
        assert!(owner.bytes(0..BYTES) == writer.bytes(0..BYTES), "cut after {cut}");
        assert!(matches!(owner.arrivals.try_recv(), Some(Arrival::Batch { bytes, .. }) if bytes == BYTES as u64));
        assert_eq!(owner.arrivals.try_recv(), None, "cut after {cut}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_acknowledgement_does_not_make_a_second_arrival() {
    for replies in [10, 15, 29] {
        let (writer, mut owner, proxy) = faulty(&[Fault::CutRepliesAfter(replies), Fault::None]).await;
        let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
        writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64)).await.unwrap();
        assert_eq!(proxy.accepted(), 2);
        assert!(matches!(owner.arrivals.try_recv(), Some(Arrival::Batch { bytes, .. }) if bytes == BYTES as u64));
        assert_eq!(owner.arrivals.try_recv(), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_that_arrived_before_its_grant_ended_is_reported_complete() {
    const WELCOME: u64 = 10;
    let (writer, mut owner, proxy) = faulty(&[Fault::StallRepliesAfter(WELCOME), Fault::None]).await;
    let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
    let batch = writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64));
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes, .. } if bytes == BYTES as u64));
    owner.engine.revoke(grant).await;
    // With the connection the answers are lost; its parts are sent again, under a grant that has
    // ended.
    writer.engine.disconnect();
    assert_eq!(batch.await.unwrap().bytes, BYTES as u64);
    assert!(proxy.accepted() >= 2);
    assert_eq!(owner.arrivals.try_recv(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_cut_in_every_attempt_fails_and_never_arrives() {
    for cut in [200, 40_000, BYTES as u64] {
        let (writer, mut owner, proxy) = faulty(&[Fault::CutAfter(cut)]).await;
        let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
        let error = writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64)).await.unwrap_err();
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!((proxy.accepted(), owner.arrivals.try_recv()), (2, None), "one retry");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_connection_is_noticed_and_the_batch_takes_another() {
    for fault in [Fault::StallAfter(50_000), Fault::StallAfter(20), Fault::StallRepliesAfter(10)] {
        let (writer, mut owner, proxy) = faulty(&[fault, Fault::None]).await;
        let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
        let write = writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64));
        tokio::time::timeout(Duration::from_secs(5), write).await.expect("in time").unwrap();
        assert_eq!(proxy.accepted(), 2);
        assert!(owner.bytes(0..BYTES) == writer.bytes(0..BYTES));
        assert!(matches!(owner.arrivals.try_recv(), Some(Arrival::Batch { .. })));
        // What the first connection still carries comes late, and lands nowhere.
        owner.fill(9);
        let after = owner.bytes(0..BYTES);
        proxy.release();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(owner.bytes(0..BYTES) == after);
        assert_eq!(owner.arrivals.try_recv(), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_network_is_not_treated_as_stalled() {
    // 1 s in all, 2.5 times the progress timeout; all bytes fit into the sockets' buffers, so that
    // only the owner's word tells that they move.
    let (writer, owner, proxy) = faulty(&[Fault::Trickle(2000, Duration::from_millis(25))]).await;
    let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
    let started = Instant::now();
    writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64)).await.unwrap();
    assert!(started.elapsed() > Duration::from_millis(800));
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_other_batches_on_a_broken_lane_are_retried() {
    let one_lane = TransferConfig { lanes_per_peer: 1, progress_timeout: LONG, ..config("w", 1) };
    let writer = TestNode::bind(one_lane, 2 << 20).await;
    let mut owner = TestNode::bind(config("o", 1), 2 << 20).await;
    writer.fill(1);
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::CutAfter(700_000), Fault::None]).await;
    let remote = proxy.via(&owner.descriptor);
    let part = 200_000;
    let grant = owner.grant(1, &writer, vec![0..2 << 20]);
    let batches: Vec<_> = (0..10).map(|i| writer.write(&remote, grant, vec![span(i * part, i * part, part)])).collect();
    for batch in batches {
        batch.await.unwrap();
        assert!(matches!(owner.arrival().await, Arrival::Batch { bytes: 200_000, .. }));
    }
    assert_eq!((proxy.accepted(), owner.arrivals.try_recv()), (2, None));
    assert!(owner.bytes(0..2_000_000) == writer.bytes(0..2_000_000));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_batch_frees_its_source_at_once_and_others_go_on() {
    let patient = TransferConfig { lanes_per_peer: 1, progress_timeout: LONG, ..config("w", 1) };
    let bytes = 16 << 20;
    let writer = TestNode::bind(patient, bytes).await;
    let mut owner = TestNode::bind(config("o", 1), bytes).await;
    writer.fill(1);
    // Stalls in mid-payload, with far more to come than sockets hold.
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::StallAfter(50_000)]).await;
    let remote = proxy.via(&owner.descriptor);
    let half = bytes as u64 / 2;
    let first = owner.grant(1, &writer, vec![0..half]);
    let second = owner.grant(2, &writer, vec![half..2 * half]);
    let given_up = writer.write(&remote, first, whole(half));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let other = writer.write(&remote, second, vec![span(half, half, half)]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let handle = given_up.cancel_handle();
    let asked = Instant::now();
    handle.cancel();
    assert_eq!(given_up.await, Err(TransferError::Cancelled));
    assert!(asked.elapsed() < Duration::from_millis(200), "{:?}", asked.elapsed());
    let before = writer.bytes(0..half as usize);
    writer.fill_first(half as usize, 2);
    proxy.release();
    other.await.unwrap();
    assert!(matches!(owner.arrival().await, Arrival::Batch { grant, .. } if grant == second));
    assert_eq!((owner.arrivals.try_recv(), proxy.accepted()), (None, 1));
    assert!(owner.bytes(half as usize..bytes) == writer.bytes(half as usize..bytes));
    let landed = owner.bytes(0..half as usize);
    assert!(landed.iter().zip(&before).all(|(&landed, &before)| landed == before || landed == 0), "read after the end");
    assert!(landed[half as usize - 4096..].iter().all(|&byte| byte == 0), "the rest never came");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelling_a_batch_at_any_moment_leaves_the_lanes_usable() {
    let bytes = 2 << 20;
    let (writer, mut owner) = pair(bytes).await;
    let grant = owner.grant(1, &writer, vec![0..bytes as u64]);
    let mut complete = 0;
    for round in 0..30u64 {
        let batch = writer.write(&owner.descriptor, grant, whole(bytes as u64));
        tokio::time::sleep(Duration::from_micros(round * 100)).await;
        batch.cancel();
        match batch.await {
            Ok(_) => complete += 1,
            Err(error) => assert_eq!(error, TransferError::Cancelled),
        }
        // Free now: whatever is still on its way is not this.
        writer.fill(100 + round);
    }
    writer.write(&owner.descriptor, grant, whole(bytes as u64)).await.unwrap();
    let mut arrived = 0;
    while owner.arrivals.try_recv().is_some() {
        arrived += 1;
    }
    // A batch may complete just when it is cancelled.
    assert!(arrived > complete && arrived <= 31, "{arrived} arrived, {complete} known complete");
    assert!(owner.bytes(0..bytes) == writer.bytes(0..bytes));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_ends_at_its_deadline_and_dropping_it_cancels_it() {
    // Far more than sockets hold.
    let bytes = 16 << 20;
    let one_lane = TransferConfig { lanes_per_peer: 1, progress_timeout: LONG, ..config("w", 1) };
    let writer = TestNode::bind(one_lane, bytes).await;
    let mut owner = TestNode::bind(config("o", 1), bytes).await;
    writer.fill(1);
    let proxy = Proxy::before(&owner.descriptor, &owner.tasks, &[Fault::StallAfter(50_000)]).await;
    let remote = proxy.via(&owner.descriptor);
    let grant = owner.grant(1, &writer, vec![0..bytes as u64]);
    let late = writer.write_within(Duration::from_millis(60), &remote, grant, whole(bytes as u64)).await.unwrap_err();
    assert_eq!((late.kind(), late), (ErrorKind::DeadlineExceeded, TransferError::Deadline));
    let dropped = writer.write(&remote, grant, whole(bytes as u64));
    tokio::time::sleep(Duration::from_millis(30)).await;
    drop(dropped);
    proxy.release();
    writer.write(&remote, grant, vec![]).await.unwrap();
    assert!(matches!(owner.arrivals.try_recv(), Some(Arrival::Batch { bytes: 0, .. })));
    assert_eq!(owner.arrivals.try_recv(), None);
    assert!(owner.bytes(bytes - 4096..bytes).iter().all(|&byte| byte == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_peer_is_reported_soon_and_reached_again_later() {
    let writer = TestNode::bind(config("w", 1), 4096).await;
    let place = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let owner_config = TransferConfig { listen: place, ..config("o", 1) };
    let first = TestNode::bind(owner_config.clone(), 4096).await;
    let remote = first.descriptor.clone();
    let grant = first.grant(1, &writer, vec![0..4096]);
    writer.write(&remote, grant, whole(4096)).await.unwrap();
    first.stop().await;

    let asked = Instant::now();
    let many = (0..50).map(|_| writer.write(&remote, grant, whole(1))).collect::<Vec<_>>();
    for batch in many {
        let error = batch.await.unwrap_err();
        assert!(matches!(error, TransferError::PeerUnreachable { .. }), "{error}");
    }
    assert!(asked.elapsed() < Duration::from_secs(2), "they share their attempts: {:?}", asked.elapsed());

    // The same start, reachable again, as after a network failure.
    let back = TestNode::bind(owner_config.clone(), 4096).await;
    back.grant(1, &writer, vec![0..4096]);
    writer.write(&remote, grant, whole(4096)).await.unwrap();
    back.stop().await;

    // Another start at the same place.
    let restarted =
        TestNode::bind(TransferConfig { generation: baton_types::Generation(2), ..owner_config }, 4096).await;
    restarted.grant(1, &writer, vec![0..4096]);
    let stale = writer.write(&remote, grant, whole(4096)).await.unwrap_err();
    assert!(matches!(stale, TransferError::StaleGeneration { .. }), "{stale}");
    assert!(restarted.bytes(0..4096).iter().all(|&byte| byte == 0));
    writer.write(&restarted.descriptor, grant, whole(4096)).await.unwrap();
}

#[tokio::test]
async fn listen_port_in_use_is_named_in_the_error() {
    let owner = TestNode::bind(config("o", 1), 4096).await;
    let taken = TransferConfig { listen: owner.engine.local_addr(), ..config("p", 1) };
    let error = TransferEngine::bind(taken, &owner.tasks).await.err().expect("the port is taken");
    assert!(error.to_string().starts_with(&format!("cannot listen on {}", owner.engine.local_addr())), "{error}");
}

#[tokio::test]
async fn shutdown_ends_batches_under_way() {
    let (writer, owner, proxy) = faulty(&[Fault::StallAfter(50_000)]).await;
    let grant = owner.grant(1, &writer, vec![0..BYTES as u64]);
    let batch = writer.write(&proxy.via(&owner.descriptor), grant, whole(BYTES as u64));
    tokio::time::sleep(Duration::from_millis(30)).await;
    writer.engine.shutdown();
    assert_eq!(batch.await, Err(TransferError::Closed));
    writer.stop().await;
}

#[tokio::test]
async fn fake_network_injects_the_configured_faults() {
    let network = FakeNetwork::new();
    let writer = TestNode::fake(&network, config("w", 1), 4096);
    let mut owner = TestNode::fake(&network, config("o", 1), 4096);
    writer.fill(1);
    let remote = owner.descriptor.clone();
    let grant = owner.grant(1, &writer, vec![0..4096]);
    let write = || writer.write_within(Duration::from_millis(100), &remote, grant, whole(4096));

    network.set_faults(|faults| faults.drop_batches = 1);
    assert_eq!(write().await, Err(TransferError::Deadline));
    network.set_faults(|faults| faults.fail_after_bytes = Some(1000));
    assert!(matches!(write().await, Err(TransferError::ConnectionLost { .. })));
    assert!(owner.bytes(0..1000) == writer.bytes(0..1000) && owner.bytes(1000..4096).iter().all(|&byte| byte == 0));
    network.set_faults(|faults| faults.delay = Duration::from_millis(30));
    let started = Instant::now();
    write().await.unwrap();
    assert!(started.elapsed() >= Duration::from_millis(30));
    let node = owner.identity.node.clone();
    network.set_faults(|faults| faults.unreachable = [node].into());
    assert!(matches!(write().await, Err(TransferError::PeerUnreachable { .. })));
    network.set_faults(|faults| *faults = crate::FakeFaults { reorder: true, ..Default::default() });
    while owner.arrivals.try_recv().is_some() {}
    let options = |tag| crate::BatchOptions::new(Instant::now() + LONG).tag(tag);
    let both = [1, 2].map(|tag| writer.engine.write(writer.segment, &remote, grant, whole(64), options(tag)));
    for batch in both {
        batch.await.unwrap();
    }
    let tags = [owner.arrival().await, owner.arrival().await].map(|arrival| match arrival {
        Arrival::Batch { tag, .. } => tag,
        other => panic!("{other:?}"),
    });
    assert!(tags == [1, 2] || tags == [2, 1]);
    owner.engine.revoke(grant).await;
    assert!(matches!(write().await, Err(TransferError::Refused { .. })));
    let later = TestNode::fake(&network, config("o", 2), 4096);
    assert!(matches!(write().await, Err(TransferError::StaleGeneration { .. })));
    drop(later);
}
