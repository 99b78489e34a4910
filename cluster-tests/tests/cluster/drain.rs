//! Nodes that leave in order: by command, by signal, one after the other under load; and processes
//! that end whatever their clients do.

use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Answer, Ask, Builder, Cluster, Process, model, signal};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::operator::{baton, until};

const SECOND: Duration = Duration::from_secs(1);
const SLOW: [&str; 2] = ["--mock-base-us", "10000"];

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|i| 32 + (i * 7 + salt * 13) % 90).collect()
}

fn state<'a>(nodes: &'a [v1::NodeStatus], name: &str) -> Option<&'a str> {
    let node = nodes.iter().find(|node| node.info.as_ref().is_some_and(|info| info.name == name))?;
    Some(node.state.as_str())
}

async fn status_of(path: &str, address: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n").as_bytes()).await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    Ok(page)
}

#[tokio::test]
async fn drained_node_takes_no_requests_until_undrained() -> anyhow::Result<()> {
    let cluster = Cluster::mock().prefill(2).decode(2).node_flags(&SLOW).start().await?;
    let ask = |salt| Ask::tokens(prompt(90, salt)).max_tokens(150).ignore_eos();
    let mut alone = Vec::new();
    for salt in 0..4 {
        alone.push(cluster.ask(ask(salt)).await?.token_ids);
    }
    let drained = async {
        tokio::time::sleep(SECOND / 4).await;
        let began = Instant::now();
        let output = baton(&cluster, &["drain", "decode-0"]).await?;
        anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8(output.stdout)?, "decode-0: drained\n");
        anyhow::Ok(began.elapsed())
    };
    let (answers, drained) = tokio::join!(futures::future::join_all((0..4).map(|n| cluster.ask(ask(n)))), drained);
    let answers = answers.into_iter().collect::<anyhow::Result<Vec<Answer>>>()?;
    let migrations: u32 =
        answers.iter().filter_map(|answer| answer.finished.timeline.as_ref()).map(|time| time.migrations).sum();
    println!("drained after {:?}, {migrations} sequences migrated", drained?);
    assert!(migrations > 0, "nothing was on it");
    for (answer, alone) in answers.iter().zip(&alone) {
        assert_eq!(&answer.token_ids, alone);
        assert_eq!(answer.finished.decode_node, "decode-1");
    }
    let http = cluster.decode[0].ready.http.clone().context("a port")?;
    assert!(status_of("/ready", &http).await?.contains("503") && status_of("/health", &http).await?.contains("200"));

    // It is here, and stays away from requests, whatever happens to the session.
    for salt in 0..6 {
        assert_eq!(cluster.ask(ask(salt).max_tokens(3)).await?.finished.decode_node, "decode-1");
    }
    let output = baton(&cluster, &["undrain", "decode-0"]).await?;
    assert_eq!(String::from_utf8(output.stdout)?, "decode-0: ready\n");
    assert!(status_of("/ready", &http).await?.contains("200"));
    let both = futures::future::join_all((0..8).map(|salt| cluster.ask(ask(salt).max_tokens(40)))).await;
    let on_it =
        both.into_iter().filter(|answer| answer.as_ref().is_ok_and(|answer| answer.finished.decode_node == "decode-0"));
    assert!(on_it.count() > 0, "it takes requests again");

    for (arguments, wanted) in
        [(["drain", "decode-7"], "node: this conductor knows no node 'decode-7'"), (["undrain", ""], "node: ")]
    {
        let output = baton(&cluster, &arguments).await?;
        let said = String::from_utf8(output.stderr)?;
        assert!(!output.status.success() && said.contains(wanted), "{arguments:?}: {said}");
    }
    cluster.wait_idle(2 * SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn drained_node_that_ends_serves_again_after_restart() -> anyhow::Result<()> {
    let builder = Cluster::mock().decode(2).node_flags(&SLOW);
    let mut cluster = builder.clone().start().await?;
    cluster.operator().drain(v1::DrainRequest { node: "decode-1".into() }).await?;
    assert_eq!(state(&cluster.nodes().await?, "decode-1"), Some("draining"), "at once");
    let node = cluster.decode.remove(1);
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    node.stop().await?;
    cluster
        .wait_for("a drained node", SECOND, || async {
            Ok(state(&cluster.nodes().await?, "decode-1") == Some("drained"))
        })
        .await?;
    let (code, message) = match cluster.operator().undrain(v1::UndrainRequest { node: "decode-1".into() }).await {
        Err(status) => (status.code(), status.message().to_owned()),
        Ok(_) => panic!("it is gone"),
    };
    assert_eq!((code, &*message), (tonic::Code::Unavailable, "node: decode-1 has no session with this conductor"));
    cluster.decode.push(builder.start_node("decode", 1, &conductor, cluster.folder()).await?);
    cluster.wait_ready(3).await?;
    cluster.stop().await
}

/// Streams, one after the other in each of `clients`, until `stop`: answers that differ from the
/// quiet ones, and how many there were.
async fn load(
    cluster: &Cluster,
    asks: &[Ask],
    quiet: &[Answer],
    clients: usize,
    stop: &std::sync::atomic::AtomicBool,
) -> anyhow::Result<usize> {
    let client = async |first: usize| {
        let mut count = 0;
        for n in (first..).step_by(clients) {
            if stop.load(std::sync::atomic::Ordering::Relaxed) {
                break;
            }
            let n = n % asks.len();
            let answer = cluster.ask(asks[n].clone()).await.with_context(|| format!("request {n}"))?;
            anyhow::ensure!(answer.token_ids == quiet[n].token_ids, "request {n}: other tokens");
            anyhow::ensure!(answer.logprobs == quiet[n].logprobs, "request {n}: other log-probabilities");
            count += 1;
        }
        anyhow::Ok(count)
    };
    let counts = futures::future::try_join_all((0..clients).map(client)).await?;
    Ok(counts.into_iter().sum())
}

/// Restarts every node, one after the other, in order.
async fn roll(
    cluster: &Cluster,
    builder: &Builder,
    nodes: Vec<(&str, usize, Process)>,
) -> anyhow::Result<Vec<Process>> {
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let count = nodes.len();
    let mut again = Vec::new();
    for (role, index, node) in nodes {
        // The others are busy again.
        tokio::time::sleep(SECOND).await;
        node.stop().await?;
        again.push(builder.start_node(role, index, &conductor, cluster.folder()).await?);
        cluster.wait_ready(count).await?;
    }
    Ok(again)
}

/// 2 + 2 nodes, 8 clients, every node restarted: no request fails, no token changes.
async fn rolling_restart(builder: Builder, asks: Vec<Ask>) -> anyhow::Result<()> {
    let mut cluster = builder.clone().start().await?;
    let quiet = futures::future::try_join_all(asks.iter().map(|ask| cluster.ask(ask.clone()))).await?;
    let numbered = |role, nodes: Vec<Process>| (0..).zip(nodes).map(move |(index, node)| (role, index, node));
    let nodes: Vec<_> = numbered("prefill", std::mem::take(&mut cluster.prefill))
        .chain(numbered("decode", std::mem::take(&mut cluster.decode)))
        .collect();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let began = Instant::now();
    let restart = async {
        let again = roll(&cluster, &builder, nodes).await;
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        again
    };
    let (served, again) = tokio::join!(load(&cluster, &asks, &quiet, 8, &stop), restart);
    let served = served?;
    let mut again = again?;
    let retries = cluster.conductor.metric("baton_conductor_retries_total").await?;
    println!("{served} requests in {:?} while 4 nodes were restarted, {retries} placed again", began.elapsed());
    cluster.decode = again.split_off(2);
    cluster.prefill = again;
    cluster.wait_idle(2 * SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn rolling_restart_of_mock_nodes_under_load_changes_no_answer() -> anyhow::Result<()> {
    let asks = (0..32).map(|n| {
        let ask = Ask::tokens(prompt(20 + 17 * (n % 11), n)).max_tokens(40 + 10 * (n % 9)).ignore_eos();
        ask.seeded(n.into(), 0.7)
    });
    rolling_restart(Cluster::mock().prefill(2).decode(2).node_flags(&SLOW), asks.collect()).await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn rolling_restart_of_model_nodes_under_load_changes_no_answer() -> anyhow::Result<()> {
    let model = model();
    let asks = (0..16).map(|n: u32| {
        let tokens: Vec<u32> = (0..40 + 23 * (n % 7)).map(|i| 1000 + (n * 997 + i * 7919) % 40_000).collect();
        let ask = Ask::tokens(tokens).max_tokens(60 + 20 * (n % 5)).ignore_eos();
        let ask = ask.sampling(|sampling| sampling.logprobs = Some(1));
        if n.is_multiple_of(2) { ask } else { ask.seeded(n.into(), 0.8) }
    });
    rolling_restart(Cluster::model(&model).prefill(2).decode(2), asks.collect()).await
}

/// Clients that read nothing, send half of something, or hold a connection, at each port.
#[tokio::test]
async fn processes_end_in_grace_period_despite_open_client_connections() -> anyhow::Result<()> {
    let grace = ["--grace-s", "1"];
    let builder = Cluster::mock().node_flags(&SLOW).node_flags(&grace).conductor_flags(&grace);
    let cluster = builder.start().await?;
    let conductor = &cluster.conductor.ready;
    let ports: Vec<String> = [&cluster.conductor, &cluster.prefill[0], &cluster.decode[0]]
        .into_iter()
        .flat_map(|process| [Some(process.ready.grpc.clone()), process.ready.http.clone()])
        .flatten()
        .collect();
    let mut held = Vec::new();
    for port in &ports {
        for beginning in [
            &b""[..],
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: 900\r\n\r\n{",
        ] {
            let mut stream = TcpStream::connect(port).await?;
            stream.write_all(beginning).await?;
            held.push(stream);
        }
    }
    // Streams that are not read, over both APIs.
    let long = Ask::tokens(prompt(40, 1)).max_tokens(20_000).ignore_eos();
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = cluster.inference().generate(long.0.clone()).await?.into_inner();
        assert!(matches!(stream.message().await?.and_then(|first| first.event), Some(Event::Accepted(_))));
        streams.push(stream);
    }
    let body = r#"{"prompt": "hello", "max_tokens": 20000, "ignore_eos": true, "stream": true}"#;
    let address = conductor.http.clone().context("a port")?;
    let mut http = TcpStream::connect(&address).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    http.write_all(format!("{head}{body}").as_bytes()).await?;
    // Sessions with both nodes whose answers are not read.
    let mut sessions = Vec::new();
    for node in cluster.prefill.iter().chain(&cluster.decode) {
        let address = format!("http://{}", node.ready.grpc);
        let mut client = v1::node_client::NodeClient::connect(address).await?;
        let (commands, queued) = tokio::sync::mpsc::channel(4);
        let hello =
            v1::Hello { protocol_version: baton_proto::PROTOCOL_VERSION, conductor_id: "000000000000000a".into() };
        commands.send(v1::NodeCommand { command: Some(v1::node_command::Command::Hello(hello)) }).await?;
        let stream = client.session(tokio_stream::wrappers::ReceiverStream::new(queued)).await?;
        sessions.push((commands, stream));
    }
    tokio::time::sleep(SECOND / 2).await;
    // The nodes first: they are told nothing by a conductor that would end their requests.
    let began = Instant::now();
    for process in cluster.prefill.into_iter().chain(cluster.decode) {
        process.stop().await?;
    }
    cluster.conductor.stop().await?;
    println!("three processes were down after {:?}", began.elapsed());
    drop((held, streams, http, sessions));
    Ok(())
}

#[tokio::test]
async fn second_signal_ends_processes_before_the_grace_period() -> anyhow::Result<()> {
    let flags = ["--grace-s", "60"];
    let cluster = Cluster::mock().node_flags(&SLOW).node_flags(&flags).conductor_flags(&flags).start().await?;
    let ask = Ask::tokens(prompt(40, 1)).max_tokens(5000).ignore_eos();
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    stream.message().await?;
    until(&cluster, &["load"], |load| load["decode"][0]["running"] == 1).await?;
    let began = Instant::now();
    for process in [&cluster.decode[0], &cluster.conductor] {
        signal(process.pid(), "TERM");
    }
    tokio::time::sleep(SECOND / 2).await;
    assert!(stream.message().await?.is_some(), "it goes on in the grace period");
    let Cluster { conductor, decode, prefill, .. } = cluster;
    for process in decode.into_iter().chain([conductor]).chain(prefill) {
        // The second one, but for the prefill node, which has nothing to do.
        process.stop().await?;
    }
    assert!(began.elapsed() < 10 * SECOND, "{:?}", began.elapsed());
    Ok(())
}

#[tokio::test]
async fn terminating_conductor_is_not_ready_before_it_refuses_requests() -> anyhow::Result<()> {
    let cluster = Cluster::mock().conductor_flags(&["--not-ready-s", "2"]).start().await?;
    signal(cluster.conductor.pid(), "TERM");
    cluster
        .wait_for("a conductor that is not ready", SECOND, || async {
            Ok(cluster.http("/ready", None).await?.0 == 503)
        })
        .await?;
    let answer = cluster.ask(Ask::text("still there?").max_tokens(5)).await?;
    assert_eq!(answer.token_ids.len(), 5, "who comes by then is served");
    cluster
        .wait_for("a conductor that takes nothing", 4 * SECOND, || async {
            Ok(cluster.inference().generate(Ask::text("and now?").0).await.is_err())
        })
        .await?;
    Ok(())
}
