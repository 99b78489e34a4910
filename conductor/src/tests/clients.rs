//! Clients that leave, or do not read.

use baton_proto::v1;
use tonic::Code;

use super::client::{Answer, request};
use super::node::{Job, decoded};
use super::world::{World, settings, soon, until};
use crate::config::Settings;

pub async fn queued_request_is_dropped_when_its_client_leaves() {
    let mut w = World::with(&["p0"]).await;
    w.join("d0", |info| (info.profile.max_running, info.profile.max_waiting) = (1, 0)).await;
    let answer = w.generate(request("first", 2)).await;
    let slo = v1::ServiceLevelObjectives { ttft_ms: Some(5000.0), tbt_ms: None };
    let held = w.ask(v1::GenerateRequest { slo: Some(slo), ..request("second", 2) });
    until("it is queued", || (w.frontend.cluster().requests_queued() == 1).then_some(())).await;
    held.abort();
    until("it is forgotten", || (w.frontend.cluster().requests_queued() == 0).then_some(())).await;
    drop(answer);
    w.ends().await;
}

pub async fn request_is_aborted_at_both_nodes_when_its_client_leaves() {
    let mut w = World::with(&["p0", "d0"]).await;
    let stages: [fn(&mut World, &Job); 5] = [
        |_, _| {},
        |w, job| w.node("p0").started(job.key),
        |w, job| {
            w.node("p0").started(job.key);
            w.node("p0").first_token(job.key, 'a', None);
        },
        |w, job| w.node("p0").computes(job.key, 'a'),
        |w, job| {
            w.node("p0").computes(job.key, 'a');
            w.node("d0").token(job.key, 1, 'b');
        },
    ];
    for (stage, tokens) in stages.into_iter().zip(["", "", "a", "a", "ab"]) {
        let mut answer = w.generate(request("hi", 9)).await;
        let job = w.job().await;
        stage(&mut w, &job);
        answer.reads(tokens).await;
        w.report().await;
        drop(answer);
        w.node("p0").hears_abort(job.key).await;
        w.node("d0").hears_abort(job.key).await;
        w.ends().await;
    }
    let load = soon(w.operator().cluster_load(v1::ClusterLoadRequest {})).await.unwrap().into_inner();
    let goodput = load.goodput.unwrap();
    assert_eq!((goodput.aborted, goodput.ended), (5, 0), "they neither met nor missed an objective");
}

pub async fn http_request_is_aborted_at_both_nodes_when_its_client_leaves() {
    let mut w = World::with(&["p0", "d0"]).await;
    for stream in ["true", "false"] {
        let body = format!(r#"{{"prompt":"hi","max_tokens":9,"stream":{stream}}}"#);
        let answer = w.http("/v1/completions", &body);
        let job = w.job().await;
        w.node("p0").computes(job.key, 'a');
        w.report().await;
        answer.abort();
        w.node("p0").hears_abort(job.key).await;
        w.node("d0").hears_abort(job.key).await;
        w.ends().await;
    }
}

pub async fn recovering_request_is_dropped_when_its_client_leaves() {
    let mut w = World::with(&["p0", "d0"]).await;
    let answer = w.generate(request("hi", 9)).await;
    w.job().await;
    w.node("d0").die();
    w.until_state("d0", "lost").await;
    w.pass_ms(500).await;
    assert_eq!(w.frontend.live.len(), 1);
    drop(answer);
    w.ends().await;
}

pub async fn abort_ends_the_request_of_another_stream() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 9)).await;
    let job = w.job().await;
    answer.event().await.unwrap();
    let abort = |id: &str| v1::AbortRequest { request_id: id.into() };
    soon(w.inference().abort(abort(&answer.id))).await.unwrap();
    let status = answer.end().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Cancelled, "the request was aborted"));
    w.node("p0").hears_abort(job.key).await;
    w.node("d0").hears_abort(job.key).await;
    w.ends().await;
    let status = soon(w.inference().abort(abort(&answer.id))).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

const TOKENS: u32 = 8000;

/// A client that reads nothing, with a request that has given it a token.
async fn unread(settings: Settings) -> (World, Answer, Job) {
    let mut w = World::with_settings(settings, &["p0", "d0"]).await;
    let answer = w.generate_unread(request("hi", TOKENS)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    (w, answer, job)
}

async fn says_much(w: &mut World, job: &Job, tokens: std::ops::Range<u32>) {
    for step in tokens.step_by(100) {
        let events: Vec<_> = (step..step + 100).map(|index| decoded(index, 'b', None)).collect();
        w.node("d0").decode(job.key, &events);
    }
    w.report().await;
}

pub async fn request_with_too_many_unread_bytes_is_ended() {
    let (mut w, mut answer, job) = unread(Settings { max_body_bytes_total: Some(1 << 16), ..settings() }).await;
    says_much(&mut w, &job, 1..7001).await;
    w.node("d0").hears_abort(job.key).await;
    let status = answer.end().await.unwrap_err();
    assert!(status.code() == Code::ResourceExhausted && status.message().contains("were not read"), "{status}");
    w.ends().await;
}

pub async fn unread_request_is_ended_at_stall_timeout() {
    let (mut w, mut answer, job) = unread(Settings { stall_timeout_s: 20.0, ..settings() }).await;
    says_much(&mut w, &job, 1..7001).await;
    w.pass_ms(15_000).await;
    // It goes on, but its client does not read.
    w.node("d0").token(job.key, 7001, 'b');
    w.pass_ms(4950).await;
    assert_eq!(w.frontend.live.len(), 1);
    w.pass_ms(50).await;
    w.node("d0").hears_abort(job.key).await;
    assert_eq!(answer.end().await.unwrap_err().code(), Code::DeadlineExceeded);
    w.ends().await;
}
