//! Requests that are asked for again, with the same idempotency key.

use baton_proto::v1;
use tonic::Code;

use super::client::{Answer, request};
use super::node::Job;
use super::world::{World, soon, until};

fn keyed(max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest { idempotency_key: "order 7".into(), ..request("hi", max_tokens) }
}

/// A request with a key whose client has read its first token.
async fn begun(max_tokens: u32) -> (World, Answer, Job) {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(keyed(max_tokens)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    answer.reads("a").await;
    (w, answer, job)
}

pub async fn repeated_idempotency_key_attaches_to_running_request() {
    let (mut w, mut first, job) = begun(3).await;
    // Another name for operators, and less patience, are no other request.
    let again = v1::GenerateRequest { client_request_id: "again".into(), timeout_ms: Some(9000.0), ..keyed(3) };
    let mut second = w.generate(again).await;
    second.reads("a").await;
    w.node("d0").token(job.key, 1, 'b');
    first.reads("ab").await;
    drop(first);
    w.node("d0").last_token(job.key, 2, 'c');
    second.end().await.unwrap();
    assert_eq!((second.text.as_str(), second.id.as_str()), ("abc", &*job.key.request.to_string()));
    assert!(!w.has_job().await, "it is served once");
    let (_, metrics) = w.get("/metrics").await;
    assert!(metrics.contains("baton_conductor_requests_attached_total 1"), "{metrics}");
    w.ends().await;
}

pub async fn keyed_request_continues_for_client_with_longer_timeout() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut first = w.generate(v1::GenerateRequest { timeout_ms: Some(3000.0), ..keyed(3) }).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    first.reads("a").await;
    w.report().await;
    w.pass_ms(2000).await;
    let mut second = w.generate(v1::GenerateRequest { timeout_ms: Some(9000.0), ..keyed(3) }).await;
    second.reads("a").await;
    w.report().await;
    w.pass_ms(2000).await;
    assert_eq!(first.end().await.unwrap_err().code(), Code::DeadlineExceeded);
    w.node("d0").token(job.key, 1, 'b');
    w.node("d0").last_token(job.key, 2, 'c');
    second.end().await.unwrap();
    assert!(second.text == "abc" && !w.has_job().await, "it is served once");
    w.ends().await;
}

pub async fn idempotency_key_of_another_request_is_refused() {
    let (mut w, first, _) = begun(3).await;
    let status = w.refusal(keyed(4)).await;
    assert_eq!(status.code(), Code::AlreadyExists);
    assert!(status.message().starts_with("idempotency_key: another request has this key"), "{status}");
    let long = w.refusal(v1::GenerateRequest { idempotency_key: "k".repeat(129), ..request("hi", 1) }).await;
    assert_eq!(long.message(), "idempotency_key: 129 bytes, but at most 128 are taken");
    drop(first);
    w.pass_ms(10_000).await;
    w.ends().await;
}

pub async fn keyed_answer_is_kept_ten_seconds_after_its_client_left() {
    let (mut w, first, job) = begun(3).await;
    w.report().await;
    drop(first);
    w.pass_ms(9_000).await;
    w.node("d0").token(job.key, 1, 'b');
    w.node("d0").last_token(job.key, 2, 'c');
    let mut second = w.generate(keyed(3)).await;
    second.end().await.unwrap();
    assert_eq!(second.text, "abc");
    w.ends().await;
    drop(second);
    w.pass_ms(9_000).await;
    let mut third = w.generate(keyed(3)).await;
    third.end().await.unwrap();
    assert!(third.text == "abc" && !w.has_job().await);
    drop(third);
    w.pass_ms(11_500).await;
    let fourth = w.generate(keyed(3)).await;
    w.job().await;
    drop(fourth);
    w.pass_ms(11_500).await;
    w.ends().await;
}

pub async fn keyed_request_is_ended_ten_seconds_after_its_client_left() {
    let (mut w, first, job) = begun(9).await;
    w.report().await;
    drop(first);
    w.pass_ms(9_000).await;
    assert_eq!(w.frontend.live.len(), 1, "a client may come back");
    w.pass_ms(1_500).await;
    w.node("p0").hears_abort(job.key).await;
    w.node("d0").hears_abort(job.key).await;
    w.ends().await;
}

