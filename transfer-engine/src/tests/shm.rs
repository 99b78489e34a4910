//! Shared memory between processes of a host, and the choice between it and tcp.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_types::GrantId;

use super::checks::{check_cancel, check_fence, check_writes_against_a_copy};
use super::harness::{LONG, TestNode, config, pair_over, span, whole};
use crate::{
    Arrival, BatchOptions, GrantSpec, RefusalReason, SegmentDescriptor, SegmentId, TransferConfig, TransferError,
    TransportChoice, TransportKind,
};

const SHM: TransportChoice = TransportChoice::Only(TransportKind::Shm);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_is_chosen_between_engines_of_one_host() {
    let (writer, mut owner) = pair_over(TransportChoice::Auto, 1 << 20).await;
    let grant = owner.grant(1, &writer, vec![0..1 << 20]);
    let report = writer.write(&owner.descriptor, grant, whole(1 << 20)).await.unwrap();
    assert_eq!((report.bytes, report.transport), (1 << 20, TransportKind::Shm));
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes, tag: 7, .. } if bytes == 1 << 20));
    assert!(owner.bytes(0..1 << 20) == writer.bytes(0..1 << 20));
    let path = &writer.engine.paths()[0];
    assert_eq!((path.transport, path.bytes, path.batches), (Some(TransportKind::Shm), 1 << 20, 1));
    assert_eq!((path.fallbacks, path.in_flight_bytes), (0, 0));
    writer.stop().await;
    owner.stop().await;
}

#[test]
fn random_spans_equal_a_plain_copy_over_shm() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (writer, owner) = runtime.block_on(pair_over(SHM, 1 << 20));
    check_writes_against_a_copy(&writer, owner, &runtime, 1 << 20);
}

