//! Floods at a node's port: what decodes there goes on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, Process};
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::node_client::NodeClient;
use baton_proto::{PROTOCOL_VERSION, v1};
use futures::future::join_all;
use tonic::transport::Channel;

const SECOND: Duration = Duration::from_secs(1);
const STREAMS: u32 = 8;
const TOKENS: u32 = 250;

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|i| 32 + (i * 7 + salt * 13) % 90).collect()
}

/// The tokens of a stream, and the times between them.
async fn stream(cluster: &Cluster, salt: u32) -> anyhow::Result<(Vec<u32>, Vec<Duration>)> {
    let ask = Ask::tokens(prompt(60, salt)).max_tokens(TOKENS).ignore_eos();
    let mut stream = cluster.inference().generate(ask.0).await?.into_inner();
    let mut tokens = Vec::new();
    let mut gaps = Vec::new();
    let mut last = None;
    while let Some(response) = stream.message().await? {
        if let Some(Event::Delta(delta)) = response.event {
            tokens.extend(delta.token_ids);
            gaps.extend(last.replace(Instant::now()).map(|last: Instant| last.elapsed()));
        }
    }
    Ok((tokens, gaps))
}

/// All of them at once: their tokens, and the 99th percentile of their gaps.
async fn streams(cluster: &Cluster) -> anyhow::Result<(Vec<Vec<u32>>, Duration)> {
    let all = join_all((0..STREAMS).map(|salt| stream(cluster, salt))).await;
    let all = all.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let mut gaps: Vec<_> = all.iter().flat_map(|(_, gaps)| gaps.iter().copied()).collect();
    gaps.sort();
    let p99 = gaps[gaps.len() * 99 / 100];
    Ok((all.into_iter().map(|(tokens, _)| tokens).collect(), p99))
}

async fn client(node: &Process) -> anyhow::Result<NodeClient<Channel>> {
    Ok(NodeClient::connect(format!("http://{}", node.ready.grpc)).await?)
}

