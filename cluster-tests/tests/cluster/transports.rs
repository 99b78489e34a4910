//! What carries KV between nodes: chosen by itself, forced, and shown to operators.

use std::process::Output;
use std::time::Duration;

use baton_cluster_tests::{Answer, Ask, Builder, Cluster, binary, model};
use baton_proto::v1;
use serde_json::Value;
use tokio::process::Command;

const SECOND: Duration = Duration::from_secs(1);

/// Runs `baton` to its end.
async fn baton(arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(binary("baton")?);
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
        command.env_remove(key);
    }
    let output = command.args(arguments).kill_on_drop(true).output();
    Ok(tokio::time::timeout(Duration::from_secs(60), output).await??)
}

/// `baton nodes --transport` of a cluster.
async fn paths(cluster: &Cluster, flags: &[&str]) -> anyhow::Result<String> {
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let output = baton(&[&["nodes", "--transport", "--conductor", &conductor], flags].concat()).await?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// What `cluster` answers; each answer's KV travelled over `transport`.
async fn answers(cluster: &Cluster, asks: &[Ask], transport: &str) -> anyhow::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    for ask in asks {
        let answer = cluster.ask(ask.clone()).await?;
        assert_eq!(answer.kv_transfer().transport, transport);
        assert!(answer.kv_transfer().bytes > 0);
        answers.push(answer);
    }
    Ok(answers)
}

/// Asks the same of a cluster that chooses and of one that is told `tcp`: shared memory is chosen,
/// and it carries the same bytes.
async fn the_same_over_shm_and_tcp(builder: Builder, asks: &[Ask]) -> anyhow::Result<()> {
    // How many tokens the partial prefill has depends on times.
    let builder = builder.conductor_flags(&["--partial-prefill", "false"]);
    let auto = builder.clone().start().await?;
    let over_shm = answers(&auto, asks, "shm").await?;
    let bytes: u64 = over_shm.iter().map(|answer| answer.kv_transfer().bytes).sum();
    auto.wait_idle(SECOND).await?;
    the_operator_sees(&auto, "shm", bytes).await?;
    auto.stop().await?;

    let forced = builder.node_flags(&["--transport", "tcp"]).start().await?;
    let over_tcp = answers(&forced, asks, "tcp").await?;
    forced.wait_idle(SECOND).await?;
    the_operator_sees(&forced, "tcp", bytes).await?;
    forced.stop().await?;

    for (shm, tcp) in over_shm.iter().zip(&over_tcp) {
        assert_eq!(shm.token_ids, tcp.token_ids);
        assert_eq!(shm.kv_transfer().bytes, tcp.kv_transfer().bytes);
    }
    Ok(())
}

/// One pair of nodes, `bytes` over `transport`, within the time between two reports.
async fn the_operator_sees(cluster: &Cluster, transport: &str, bytes: u64) -> anyhow::Result<()> {
    let sent = |node: &v1::NodeStatus| -> u64 {
        node.transfer.iter().flat_map(|report| &report.paths).map(|path| path.bytes).sum()
    };
    cluster
        .wait_for("report of all bytes", 3 * SECOND, || async {
            Ok(cluster.nodes().await?.iter().map(sent).sum::<u64>() == bytes)
        })
        .await?;
    let listed: Value = serde_json::from_str(&paths(cluster, &["--json"]).await?)?;
    let pair = &listed[0];
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    assert_eq!((&pair["from"], &pair["to"]), (&"prefill-0".into(), &"decode-0".into()));
    assert_eq!((&pair["transport"], &pair["bytes"]), (&transport.into(), &bytes.into()));
    assert_eq!((&pair["retries"], &pair["fallbacks"]), (&0.into(), &0.into()));
    assert_eq!(pair["in_flight_bytes"], 0);
    assert!(pair["bytes_per_second"].as_f64().unwrap() > 0.0, "{pair}");
    assert!(pair["batches"].as_u64().unwrap() > 0 && pair["lanes"].as_u64().unwrap() > 0, "{pair}");
    let table = paths(cluster, &[]).await?;
    assert!(table.starts_with("FROM") && table.contains(transport), "{table}");
    Ok(())
}

fn mock_asks() -> Vec<Ask> {
    let prompt = |i: u32| (0..200 + 150 * i).map(|token| 32 + (token * 7 + i * 13) % 90).collect::<Vec<_>>();
    (0..6).map(|i| Ask::tokens(prompt(i)).max_tokens(12).seeded(u64::from(i), 0.8).ignore_eos()).collect()
}

#[tokio::test]
async fn shm_and_tcp_transports_give_same_tokens_of_mock() -> anyhow::Result<()> {
    the_same_over_shm_and_tcp(Cluster::mock(), &mock_asks()).await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn shm_and_tcp_transports_give_same_tokens_of_model() -> anyhow::Result<()> {
    let model = model();
    let questions = ["What is the capital of France?", "Name three rivers of Europe.", "Why is the sky blue?"];
    let asks: Vec<_> = questions.iter().map(|question| Ask::user(question).max_tokens(16)).collect();
    the_same_over_shm_and_tcp(Cluster::model(&model), &asks).await
}

#[tokio::test]
async fn transfer_paths_list_only_pairs_that_sent_kv() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    assert_eq!(paths(&cluster, &["--json"]).await?.trim(), "[]");
    assert_eq!(
        paths(&cluster, &[]).await?.trim(),
        "no node has reported that it sent KV to another one (nodes report once a second)"
    );
    let reported = || async { Ok(cluster.nodes().await?.iter().all(|node| node.transfer.is_some())) };
    cluster.wait_for("first report of each node", 3 * SECOND, reported).await?;
    for node in cluster.nodes().await? {
        let ways: Vec<_> = node.transfer.unwrap().addresses.into_iter().map(|way| way.transport).collect();
        assert_eq!(ways, ["shm", "tcp"]);
    }
    cluster.stop().await
}

#[tokio::test]
async fn unavailable_transport_stops_the_start() -> anyhow::Result<()> {
    let up = ["up", "--engine", "mock", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--set"];
    let output = baton(&[&up[..], &["node.transport=rdma"]].concat()).await?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("transport: rdma"), "{}: {error}", output.status);

    let output = baton(&[&up[..], &["node.transport=carrier-pigeon"]].concat()).await?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    // Whichever node ends first.
    let ended = "ended with status 2 before it was ready";
    let said = "--transport: 'carrier-pigeon': expected auto, rdma, shm or tcp";
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains(ended) && error.contains(said), "{error}");
    Ok(())
}

#[tokio::test]
async fn forced_transport_missing_at_peer_fails_the_request() -> anyhow::Result<()> {
    let builder = Cluster::mock().prefill_flags(&["--transport", "shm"]).decode_flags(&["--transport", "tcp"]);
    let cluster = builder.start().await?;
    let (code, message) = cluster.refused(mock_asks().remove(0)).await;
    assert_eq!(code, tonic::Code::Unavailable, "{message}");
    assert_eq!(message, "a node could not serve the request: unavailable", "clients are told no names");
    let log = std::fs::read_to_string(&cluster.conductor.log)?;
    assert!(log.contains("over shm, the only transport allowed"), "{log}");
    assert_eq!(paths(&cluster, &["--json"]).await?.trim(), "[]", "nothing fell back");
    cluster.wait_idle(2 * SECOND).await?;
    cluster.stop().await
}
