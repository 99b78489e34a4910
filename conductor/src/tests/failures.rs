//! Requests that nodes fail, and nodes that say what they should not.

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event as Said;
use baton_types::{ErrorKind, FinishReason, KvDtype, NodeId, NodeInfo, PrefillEvent, Refused, RequestId, RequestKey};
use futures::FutureExt;
use tonic::Code;

use super::client::request;
use super::node::decoded;
use super::world::{World, settings, soon, until};
use crate::config::Settings;

pub async fn job_that_a_node_refuses_is_placed_again() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let first = w.job().await;
    w.node(&first.node).failed(first.key, ErrorKind::Overloaded);
    let second = w.job().await;
    assert_ne!(first.node, second.node);
    w.node(&first.node).hears_abort(first.key).await;
    w.node(&second.node).computes(second.key, 'a');
    w.node("d0").last_token(second.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn job_for_full_session_goes_to_another_node() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    let id = w.node("p0").info.node.clone();
    while w.frontend.nodes.send(&id, Command::ClearCache(v1::ClearCacheCommand {})) {}
    // Nothing waits here, so that the session is as full, and its end as unknown, for all of them.
    let mut answers = Vec::new();
    for n in 0..6 {
        let request = w.frontend.generate(RequestId(n), request("hi", 2), None).now_or_never();
        answers.push(request.expect("it waits for nothing").unwrap_or_else(|error| panic!("{error}")));
    }
    for _ in 0..6 {
        assert_eq!(w.job().await.node, "p1");
    }
    w.until_state("p0", "lost").await;
    drop(answers);
    w.ends().await;
}

pub async fn failure_in_mid_stream_is_reported_over_http() {
    let mut w = World::with(&["p0", "d0"]).await;
    for (stream, status) in [("true", 200), ("false", 500)] {
        let body = format!(r#"{{"prompt":"hi","max_tokens":9,"stream":{stream}}}"#);
        let answer = w.http("/v1/completions", &body);
        let job = w.job().await;
        w.node("p0").computes(job.key, 'a');
        w.node("d0").token(job.key, 1, 'b');
        w.node("d0").token(job.key, 1, 'x');
        let (code, told) = soon(answer).await.unwrap();
        assert!(code == status && told.contains("could not be continued as it was begun"), "{told}");
        assert!(!told.contains("[DONE]"), "what ends so is not whole: {told}");
        w.ends().await;
    }
}

pub async fn internal_failure_of_a_node_ends_the_request() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    w.node(&job.node).failed(job.key, ErrorKind::Internal);
    let status = answer.end().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Internal, "a node could not serve the request: internal"));
    w.node("d0").hears_abort(job.key).await;
    w.ends().await;
}

pub async fn prefix_that_spoils_a_request_is_forgotten_at_every_node() {
    let mut w = World::with(&["p0", "p1", "d0"]).await;
    let mut answer = w.generate(request("a prompt of more than one block of tokens", 2)).await;
    let first = w.job().await;
    w.node(&first.node).failed(first.key, ErrorKind::DataLoss);
    let forgets = |command: &Command| match command {
        Command::ForgetPrefix(forget) => Some(forget.block_hashes.len()),
        _ => None,
    };
    let second = w.job().await;
    for node in ["p0", "p1", "d0"] {
        assert_eq!(w.node(node).hears("to forget it", forgets).await, 2 * 16, "two blocks: {node}");
    }
    w.node(&second.node).computes(second.key, 'a');
    w.node("d0").last_token(second.key, 1, 'b');
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn decode_node_that_fails_is_replaced() {
    let mut w = World::with(&["p0", "d0", "d1"]).await;
    let mut answer = w.generate(request("hi", 2)).await;
    let first = w.job().await;
    let refused = Refused { kind: ErrorKind::Unavailable, message: "no answer".into() };
    w.node("p0").prefill(first.key, &PrefillEvent::DecodeFailed(refused.clone()));
    let second = w.job().await;
    assert_ne!(first.decode(), second.decode());
    w.node("p0").computes(second.key, 'a');
    answer.reads("a").await;
    w.node(&second.decode()).decode(second.key, &[baton_types::DecodeEvent::Failed(refused)]);
    // Both have failed it: they are asked again.
    let third = w.job().await;
    w.node("p0").started(third.key);
    w.node("p0").first_token(third.key, 'b', Some(FinishReason::Length));
    answer.end().await.unwrap();
    w.ends().await;
}

pub async fn contradicted_token_ends_the_request() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 9)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    w.node("d0").token(job.key, 1, 'b');
    answer.reads("ab").await;
    w.node("d0").token(job.key, 1, 'x');
    assert_eq!(answer.end().await.unwrap_err().code(), Code::DataLoss);
    w.node("d0").hears_abort(job.key).await;
    w.ends().await;
}