fn lease(node: &v1::NodeInfo, n: u64) -> v1::LeaseRequest {
    v1::LeaseRequest {
        protocol_version: PROTOCOL_VERSION,
        target_generation: node.generation.clone(),
        key: Some(v1::RequestKey { request_id: format!("{n:032x}"), attempt: 0 }),
        reader_node: "no-node".into(),
        reader_generation: node.generation.clone(),
        block_hashes: (0..16 * 1000).map(|byte| (byte as u64 * 31 + n) as u8).collect(),
        layout: node.layout.clone(),
        kv_class: node.kv_class.clone(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_keep_their_tokens_under_a_flood_of_calls_to_decode_node() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "10000"]).start().await?;
    let (expected, _) = streams(&cluster).await?;
    let nodes = cluster.nodes().await?;
    let decode = nodes.into_iter().filter_map(|node| node.info).find(|info| info.role == "decode").context("a node")?;
    for what in ["checks", "leases"] {
        let stop = AtomicBool::new(false);
        let calls = AtomicU64::new(0);
        let refused = AtomicU64::new(0);
        let flood = async |n: u64| {
            let mut client = client(&cluster.decode[0]).await?;
            while !stop.load(Ordering::Relaxed) {
                let status = match what {
                    "checks" => client.check_integrity(v1::CheckIntegrityRequest {}).await.err(),
                    _ => client.lease(lease(&decode, n)).await.err(),
                };
                calls.fetch_add(1, Ordering::Relaxed);
                let is_full = status.is_some_and(|status| status.code() == tonic::Code::ResourceExhausted);
                refused.fetch_add(u64::from(is_full), Ordering::Relaxed);
            }
            anyhow::Ok(())
        };
        let (_, quiet) = streams(&cluster).await?;
        let under = async {
            let under = streams(&cluster).await;
            stop.store(true, Ordering::Relaxed);
            under
        };
        let (under, flooded) = tokio::join!(under, join_all((0..100).map(flood)));
        flooded.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let (tokens, p99) = under?;
        let calls = calls.into_inner();
        let refused = refused.into_inner();
        let ratio = p99.as_secs_f64() / quiet.as_secs_f64();
        println!("{what}: {calls} calls, {refused} refused; TBT p99 {quiet:?} without, {p99:?} with them: {ratio:.2}");
        assert_eq!(tokens, expected);
        assert!(calls > 100, "{calls}");
    }
    cluster.wait_idle(2 * SECOND).await?;
    cluster.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_sessions_of_a_node_are_bounded_in_number_and_memory() -> anyhow::Result<()> {
    let cluster = Cluster::mock().node_flags(&["--mock-base-us", "10000"]).start().await?;
    let (expected, quiet) = streams(&cluster).await?;
    let before = cluster.decode[0].resident_bytes()?;
    let mut held = Vec::new();
    let mut refused = 0;
    for n in 0..500u64 {
        // Sixteen to a connection.
        if n % 16 == 0 {
            held.push((client(&cluster.decode[0]).await?, Vec::new()));
        }
        let (client, sessions) = held.last_mut().context("a client")?;
        let (commands, queued) = tokio::sync::mpsc::channel(4);
        let hello = v1::Hello { protocol_version: PROTOCOL_VERSION, conductor_id: format!("{n:016x}") };
        commands.send(v1::NodeCommand { command: Some(v1::node_command::Command::Hello(hello)) }).await?;
        match client.session(tokio_stream::wrappers::ReceiverStream::new(queued)).await {
            Ok(session) => sessions.push((commands, session)),
            Err(status) => {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
                refused += 1;
            }
        }
    }
    let (tokens, p99) = streams(&cluster).await?;
    let grown = cluster.decode[0].resident_bytes()?.saturating_sub(before);
    println!(
        "{refused} of 500 sessions refused; {} KiB more; TBT p99 {quiet:?} without, {p99:?} with them: {:.2}",
        grown >> 10,
        p99.as_secs_f64() / quiet.as_secs_f64()
    );
    assert_eq!(tokens, expected);
    assert!(refused > 400 && grown < 256 << 20, "{refused} refused, {grown} bytes");
    drop(held);
    // There is room for others again.
    let mut client = client(&cluster.decode[0]).await?;
    cluster
        .wait_for("a session", 5 * SECOND, || {
            let mut client = client.clone();
            async move {
                let hello = v1::Hello { protocol_version: PROTOCOL_VERSION, conductor_id: "00000000000000ff".into() };
                let hello = v1::NodeCommand { command: Some(v1::node_command::Command::Hello(hello)) };
                Ok(client.session(tokio_stream::once(hello)).await.is_ok())
            }
        })
        .await?;
    client.check_integrity(v1::CheckIntegrityRequest {}).await?;
    cluster.stop().await
}

/// A client that reads nothing keeps its sequence slot at the decode node no longer than its answer
/// takes.
#[tokio::test]
async fn unread_requests_release_their_sequence_slots_to_others() -> anyhow::Result<()> {
    let flags = ["--mock-base-us", "2000", "--max-running", "4"];
    let cluster = Cluster::mock().node_flags(&flags).start().await?;
    let mut unread = Vec::new();
    // As many as run at once; enough tokens to fill every window on the way.
    for salt in 0..4 {
        let ask = Ask::tokens(prompt(40, salt)).max_tokens(1500).ignore_eos();
        let ask = ask.sampling(|sampling| sampling.logprobs = Some(20));
        // A connection each: what one does not read must not be another's.
        let channel = Channel::from_shared(format!("http://{}", cluster.conductor.ready.grpc))?
            .initial_stream_window_size(1024)
            .initial_connection_window_size(65_535)
            .connect()
            .await?;
        let mut client = v1::inference_client::InferenceClient::new(channel);
        unread.push(client.generate(ask.0).await?.into_inner());
    }
    let began = Instant::now();
    cluster
        .wait_for("places that are given back", 30 * SECOND, || async {
            let placed: u32 = cluster.nodes().await?.iter().map(|node| node.placed).sum();
            Ok(placed == 0)
        })
        .await?;
    println!("four unread answers of 1,500 tokens are over after {:?}", began.elapsed());
    let answer = cluster.ask(Ask::tokens(prompt(40, 9)).max_tokens(20).ignore_eos()).await?;
    assert_eq!(answer.token_ids.len(), 20);
    for mut stream in unread {
        let mut tokens = 0;
        let mut finished = false;
        while let Some(response) = stream.message().await? {
            match response.event {
                Some(Event::Delta(delta)) => tokens += delta.token_ids.len(),
                Some(Event::Finished(_)) => finished = true,
                _ => {}
            }
        }
        assert!(tokens == 1500 && finished, "a client that reads late has all of it: {tokens}");
    }
    cluster.stop().await
}
