//! Nodes that go away while they have requests.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_types::{FinishReason, Generation, NodeInfo};
use tonic::Code;

use super::client::{Answer, request};
use super::node::{FakeNode, Job};
use super::world::{World, settings, soon, until};
use crate::config::Settings;
use crate::nodes::SessionEvents;

/// The other one of two nodes.
fn other(node: &str) -> String {
    let (kind, number) = node.split_at(1);
    format!("{kind}{}", if number == "0" { 1 } else { 0 })
}

pub async fn decode_node_death_neither_loses_nor_repeats_a_token() {
    let mut w = World::with(&["p0", "p1", "d0", "d1"]).await;
    let mut answer = w.generate(request("hi", 4)).await;
    let first = w.job().await;
    w.node(&first.node).computes(first.key, 'a');
    w.node(&first.decode()).token(first.key, 1, 'b');
    answer.reads("ab").await;
    w.node(&first.decode()).die();

    let second = w.job().await;
    assert_eq!((second.key.attempt.0, second.decode()), (1, other(&first.decode())));
    assert_eq!((second.wire.output_tokens, &second.wire.tokens[3..]), (2, &[97, 98][..]), "it goes on from there");
    w.node(&first.node).hears_abort(first.key).await;
    let lost = w.node(&first.node).hears("what was lost", |command| match command {
        Command::NodeLost(lost) => Some(lost.node.clone()),
        _ => None,
    });
    assert_eq!(lost.await, first.decode());
    assert_eq!(w.state(&first.decode()), "lost");

    w.node(&second.node).started(second.key);
    w.node(&second.node).first_token(second.key, 'c', None);
    w.node(&second.node).handed_off(second.key);
    // Once more what the client has: it is not given it again.
    w.node(&second.decode()).token(second.key, 1, 'b');
    w.node(&second.decode()).last_token(second.key, 3, 'd');
    assert_eq!(answer.end().await.unwrap().decode_node, second.decode());
    assert_eq!(answer.tokens, "abcd");
    w.ends().await;
}

