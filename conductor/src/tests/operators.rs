//! What operators ask.

use std::sync::atomic::Ordering::Relaxed;

use baton_proto::v1;
use baton_proto::v1::explain_response::Decision;
use baton_proto::v1::node_command::Command;
use baton_runtime::Clock;
use baton_types::KvDtype;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::client::request;
use super::world::{World, soon, until};

fn drain(command: &Command) -> Option<bool> {
    match command {
        Command::Drain(drain) => Some(drain.draining),
        _ => None,
    }
}

pub async fn operators_drain_and_undrain_a_node() {
    let mut w = World::with(&["p0", "d0", "d1"]).await;
    let mut operator = w.operator();
    let node = "d0".to_owned();
    soon(operator.drain(v1::DrainRequest { node: node.clone() })).await.unwrap();
    assert!(w.node("d0").hears("a drain", drain).await);
    assert_eq!(w.state("d0"), "draining", "before it says so itself");
    w.report().await;
    for _ in 0..4 {
        let mut answer = w.generate(request("hi", 2)).await;
        let job = w.job().await;
        assert_eq!(job.decode(), "d1");
        w.node("p0").computes(job.key, 'a');
        w.node("d1").last_token(job.key, 1, 'b');
        answer.end().await.unwrap();
    }
    soon(operator.undrain(v1::UndrainRequest { node: node.clone() })).await.unwrap();
    assert!(!w.node("d0").hears("an undrain", drain).await);
    w.report().await;
    assert_eq!(w.state("d0"), "ready");

    let status = soon(operator.drain(v1::DrainRequest { node: "d7".into() })).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "node: this conductor knows no node 'd7'"));
    w.node("d0").die();
    w.until_state("d0", "lost").await;
    let status = soon(operator.drain(v1::DrainRequest { node })).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    w.ends().await;
}

pub async fn operators_see_nodes_loads_and_caches() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut operator = w.operator();
    w.pass_ms(1000).await;
    w.node("d0").load.blocks_used = 7;
    w.report().await;
    w.node("d0").is_silent = true;
    w.pass_ms(500).await;
    let nodes = soon(operator.list_nodes(v1::ListNodesRequest {})).await.unwrap().into_inner().nodes;
    let seen: Vec<_> =
        nodes.iter().map(|node| (node.info.as_ref().unwrap().name.as_str(), &*node.state, node.report_age_s)).collect();
    assert_eq!(seen, [("p0", "ready", 0.0), ("d0", "ready", 0.5)]);
    assert_eq!(nodes[1].load.unwrap().blocks_used, 7);
    w.node("d0").is_silent = false;

    *w.node("d0").problem.lock().unwrap() = "block 7 is free and in use".into();
    let checked = soon(operator.check_integrity(v1::CheckClusterIntegrityRequest {})).await.unwrap().into_inner();
    let problems: Vec<_> = checked.nodes.iter().map(|node| (node.node.as_str(), node.problem.as_str())).collect();
    assert_eq!(problems, [("p0", ""), ("d0", "block 7 is free and in use")]);

    w.node("d0").is_mute.store(true, Relaxed);
    let mut other = w.operator();
    let checking = tokio::spawn(async move { other.check_integrity(v1::CheckClusterIntegrityRequest {}).await });
    while !checking.is_finished() {
        w.pass_ms(1000).await;
    }
    let checked = checking.await.unwrap().unwrap().into_inner();
    assert_eq!(checked.nodes[1].problem, "no answer within 5s");

    let load = soon(operator.cluster_load(v1::ClusterLoadRequest {})).await.unwrap().into_inner();
    assert_eq!((load.prefill.len(), load.decode[0].blocks_used, load.prediction_errors.len()), (1, 7, 4));

    let is_clear = |command: &Command| matches!(command, Command::ClearCache(_)).then_some(());
    for (name, told) in [("", vec!["p0", "d0"]), ("d0", vec!["d0"])] {
        let cleared = soon(operator.clear_cache(v1::ClearCacheRequest { node: name.into() })).await.unwrap();
        let cleared = cleared.into_inner();
        assert_eq!(
            (cleared.nodes, cleared.held_blocks.last()),
            (told.iter().map(ToString::to_string).collect(), Some(&7))
        );
        w.node("d0").hears("a clear", is_clear).await;
    }
    let lookup = v1::CacheLookupRequest { request: Some(request("hi", 1)) };
    let found = soon(operator.cache_lookup(lookup)).await.unwrap().into_inner();
    assert_eq!((found.prompt_tokens, found.matches.len()), (3, 0));
    let version = soon(operator.version(v1::VersionRequest {})).await.unwrap().into_inner();
    assert_eq!(version.conductor_id, w.frontend.id.to_string());
    w.ends().await;
}

