//! Sequences that migrate to another decode node, because theirs has no room for them or is on its
//! way out. Their tokens are the same, whatever becomes of either node.

use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::{Answer, Ask, Builder, Cluster, metric, model, signal};
use baton_proto::v1;
use serde_json::json;

const SECOND: Duration = Duration::from_secs(1);
const PROMPT_TOKENS: u32 = 96;
const OUTPUT_TOKENS: u32 = 288;
const SEQUENCES: u32 = 6;
/// Of prompt and answer; the last token's KV is never computed.
const BLOCKS: u32 = (PROMPT_TOKENS + OUTPUT_TOKENS - 1).div_ceil(16);

fn ask(n: u32) -> Ask {
    let prompt: Vec<u32> = (0..PROMPT_TOKENS).map(|i| 1000 + (n * 997 + i * 7919) % 40_000).collect();
    let ask = Ask::tokens(prompt).max_tokens(OUTPUT_TOKENS).ignore_eos();
    let ask = ask.sampling(|sampling| {
        sampling.logprobs = Some(2);
        sampling.repetition_penalty = Some(1.1);
    });
    if n.is_multiple_of(2) { ask } else { ask.seeded(n.into(), 0.8) }
}

/// A cluster whose first decode node has room for the prompts, but not for the answers.
async fn small(model: &std::path::Path) -> anyhow::Result<(Builder, Cluster)> {
    let blocks = (BLOCKS * SEQUENCES * 3 / 5).to_string();
    let roomy = Cluster::model(model);
    let cluster = roomy.clone().decode_flags(&["--cache-blocks", &blocks, "--growth-blocks", "0"]).start().await?;
    Ok((roomy, cluster))
}

async fn alone(cluster: &Cluster) -> anyhow::Result<Vec<Answer>> {
    let mut answers = Vec::new();
    for n in 0..SEQUENCES {
        answers.push(cluster.ask(ask(n)).await?);
    }
    Ok(answers)
}

fn assert_same(together: &[Answer], alone: &[Answer]) {
    for (n, (together, alone)) in together.iter().zip(alone).enumerate() {
        assert_eq!(together.token_ids.len(), OUTPUT_TOKENS as usize);
        assert_eq!(together.token_ids, alone.token_ids, "request {n}");
        assert_eq!(together.logprobs, alone.logprobs, "request {n}");
    }
}

fn timeline(answer: &Answer) -> v1::Timeline {
    answer.finished.timeline.clone().unwrap_or_default()
}

fn migrations(answers: &[Answer]) -> u32 {
    answers.iter().map(|answer| timeline(answer).migrations).sum()
}

/// Sends all of them, and, once they run, does `beside`.
async fn while_all_run<T>(
    cluster: &Cluster,
    beside: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(Vec<Answer>, T)> {
    let all = futures::future::try_join_all((0..SEQUENCES).map(|n| cluster.ask(ask(n))));
    tokio::try_join!(all, async {
        cluster.wait_for("preemption", Duration::from_secs(20), || preempted(cluster)).await?;
        beside.await
    })
}

async fn preempted(cluster: &Cluster) -> anyhow::Result<bool> {
    Ok(cluster.check_integrity().await?.iter().any(|(_, load)| load.preemptions > 0))
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn preempted_sequences_migrate_to_a_node_with_room() -> anyhow::Result<()> {
    let model = model();
    let (roomy, mut cluster) = small(&model).await?;
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let alone = alone(&cluster).await?;
    assert_eq!(migrations(&alone), 0);
    let folder = cluster.folder().to_owned();
    let (together, second) =
        while_all_run(&cluster, async { roomy.start_node("decode", 1, &conductor, &folder).await }).await?;
    cluster.decode.push(second);
    assert_same(&together, &alone);
    assert!(migrations(&together) > 0, "no sequence migrated");
    let migrated = together.iter().filter(|answer| timeline(answer).migrations > 0);
    for answer in migrated.clone() {
        assert_eq!(answer.finished.decode_node, "decode-1");
    }
    let fetched: u64 = migrated.filter_map(|answer| timeline(answer).migrated).map(|migrated| migrated.bytes).sum();
    let (_, page) = cluster.http("/metrics", None).await?;
    let done = page.lines().find(|line| line.starts_with("baton_conductor_migrations_total{outcome=\"done\"}"));
    println!("{} migrations, {fetched} bytes fetched; {}", migrations(&together), done.unwrap_or_default());
    assert!(fetched > 0 && done.is_some());
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn draining_decode_node_migrates_its_sequences_and_exits() -> anyhow::Result<()> {
    let model = model();
    let mut cluster = Cluster::model(&model).decode(2).start().await?;
    // Its schema is not complete before: what it may write next follows from its tokens, at either
    // node.
    let list = json!({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 400});
    let long = ask(1).max_tokens(400).sampling(|sampling| sampling.ignore_eos = false).schema(&list);
    let alone = cluster.ask(long.clone()).await?;
    let mut nodes = std::mem::take(&mut cluster.decode);
    let began = Instant::now();
    let (answer, (drained, gone)) = tokio::try_join!(cluster.ask(long), async {
        // Whichever of the two it is on.
        let drained = loop {
            let loads = cluster.check_integrity().await?;
            if let Some(at) = loads.iter().position(|(node, load)| node.starts_with("decode") && load.running > 0) {
                break loads[at].0.clone();
            }
            anyhow::ensure!(began.elapsed() < Duration::from_secs(10), "no decode node has the sequence");
        };
        nodes.remove(usize::from(drained == "decode-1")).stop().await?;
        anyhow::Ok((drained, began.elapsed()))
    })?;
    println!("the node was gone after {gone:?}, the answer was complete after {:?}", began.elapsed());
    cluster.decode = nodes;
    assert!(answer.text.starts_with('[') && answer.text.matches("\"green\"").count() > 1, "{}", answer.text);
    assert_eq!((answer.token_ids, answer.logprobs), (alone.token_ids, alone.logprobs));
    assert_eq!(answer.finished.timeline.context("a timeline")?.migrations, 1);
    assert_ne!(answer.finished.decode_node, drained);
    assert!(gone < began.elapsed(), "it waited for the end of the answer");
    cluster.wait_idle_without(&[&drained], 2 * SECOND).await?;
    cluster.stop().await
}

/// The node that takes sequences is stopped while it reads, and killed.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn death_of_migration_target_changes_no_token() -> anyhow::Result<()> {
    let model = model();
    let (roomy, cluster) = small(&model).await?;
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let alone = alone(&cluster).await?;
    let http = cluster.decode[0].ready.http.clone().unwrap();
    let folder = cluster.folder().to_owned();
    let (together, leased) = while_all_run(&cluster, async {
        let second = roomy.start_node("decode", 1, &conductor, &folder).await?;
        let granted = "baton_node_leases_total{outcome=\"granted\"}";
        let began = Instant::now();
        while metric(&http, granted).await? == 0.0 && began.elapsed() < Duration::from_secs(10) {}
        signal(second.pid(), "STOP");
        tokio::time::sleep(Duration::from_millis(300)).await;
        second.kill().await?;
        metric(&http, granted).await
    })
    .await?;
    println!("{leased} leases, {} migrations", migrations(&together));
    assert!(leased > 0.0, "no node was asked to take a sequence");
    assert_same(&together, &alone);
    cluster.wait_idle_without(&["decode-1"], 2 * SECOND).await?;
    cluster.stop().await
}
