//! An engine whose step never ends takes its node out, and not the cluster.

use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster};

const SECOND: Duration = Duration::from_secs(1);
/// A step with it never ends.
const STUCK: u32 = 300;

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|i| 32 + (i * 7 + salt * 13) % 90).collect()
}

#[tokio::test]
async fn request_that_hangs_engines_fails_after_two_nodes_and_is_named() -> anyhow::Result<()> {
    let flags = ["--mock-base-us", "10000", "--mock-stuck-token", "300", "--step-timeout-s", "3"];
    let cluster = Cluster::mock().prefill(4).decode(1).node_flags(&flags).start().await?;
    let long = |salt| Ask::tokens(prompt(60, salt)).max_tokens(400).ignore_eos();
    let quiet = cluster.ask(long(1)).await?.token_ids;
    let mut poison = prompt(60, 2);
    poison[30] = STUCK;
    let bad = async {
        let began = Instant::now();
        let status = cluster.ask(Ask::tokens(poison).max_tokens(4)).await.err().context("it was served")?;
        anyhow::Ok((status.to_string(), began.elapsed()))
    };
    // Streams and prompts meanwhile.
    let beside = async {
        let mut prompts = Vec::new();
        for salt in 10..40 {
            let began = Instant::now();
            cluster.ask(Ask::tokens(prompt(60, salt)).max_tokens(2)).await?;
            prompts.push(began.elapsed());
            tokio::time::sleep(SECOND / 5).await;
        }
        anyhow::Ok(prompts.into_iter().max().unwrap_or_default())
    };
    let (bad, stream, beside) = tokio::join!(bad, cluster.ask(long(1)), beside);
    let bad = bad?;
    let beside = beside?;
    println!("ended after {:?}: {}; the slowest prompt beside it took {beside:?}", bad.1, bad.0);
    assert!(bad.0.contains("nodes died or hung while they had the request"), "{}", bad.0);
    assert_eq!(stream?.token_ids, quiet);
    assert!(beside < 4 * SECOND, "a prompt on a stalled node goes elsewhere after two seconds");
    cluster
        .wait_for("two nodes that are gone", 10 * SECOND, || async {
            Ok(cluster.nodes().await?.iter().filter(|node| node.state == "lost").count() == 2)
        })
        .await?;

    let conductor = std::fs::read_to_string(&cluster.conductor.log)?;
    assert!(conductor.contains("the node's engine makes no progress: it is suspected"), "{conductor}");
    let ended =
        conductor.lines().find(|line| line.contains("died or hung while they had the request")).context("no line")?;
    let id = ended.split("request=").nth(1).and_then(|rest| rest.split_whitespace().next()).context("no id")?;
    let mut named = 0;
    for node in &cluster.prefill {
        let log = std::fs::read_to_string(&node.log)?;
        named += log.lines().filter(|line| line.contains("taken to be dead") && line.contains(id)).count();
    }
    assert_eq!(named, 2, "both nodes name the request that they hung in");
    Ok(())
}
