//! The real binaries with the mock engine: the control plane and the transfers are real, and the
//! tokens depend on every byte that was transferred.

use std::time::Duration;

use baton_cluster_tests::{Ask, Cluster, signal};
use futures::future::join_all;
use tonic::Code;

const SECOND: Duration = Duration::from_secs(1);

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|i| 32 + (i * 7 + salt * 13) % 90).collect()
}

#[tokio::test]
async fn request_crosses_the_cluster_and_releases_its_blocks() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let answer = cluster.ask(Ask::tokens(prompt(100, 0)).max_tokens(20)).await?;
    assert_eq!(answer.token_ids.len(), 20);
    assert_eq!(answer.finished.finish_reason, "length");
    assert_eq!(
        (answer.finished.prefill_node.as_str(), answer.finished.decode_node.as_str()),
        ("prefill-0", "decode-0")
    );
    // 7 blocks of 16 tokens x 16 bytes in 4 layers.
    assert_eq!(answer.kv_transfer().bytes, 4 * 7 * 16 * 16);
    assert_eq!(answer.kv_transfer().transport, "shm");
    let usage = answer.finished.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (100, 20, 0));
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn tokens_do_not_depend_on_nodes_batches_chunks_or_caches() -> anyhow::Result<()> {
    let asks: Vec<_> =
        (0..16).map(|i| Ask::tokens(prompt(30 + 37 * i, i)).max_tokens(12).seeded(u64::from(i), 0.8)).collect();
    let small = Cluster::mock().node_flags(&["--block-tokens", "16"]).start().await?;
    let mut alone = Vec::new();
    for ask in &asks {
        alone.push(small.ask(ask.clone()).await?.token_ids);
    }
    small.wait_idle(SECOND).await?;
    small.stop().await?;

    let large = Cluster::mock().prefill(2).decode(2).prefill_flags(&["--chunk-tokens", "64"]).start().await?;
    for round in 0..2 {
        let together = join_all(asks.iter().map(|ask| large.ask(ask.clone()))).await;
        for (i, (answer, expected)) in together.into_iter().zip(&alone).enumerate() {
            assert_eq!(&answer?.token_ids, expected, "request {i}, round {round}");
        }
    }
    large.wait_idle(SECOND).await?;
    large.stop().await
}

