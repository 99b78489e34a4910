//! Over RDMA, if there are devices: `scripts/test-rdma.sh` runs these in a virtual machine with two
//! Soft-RoCE rails. It emulates its processor, so that they write less than the others do.

use std::time::Duration;

use baton_transfer_engine::{TransportChoice, TransportKind};

use crate::torn_writes::Killer;
use crate::{crowd, fencing, torn_writes};

const RDMA: TransportChoice = TransportChoice::Only(TransportKind::Rdma);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn announced_batch_is_whole_while_the_writer_disconnects_over_rdma() {
    let batches = if std::env::var_os("BATON_TEST_LONG").is_some() { 10_000 } else { 2_000 };
    let scale = torn_writes::Scale { batches, slot_bytes: 32 << 10, disconnect_ms: (10, 100) };
    torn_writes::torn_writes(RDMA, Killer::Writer, scale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn no_byte_lands_after_a_fence_if_a_stopped_writer_resumes_over_rdma() {
    let scale = fencing::Scale {
        batch_bytes: 16 << 20,
        writers: 2,
        rounds: 2,
        other_bytes: 64 << 10,
        other_limit: Duration::from_secs(2),
        other_batches: 20,
    };
    fencing::fencing(RDMA, scale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs RDMA devices: make test runs it in scripts/rdma-guest.sh"]
async fn idle_peers_cost_little_and_are_disconnected_over_rdma() {
    let (peers, idle) = if std::env::var_os("BATON_TEST_LONG").is_some() { (1000, 25) } else { (200, 6) };
    crowd::idle_peers(RDMA, peers, Duration::from_secs(idle)).await;
}
