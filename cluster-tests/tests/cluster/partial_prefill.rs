//! Prompts that two nodes compute, the decode node the last part (partial prefill): the same
//! tokens, whatever becomes of either.

use std::time::Duration;

use baton_cluster_tests::{Ask, Cluster, model};
use tokio::task::JoinSet;

const SECOND: Duration = Duration::from_secs(1);
const RETRIES: &str = "baton_conductor_retries_total";

fn prompt(n: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| 1000 + (n * 1013 + i * 7919) % 40_000).collect()
}

/// Of all prompts so far: how many were split.
async fn split(cluster: &Cluster) -> anyhow::Result<f64> {
    cluster.conductor.metric("baton_conductor_partial_prefills_total").await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn partial_prefill_gives_same_tokens_as_whole_prefill() -> anyhow::Result<()> {
    let model = model();
    let asks: Vec<_> = [700, 333, 1000, 150]
        .into_iter()
        .zip(0..)
        .map(|(tokens, n)| {
            let ask = Ask::tokens(prompt(n, tokens)).max_tokens(12).ignore_eos();
            let ask = if n % 2 == 0 { ask } else { ask.seeded(7, 0.9) };
            ask.sampling(|sampling| sampling.logprobs = Some(3))
        })
        .collect();
    let whole = Cluster::model(&model).conductor_flags(&["--partial-prefill", "false"]).start().await?;
    let mut expected = Vec::new();
    for ask in &asks {
        expected.push(whole.ask(ask.clone()).await?);
    }
    assert_eq!(split(&whole).await?, 0.0);
    whole.stop().await?;
    for transport in ["shm", "tcp"] {
        let cluster = Cluster::model(&model).node_flags(&["--transport", transport]).start().await?;
        for (ask, expected) in asks.iter().zip(&expected) {
            // While streams run: the partial prefill's layers go with their steps.
            let mut streams = JoinSet::new();
            for n in 0..2 {
                let mut client = cluster.inference();
                let ask = Ask::tokens(prompt(50 + n, 20)).max_tokens(40).ignore_eos();
                streams.spawn(async move {
                    let mut stream = client.generate(ask.0).await?.into_inner();
                    while stream.message().await?.is_some() {}
                    Ok::<(), anyhow::Error>(())
                });
            }
            let answer = cluster.ask(ask.clone()).await?;
            assert_eq!(answer.token_ids, expected.token_ids, "{transport}");
            assert_eq!(answer.logprobs, expected.logprobs, "{transport}");
            let bytes = answer.kv_transfer().bytes;
            let all = expected.kv_transfer().bytes;
            println!("{transport}: {bytes} of {all} bytes pushed, TTFT {:?}, alone {:?}", answer.ttft, expected.ttft);
            assert!(bytes > 0 && bytes < all, "{bytes} of {all}: the partial prefill's KV is where it is needed");
            while let Some(ended) = streams.join_next().await {
                ended??;
            }
        }
        assert!(split(&cluster).await? >= 4.0);
        assert!(cluster.decode[0].metric("baton_decode_partial_prefill_tokens_total").await? >= 200.0);
        // What the prefill node has not computed of a prompt it gets from the decode node.
        let again = cluster.ask(asks[0].clone()).await?;
        assert_eq!(again.token_ids, expected[0].token_ids);
        assert!(again.cached_tokens() > 500, "{}", again.cached_tokens());
        cluster.wait_idle(SECOND).await?;
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test]
async fn partial_prefill_survives_death_of_either_node() -> anyhow::Result<()> {
    let profile = tempfile::NamedTempFile::new()?;
    // 1,000 tokens take a second.
    let numbers = r#"{"name": "slow", "prefill_base": 0.001, "prefill_per_token": 0.001, "prefill_per_token_pair": 0.0, "decode_base": 0.002,
        "decode_per_sequence": 0.001, "decode_per_kv_token": 0.0, "chunk_tokens": 1024, "layers": 80, "kv_bytes_per_token": 327680, "decode_kv_tokens": 4096,
        "cache_tokens": 8192, "max_running": 8, "network_bytes_per_s": 655360000, "network_latency_s": 0.001, "ssd_bytes_per_s": 1.0, "step_noise": 0.0}"#;
    std::fs::write(profile.path(), numbers)?;
    let fitted = format!("fitted:{}", profile.path().display());
    let builder = Cluster::mock().node_flags(&["--mock-profile", &fitted]);
    let mut cluster = builder.clone().start().await?;
    let ask = |n: usize| {
        let tokens: Vec<_> = (0..2000).map(|i| ((i + 31 * n) * 7 % 250) as u32).collect();
        Ask::tokens(tokens).max_tokens(8).ignore_eos()
    };
    let mut expected = Vec::new();
    for n in 0..3 {
        expected.push(cluster.ask(ask(n)).await?.token_ids);
    }
    assert_eq!(split(&cluster).await?, 3.0);
    for (n, role) in [(0, "prefill"), (1, "decode"), (2, "prefill")] {
        // Nothing of it may be cached.
        for role in ["prefill", "decode"] {
            cluster.restart(&builder, role).await?;
        }
        let before = split(&cluster).await?;
        let retries = cluster.conductor.metric(RETRIES).await?;
        let mut client = cluster.inference();
        let mut asked = JoinSet::new();
        asked.spawn(async move {
            let mut stream = client.generate(ask(n).0).await?.into_inner();
            let mut tokens = Vec::new();
            while let Some(response) = stream.message().await? {
                if let Some(baton_proto::v1::generate_response::Event::Delta(delta)) = response.event {
                    tokens.extend(delta.token_ids);
                }
            }
            Ok::<Vec<u32>, anyhow::Error>(tokens)
        });
        // Both are at it: alone it would take two seconds.
        tokio::time::sleep(SECOND / 2).await;
        assert_eq!(split(&cluster).await?, before + 1.0);
        cluster.restart(&builder, role).await?;
        assert_eq!(asked.join_next().await.unwrap()??, expected[n], "the {role} node died");
        assert!(cluster.conductor.metric(RETRIES).await? > retries, "the {role} node was not missed");
    }
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}