#[tokio::test]
async fn repeated_prompt_is_neither_computed_nor_pushed_again() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--partial-prefill", "false"]).start().await?;
    let ask = Ask::tokens(prompt(1500, 3)).max_tokens(8);
    let first = cluster.ask(ask.clone()).await?;
    let second = cluster.ask(ask).await?;
    assert_eq!(second.token_ids, first.token_ids);
    assert_eq!((first.cached_tokens(), second.cached_tokens()), (0, 1488));
    // Of 94 blocks only the last, partial one is pushed again.
    assert_eq!(first.kv_transfer().bytes, 4 * 94 * 256);
    assert_eq!(second.kv_transfer().bytes, 4 * 256);

    // The next turn begins with the prompt and the answer of this one. The decode node holds those
    // blocks, and the prefill node fetches the one that it lacks.
    let mut turn = prompt(1500, 3);
    turn.extend(&first.token_ids);
    turn.extend(prompt(40, 9));
    let next = cluster.ask(Ask::tokens(turn).max_tokens(4)).await?;
    assert_eq!(next.cached_tokens(), 1504);
    let timeline = next.finished.timeline.as_ref().unwrap();
    assert_eq!(timeline.prefix_fetch.as_ref().unwrap().bytes, 4 * 256);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn mock_profile_sets_step_times_cache_size_and_network() -> anyhow::Result<()> {
    let profile = tempfile::NamedTempFile::new()?;
    // A network that carries 1000 tokens' KV per second.
    let numbers = r#"{"name": "slow", "prefill_base": 0.001, "prefill_per_token": 1e-6, "prefill_per_token_pair": 0.0, "decode_base": 0.002,
        "decode_per_sequence": 0.0, "decode_per_kv_token": 0.0, "chunk_tokens": 64, "layers": 80, "kv_bytes_per_token": 327680, "decode_kv_tokens": 4096,
        "cache_tokens": 8192, "max_running": 8, "network_bytes_per_s": 327680000, "network_latency_s": 0.001, "ssd_bytes_per_s": 1.0, "step_noise": 0.05}"#;
    std::fs::write(profile.path(), numbers)?;
    let fitted = format!("fitted:{}", profile.path().display());
    let ask = Ask::tokens(prompt(100, 0)).max_tokens(20);
    let plain = Cluster::mock().start().await?;
    let expected = plain.ask(ask.clone()).await?.token_ids;
    plain.stop().await?;

    let cluster = Cluster::mock().node_flags(&["--mock-profile", &fitted, "--mock-kv-bytes", "128"]).start().await?;
    let answer = cluster.ask(ask).await?;
    assert_eq!(answer.token_ids, expected);
    // 7 blocks of 16 tokens of 128 bytes, which take as long as 112 tokens of the model.
    assert_eq!(answer.kv_transfer().bytes, 7 * 16 * 128);
    assert!(answer.kv_transfer().seconds >= 0.112, "{:?}", answer.kv_transfer());
    let nodes = cluster.nodes().await?;
    let blocks: Vec<_> = nodes.iter().filter_map(|node| node.load.as_ref().map(|load| load.blocks_total)).collect();
    assert_eq!(blocks.iter().sum::<u32>(), (8192 + 4096) / 16, "{nodes:#?}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn single_token_or_scoring_request_needs_no_decode_node() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let ask = Ask::tokens(prompt(50, 1)).max_tokens(1).sampling(|s| s.prompt_logprobs = Some(3));
    let answer = cluster.ask(ask).await?;
    assert_eq!((answer.token_ids.len(), answer.prompt_logprobs.len()), (1, 50));
    assert!(answer.prompt_logprobs[..49].iter().all(|p| p.logprob.is_some() && p.top.len() == 3));
    assert_eq!(answer.prompt_logprobs[49].top[0].token_id, answer.token_ids[0]);
    assert_eq!((answer.finished.decode_node.as_str(), answer.kv_transfer().bytes), ("", 0));
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn aborted_request_frees_both_nodes_within_a_second() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "20000"]).start().await?;
    for tokens_seen in [0, 1, 5] {
        let ask = Ask::tokens(prompt(700, tokens_seen)).max_tokens(500).ignore_eos();
        let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
        for _ in 0..=tokens_seen {
            stream.message().await?;
        }
        drop(stream);
        cluster.wait_idle(SECOND).await?;
    }
    // By name, from another connection.
    let ask = Ask::tokens(prompt(100, 8)).max_tokens(500).ignore_eos();
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    let Some(baton_proto::v1::generate_response::Event::Accepted(accepted)) =
        stream.message().await?.and_then(|r| r.event)
    else {
        panic!("no Accepted");
    };
    let abort = baton_proto::v1::AbortRequest { request_id: accepted.request_id };
    cluster.inference().abort(abort.clone()).await?;
    let ended = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("no status"),
            Err(status) => break status,
        }
    };
    assert_eq!(ended.code(), Code::Cancelled);
    cluster.wait_idle(SECOND).await?;
    assert_eq!(cluster.inference().abort(abort).await.unwrap_err().code(), Code::NotFound);
    cluster.stop().await
}

