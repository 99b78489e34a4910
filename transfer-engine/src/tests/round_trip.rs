//! Batches that nothing disturbs.

use super::harness::{TestNode, config, pair, span, whole};
use crate::{Arrival, FakeNetwork};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_arrives_whole_and_is_reported_on_both_sides() {
    let (writer, mut owner) = pair(1 << 20).await;
    let grant = owner.grant(1, &writer, vec![0..1 << 20]);
    let report = writer.write(&owner.descriptor, grant, whole(1 << 20)).await.unwrap();
    assert_eq!((report.bytes, report.spans), (1 << 20, 1));
    let from = writer.identity.0.clone();
    assert_eq!(owner.arrivals.try_recv(), Some(Arrival::Batch { grant, tag: 7, bytes: 1 << 20, from }));
    assert!(owner.bytes(0..1 << 20) == writer.bytes(0..1 << 20));
    writer.stop().await;
    owner.stop().await;
}
