//! What is taken in, queued at admission and refused.

use baton_proto::{RETRY_AFTER_METADATA, v1};
use tonic::{Code, Status};

use super::client::{Answer, request};
use super::world::{World, settings, soon, until};
use crate::config::Settings;

/// A cluster with one place to decode in, and the request that has it.
async fn full() -> (World, Answer, super::node::Job) {
    let mut w = World::with(&["p0"]).await;
    w.join("d0", |info| (info.profile.max_running, info.profile.max_waiting) = (1, 0)).await;
    let answer = w.generate(request("first", 2)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    (w, answer, job)
}

fn within(ttft_ms: f64) -> v1::GenerateRequest {
    let slo = v1::ServiceLevelObjectives { ttft_ms: Some(ttft_ms), tbt_ms: None };
    v1::GenerateRequest { slo: Some(slo), ..request("second", 2) }
}

async fn until_queued(w: &World) {
    until("it is queued", || (w.frontend.cluster().requests_queued() == 1).then_some(())).await;
}

fn is_overloaded(status: &Status) -> bool {
    status.code() == Code::ResourceExhausted && status.metadata().contains_key(RETRY_AFTER_METADATA)
}

pub async fn request_without_a_ready_node_is_refused_at_once() {
    let mut w = World::with(&[]).await;
    let status = w.refusal(request("hi", 2)).await;
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "no node is ready"));
    assert_eq!(status.metadata().get(RETRY_AFTER_METADATA).unwrap(), "1");
    w.join("p0", |_| {}).await;
    assert_eq!(w.refusal(request("hi", 2)).await.message(), "no decode node is ready");
    w.join("d0", |_| {}).await;
    assert_eq!(w.refusal(request(&"x".repeat(9000), 2)).await.code(), Code::InvalidArgument);
    w.ends().await;
}

pub async fn full_cluster_refuses_request_without_objective() {
    let (mut w, mut answer, job) = full().await;
    let status = w.refusal(request("second", 2)).await;
    assert!(is_overloaded(&status) && status.message().starts_with("no decode node has room"), "{status}");
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn queued_request_is_placed_once_there_is_room() {
    let (mut w, mut answer, job) = full().await;
    let held = w.ask(within(5000.0));
    until_queued(&w).await;
    w.pass_ms(1000).await;
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    assert!(!w.has_job().await, "it looks again every 250 ms");
    w.pass_ms(250).await;
    let job = w.job().await;
    let mut answer = soon(held).await.unwrap().unwrap();
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    let timeline = answer.end().await.unwrap().timeline.unwrap();
    assert!((1.0..=1.25).contains(&timeline.placement_s), "{timeline:?}");
    w.ends().await;
}

pub async fn queued_request_is_refused_at_its_deadline() {
    let (mut w, mut answer, job) = full().await;
    let held = w.ask(within(5000.0));
    until_queued(&w).await;
    w.pass_ms(4500).await;
    assert_eq!(w.frontend.cluster().requests_queued(), 1);
    w.pass_ms(500).await;
    let status = soon(held).await.unwrap().err().unwrap();
    assert!(is_overloaded(&status), "{status}");
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn conductor_at_max_requests_refuses_another() {
    let mut w = World::with_settings(Settings { max_requests: 1, ..settings() }, &["p0", "d0"]).await;
    let answer = w.generate(request("hi", 1)).await;
    let status = w.refusal(request("hi", 1)).await;
    assert!(is_overloaded(&status) && status.message().contains("serves as many as it may, 1"), "{status}");
    let (code, told) = soon(w.http("/v1/completions", r#"{"prompt":"hi"}"#)).await.unwrap();
    assert!(code == 429 && told.contains("retry-after: 1"), "{told}");
    drop(answer);
    w.ends().await;
}
