//! Reads under leases.

use super::checks::{check_changing_bytes, check_lost_connections, check_reads_against_a_copy, check_refusals};
use super::harness::{TestNode, config, pair_over};
use crate::{FakeNetwork, TransportChoice, TransportKind};

const KINDS: [TransportKind; 2] = [TransportKind::Tcp, TransportKind::Shm];

#[test]
fn reads_equal_a_plain_copy_over_each_transport() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _inside = runtime.enter();
    let network = FakeNetwork::new();
    let fake = |name| TestNode::fake(&network, config(name, 1), 1 << 20);
    let over = |kind| runtime.block_on(pair_over(TransportChoice::Only(kind), 1 << 20));
    for (reader, holder) in [over(TransportKind::Tcp), over(TransportKind::Shm), (fake("r"), fake("h"))] {
        check_reads_against_a_copy(&runtime, &reader, &holder);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_not_allowed_by_its_lease_is_refused() {
    for kind in KINDS {
        check_refusals(kind).await;
    }
}

/// A lease that ends while it is read under: whatever the reader is told, it never takes changed
/// bytes for the leased ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_changed_after_the_lease_are_not_delivered() {
    for kind in KINDS {
        check_changing_bytes(kind, 16 << 20).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_survives_lost_connections() {
    for kind in KINDS {
        check_lost_connections(kind).await;
    }
}