pub async fn operators_see_nodes_that_cannot_join() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut operator = w.operator();
    let mut other = w.info("p1");
    other.layout.dtype = KvDtype::F32;
    assert_eq!(w.register(&other).await, Err(Code::Unavailable));
    let mut far = w.info("d1");
    far.address = "http://127.0.0.1:1".into();
    assert_eq!(w.register(&far).await.unwrap().no_session, "");
    until("the dial failed", || w.frontend.unjoined.reason(&far)).await;
    assert!(w.register(&far).await.unwrap().no_session.contains("Connection refused"), "the node is told");

    let listed = soon(operator.list_nodes(v1::ListNodesRequest {})).await.unwrap().into_inner();
    let seen: Vec<_> = listed.unjoined.iter().map(|node| (&*node.name, &*node.role, &*node.state)).collect();
    assert_eq!(seen, [("d1", "decode", "unreachable"), ("p1", "prefill", "refused")]);
    assert_eq!(listed.unjoined[1].reason, "kv_dtype: node p1 has f32, this conductor's setting is f16");
    let checked = soon(operator.check_integrity(v1::CheckClusterIntegrityRequest {})).await.unwrap().into_inner();
    let problems: Vec<_> = checked.nodes.iter().map(|node| (&*node.node, node.problem.is_empty())).collect();
    assert_eq!(problems, [("d1", false), ("p1", false), ("p0", true), ("d0", true)]);
    let (_, metrics) = w.get("/metrics").await;
    assert!(metrics.contains(r#"baton_conductor_nodes_unjoined{state="refused"} 1"#), "{metrics}");

    w.join("p1", |_| {}).await;
    let unjoined = |w: &World| w.frontend.unjoined.lately(w.clock.now()).len();
    assert_eq!(unjoined(&w), 1, "it has a session");
    w.pass_ms(31_000).await;
    assert_eq!(unjoined(&w), 0, "it asks no more");
    w.ends().await;
}

pub async fn explain_and_recall_report_placement_and_end_of_request() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut operator = w.operator();
    let explain = v1::ExplainRequest { request: Some(request("hi", 2)) };
    let explained = soon(operator.explain(explain)).await.unwrap().into_inner();
    let Some(Decision::Placed(placed)) = explained.decision else { panic!("{explained:?}") };
    assert_eq!((placed.prefill.as_str(), placed.decode.as_str(), explained.prompt_tokens), ("p0", "d0", 3));
    assert!(!w.has_job().await && w.frontend.cluster().placed() == 0, "nothing is generated, and nothing charged");

    let named = v1::GenerateRequest { client_request_id: "mine".into(), ..request("hi", 2) };
    let mut answer = w.generate(named).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    let recalled =
        soon(operator.explain_by_id(v1::ExplainByIdRequest { request_id: "mine".into() })).await.unwrap().into_inner();
    assert_eq!((recalled.request_id, recalled.decisions.len()), (answer.id, 1));
    assert_eq!(recalled.end.unwrap().finish_reason, "length");
    let unknown = v1::ExplainByIdRequest { request_id: "another's".into() };
    assert_eq!(soon(operator.explain_by_id(unknown)).await.unwrap_err().code(), Code::NotFound);
    w.ends().await;
}

