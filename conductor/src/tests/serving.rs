//! Requests that go well.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::node_event::Event as Said;
use baton_types::{FinishReason, PrefillEvent, TokenLogprobs};
use futures::FutureExt;

use super::client::request;
use super::node::first_token;
use super::world::{World, settings, soon, until};
use crate::config::Settings;

pub async fn request_streams_to_its_end_over_grpc() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 3)).await;
    let job = w.job().await;
    assert_eq!((job.node.as_str(), job.decode().as_str(), &job.wire.tokens[..]), ("p0", "d0", &[256, 104, 105][..]));
    w.node("p0").computes(job.key, 'a');
    answer.reads("a").await;
    w.node("d0").token(job.key, 1, 'b');
    answer.reads("ab").await;
    w.node("d0").last_token(job.key, 2, 'c');
    let finished = answer.end().await.unwrap();
    assert_eq!((answer.text.as_str(), finished.finish_reason.as_str()), ("abc", "length"));
    assert_eq!((finished.prefill_node.as_str(), finished.decode_node.as_str()), ("p0", "d0"));
    let usage = finished.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 3));
    assert_eq!(finished.timeline.unwrap().kv_transfer.unwrap().bytes, 4096);
    w.ends().await;
}

pub async fn first_token_smoothing_keeps_the_first_token_back() {
    let mut w = World::with(&["p0", "d0"]).await;
    let slo = v1::ServiceLevelObjectives { ttft_ms: Some(10_000.0), tbt_ms: Some(20.0) };
    let mut answer = w.generate(v1::GenerateRequest { slo: Some(slo), ..request("hi", 2) }).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    w.report().await;
    assert!(matches!(answer.event().await, Ok(Some(Event::Accepted(_)))));
    w.report().await;
    assert!(answer.event().now_or_never().is_none(), "a step of the decode node later");
    w.pass_ms(50).await;
    answer.reads("a").await;
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn long_prompt_gets_partial_prefill_at_its_decode_node() {
    let mut w = World::with_settings(Settings { partial_prefill: true, ..settings() }, &["p0", "d0"]).await;
    let mut answer = w.generate(request(&"0123456789abcdef".repeat(100), 2)).await;
    let job = w.job().await;
    assert!(job.node == "p0" && job.wire.partial_prefill_tokens > 0, "{} tokens", job.wire.partial_prefill_tokens);
    w.node("p0").started(job.key);
    w.node("p0").handed_off(job.key);
    w.node("d0").token(job.key, 0, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    assert_eq!(answer.tokens, "ab");
    let (_, metrics) = w.get("/metrics").await;
    assert!(metrics.contains("baton_conductor_partial_prefills_total 1"), "{metrics}");
    w.ends().await;
}

pub async fn http_completion_is_served_streamed_and_whole() {
    let mut w = World::with(&["p0", "d0"]).await;
    for stream in ["true", "false"] {
        let body = format!(r#"{{"model":"mock","prompt":"hi","max_tokens":2,"stream":{stream}}}"#);
        let answer = w.http("/v1/completions", &body);
        let job = w.job().await;
        w.node("p0").computes(job.key, 'a');
        w.node("d0").last_token(job.key, 1, 'b');
        let (status, answer) = soon(answer).await.unwrap();
        assert_eq!(status, 200, "{answer}");
        match stream {
            "true" => assert!(answer.contains(r#""text":"b""#) && answer.contains("data: [DONE]"), "{answer}"),
            _ => assert!(answer.contains(r#""text":"ab""#), "{answer}"),
        }
    }
    let (status, answer) = soon(w.http("/v1/completions", r#"{"model":"another","prompt":"hi"}"#)).await.unwrap();
    assert!(status == 404 && answer.contains("another"), "{answer}");
    w.ends().await;
}

pub async fn single_token_request_gets_no_decode_node() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 1)).await;
    let job = w.job().await;
    assert!(job.wire.decode.is_none());
    w.node("p0").started(job.key);
    w.node("p0").first_token(job.key, 'a', Some(FinishReason::Length));
    assert_eq!(answer.end().await.unwrap().decode_node, "");
    w.ends().await;
}

pub async fn stop_string_ends_request_and_aborts_it_at_both_nodes() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut asked = request("hi", 9);
    asked.sampling.as_mut().unwrap().stop = vec!["bc".into()];
    let mut answer = w.generate(asked).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    for (index, token) in [(1, 'b'), (2, 'c'), (3, 'd')] {
        w.node("d0").token(job.key, index, token);
    }
    let finished = answer.end().await.unwrap();
    assert_eq!((finished.finish_reason.as_str(), finished.stop_sequence.as_str()), ("stop", "bc"));
    assert_eq!(answer.text, "a");
    w.node("d0").hears_abort(job.key).await;
    w.node("p0").hears_abort(job.key).await;
    w.ends().await;
}

pub async fn request_with_n_answers_places_others_once_the_first_decodes() {
    let mut w = World::with(&["p0", "d0"]).await;
    let asked = v1::GenerateRequest { n: 2, ..request("hi", 2) };
    let mut client = w.inference();
    let mut stream = soon(client.generate(asked)).await.unwrap().into_inner();
    let first = w.job().await;
    w.node("p0").computes(first.key, 'a');
    w.node("d0").last_token(first.key, 1, 'b');
    let second = w.job().await;
    assert_ne!(first.key.request, second.key.request);
    w.node("p0").computes(second.key, 'c');
    w.node("d0").last_token(second.key, 1, 'd');
    let mut texts = [String::new(), String::new()];
    let mut finished = 0;
    while let Some(response) = soon(stream.message()).await.unwrap() {
        match response.event {
            Some(Event::Delta(delta)) => texts[response.completion as usize] += &delta.text,
            Some(Event::Finished(_)) => finished += 1,
            _ => {}
        }
    }
    assert_eq!((texts, finished), (["ab".into(), "cd".into()], 2));
    w.ends().await;
}

pub async fn prompt_logprobs_are_sent_once() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut asked = request("hi", 1);
    asked.sampling.as_mut().unwrap().prompt_logprobs = Some(0);
    let mut answer = w.generate(asked).await;
    let job = w.job().await;
    let PrefillEvent::FirstToken { token, logprobs, finish, compute, .. } = first_token('a', Some(FinishReason::Stop))
    else {
        unreachable!()
    };
    let prompt_logprobs = vec![TokenLogprobs { logprob: Some(-1.0), top: Vec::new() }, TokenLogprobs::default()];
    w.node("p0").started(job.key);
    w.node("p0").prefill(job.key, &PrefillEvent::FirstToken { token, logprobs, prompt_logprobs, finish, compute });
    let mut positions = Vec::new();
    while let Some(event) = answer.event().await.unwrap() {
        if let Event::PromptLogprobs(logprobs) = event {
            positions.extend(logprobs.positions);
        }
    }
    assert_eq!((positions.len(), positions[0].text.as_str()), (2, "h"), "of the token after the first");
    w.ends().await;
}

pub async fn request_without_handoff_report_ends_after_two_seconds() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    w.node("p0").started(job.key);
    w.node("p0").first_token(job.key, 'a', None);
    w.node("d0").last_token(job.key, 1, 'b');
    answer.reads("ab").await;
    w.pass_ms(1950).await;
    assert_eq!(w.frontend.live.len(), 1, "the report may still come");
    w.pass_ms(50).await;
    assert_eq!(answer.end().await.unwrap().finish_reason, "length");
    w.ends().await;
}

pub async fn prompt_without_prefill_node_is_computed_at_decode_node() {
    let fallback = Settings { prompts_at_decode: "fallback".into(), ..settings() };
    let mut w = World::with_settings(fallback, &["d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    assert!(job.node == "d0" && job.wire.decode.is_none());
    w.node("d0").started(job.key);
    w.node("d0").first_token(job.key, 'a', None);
    w.node("d0").handed_off(job.key);
    w.node("d0").last_token(job.key, 1, 'b');
    assert_eq!(answer.end().await.unwrap().prefill_node, "d0");
    w.ends().await;
}

pub async fn step_and_transfer_reports_are_kept_for_operators() {
    let mut w = World::with(&["p0", "d0"]).await;
    let slice = v1::SliceReport { rows: 8, attended_tokens: 64, seconds: 0.01 };
    let step = v1::StepReport { rows: 2, attended_tokens: 100, seconds: 0.02, prompt_rows: 0, slice: Some(slice) };
    let report = v1::TransferReport {
        addresses: vec![v1::TransferAddress { transport: "tcp".into(), address: "127.0.0.1:1".into() }],
        paths: Vec::new(),
    };
    w.node("d0").say(Said::Step(step));
    w.node("d0").say(Said::Transfer(report));
    let node = w.node("d0").info.node.clone();
    let kept = until("the report", || w.frontend.transfers.of(&node)).await;
    assert_eq!(kept.addresses[0].transport, "tcp");
    w.pass(Duration::from_secs(6)).await;
    let load = soon(w.operator().cluster_load(v1::ClusterLoadRequest {})).await.unwrap().into_inner();
    assert_eq!(load.decode[0].step_s, Some(0.02), "the last step");
    w.ends().await;
}