#[tokio::test]
async fn span_outside_the_grant_is_refused_and_the_shm_lane_goes_on() {
    let (writer, mut owner) = pair_over(SHM, 1 << 16).await;
    let grant = owner.grant(1, &writer, vec![0..1000]);
    let before = owner.bytes(0..1 << 16);
    let refused = writer.write(&owner.descriptor, grant, vec![span(0, 500, 501)]).await.unwrap_err();
    assert!(matches!(refused, TransferError::Refused { reason: RefusalReason::OutOfRange, .. }), "{refused}");
    assert!(owner.bytes(0..1 << 16) == before);
    writer.write(&owner.descriptor, grant, vec![span(0, 500, 500)]).await.unwrap();
    assert!(matches!(owner.arrival().await, Arrival::Batch { bytes: 500, .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fence_stops_the_owners_copies_over_shm() {
    check_fence(SHM, 64 << 20, Duration::from_micros(400)).await;
}

/// A batch that has resolved leaves its source to its owner: what is copied later must never be
/// believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_batch_never_arrives_with_later_bytes_over_shm() {
    check_cancel(SHM, 32 << 20).await;
}

/// With one transport left, or not.
const UNSHARED: [(TransportChoice, Option<TransportKind>); 2] =
    [(TransportChoice::Auto, Some(TransportKind::Tcp)), (SHM, None)];

/// Registers memory that was not allocated to be shared.
fn register_unshared(node: &TestNode) -> (SegmentId, SegmentDescriptor) {
    node.engine.register(Arc::new(MemoryRegion::allocate(1 << 16).unwrap())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unshared_memory_is_written_over_tcp_or_fails_with_a_reason() {
    for (transport, carried_by) in UNSHARED {
        let (writer, owner) = pair_over(transport, 1 << 16).await;
        let (segment, _) = register_unshared(&writer);
        let grant = owner.grant(1, &writer, vec![0..1 << 16]);
        let options = BatchOptions::new(Instant::now() + LONG);
        let result = writer.engine.write(segment, &owner.descriptor, grant, whole(1 << 16), options).await;
        match (result, carried_by) {
            (Ok(report), Some(kind)) => assert_eq!(report.transport, kind),
            (Err(error), None) => assert!(error.to_string().contains("cannot be reached by shm"), "{error}"),
            (other, _) => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unshared_segment_is_read_over_tcp_and_others_stay_on_shm() {
    for (transport, carried_by) in UNSHARED {
        let (reader, owner) = pair_over(transport, 1 << 16).await;
        let (segment, unshared) = register_unshared(&owner);
        let writer = Some(reader.identity.clone());
        let expires = Instant::now() + LONG;
        let spec = GrantSpec { id: GrantId(1), segment, ranges: vec![0..1 << 16], writer, expires };
        owner.engine.lease(spec).unwrap();
        let grant = owner.grant(2, &reader, vec![0..1 << 16]);
        for _ in 0..3 {
            let report = reader.write(&owner.descriptor, grant, whole(1 << 16)).await.unwrap();
            assert_eq!(report.transport, TransportKind::Shm);
            match (reader.read(&unshared, GrantId(1), whole(1 << 16)).await, carried_by) {
                (Ok(report), Some(kind)) => assert_eq!(report.transport, kind),
                (Err(error), None) => assert!(error.to_string().contains("cannot share the segment"), "{error}"),
                (other, _) => panic!("{other:?}"),
            }
        }
        let path = reader.engine.paths().remove(0);
        assert_eq!((path.retries, path.fallbacks), (0, 0), "no connection has ended for it");
    }
}

fn with_shm_at(descriptor: &SegmentDescriptor, address: &str) -> SegmentDescriptor {
    let mut changed = descriptor.clone();
    let shm = changed.transports.iter_mut().find(|transport| transport.kind == TransportKind::Shm).unwrap();
    shm.address = address.to_owned();
    changed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_that_cannot_share_memory_fall_back_to_tcp() {
    let (writer, owner) = pair_over(TransportChoice::Auto, 1 << 16).await;
    let address = owner.descriptor.address(TransportKind::Shm).unwrap();
    let here = address.split_once('/').unwrap().0;
    let network = address.rsplit_once('-').unwrap().1;
    // If there is no way, there is nothing to fall back from.
    for (address, fallbacks) in [
        (format!("{here}/@no-listener-here-{network}"), 1),
        (format!("{here}/@in-another-network-net:[1]"), 0),
        ("another-host/@x".to_owned(), 0),
    ] {
        let grant = owner.grant(address.len() as u64, &writer, vec![0..1 << 16]);
        let remote = with_shm_at(&owner.descriptor, &address);
        let report = writer.write(&remote, grant, whole(1 << 16)).await.unwrap();
        assert_eq!(report.transport, TransportKind::Tcp, "{address}");
        let path = writer.engine.paths().into_iter().find(|path| path.fallbacks == fallbacks);
        assert!(path.is_some(), "{address}: {:?}", writer.engine.paths());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_closed_in_mid_transfer_lose_no_batch_and_shm_comes_back() {
    let bytes = 4u64 << 20;
    let retrying = |name| TransferConfig { transport: TransportChoice::Auto, retries: 8, ..config(name, 1) };
    let writer = TestNode::bind(retrying("w"), bytes as usize).await;
    let mut owner = TestNode::bind(retrying("o"), bytes as usize).await;
    for round in 0..40 {
        writer.fill(round);
        let grant = owner.grant(round, &writer, vec![0..bytes]);
        let batch = writer.write(&owner.descriptor, grant, whole(bytes));
        tokio::time::sleep(Duration::from_micros(round * 50)).await;
        writer.engine.disconnect();
        batch.await.unwrap();
        assert!(matches!(owner.arrival().await, Arrival::Batch { grant: arrived, .. } if arrived == grant));
        assert!(owner.bytes(0..1 << 16) == writer.bytes(0..1 << 16), "round {round}");
        assert!(owner.arrivals.try_recv().is_none());
        owner.engine.revoke(grant).await;
    }
    let path = writer.engine.paths().remove(0);
    assert!(path.retries > 0 && path.fallbacks > 0, "{path:?}");
    let back = Instant::now();
    loop {
        let grant = owner.grant(1_000, &writer, vec![0..10]);
        let report = writer.write(&owner.descriptor, grant, whole(10)).await.unwrap();
        owner.engine.revoke(grant).await;
        if report.transport == TransportKind::Shm {
            break;
        }
        assert!(back.elapsed() < Duration::from_secs(3), "no failure is for ever");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    println!("back on shm after {:?}; {path:?}", back.elapsed());
}

#[tokio::test]
async fn shm_sockets_in_a_folder_connect_and_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name| TransferConfig { transport: SHM, shm_folder: Some(folder.path().to_owned()), ..config(name, 1) };
    let writer = TestNode::bind(at("w"), 4096).await;
    let owner = TestNode::bind(at("o"), 4096).await;
    let grant = owner.grant(1, &writer, vec![0..4096]);
    assert_eq!(writer.write(&owner.descriptor, grant, whole(4096)).await.unwrap().transport, TransportKind::Shm);
    writer.stop().await;
    owner.stop().await;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the sockets' files go with their engines");
}