pub async fn run_time_settings_change_while_conductor_serves() {
    let mut w = World::with(&["p0", "d0"]).await;
    let mut operator = w.operator();
    let watched = soon(operator.watch_settings(v1::WatchSettingsRequest {})).await.unwrap();
    let mut watched = watched.into_inner();
    let of = |settings: &v1::RunTimeSettings, key: &str| {
        let setting = settings.settings.iter().find(|setting| setting.key == key).unwrap();
        (setting.value.clone().unwrap(), setting.origin.clone())
    };
    let first = soon(watched.message()).await.unwrap().unwrap();
    assert_eq!((first.version, of(&first, "max_requests")), (0, ("16384".into(), "default".into())));

    let set = |key: &str, value: &str| {
        let values = [(key.to_owned(), value.to_owned())].into();
        v1::SetSettingsRequest { values, by: "me".into() }
    };
    soon(operator.set_settings(set("max_requests", "1"))).await.unwrap();
    let told = soon(watched.message()).await.unwrap().unwrap();
    assert_eq!((told.version, &*told.by, of(&told, "max_requests").1), (1, "me", "set at run time".into()));
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    assert_eq!(w.refusal(request("hi", 2)).await.code(), Code::ResourceExhausted);
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();

    soon(operator.set_settings(set("log", "debug"))).await.unwrap();
    let is_told = |command: &Command| match command {
        Command::Settings(settings) => (settings.version == 2).then(|| settings.log.clone()),
        _ => None,
    };
    assert_eq!(w.node("d0").hears("settings", is_told).await, "debug");
    assert_eq!(soon(watched.message()).await.unwrap().unwrap().version, 2);
    w.join("d1", |_| {}).await;
    assert_eq!(w.node("d1").hears("settings", is_told).await, "debug", "one that joins is told, too");
    let wrong = soon(operator.set_settings(set("max_requests", "none"))).await.unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidArgument);
    assert_eq!(wrong.message(), "max_requests: 'none': expected a whole number, 0 or more");
    let (_, metrics) = w.get("/metrics").await;
    assert!(metrics.contains("baton_conductor_settings_version 2"), "the wrong one made none");
    // A drain does not wait for those who watch.
    w.ends().await;
    w.signal();
    assert!(soon(watched.message()).await.unwrap().is_none());
    w.pass_ms(50).await;
    w.down().await.unwrap();
}

pub async fn health_readiness_and_metrics_follow_the_nodes() {
    let mut w = World::with(&[]).await;
    let mut health = HealthClient::new(w.channel());
    let whole = HealthCheckRequest { service: String::new() };
    let mut watched = soon(health.watch(whole.clone())).await.unwrap().into_inner();
    let status = |response: tonic_health::pb::HealthCheckResponse| response.status();
    assert_eq!(soon(watched.message()).await.unwrap().map(status), Some(ServingStatus::NotServing));
    assert_eq!((w.get("/health").await.0, w.get("/ready").await.0), (200, 503));
    w.join("p0", |_| {}).await;
    w.join("d0", |_| {}).await;
    w.pass_ms(100).await;
    assert_eq!(soon(watched.message()).await.unwrap().map(status), Some(ServingStatus::Serving));
    assert_eq!(status(soon(health.check(whole)).await.unwrap().into_inner()), ServingStatus::Serving);
    let other = HealthCheckRequest { service: "other".into() };
    assert_eq!(soon(health.check(other)).await.unwrap_err().code(), Code::NotFound);
    let (code, ready) = w.get("/ready").await;
    assert!(code == 200 && ready.contains(r#""decode_nodes":1"#), "{ready}");

    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    w.node("d0").last_token(job.key, 1, 'b');
    answer.end().await.unwrap();
    let (_, metrics) = w.get("/metrics").await;
    for line in [r#"baton_conductor_nodes_ready{role="decode"} 1"#, "baton_conductor_generation_tokens_total 2"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let models = soon(w.inference().list_models(v1::ListModelsRequest {})).await.unwrap().into_inner().models;
    assert_eq!((models[0].name.as_str(), models[0].context_length), ("mock", 8192));
    w.ends().await;
}
