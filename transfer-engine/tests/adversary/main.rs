//! The engine among peers that die, hang, lie and flood. Engines in several processes, over each transport that this machine has.

#![allow(clippy::unwrap_used)] // helpers of tests

mod fencing;
mod node;
mod pattern;
mod peer;
mod proxy;
mod torn_writes;

use baton_transfer_engine::{TransportChoice, TransportKind};

const TCP: TransportChoice = TransportChoice::Only(TransportKind::Tcp);

#[test]
#[ignore = "the other process of the tests here, which start it themselves"]
fn other_process() {
    peer::run_as_other_process();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_byte_is_there_when_a_batch_is_announced_while_connections_die_over_tcp() {
    torn_writes::torn_writes(TCP, 10_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_lands_after_a_fence_when_a_stopped_writer_goes_on_over_tcp() {
    fencing::fencing(TCP).await;
}