pub async fn keyed_request_is_served_anew_after_its_first_try_failed() {
    let mut w = World::with(&[]).await;
    let status = w.refusal(keyed(1)).await;
    assert_eq!(status.code(), Code::Unavailable);
    w.join("p0", |_| {}).await;
    w.join("d0", |info| (info.profile.max_running, info.profile.max_waiting) = (1, 0)).await;
    // The first one waits for room, and its client leaves meanwhile: the second one is placed in
    // its stead.
    let running = w.generate(request("first", 2)).await;
    let job = w.job().await;
    let slo = v1::ServiceLevelObjectives { ttft_ms: Some(5000.0), tbt_ms: None };
    let held = v1::GenerateRequest { slo: Some(slo), ..keyed(2) };
    let first = w.ask(held.clone());
    until("it is queued", || (w.frontend.cluster().requests_queued() == 1).then_some(())).await;
    let second = w.ask(held);
    w.report().await;
    assert_eq!(w.frontend.cluster().requests_queued(), 1, "one is queued for both");
    first.abort();
    until("the second one is queued", || (w.frontend.cluster().requests_queued() == 1).then_some(())).await;
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    w.pass_ms(500).await;
    let job = w.job().await;
    drop(running);
    // Failed so that it cannot be placed again: a client that asks again is served anew.
    let mut second = soon(second).await.unwrap().unwrap();
    w.node("p0").failed(job.key, baton_types::ErrorKind::Invalid);
    assert_eq!(second.end().await.unwrap_err().code(), Code::InvalidArgument);
    w.ends().await;
    let mut third = w.generate(keyed(2)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'c');
    w.node("d0").last_token(job.key, 1, 'd');
    third.end().await.unwrap();
    assert_eq!(third.text, "cd");
    w.ends().await;
}

pub async fn repeated_http_idempotency_key_attaches_to_running_request() {
    let mut w = World::with(&["p0", "d0"]).await;
    let ask = |w: &World, key: &str, body: &str| {
        super::client::http_with(w.addresses.http, "/v1/completions", &[("Idempotency-Key", key)], body)
    };
    // Two prompts are two requests, each with a key of its own.
    let body = r#"{"prompt":["hi","ho"],"max_tokens":2}"#;
    let first = ask(&w, "k", body);
    let jobs = [w.job().await, w.job().await];
    w.node("p0").computes(jobs[0].key, 'a');
    w.report().await;
    first.abort();
    w.pass_ms(5_000).await;
    let second = ask(&w, "k", body);
    w.report().await;
    let (status, told) = soon(ask(&w, "k", r#"{"prompt":"ho","max_tokens":2}"#)).await.unwrap();
    assert!(status == 409 && told.contains("x-should-retry: false") && told.contains("idempotency_key"), "{told}");
    w.node("p0").computes(jobs[1].key, 'x');
    w.node("d0").last_token(jobs[0].key, 1, 'b');
    w.node("d0").last_token(jobs[1].key, 1, 'y');
    let (status, told) = soon(second).await.unwrap();
    let ab = r#""text":"ab""#;
    let xy = r#""text":"xy""#;
    assert!(status == 200 && told.contains(ab) && told.contains(xy) && !w.has_job().await, "{told}");
    for wrong in ["", &"k".repeat(121)] {
        let (status, told) = soon(ask(&w, wrong, body)).await.unwrap();
        assert!(status == 400 && told.contains("idempotency-key: expected 1 to 120"), "{told}");
    }
    w.ends().await;
}

/// So another conductor, which knows nothing of the first try, draws the same tokens.
pub async fn seed_is_derived_from_idempotency_key() {
    let mut one = World::with(&["p0", "d0"]).await;
    let mut two = World::with(&["p0", "d0"]).await;
    let _answers = [one.generate(keyed(3)).await, two.generate(keyed(3)).await];
    let seed = |job: Job| job.wire.sampling.unwrap().seed;
    let seeds = [seed(one.job().await), seed(two.job().await)];
    assert_eq!(seeds[0], seeds[1]);
    let _other = one.generate(v1::GenerateRequest { idempotency_key: "order 8".into(), ..request("hi", 3) }).await;
    assert_ne!(seed(one.job().await), seeds[0]);
}
