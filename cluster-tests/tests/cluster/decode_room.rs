//! Decode nodes whose memory is too small for all sequences.

use std::time::Duration;

use baton_cluster_tests::{Ask, Cluster, model};
use tokio::task::JoinSet;

const SECOND: Duration = Duration::from_secs(1);
const PROMPT_TOKENS: usize = 64;
const OUTPUT_TOKENS: u32 = 64;
const SEQUENCES: u32 = 8;
/// Of prompt and answer; the last token's KV is never computed.
const BLOCKS: u32 = (PROMPT_TOKENS as u32 + OUTPUT_TOKENS - 1).div_ceil(16);

fn ask(n: u32) -> Ask {
    let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|i| 1000 + (n * 997 + i * 7919) % 40_000).collect();
    let ask = Ask::tokens(prompt).max_tokens(OUTPUT_TOKENS).ignore_eos();
    if n.is_multiple_of(2) { ask } else { ask.seeded(n.into(), 0.8) }
}

async fn all_at_once(cluster: &Cluster) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut outputs = vec![Vec::new(); SEQUENCES as usize];
    let mut tasks = JoinSet::new();
    for n in 0..SEQUENCES {
        let mut client = cluster.inference();
        tasks.spawn(async move {
            let mut stream = client.generate(ask(n).0).await?.into_inner();
            let mut tokens = Vec::new();
            let mut finished = false;
            while let Some(response) = stream.message().await? {
                match response.event {
                    Some(baton_proto::v1::generate_response::Event::Delta(delta)) => tokens.extend(delta.token_ids),
                    Some(baton_proto::v1::generate_response::Event::Finished(_)) => finished = true,
                    _ => {}
                }
            }
            anyhow::ensure!(finished, "request {n} did not end");
            anyhow::Ok((n, tokens))
        });
    }
    while let Some(done) = tasks.join_next().await {
        let (n, tokens) = done??;
        outputs[n as usize] = tokens;
    }
    Ok(outputs)
}

async fn preemptions(cluster: &Cluster) -> anyhow::Result<u64> {
    let loads = cluster.check_integrity().await?;
    Ok(loads.iter().map(|(_, load)| load.preemptions).sum())
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn preempted_sequences_end_with_same_tokens() -> anyhow::Result<()> {
    let model = model();
    let half = (BLOCKS * SEQUENCES / 2).to_string();
    let mut alone = Vec::new();
    for growth in ["0", "4"] {
        let cluster =
            Cluster::model(&model).decode_flags(&["--cache-blocks", &half, "--growth-blocks", growth]).start().await?;
        if alone.is_empty() {
            for n in 0..SEQUENCES {
                alone.push(cluster.ask(ask(n)).await?.token_ids);
            }
        }
        assert_eq!(preemptions(&cluster).await?, 0);
        let together = all_at_once(&cluster).await?;
        let preempted = preemptions(&cluster).await?;
        println!("room for {half} blocks, {growth} kept for growth: {preempted} preemptions");
        for (n, (together, alone)) in together.iter().zip(&alone).enumerate() {
            assert_eq!(together.len(), OUTPUT_TOKENS as usize);
            assert_eq!(together, alone, "request {n}");
        }
        assert!(preempted > 0 || growth != "0");
        cluster.wait_idle(SECOND).await?;
        cluster.stop().await?;
    }
    Ok(())
}