pub async fn request_without_progress_is_ended() {
    let mut w = World::with_settings(Settings { stall_timeout_s: 20.0, ..settings() }, &["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 9)).await;
    let job = w.job().await;
    w.pass_ms(15_000).await;
    w.node("p0").prefill(job.key, &PrefillEvent::Progress { tokens: 1 });
    w.pass_ms(19_900).await;
    assert_eq!(w.frontend.live.len(), 1, "its node said that it goes on");
    w.pass_ms(100).await;
    let status = answer.end().await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::DeadlineExceeded, "no progress for 20s: the request was ended")
    );
    w.node("p0").hears_abort(job.key).await;
    w.ends().await;
}

pub async fn request_past_its_timeout_is_ended() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(v1::GenerateRequest { timeout_ms: Some(2000.0), ..request("hi", 9) }).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    answer.reads("a").await;
    w.pass_ms(1950).await;
    assert_eq!(w.frontend.live.len(), 1);
    w.pass_ms(50).await;
    let status = answer.end().await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::DeadlineExceeded, "not over within 2s: the request was ended")
    );
    w.node("d0").hears_abort(job.key).await;
    w.ends().await;
}

pub async fn unreadable_node_message_is_skipped_or_fails_its_request() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut answer = w.generate(request("hi", 3)).await;
    let job = w.job().await;
    w.node("p0").say(Said::Prefill(v1::PrefillEvent::default()));
    w.node("p0").say(Said::Step(v1::StepReport { seconds: f64::NAN, rows: 1, ..v1::StepReport::default() }));
    w.node("p0").say(Said::Kv(v1::KvEvents { events: vec![v1::KvEvent::default()], ..v1::KvEvents::default() }));
    w.node("p0").say(Said::Welcome(v1::Welcome::default()));
    w.node("p0").computes(job.key, 'a');
    // What one of them says keeps none of the others from being heard.
    let whose = v1::RequestKey { request_id: "unknown".into(), attempt: 0 };
    let unreadable = v1::DecodeEvent { key: Some(whose), event: None };
    let token = |index, token| v1::DecodeEvent::from_domain(job.key, &decoded(index, token, None));
    let events = vec![token(1, 'b'), unreadable, token(2, 'c')];
    w.node("d0").say(Said::Decode(v1::DecodeEvents { events }));
    answer.reads("abc").await;
    // What is said of a request and cannot be read fails it: it cannot go on as if nothing had been
    // said.
    let unreadable = v1::DecodeEvent { key: Some(job.key.into()), event: None };
    w.node("d0").say(Said::Decode(v1::DecodeEvents { events: vec![unreadable] }));
    assert_eq!(answer.end().await.unwrap_err().code(), Code::Internal);
    assert_eq!(w.state("p0"), "ready");
    w.ends().await;
}

/// What a node may say with a number in it, of a request and of itself.
fn numbers(key: RequestKey, n: u64) -> Vec<Said> {
    use v1::{decode_event, kv_event, prefill_event};
    let small = n as u32;
    let times = n as f64;
    let of = Some(v1::RequestKey::from(key));
    let prefill = |event| Said::Prefill(v1::PrefillEvent { key: of.clone(), event: Some(event) });
    let kv = |snapshot, goes_on| {
        let events = vec![v1::KvEvent { event: Some(kv_event::Event::Cleared(true)) }];
        Said::Kv(v1::KvEvents { sequence: n, snapshot, events, goes_on })
    };
    let path = v1::TransferPath { node: "d0".into(), lanes: small, bytes: n, batches: n, ..Default::default() };
    let slice = Some(v1::SliceReport { rows: small, attended_tokens: n, seconds: times });
    let token = v1::DecodedToken { index: small, token: small, queue_s: Some(times), ..Default::default() };
    let token = v1::DecodeEvent { key: of.clone(), event: Some(decode_event::Event::Token(token)) };
    let load = v1::Load {
        running: small,
        waiting: small,
        queued_tokens: n,
        kv_tokens: n,
        blocks_used: small,
        prefix_queries: n,
        preemptions: n,
        step: Some(v1::StepProgress { elapsed_s: times, left_s: times }),
        ..Default::default()
    };
    vec![
        Said::Load(load),
        Said::LeaderTerm(n),
        kv(true, false),
        kv(false, true),
        kv(false, false),
        Said::Step(v1::StepReport { rows: small, attended_tokens: n, seconds: times, prompt_rows: small, slice }),
        Said::Transfer(v1::TransferReport { addresses: Vec::new(), paths: vec![path] }),
        Said::MigrationRequest(v1::MigrationRequest { key: of.clone(), output_tokens: small }),
        prefill(prefill_event::Event::Started(v1::PrefillStarted { queue_s: times, cached_tokens: small })),
        prefill(prefill_event::Event::Progress(v1::PrefillProgress { tokens: small })),
        Said::Decode(v1::DecodeEvents { events: vec![token] }),
    ]
}

