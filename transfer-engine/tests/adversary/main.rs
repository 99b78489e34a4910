//! The engine among peers that die, hang, lie and flood. Engines in several processes, over each
//! transport that this machine has.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(clippy::unwrap_used)] // helpers of tests
#![allow(clippy::single_range_in_vec_init)] // a grant of one range is a list of one range

mod crowd;
mod fencing;
mod flood;
mod fuzz;
mod hostile;
mod node;
mod other_process;
mod pattern;
mod peer;
mod proxy;
mod raw;
#[cfg(feature = "rdma")]
mod rdma;
mod torn_writes;

use std::time::Duration;

use baton_transfer_engine::{TransportChoice, TransportKind};

use torn_writes::Killer;

/// Peers without work for this long are disconnected, in tests of that.
const IDLE: Duration = Duration::from_secs(6);
const TCP: TransportChoice = TransportChoice::Only(TransportKind::Tcp);
const SHM: TransportChoice = TransportChoice::Only(TransportKind::Shm);

#[test]
#[ignore = "the other process of the tests here, which start it themselves"]
fn other_process() {
    other_process::run();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_batch_is_whole_while_connections_die_over_tcp() {
    torn_writes::torn_writes(TCP, Killer::Proxy, torn_writes::Scale::FULL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_byte_lands_after_a_fence_if_a_stopped_writer_resumes_over_tcp() {
    fencing::fencing(TCP, fencing::Scale::FULL).await;
}

#[tokio::test]
async fn thousand_idle_peers_cost_little_and_are_disconnected_over_tcp() {
    crowd::idle_peers(TCP, 1000, IDLE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_no_grant_covers_are_refused_with_a_reason_over_tcp() {
    hostile::lies_about_grants(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_handshakes_are_refused_with_a_reason_over_tcp() {
    hostile::lies_in_the_handshake(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_frames_end_their_connection_with_a_reason_over_tcp() {
    hostile::broken_frames(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_peers_are_disconnected_over_tcp() {
    hostile::slow_peers(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peer_that_never_reads_is_disconnected_over_tcp() {
    hostile::deaf_peer(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_silent_connections_hurt_no_other_peer_over_tcp() {
    flood::silent_connections(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_idle_connections_keep_no_peer_out_over_tcp() {
    flood::idle_connections(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_frame_header_ends_the_connection_over_tcp() {
    flood::half_heads(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_batch_takes_bounded_memory_over_tcp() {
    flood::endless_batch(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_peers_starve_no_other_peer_over_tcp() {
    flood::busy_peers(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutated_transcripts_do_no_harm_over_tcp() {
    fuzz::mutated_transcripts(TCP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_batch_is_whole_while_the_writer_disconnects_over_tcp() {
    torn_writes::torn_writes(TCP, Killer::Writer, torn_writes::Scale::FULL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn announced_batch_is_whole_while_the_writer_disconnects_over_shm() {
    torn_writes::torn_writes(SHM, Killer::Writer, torn_writes::Scale::FULL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_byte_lands_after_a_fence_if_a_stopped_writer_resumes_over_shm() {
    fencing::fencing(SHM, fencing::Scale::FULL).await;
}

#[tokio::test]
async fn thousand_idle_peers_cost_little_and_are_disconnected_over_shm() {
    crowd::idle_peers(SHM, 1000, IDLE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_no_grant_covers_are_refused_with_a_reason_over_shm() {
    hostile::lies_about_grants(SHM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_handshakes_are_refused_with_a_reason_over_shm() {
    hostile::lies_in_the_handshake(SHM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_frames_end_their_connection_with_a_reason_over_shm() {
    hostile::broken_frames(SHM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_memory_unlike_its_frames_is_refused_with_a_reason_over_shm() {
    hostile::broken_memory(SHM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_peers_are_disconnected_over_shm() {
    hostile::slow_peers(SHM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_silent_connections_hurt_no_other_peer_over_shm() {
    flood::silent_connections(SHM).await;
}