#[tokio::test]
async fn request_without_room_waits_or_is_refused_before_prefill() -> anyhow::Result<()> {
    let cluster = Cluster::mock()
        .decode_flags(&["--cache-blocks", "16", "--max-running", "1", "--max-waiting", "1"])
        .node_flags(&["--mock-base-us", "20000"])
        .start()
        .await?;
    // 256 tokens of room: one request of 200 + 50 takes nearly all of it.
    let ask = |first| Ask::tokens(prompt(200, first)).max_tokens(50).ignore_eos();
    let mut holder = cluster.inference().generate(ask(0).0).await?.into_inner();
    holder.message().await?;
    // The next one waits for room, and for that one slot is left; after it there is none.
    let (waits, refused) = tokio::join!(cluster.ask(ask(1)), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        cluster.inference().generate(ask(2).0).await.expect_err("there is no slot")
    });
    assert_eq!(waits?.token_ids.len(), 50);
    assert_eq!(refused.code(), Code::ResourceExhausted, "{}", refused.message());
    assert!(refused.metadata().get("retry-after").is_some());
    // No retry helps what no node holds.
    let (code, message) = cluster.refused(Ask::tokens(prompt(300, 0)).max_tokens(5)).await;
    assert_eq!(code, Code::InvalidArgument, "{message}");
    assert!(message.contains("the nodes hold 257 of the context's 32768"), "{message}");
    drop(holder);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn dead_decode_node_is_replaced_with_same_tokens() -> anyhow::Result<()> {
    let mut cluster = Cluster::mock().prefill(2).decode(2).node_flags(&["--mock-base-us", "10000"]).start().await?;
    let ask = Ask::tokens(prompt(200, 4)).max_tokens(60).ignore_eos();
    let expected = cluster.ask(ask.clone()).await?;
    let mut name = String::new();

    let mut stream = cluster.inference().generate(ask.0.clone()).await?.into_inner();
    let mut tokens = Vec::new();
    let mut killed = false;
    let mut finished = None;
    while let Some(response) = stream.message().await? {
        match response.event {
            Some(baton_proto::v1::generate_response::Event::Delta(delta)) => tokens.extend(delta.token_ids),
            Some(baton_proto::v1::generate_response::Event::Finished(last)) => finished = Some(*last),
            _ => {}
        }
        if tokens.len() >= 10 && !killed {
            // The one that has it now, wherever the first request was.
            let nodes = cluster.nodes().await?;
            let mut names =
                nodes.iter().filter(|node| node.placed == 1).filter_map(|node| Some(node.info.as_ref()?.name.clone()));
            name = names.find(|name| name.starts_with("decode")).expect("a decode node has the request");
            cluster.decode.remove(usize::from(name == "decode-1")).kill().await?;
            killed = true;
        }
    }
    assert_eq!(tokens, expected.token_ids, "nothing lost, repeated or changed");
    assert!(killed);
    assert_ne!(finished.map(|last| last.decode_node), Some(name), "another node took it over");
    cluster.wait_ready(3).await?;
    cluster
        .wait_for("idle nodes", SECOND, || async {
            let loads = cluster.nodes().await?;
            Ok(loads.iter().filter(|n| n.state == "ready").all(|n| n.load.as_ref().is_some_and(|l| l.blocks_used == 0)))
        })
        .await?;
    cluster.stop().await
}

#[tokio::test]
async fn unread_request_can_be_aborted() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let ask = Ask::tokens(prompt(60, 5)).max_tokens(20_000).ignore_eos().sampling(|s| s.logprobs = Some(20));
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    let Some(baton_proto::v1::generate_response::Event::Accepted(accepted)) =
        stream.message().await?.and_then(|r| r.event)
    else {
        panic!("no Accepted");
    };
    // Enough for the connection's window and the queue behind it to be full.
    tokio::time::sleep(2 * SECOND).await;
    cluster.inference().abort(baton_proto::v1::AbortRequest { request_id: accepted.request_id }).await?;
    cluster.wait_idle(SECOND).await?;
    let placed: u32 = cluster.nodes().await?.iter().map(|node| node.placed).sum();
    assert_eq!(placed, 0, "its charges are given back");
    cluster.stop().await
}

