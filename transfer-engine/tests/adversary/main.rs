//! The engine among peers that die, hang, lie and flood. Engines in several processes, over each transport that this machine has.

#![allow(clippy::unwrap_used)] // helpers of tests
#![allow(clippy::single_range_in_vec_init)] // a grant of one range is a list of one range

mod crowd;
mod fencing;
mod node;
mod other_process;
mod pattern;
mod peer;
mod proxy;
mod torn_writes;

use baton_transfer_engine::{TransportChoice, TransportKind};

const TCP: TransportChoice = TransportChoice::Only(TransportKind::Tcp);

#[test]
#[ignore = "the other process of the tests here, which start it themselves"]
fn other_process() {
    other_process::run();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_byte_is_there_when_a_batch_is_announced_while_connections_die_over_tcp() {
    torn_writes::torn_writes(TCP, 10_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_lands_after_a_fence_when_a_stopped_writer_goes_on_over_tcp() {
    fencing::fencing(TCP).await;
}

#[tokio::test]
async fn a_thousand_idle_peers_cost_little_and_are_let_go_over_tcp() {
    crowd::thousand_peers(TCP).await;
}
