//! Prompts that decode nodes compute: all if no prefill node is left, else short ones.

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
#[ignore = "needs a model: BATON_MODEL"]
async fn decode_nodes_without_prefill_node_give_same_tokens() -> anyhow::Result<()> {
    let model = model();
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
    let mut gaps = Vec::new();
    let mut last = None;
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
        let mut stream = client.generate(ask.0).await.expect("a long prompt is taken").into_inner();
        while stream.message().await.expect("a long prompt is answered").is_some() {}
    }
}

/// What became of short prompts, and of the streams meanwhile.
struct Served {
    ttfts: Vec<Duration>,
    tokens: Vec<Vec<u32>>,
    /// The streams' longest tail of gaps.
    tail: Duration,
    /// Prompts that a decode node computed.
    at_decode: usize,
}

/// Short prompts while three streams run.
async fn short_prompts(cluster: &Cluster, round: u32, busy: bool) -> anyhow::Result<Served> {
    let mut background = JoinSet::new();
    if busy {
        background.spawn(long_prompts(cluster.inference(), round));
    }
    let mut streams = JoinSet::new();
    for n in 0..3 {
        streams.spawn(stream(cluster.inference(), round * 10 + n));
    }
    tokio::time::sleep(SECOND).await;
    let mut ttfts = Vec::new();
    let mut tokens = Vec::new();
    let mut at_decode = 0;
    for n in 0..6 {
        let ask = Ask::tokens(prompt(1000 + round * 100 + n, 64)).max_tokens(4).ignore_eos();
        let answer = cluster.ask(ask).await?;
        ttfts.push(answer.ttft);
        tokens.push(answer.token_ids.clone());
        at_decode += usize::from(answer.finished.prefill_node == answer.finished.decode_node);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    assert!(background.try_join_next().is_none(), "long prompts kept the prefill node busy to the end");
    let mut longest = Duration::ZERO;
    while let Some(tail) = streams.join_next().await {
        longest = longest.max(tail??);
    }
    Ok(Served { ttfts, tokens, tail: longest, at_decode })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn short_prompts_at_decode_node_give_same_tokens_and_lower_ttft() -> anyhow::Result<()> {
    let model = model();
    let builder = || Cluster::model(&model).decode_flags(&["--decode-chunk-tokens", "32"]);
    let whole_way = builder().conductor_flags(&["--prompts-at-decode", "never"]).start().await?;
    let short = builder().conductor_flags(&["--prompts-at-decode", "short"]).start().await?;
    let rounds = if std::env::var_os("BATON_TEST_LONG").is_some() { 9 } else { 3 };
    for busy in [false, true] {
        let mut ratios = Vec::new();
        let mut worst = Duration::ZERO;
        let mut at_decode = 0;
        for round in 0..rounds {
            // Prompts of its own, of which nothing is cached.
            let round = 2 * round + u32::from(busy);
            let whole = short_prompts(&whole_way, round, busy).await?;
            assert_eq!(whole.at_decode, 0);
            let served = short_prompts(&short, round, busy).await?;
            assert_eq!(served.tokens, whole.tokens);
            ratios.push(median(served.ttfts).as_secs_f64() / median(whole.ttfts).as_secs_f64());
            worst = worst.max(served.tail);
            at_decode += served.at_decode;
        }
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        println!(
            "prefill node {}: TTFT of 64 tokens over that of the whole way {ratio:.2} of {ratios:.2?} ({at_decode} of {} at the decode node); the worst stream's tail {worst:?} of {TBT_MS} ms",
            if busy { "busy" } else { "idle" },
            rounds * 6
        );
        assert!(at_decode > 0 || !busy, "a queue of long prompts is no place for a short one");
        // Idle, it is no later: two clusters share two cores, and medians of single rounds differ
        // by a quarter. Behind long prompts it is 0.06.
        let most = if busy { 0.5 } else { 1.25 };
        assert!(ratio <= most, "{ratio} of the whole way's");
        assert!(worst.as_secs_f64() * 1e3 <= TBT_MS, "the streams keep their objective: {worst:?}");
    }
    for cluster in [whole_way, short] {
        cluster.wait_idle(5 * SECOND).await?;
        cluster.stop().await?;
    }
    Ok(())
}