pub async fn prompt_of_dead_prefill_node_is_computed_at_another() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let first = w.job().await;
    w.node(&first.node).started(first.key);
    w.node(&first.node).die();
    let second = w.job().await;
    assert_eq!((second.node.clone(), second.wire.output_tokens), (other(&first.node), 0));
    w.node("d0").hears_abort(first.key).await;
    w.node(&second.node).computes(second.key, 'a');
    w.node("d0").last_token(second.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

/// A request that decodes, and its decode node.
async fn decoding(w: &mut World, max_tokens: u32) -> (Answer, Job) {
    let mut answer = w.generate(request("hi", max_tokens)).await;
    let job = w.job().await;
    w.node(&job.node).computes(job.key, 'a');
    w.node(&job.decode()).token(job.key, 1, 'b');
    answer.reads("ab").await;
    (answer, job)
}

pub async fn silent_node_is_suspected_after_two_seconds_and_lost_after_ten() {
    let mut w = World::with(&["p0", "d0", "d1"]).await;
    let (mut answer, first) = decoding(&mut w, 4).await;
    let silent = first.decode();
    w.report().await;
    w.node(&silent).is_silent = true;
    w.pass_ms(1950).await;
    assert_eq!(w.state(&silent), "ready");
    w.pass_ms(50).await;
    assert_eq!(w.state(&silent), "suspect");
    let second = w.job().await;
    assert_eq!(second.decode(), other(&silent));
    // It was only slow: what it says of the attempt that was given up changes nothing.
    w.node(&silent).hears_abort(first.key).await;
    w.node(&second.node).computes(second.key, 'c');
    w.node(&second.decode()).last_token(second.key, 3, 'd');
    answer.end().await.unwrap();
    assert_eq!(answer.tokens, "abcd");
    w.pass_ms(7950).await;
    assert_eq!(w.state(&silent), "suspect");
    w.pass_ms(50).await;
    assert_eq!(w.state(&silent), "lost");
    let listed = soon(w.operator().list_nodes(v1::ListNodesRequest {})).await.unwrap().into_inner().nodes;
    let lost = listed.iter().find(|node| node.state == "lost").unwrap();
    assert!(lost.report_age_s >= 10.0 && lost.load.is_none(), "since its last report: {lost:?}");
    w.ends().await;
}

pub async fn silent_node_without_replacement_keeps_its_request_until_lost() {
    let mut w = World::with(&["p0", "d0"]).await;
    let (mut answer, job) = decoding(&mut w, 3).await;
    w.report().await;
    w.node("d0").is_silent = true;
    w.pass_ms(9950).await;
    assert!(w.state("d0") == "suspect" && !w.has_job().await);
    w.pass_ms(50).await;
    assert_eq!(w.state("d0"), "lost");
    w.node("p0").hears_abort(job.key).await;
    w.join("d1", |_| {}).await;
    w.pass_ms(1600).await;
    let second = w.job().await;
    w.node("p0").started(second.key);
    w.node("p0").first_token(second.key, 'c', Some(FinishReason::Length));
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn request_of_silent_node_is_placed_again_once_another_joins() {
    let mut w = World::with(&["p0", "d0"]).await;
    let (mut answer, first) = decoding(&mut w, 4).await;
    w.report().await;
    w.node("d0").is_silent = true;
    w.pass_ms(3000).await;
    assert!(w.state("d0") == "suspect" && !w.has_job().await, "no other node could go on with it");
    w.join("d1", |_| {}).await;
    w.pass_ms(250).await;
    let second = w.job().await;
    assert_eq!(second.decode(), "d1");
    w.node("d0").hears_abort(first.key).await;
    w.node("p0").computes(second.key, 'c');
    w.node("d1").last_token(second.key, 3, 'd');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn report_of_earlier_generation_is_ignored() {
    let mut w = World::with(&["p0", "d0"]).await;
    let earlier = w.node("d0").info.clone();
    w.node("d0").restart(2);
    w.begin_session("d0").await;
    // It was on its way when the later start was greeted.
    w.frontend.on_event(&earlier, Event::Load(v1::Load { draining: true, ..v1::Load::default() }));
    assert_eq!(w.state("d0"), "ready");
    w.ends().await;
}

pub async fn node_with_full_command_queue_is_lost() {
    let mut w = World::with(&["p0", "d0"]).await;
    let id = w.node("d0").info.node.clone();
    let command = || Command::ClearCache(v1::ClearCacheCommand {});
    let sent = (0..10_000).take_while(|_| w.frontend.nodes.send(&id, command())).count();
    assert_eq!(sent, 4096, "nothing is read meanwhile");
    w.until_state("d0", "lost").await;
    assert!(!w.frontend.nodes.send(&id, command()));
    w.ends().await;
}

pub async fn node_that_does_not_greet_is_dialled_again_after_five_seconds() {
    let mut w = World::with(&["p0"]).await;
    let node = FakeNode::start(w.info("d0")).await;
    node.is_mute.store(true, Relaxed);
    w.register(&node.info).await.unwrap();
    let frontend = Arc::clone(&w.frontend);
    let info = node.info.clone();
    let is_dialled = || frontend.nodes.register(info.clone()).unwrap().is_none();
    w.pass_ms(4950).await;
    assert!(is_dialled());
    w.pass_ms(50).await;
    assert!(!is_dialled());
    node.is_mute.store(false, Relaxed);
    w.register(&node.info).await.unwrap();
    until("it is known", || w.frontend.cluster().node(&node.info.node).map(drop)).await;
    w.ends().await;
}

pub async fn request_outlives_sessions_that_were_replaced() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    // A stranger takes the conductor's place at one node after the other, which ask for it again.
    for turn in 0..4 {
        let job = w.job().await;
        w.node(&job.node).started(job.key);
        if turn < 2 {
            w.node(&job.node).is_taken_over();
        } else {
            // An earlier version of a node says nothing of it.
            w.node(&job.node).leave();
        }
        w.until_state(&job.node, "lost").await;
        w.begin_session(&job.node).await;
        w.pass_ms(100).await;
    }
    let job = w.job().await;
    w.node(&job.node).computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn request_fails_after_two_nodes_died_with_it() {
    let mut w = World::with(&["p0", "p1", "p2", "d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    for _ in 0..2 {
        let job = w.job().await;
        w.node(&job.node).started(job.key);
        w.node(&job.node).die();
    }
    let status = answer.end().await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert_eq!(status.message(), "nodes died or hung while they had the request: it is not tried again");
    assert!(!w.has_job().await, "the third node is spared");
    w.ends().await;
}

pub async fn request_of_stalled_engine_is_placed_again_once_another_node_joins() {
    let mut w = World::with(&["p0", "d0"]).await;
    let (mut answer, first) = decoding(&mut w, 4).await;
    w.node("d0").load.stalled = true;
    w.pass_ms(500).await;
    assert!(w.state("d0") == "suspect" && !w.has_job().await, "no other node could go on with it");
    w.join("d1", |_| {}).await;
    w.report().await;
    let second = w.job().await;
    assert_eq!(second.decode(), "d1");
    w.node("d0").hears_abort(first.key).await;
    w.node("p0").computes(second.key, 'c');
    w.node("d1").last_token(second.key, 3, 'd');
    answer.end().await.unwrap();
    w.node("d0").load.stalled = false;
    w.report().await;
    assert_eq!(w.state("d0"), "ready");
    w.ends().await;
}

pub async fn restarted_node_replaces_its_earlier_generation() {
    let mut w = World::with(&["p0", "d0"]).await;
    let (mut answer, first) = decoding(&mut w, 4).await;
    w.node("d0").restart(2);
    w.begin_session("d0").await;
    w.pass_ms(100).await;
    let second = w.job().await;
    let generation = |job: &Job| job.wire.decode.as_ref().unwrap().generation.clone();
    assert_eq!((generation(&first), generation(&second)), (Generation(1).to_string(), Generation(2).to_string()));
    w.node("p0").computes(second.key, 'c');
    w.node("d0").last_token(second.key, 3, 'd');
    answer.end().await.unwrap();

    // The same start registers every two seconds, and an earlier one is another process of that
    // name.
    let info = w.node("d0").info.clone();
    assert_eq!(w.register(&info).await.unwrap().interval_ms, 2000);
    let earlier = NodeInfo { generation: Generation(1), ..info };
    assert_eq!(w.register(&earlier).await, Err(Code::InvalidArgument));
    w.ends().await;
}

pub async fn request_without_decode_node_fails_after_ten_seconds() {
    let mut w = World::with(&["p0", "d0"]).await;
    let (mut answer, _) = decoding(&mut w, 4).await;
    w.node("d0").die();
    w.until_state("d0", "lost").await;
    w.pass_ms(9950).await;
    assert_eq!(w.frontend.live.len(), 1);
    w.pass_ms(50).await;
    let status = answer.end().await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "a node could not serve the request: unavailable")
    );
    assert!(status.metadata().contains_key(baton_proto::RETRY_AFTER_METADATA));
    assert_eq!(w.get("/ready").await.0, 503);
    w.ends().await;
}

pub async fn request_without_decode_node_continues_if_one_joins_in_time() {
    let mut w = World::with(&["p0", "d0"]).await;
    let (mut answer, _) = decoding(&mut w, 3).await;
    w.node("d0").die();
    w.until_state("d0", "lost").await;
    w.pass_ms(5000).await;
    w.join("d1", |_| {}).await;
    // Looks are ever rarer, but no more than 1.6 s apart.
    w.pass_ms(1600).await;
    let job = w.job().await;
    w.node("p0").started(job.key);
    w.node("p0").first_token(job.key, 'c', Some(FinishReason::Length));
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn requests_of_lost_node_are_placed_again_32_at_a_time() {
    const REQUESTS: usize = 40;
    let mut w = World::with(&[]).await;
    let roomy = |info: &mut NodeInfo| (info.profile.max_waiting, info.profile.max_running) = (99, 99);
    w.join("p0", roomy).await;
    w.join("d0", roomy).await;
    let mut answers = Vec::new();
    for _ in 0..REQUESTS {
        answers.push(w.generate(request("hi", 2)).await);
        let job = w.job().await;
        w.node("p0").computes(job.key, 'a');
    }
    for answer in &mut answers {
        answer.reads("a").await;
    }
    w.join("d1", roomy).await;
    w.node("d0").die();
    w.until_state("d0", "lost").await;
    let mut placed_again = Vec::new();
    while placed_again.len() < 32 {
        placed_again.push(w.job().await);
    }
    assert!(!w.has_job().await, "the others wait their turn");
    w.pass(Duration::from_millis(50)).await;
    while placed_again.len() < REQUESTS {
        placed_again.push(w.job().await);
    }
    for job in &placed_again {
        w.node("p0").started(job.key);
        w.node("p0").first_token(job.key, 'b', Some(FinishReason::Length));
    }
    for answer in &mut answers {
        answer.end().await.unwrap();
    }
    w.ends().await;
}

pub async fn drained_node_that_leaves_fails_no_request() {
    // A failure would end it.
    let mut w = World::with_settings(Settings { max_attempts: 1, ..settings() }, &["p0", "d0", "d1"]).await;
    let (mut answer, first) = decoding(&mut w, 4).await;
    let leaving = first.decode();
    w.node(&leaving).load.draining = true;
    w.report().await;
    assert_eq!(w.state(&leaving), "draining");
    w.node(&leaving).leave();
    w.until_state(&leaving, "drained").await;
    let second = w.job().await;
    assert_eq!(second.decode(), other(&leaving));
    w.node("p0").computes(second.key, 'c');
    w.node(&second.decode()).last_token(second.key, 3, 'd');
    answer.end().await.unwrap();
    // One that leaves without having drained is lost.
    w.node("p0").leave();
    w.until_state("p0", "lost").await;
    w.ends().await;
}
