//! Links between nodes that are slow.

use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Answer, Ask, Cluster, PROXIED_HOST, Process, Proxy};
use futures::future::try_join_all;

const DELAY: Duration = Duration::from_millis(30);

/// A cluster with one decode node, which is reached through proxies: of its gRPC and of its
/// transfer port.
struct Proxied {
    cluster: Cluster,
    node: Process,
    grpc: Proxy,
    transfer: Proxy,
}

fn port(address: &str) -> anyhow::Result<u16> {
    Ok(address.rsplit(':').next().context("a port")?.parse()?)
}

async fn proxied() -> anyhow::Result<Proxied> {
    let builder = Cluster::mock().decode(0).conductor_flags(&["--partial-prefill", "false"]);
    let builder = builder.node_flags(&["--transport", "tcp"]);
    let cluster = builder.clone().start().await?;
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let builder = builder.node_flags(&["--advertise-host", PROXIED_HOST]);
    let node = builder.start_node("decode", 0, &conductor, cluster.folder()).await?;
    let grpc = Proxy::before(port(&node.ready.grpc)?).await?;
    let transfer = Proxy::before(port(node.ready.transfer.as_deref().context("a transfer port")?)?).await?;
    cluster.wait_ready(2).await?;
    Ok(Proxied { cluster, node, grpc, transfer })
}

/// Asks all at once.
async fn ask(cluster: &Cluster, asks: &[Ask]) -> anyhow::Result<Vec<Answer>> {
    try_join_all(asks.iter().map(|ask| cluster.ask(ask.clone()))).await
}

fn asks() -> Vec<Ask> {
    (0..8).map(|n| Ask::text(&format!("{n}: {}", "what a link carries ".repeat(30))).max_tokens(20)).collect()
}

fn tokens(answers: &[Answer]) -> Vec<&[u32]> {
    answers.iter().map(|answer| &answer.token_ids[..]).collect()
}

async fn forget(cluster: &Cluster) -> anyhow::Result<()> {
    cluster.operator().clear_cache(baton_proto::v1::ClearCacheRequest::default()).await?;
    Ok(())
}

#[tokio::test]
async fn slow_links_between_nodes_change_no_token() -> anyhow::Result<()> {
    let Proxied { cluster, node, grpc, transfer } = proxied().await?;
    let quiet = ask(&cluster, &asks()).await?;
    forget(&cluster).await?;
    grpc.set_delay(DELAY);
    transfer.set_delay(DELAY);
    let answers = ask(&cluster, &asks()).await?;
    assert_eq!(tokens(&answers), tokens(&quiet));
    // The first token comes from the prefill node, and the second is behind KV, handoff and its own
    // way.
    assert!(answers.iter().all(|answer| answer.gaps[0] > DELAY), "{:?}", answers[0].gaps);
    cluster.wait_idle(Duration::from_secs(5)).await?;
    node.stop().await?;
    cluster.stop().await
}
