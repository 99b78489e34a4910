//! Many requests at once, some abandoned, while nodes die: every one of them ends, and what is left
//! is accounted for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, signal};
use baton_proto::v1::generate_response::Event;
use baton_types::Random;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// How one request ended.
#[derive(Debug, PartialEq)]
enum End {
    Finished { tokens: Vec<u32> },
    Abandoned,
    Failed(tonic::Code),
}

/// Request `index`: a shared beginning and an end of its own.
fn request(index: u64) -> (Ask, Option<Duration>) {
    let mut random = Random::new(index);
    let shared = (random.next_u64() % 40) as usize * 8;
    let own = 1 + (random.next_u64() % 60) as usize;
    let tokens: Vec<u32> = (0..shared)
        .map(|i| 33 + (i as u32 * 5) % 80)
        .chain((0..own).map(|i| 40 + (i as u32 + index as u32) % 70))
        .collect();
    let abandoned = index.is_multiple_of(3).then(|| Duration::from_millis(random.next_u64() % 60));
    let ask = Ask::tokens(tokens).max_tokens(1 + (random.next_u64() % 30) as u32).seeded(index, 0.7).ignore_eos();
    (ask, abandoned)
}

async fn serve(
    client: baton_proto::v1::inference_client::InferenceClient<tonic::transport::Channel>,
    ask: Ask,
) -> Result<End, tonic::Status> {
    Ok(End::Finished { tokens: serve_timed(client, ask).await?.0 })
}

/// The tokens, and the longest that its client waited for any of them.
async fn serve_timed(
    mut client: baton_proto::v1::inference_client::InferenceClient<tonic::transport::Channel>,
    ask: Ask,
) -> Result<(Vec<u32>, Duration), tonic::Status> {
    let mut stream = client.generate(ask.0).await?.into_inner();
    let mut tokens = Vec::new();
    let mut finished = false;
    let mut last = Instant::now();
    let mut longest = Duration::ZERO;
    while let Some(response) = stream.message().await? {
        longest = longest.max(last.elapsed());
        last = Instant::now();
        match response.event {
            Some(Event::Delta(delta)) => {
                assert_eq!(delta.index as usize, tokens.len(), "a token was lost or repeated");
                tokens.extend(delta.token_ids);
            }
            Some(Event::Finished(_)) => finished = true,
            _ => {}
        }
    }
    assert!(finished, "a stream ended without Finished and without a status");
    Ok((tokens, longest))
}

/// Runs requests, `at_once` at a time; gives how each ended.
async fn storm(cluster: &Cluster, requests: u64, at_once: usize) -> Vec<End> {
    let places = Arc::new(Semaphore::new(at_once));
    let mut tasks = JoinSet::new();
    for index in 0..requests {
        let ((ask, abandoned), client, places) = (request(index), cluster.inference(), places.clone());
        tasks.spawn(async move {
            let _place = places.acquire_owned().await.unwrap();
            let served = serve(client, ask);
            let end = match abandoned {
                Some(after) => tokio::time::timeout(after, served).await.unwrap_or(Ok(End::Abandoned)),
                None => served.await,
            };
            (index, end.unwrap_or_else(|status| End::Failed(status.code())))
        });
    }
    let mut ends: Vec<_> = (0..requests).map(|_| End::Abandoned).collect();
    while let Some(done) = tasks.join_next().await {
        let (index, end) = done.unwrap();
        ends[index as usize] = end;
    }
    ends
}

#[tokio::test]
async fn every_request_ends_while_nodes_die() -> anyhow::Result<()> {
    let requests = if std::env::var_os("BATON_TEST_LONG").is_some() { 5000 } else { 300 };
    let flags = ["--cache-blocks", "1500", "--max-waiting", "64"];
    let mut cluster = Cluster::mock().prefill(3).decode(3).node_flags(&flags).start().await?;
    let dying_prefill = cluster.prefill.remove(1);
    let dying_decode = cluster.decode.remove(2);
    let (first, ()) = tokio::join!(storm(&cluster, requests, 48), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        dying_decode.kill().await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        dying_prefill.kill().await.unwrap();
    });
    cluster.wait_ready(4).await?;
    cluster
        .wait_for("idle nodes", Duration::from_secs(2), || async {
            let nodes = cluster.nodes().await?;
            let mut ready = nodes.iter().filter(|node| node.state == "ready");
            Ok(ready.all(|node| {
                node.placed == 0 && node.load.as_ref().is_some_and(|load| load.blocks_used + load.blocks_reserved == 0)
            }))
        })
        .await?;
    let finished = first.iter().filter(|end| matches!(end, End::Finished { .. })).count();
    let abandoned = first.iter().filter(|end| **end == End::Abandoned).count();
    println!("{finished} of {requests} finished, {abandoned} abandoned");
    // There is room for all, so a death costs time and nothing else.
    let failed: Vec<_> = first.iter().filter(|end| matches!(end, End::Failed(_))).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert!(finished * 2 > requests as usize, "{finished} of {requests}: too few to say anything");

    // In peace every request gives the tokens that it gave in the storm.
    for index in (0..requests).filter(|index| index % 7 == 1) {
        if let End::Finished { tokens } = &first[index as usize] {
            let again = cluster.ask(request(index).0).await?;
            assert_eq!(&again.token_ids, tokens, "request {index}");
        }
    }
    cluster.stop().await
}

/// A node that is stopped says nothing, and its connections stand. What it has goes on elsewhere
/// long before they are closed.
#[tokio::test]
async fn stopped_node_delays_its_request_and_changes_no_token() -> anyhow::Result<()> {
    let flags = ["--mock-base-us", "5000", "--mock-token-us", "500"];
    let cluster = Cluster::mock().prefill(2).decode(2).node_flags(&flags).start().await?;
    let stopped = async |ask: Ask, role: &str, after: Duration| {
        let (served, stopped) = tokio::join!(serve_timed(cluster.inference(), ask.clone()), async {
            tokio::time::sleep(after).await;
            let nodes = cluster.nodes().await?;
            let of_role = |name: &&str| name.starts_with(role);
            let mut busy =
                nodes.iter().filter(|node| node.placed > 0).filter_map(|node| Some(&*node.info.as_ref()?.name));
            let name = busy.find(of_role).context("no node has the request")?;
            let index: usize = name.rsplit('-').next().context("a number")?.parse()?;
            let node = if role == "decode" { &cluster.decode[index] } else { &cluster.prefill[index] };
            signal(node.pid(), "STOP");
            anyhow::Ok(node.pid())
        });
        let served = served?;
        let stopped = stopped?;
        signal(stopped, "CONT");
        println!("{role} node stopped: {:?}", served.1);
        assert!(served.1 < Duration::from_secs(6), "{:?}", served.1);
        cluster.wait_ready(4).await?;
        assert_eq!(served.0, cluster.ask(ask).await?.token_ids, "{role}");
        cluster.wait_idle(Duration::from_secs(5)).await
    };
    let long: Vec<u32> = (0..3000).map(|i| 33 + i % 80).collect();
    stopped(Ask::tokens(vec![40; 50]).max_tokens(400).seeded(3, 0.7).ignore_eos(), "decode", Duration::from_secs(1))
        .await?;
    stopped(Ask::tokens(long).max_tokens(9).seeded(4, 0.7).ignore_eos(), "prefill", Duration::from_millis(400)).await?;
    cluster.stop().await
}