#[tokio::test]
async fn request_survives_restart_of_the_only_decode_node() -> anyhow::Result<()> {
    let builder = Cluster::mock().node_flags(&["--mock-base-us", "10000"]);
    let mut cluster = builder.clone().start().await?;
    let ask = Ask::tokens(prompt(90, 6)).max_tokens(40).ignore_eos();
    let expected = cluster.ask(ask.clone()).await?.token_ids;
    let dying = cluster.decode.remove(0);
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let (answer, again) = tokio::join!(cluster.ask(ask), async {
        tokio::time::sleep(SECOND / 5).await;
        dying.kill().await?;
        tokio::time::sleep(SECOND).await;
        builder.start_node("decode", 0, &conductor, cluster.folder()).await
    });
    assert_eq!(answer?.token_ids, expected);
    cluster.decode.push(again?);
    cluster.wait_ready(2).await?;
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn drain_lets_running_requests_finish() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "10000"]).start().await?;
    let ask = Ask::tokens(prompt(64, 2)).max_tokens(80).ignore_eos();
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    stream.message().await?;
    let rest = async {
        let mut tokens = 0;
        while let Some(response) = stream.message().await? {
            if let Some(baton_proto::v1::generate_response::Event::Delta(delta)) = response.event {
                tokens += delta.token_ids.len();
            }
        }
        anyhow::Ok(tokens)
    };
    let (tokens, stopped) = tokio::join!(rest, cluster.stop());
    stopped?;
    assert_eq!(tokens?, 80);
    Ok(())
}

#[tokio::test]
async fn request_without_nodes_is_unavailable_at_once() -> anyhow::Result<()> {
    let cluster = Cluster::mock().prefill(0).decode(0).start().await?;
    let (code, message) = cluster.refused(Ask::text("hi")).await;
    assert_eq!((code, message.as_str()), (Code::Unavailable, "no node is ready"));
    cluster.stop().await
}

