//! Prompts that decode nodes compute: where no prefill node is left, and short ones.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::time::{Duration, Instant};

use baton_cluster_tests::{Ask, Cluster, model};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use tokio::task::JoinSet;

const SECOND: Duration = Duration::from_secs(1);
/// Objective of the streams' time between tokens.
const TBT_MS: f64 = 150.0;

fn prompt(n: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| 1000 + (n * 1013 + i * 7919) % 40_000).collect()
}

#[tokio::test]
async fn without_a_prefill_node_decode_nodes_answer_with_the_same_tokens() -> anyhow::Result<()> {
    let Some(model) = model("without_a_prefill_node_decode_nodes_answer_with_the_same_tokens") else { return Ok(()) };
    let mut cluster = Cluster::model(&model).start().await?;
    let asks = [
        Ask::tokens(prompt(1, 300)).max_tokens(12).ignore_eos(),
        Ask::tokens(prompt(2, 90)).max_tokens(12).ignore_eos().seeded(7, 0.9),
        Ask::tokens(prompt(3, 40)).max_tokens(1).sampling(|sampling| sampling.prompt_logprobs = Some(2)),
    ];
    let mut expected = Vec::new();
    for ask in &asks {
        expected.push(cluster.ask(ask.clone()).await?);
    }
    cluster.prefill.remove(0).kill().await?;
    cluster.wait_ready(1).await?;
    for (ask, expected) in asks.into_iter().zip(expected) {
        let answer = cluster.ask(ask).await?;
        assert_eq!(answer.token_ids, expected.token_ids);
        assert_eq!(answer.prompt_logprobs, expected.prompt_logprobs);
        assert_eq!((answer.finished.prefill_node.as_str(), answer.kv_transfer().bytes), ("decode-0", 0));
    }
    let (_, metrics) = cluster.http("/metrics", None).await?;
    assert!(metrics.contains("baton_conductor_prompts_at_decode_total 3"), "they are counted");
    cluster.stop().await
}

/// A stream with an objective, until it is over: the mean of its longest tenth of gaps.
async fn stream(
    mut client: v1::inference_client::InferenceClient<tonic::transport::Channel>,
    n: u32,
) -> anyhow::Result<Duration> {
    let mut ask = Ask::tokens(prompt(100 + n, 32)).max_tokens(120).ignore_eos();
    ask.0.slo.get_or_insert_default().tbt_ms = Some(TBT_MS);
    let mut stream = client.generate(ask.0).await?.into_inner();
    let (mut gaps, mut last) = (Vec::new(), None);
    while let Some(response) = stream.message().await? {
        if let Some(Event::Delta(_)) = response.event {
            let now = Instant::now();
            gaps.extend(last.replace(now).map(|before| now - before));
        }
    }
    gaps.sort();
    let tail = &gaps[gaps.len() - gaps.len().div_ceil(10)..];
    Ok(tail.iter().sum::<Duration>() / tail.len() as u32)
}

/// Long prompts, one after the other: the prefill node is never idle.
async fn long_prompts(mut client: v1::inference_client::InferenceClient<tonic::transport::Channel>, round: u32) {
    for n in 0.. {
        let ask = Ask::tokens(prompt(9000 + round * 50 + n, 1000)).max_tokens(1);
        let Ok(stream) = client.generate(ask.0).await else { return };
        let mut stream = stream.into_inner();
        while let Ok(Some(_)) = stream.message().await {}
    }
}

/// Short prompts beside three streams: times to the first token, the streams' tails, and how many prompts a decode node computed.
async fn short_prompts(
    cluster: &Cluster,
    round: u32,
    busy: bool,
) -> anyhow::Result<(Vec<Duration>, Vec<Duration>, usize)> {
    let mut background = JoinSet::new();
    if busy {
        background.spawn(long_prompts(cluster.inference(), round));
    }
    let mut streams = JoinSet::new();
    for n in 0..3 {
        streams.spawn(stream(cluster.inference(), round * 10 + n));
    }
    tokio::time::sleep(SECOND).await;
    let (mut ttfts, mut at_decode) = (Vec::new(), 0);
    for n in 0..6 {
        let ask = Ask::tokens(prompt(1000 + round * 100 + n, 64)).max_tokens(4).ignore_eos();
        let answer = cluster.ask(ask).await?;
        ttfts.push(answer.ttft);
        at_decode += usize::from(answer.finished.prefill_node == answer.finished.decode_node);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    let mut tails = Vec::new();
    while let Some(tail) = streams.join_next().await {
        tails.push(tail??);
    }
    ttfts.sort();
    Ok((ttfts, tails, at_decode))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[tokio::test]
async fn short_prompts_are_computed_at_decode_nodes_where_they_may_be_with_the_same_tokens() -> anyhow::Result<()> {
    let Some(model) = model("short_prompts_are_computed_at_decode_nodes_where_they_may_be_with_the_same_tokens") else {
        return Ok(());
    };
    // `make test-long` takes five turns of each.
    let is_long = std::env::var_os("BATON_TEST_LONG").is_some();
    // Two nodes at one prompt are another matter.
    let whole = ["--split-prompts", "false"];
    let builder = || Cluster::model(&model).decode_flags(&["--decode-chunk-tokens", "32"]).conductor_flags(&whole);
    let whole_way = builder().conductor_flags(&["--prompts-at-decode", "never"]).start().await?;
    let short = builder().conductor_flags(&["--prompts-at-decode", "short"]).start().await?;
    for busy in [false, true].into_iter().filter(|busy| is_long || *busy) {
        let (mut ways, mut shorts, mut worst, mut at_decode) = (Vec::new(), Vec::new(), Duration::ZERO, 0);
        let rounds = if is_long { 5 } else { 1 };
        for round in 0..rounds {
            let (ttfts, _, at) = short_prompts(&whole_way, round, busy).await?;
            assert_eq!(at, 0);
            ways.push(median(ttfts));
            let (ttfts, tails, at) = short_prompts(&short, round, busy).await?;
            shorts.push(median(ttfts));
            worst = worst.max(tails.into_iter().max().unwrap());
            at_decode += at;
        }
        println!(
            "prefill node {}: TTFT of 64 tokens, medians: {:?} the whole way, {:?} where the conductor chooses ({at_decode} of {} at the decode node); the worst stream's tail {worst:?} \
             of {TBT_MS} ms",
            if busy { "busy" } else { "idle" },
            median(ways),
            median(shorts),
            rounds * 6
        );
        assert!(at_decode > 0 || !busy, "a queue of long prompts is no place for a short one");
    }
    // Alone, a prompt of one chunk need not cross the network.
    let alone = short.ask(Ask::tokens(prompt(5000, 32)).max_tokens(4).ignore_eos()).await?;
    assert_eq!(alone.finished.prefill_node, "decode-0");
    let same = whole_way.ask(Ask::tokens(prompt(5000, 32)).max_tokens(4).ignore_eos()).await?;
    assert_eq!((same.finished.prefill_node.as_str(), &same.token_ids), ("prefill-0", &alone.token_ids));
    for cluster in [whole_way, short] {
        cluster.wait_idle(SECOND).await?;
        cluster.stop().await?;
    }
    Ok(())
}