pub async fn node_that_says_extreme_numbers_disturbs_no_other() {
    for n in [0, 1, u64::MAX - 1, u64::MAX] {
        let mut w = World::with(&["p0", "d0"]).await;
        let asked = w.ask(request("hi", 3));
        let job = w.job().await;
        for node in ["p0", "d0"] {
            for said in numbers(job.key, n) {
                w.node(node).say(said);
            }
            w.report().await;
            assert_eq!(w.state(node), "ready", "its session stands: {n}");
        }
        // Its own request may fail of it.
        drop(asked);
        w.ends().await;
        w.report().await;
        let mut answer = w.generate(request("ho", 1)).await;
        let job = w.job().await;
        w.node("p0").first_token(job.key, 'a', Some(FinishReason::Length));
        answer.end().await.unwrap();
        w.ends().await;
    }
}

pub async fn events_of_other_nodes_and_requests_are_ignored() {
    let mut w = World::with(&["p0", "p1", "d0", "d1"]).await;
    let mut answer = w.generate(request("hi", 3)).await;
    let job = w.job().await;
    let other = |node: &str| if node.ends_with('0') { node.replace('0', "1") } else { node.replace('1', "0") };
    let other_prefill = other(&job.node);
    let other_decode = other(&job.decode());
    w.node(&other_prefill).failed(job.key, ErrorKind::Internal);
    w.node(&other_decode).token(job.key, 0, 'x');
    let nobodys = RequestKey { request: RequestId(1), ..job.key };
    w.node(&job.node).failed(nobodys, ErrorKind::Internal);
    let later = RequestKey { attempt: baton_types::Attempt(1), ..job.key };
    w.node(&job.node).failed(later, ErrorKind::Internal);
    w.report().await;
    w.node(&job.node).computes(job.key, 'a');
    w.node(&job.decode()).token(job.key, 1, 'b');
    w.node(&job.decode()).last_token(job.key, 2, 'c');
    answer.end().await.unwrap();
    assert_eq!(answer.tokens, "abc");
    // Nor is anything said of a request that is over.
    w.node(&job.decode()).token(job.key, 3, 'x');
    w.report().await;
    w.ends().await;
}

pub async fn node_that_answers_by_another_name_gets_no_session() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut info = w.node("p0").info.clone();
    info.node = NodeId::new("p1").unwrap();
    // Who registers is dialled, and p0 answers there.
    w.register(&info).await.unwrap();
    until("the dial is over", || w.frontend.nodes.register(info.clone()).unwrap()).await;
    assert!(w.frontend.cluster().node(&info.node).is_none());
    type Change = fn(&mut NodeInfo);
    let wrong: [(Change, Code); 5] = [
        (|info| info.model = "other".into(), Code::InvalidArgument),
        (|info| info.vocabulary = "other".into(), Code::InvalidArgument),
        (|info| info.layout.block_tokens = 32, Code::Unavailable),
        (|info| info.layout.dtype = KvDtype::F32, Code::Unavailable),
        (|info| info.layout.num_layers = 5, Code::Unavailable),
    ];
    for (change, code) in wrong {
        let mut wrong = info.clone();
        change(&mut wrong);
        assert_eq!(w.register(&wrong).await, Err(code), "{wrong:?}");
    }
    w.ends().await;
}
