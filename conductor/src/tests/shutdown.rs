//! The way down.

use std::time::Duration;

use baton_proto::{kind_of_status, v1};
use baton_runtime::Phase;
use baton_types::ErrorKind;
use tonic::Code;

use super::client::request;
use super::world::{World, settings, soon, until};
use crate::config::Settings;

/// A conductor with a request that decodes, and one token of it.
async fn serving() -> (World, super::client::Answer, super::node::Job) {
    let slow = Settings { not_ready_s: 5.0, grace_s: 30.0, ..settings() };
    let mut w = World::with_settings(slow, &["p0"]).await;
    w.join("d0", |info| (info.profile.max_running, info.profile.max_waiting) = (2, 0)).await;
    let mut answer = w.generate(request("hi", 3)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    answer.reads("a").await;
    (w, answer, job)
}

async fn until_phase(w: &World, phase: Phase) {
    until(&format!("{phase:?}"), || (w.frontend.shutdown.phase() == phase).then_some(())).await;
}

pub async fn conductor_is_not_ready_then_drains_then_is_down() {
    let (mut w, mut first, first_job) = serving().await;
    w.signal();
    until_phase(&w, Phase::NotReady).await;
    assert_eq!(w.get("/ready").await.0, 503);
    // Load balancers do not know of it yet.
    let mut second = w.generate(request("hi", 2)).await;
    let second_job = w.job().await;
    w.pass_ms(4950).await;
    assert_eq!(w.frontend.shutdown.phase(), Phase::NotReady);
    w.pass_ms(50).await;
    assert_eq!(w.frontend.shutdown.phase(), Phase::Draining);
    // The connection takes no more requests. Who connects again is told why.
    let mut status = w.refusal(request("hi", 2)).await;
    for _ in 0..2 {
        assert_eq!(kind_of_status(&status), ErrorKind::Unavailable);
        status = w.refusal(request("hi", 2)).await;
    }
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "this conductor is going down"));

    w.node("d0").token(first_job.key, 1, 'b');
    w.node("d0").last_token(first_job.key, 2, 'c');
    first.end().await.unwrap();
    w.node("p0").computes(second_job.key, 'a');
    w.node("d0").last_token(second_job.key, 1, 'b');
    second.end().await.unwrap();
    w.ends().await;
    w.pass_ms(50).await;
    w.down().await.unwrap();
    assert_eq!(w.frontend.shutdown.phase(), Phase::Flushed);
}

pub async fn second_signal_ends_running_requests() {
    let (mut w, mut answer, job) = serving().await;
    w.signal();
    until_phase(&w, Phase::NotReady).await;
    w.signal();
    let status = answer.end().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "this conductor is going down"));
    w.node("d0").hears_abort(job.key).await;
    w.ends().await;
    w.clock.advance(Duration::from_millis(50));
    w.down().await.unwrap();
}

pub async fn queued_request_is_refused_when_drain_begins() {
    let (mut w, mut answer, job) = serving().await;
    let other = w.generate(request("hi", 2)).await;
    let slo = v1::ServiceLevelObjectives { ttft_ms: Some(60_000.0), tbt_ms: None };
    let held = w.ask(v1::GenerateRequest { slo: Some(slo), ..request("hi", 2) });
    until("it is queued", || (w.frontend.cluster().requests_queued() == 1).then_some(())).await;
    w.signal();
    until_phase(&w, Phase::NotReady).await;
    w.pass_ms(4950).await;
    assert_eq!(w.frontend.cluster().requests_queued(), 1);
    w.pass_ms(300).await;
    let status = soon(held).await.unwrap().err().unwrap();
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "this conductor is going down"));
    drop(other);
    w.node("d0").token(job.key, 1, 'b');
    w.node("d0").last_token(job.key, 2, 'c');
    answer.end().await.unwrap();
    w.ends().await;
    w.pass_ms(50).await;
    w.down().await.unwrap();
}

pub async fn failed_task_takes_the_conductor_down() {
    let (mut w, mut answer, _) = serving().await;
    w.frontend.tasks.spawn("weak", async { Err::<(), _>("no luck") });
    until_phase(&w, Phase::Draining).await;
    w.clock.advance(Duration::from_secs(30));
    assert!(answer.end().await.is_err());
    w.ends().await;
    w.clock.advance(Duration::from_millis(50));
    assert_eq!(w.down().await.unwrap_err().to_string(), "task 'weak' failed: no luck");
}

pub async fn end_of_grace_period_ends_running_requests() {
    let (mut w, mut answer, job) = serving().await;
    w.signal();
    until_phase(&w, Phase::NotReady).await;
    w.pass_ms(5000).await;
    assert_eq!(w.frontend.shutdown.phase(), Phase::Draining);
    w.pass_ms(29_950).await;
    assert_eq!(w.frontend.live.len(), 1);
    w.pass_ms(50).await;
    assert_eq!(answer.end().await.unwrap_err().code(), Code::Unavailable);
    w.node("p0").hears_abort(job.key).await;
    w.ends().await;
    w.clock.advance(Duration::from_millis(50));
    w.down().await.unwrap();
    let _ = soon(w.inference().list_models(v1::ListModelsRequest {})).await.unwrap_err();
}