#[tokio::test]
async fn http_port_serves_completions_models_and_metrics() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    let (code, health) = cluster.http("/ready", None).await?;
    assert_eq!(code, 200, "{health}");
    let (_, models) = cluster.http("/v1/models", None).await?;
    assert!(models.contains("\"id\":\"mock\""), "{models}");
    let (code, whole) =
        cluster.http("/v1/completions", Some(r#"{"prompt": "hello", "max_tokens": 5, "temperature": 0}"#)).await?;
    let whole: serde_json::Value = serde_json::from_str(&whole)?;
    assert_eq!((code, whole["usage"]["completion_tokens"].as_u64()), (200, Some(5)));
    let (_, events) = cluster
        .http("/v1/completions", Some(r#"{"prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": true}"#))
        .await?;
    let text: String = events
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned()))
        .collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    assert!(events.trim_end().ends_with("data: [DONE]"), "{events}");
    assert!(events.contains(r#""finish_reason":"length"}],"usage":{"prompt_tokens""#), "{events}");
    let (_, events) = cluster
        .http("/v1/completions", Some(r#"{"prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}"#))
        .await?;
    let usage = events.lines().rev().filter_map(|line| line.strip_prefix("data: ")).nth(1).unwrap();
    assert!(
        usage.contains(r#""choices":[],"usage":{"prompt_tokens""#) && usage.contains(r#""completion_tokens":5"#),
        "{events}"
    );
    assert_eq!(events.matches("prompt_tokens\"").count(), 1, "{events}");
    let (code, error) = cluster.http("/v1/completions", Some(r#"{"prompt": "hello", "temperature": -1}"#)).await?;
    assert!(code == 400 && error.contains("temperature"), "{code} {error}");
    let (_, metrics) = cluster.http("/metrics", None).await?;
    assert!(metrics.contains("baton_conductor_generation_tokens_total 15"), "{metrics}");
    cluster.stop().await
}

#[tokio::test]
async fn health_follows_ready_nodes_and_drained_node_is_not_lost() -> anyhow::Result<()> {
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

    let builder = Cluster::mock().prefill(0).decode(0);
    let mut cluster = builder.clone().start().await?;
    let grpc = format!("http://{}", cluster.conductor.ready.grpc);
    let channel = tonic::transport::Endpoint::from_shared(grpc.clone())?.connect().await?;
    let is = async |cluster: &Cluster, code: u16, status: ServingStatus| {
        for service in ["", "baton.v1.Inference"] {
            let what = format!("{status:?} of '{service}'");
            let check = || async {
                let request = HealthCheckRequest { service: service.into() };
                Ok(HealthClient::new(channel.clone()).check(request).await?.into_inner().status == status as i32)
            };
            cluster.wait_for(&what, SECOND, check).await?;
        }
        let (found, health) = cluster.http("/ready", None).await?;
        anyhow::ensure!(found == code, "{found}: {health}");
        anyhow::ensure!(cluster.http("/health", None).await?.0 == 200, "it lives all the while");
        anyhow::Ok(())
    };
    let watching = HealthCheckRequest { service: "baton.v1.Inference".into() };
    let mut watched = HealthClient::new(channel.clone()).watch(watching).await?.into_inner();
    is(&cluster, 503, ServingStatus::NotServing).await?;
    assert_eq!(watched.message().await?.unwrap().status, ServingStatus::NotServing as i32);

    // A decode node alone computes prompts, too.
    let decode = builder.start_node("decode", 0, &grpc, cluster.folder()).await?;
    cluster.wait_ready(1).await?;
    is(&cluster, 200, ServingStatus::Serving).await?;
    assert_eq!(watched.message().await?.unwrap().status, ServingStatus::Serving as i32);
    cluster.ask(Ask::text("hi").max_tokens(3)).await?;

    decode.stop().await?;
    is(&cluster, 503, ServingStatus::NotServing).await?;
    assert_eq!(watched.message().await?.unwrap().status, ServingStatus::NotServing as i32);
    let states: Vec<_> = cluster.nodes().await?.into_iter().map(|node| node.state).collect();
    assert_eq!(states, ["drained"]);
    assert_eq!(cluster.check_integrity().await?.len(), 0, "there is no node to ask");
    assert_eq!(cluster.conductor.metric("baton_conductor_nodes_lost_total{role=\"decode\"}").await?, 0.0);
    let log = std::fs::read_to_string(&cluster.conductor.log)?;
    assert!(log.contains("node drained") && !log.contains("node lost") && !log.contains("WARN"), "{log}");

    let again = builder.start_node("decode", 0, &grpc, cluster.folder()).await?;
    cluster.wait_ready(1).await?;
    again.kill().await?;
    cluster.wait_for("a lost node", 2 * SECOND, || async { Ok(cluster.nodes().await?[0].state == "lost") }).await?;
    assert_eq!(cluster.conductor.metric("baton_conductor_nodes_lost_total{role=\"decode\"}").await?, 1.0);
    cluster.decode.clear();
    cluster.stop().await
}

#[tokio::test]
async fn standard_grpc_health_and_reflection_are_served() -> anyhow::Result<()> {
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};

    let cluster = Cluster::mock().start().await?;
    for (process, service) in [(&cluster.conductor, "baton.v1.Inference"), (&cluster.prefill[0], "baton.v1.Node")] {
        let channel =
            tonic::transport::Endpoint::from_shared(format!("http://{}", process.ready.grpc))?.connect().await?;
        let request = HealthCheckRequest { service: service.into() };
        let status = HealthClient::new(channel.clone()).check(request).await?.into_inner().status;
        assert_eq!(status, ServingStatus::Serving as i32, "{service}");

        let list = MessageRequest::ListServices(String::new());
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
        let mut client = ServerReflectionClient::new(channel);
        let answer = client.server_reflection_info(tokio_stream::once(request)).await?.into_inner().message().await?;
        let Some(MessageResponse::ListServicesResponse(services)) = answer.and_then(|answer| answer.message_response)
        else {
            panic!("no list of services");
        };
        let names: Vec<_> = services.service.into_iter().map(|ServiceResponse { name }| name).collect();
        assert!(names.iter().any(|name| name == service), "{names:?}");
    }
    cluster.stop().await
}

#[tokio::test]
async fn request_with_objective_that_cannot_be_met_is_refused() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "50000"]).start().await?;
    let mut ask = Ask::tokens(prompt(400, 1)).max_tokens(5);
    ask.0.slo = Some(baton_proto::v1::ServiceLevelObjectives { ttft_ms: Some(1.0), tbt_ms: None });
    let (code, message) = cluster.refused(ask.clone()).await;
    assert!(code == Code::ResourceExhausted && message.contains("objective"), "{code} {message}");
    ask.0.slo = Some(baton_proto::v1::ServiceLevelObjectives { ttft_ms: Some(60_000.0), tbt_ms: Some(60_000.0) });
    assert_eq!(cluster.ask(ask).await?.token_ids.len(), 5);
    cluster.stop().await
}

/// The first decode node's steps take 60 ms, and the objective is 30. The second look at it, when
/// its grant is asked for, finds that placement took what there was.
#[tokio::test]
async fn decode_node_with_steps_too_long_for_tbt_objective_is_reselected() -> anyhow::Result<()> {
    let nodes = |us| Cluster::mock().conductor_flags(&["--admission", "none"]).node_flags(&["--mock-base-us", us]);
    let mut cluster = nodes("60000").start().await?;
    let paced = |salt| {
        let mut ask = Ask::tokens(prompt(100, salt)).max_tokens(8).ignore_eos();
        ask.0.slo = Some(baton_proto::v1::ServiceLevelObjectives { ttft_ms: None, tbt_ms: Some(30.0) });
        ask
    };
    let refused = async |cluster: &Cluster, outcome: &str| {
        cluster.conductor.metric(&format!("baton_conductor_grants_refused_total{{outcome=\"{outcome}\"}}")).await
    };
    let expected = cluster.ask(paced(2)).await?.token_ids;
    assert_eq!(refused(&cluster, "retried").await?, 0.0, "no step had been measured");

    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let prefill = cluster.prefill[0].pid();
    let stream = cluster.ask(Ask::tokens(prompt(50, 1)).max_tokens(100).ignore_eos());
    let (stream, both) = tokio::join!(stream, async {
        tokio::time::sleep(2 * SECOND).await;
        let alone = cluster.ask(paced(2)).await?;
        assert_eq!((alone.finished.decode_node.as_str(), refused(&cluster, "retried").await?), ("decode-0", 1.0));
        // Placed while there is one decode node, computed when there are two.
        signal(prefill, "STOP");
        let reselected = cluster.ask(paced(3));
        let (reselected, second) = tokio::join!(reselected, async {
            let second = nodes("10000").start_node("decode", 1, &conductor, cluster.folder()).await;
            let waited = cluster.wait_ready(3).await;
            tokio::time::sleep(SECOND / 5).await;
            signal(prefill, "CONT");
            waited.and(second)
        });
        anyhow::Ok((alone, reselected?, second?))
    });
    let (alone, reselected, second) = both?;
    assert_eq!(stream?.token_ids.len(), 100);
    assert_eq!(alone.token_ids, expected, "what was taken in is served");
    assert_eq!((reselected.finished.decode_node.as_str(), refused(&cluster, "reselected").await?), ("decode-1", 1.0));
    assert_eq!((reselected.token_ids.len(), refused(&cluster, "retried").await?), (8, 1.0));
    cluster.decode.push(second);
    assert_eq!(cluster.ask(paced(3)).await?.token_ids, reselected.token_ids);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}
