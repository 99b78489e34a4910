//! Prefixes that another node holds: brought instead of computed, with the same tokens, whatever becomes of the holder.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::time::{Duration, Instant};

use baton_cluster_tests::{Answer, Ask, Builder, Cluster, metric, model, signal};
use baton_proto::v1;

const SECOND: Duration = Duration::from_secs(1);
/// Layers, K and V heads, head size and bytes per element of SmolLM2-135M in f16: bytes of one block of 16 tokens in all layers.
const BLOCK_BYTES: u64 = 30 * (3 * 2 * 16 * 64 * 2);
/// Of the long prompt; the last one is always computed.
const PROMPT_TOKENS: usize = 1500;
const REUSABLE_BLOCKS: u64 = (PROMPT_TOKENS as u64 - 1) / 16;

/// A prompt: any tokens will do.
fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| 1000 + i * 7919 % 40_000).collect()
}

/// Ends the prefill node as a crash would and starts it again, without its cache.
async fn restart_prefill(cluster: &mut Cluster, builder: &Builder, nodes: usize) -> anyhow::Result<()> {
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    cluster.prefill.remove(0).kill().await?;
    cluster.wait_ready(nodes - 1).await?;
    cluster.prefill.push(builder.start_node("prefill", 0, &conductor, cluster.folder()).await?);
    cluster.wait_ready(nodes).await
}

fn prefix_fetch(answer: &Answer) -> Option<v1::KvTransfer> {
    answer.finished.timeline.as_ref().and_then(|timeline| timeline.prefix_fetch.clone())
}

#[tokio::test]
async fn a_prefix_that_only_another_node_holds_is_brought_faster_than_computed() -> anyhow::Result<()> {
    let Some(model) = model("a_prefix_that_only_another_node_holds_is_brought_faster_than_computed") else {
        return Ok(());
    };
    for transport in ["shm", "tcp"] {
        let builder = Cluster::model(&model).node_flags(&["--transport", transport]);
        let mut cluster = builder.clone().start().await?;
        let ask = Ask::tokens(prompt(PROMPT_TOKENS)).max_tokens(8).ignore_eos();
        let computed = cluster.ask(ask.clone()).await?;
        assert_eq!((computed.cached_tokens(), prefix_fetch(&computed)), (0, None));
        restart_prefill(&mut cluster, &builder, 2).await?;
        let brought = cluster.ask(ask.clone()).await?;
        let fetch = prefix_fetch(&brought).unwrap();
        println!(
            "{transport}: TTFT {:?} computed, {:?} brought: {} bytes in {:.4} s",
            computed.ttft, brought.ttft, fetch.bytes, fetch.seconds
        );
        assert_eq!(brought.token_ids, computed.token_ids);
        assert_eq!((fetch.bytes, fetch.transport.as_str()), (REUSABLE_BLOCKS * BLOCK_BYTES, transport));
        assert_eq!(u64::from(brought.cached_tokens()), REUSABLE_BLOCKS * 16);
        assert_eq!(brought.kv_transfer().bytes, BLOCK_BYTES, "the decode node had the rest");
        assert!(brought.ttft < computed.ttft, "{:?} for {:?}", brought.ttft, computed.ttft);

        let again = cluster.ask(ask).await?;
        assert_eq!((&again.token_ids, prefix_fetch(&again)), (&computed.token_ids, None));
        assert_eq!(u64::from(again.cached_tokens()), REUSABLE_BLOCKS * 16, "it stays where it was brought to");
        cluster.wait_idle(SECOND).await?;
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test]
async fn without_fetching_everything_is_computed() -> anyhow::Result<()> {
    let Some(model) = model("without_fetching_everything_is_computed") else { return Ok(()) };
    let builder = Cluster::model(&model).conductor_flags(&["--fetch-prefixes", "false"]);
    let mut cluster = builder.clone().start().await?;
    let ask = Ask::tokens(prompt(400)).max_tokens(2).ignore_eos();
    let first = cluster.ask(ask.clone()).await?;
    restart_prefill(&mut cluster, &builder, 2).await?;
    let second = cluster.ask(ask).await?;
    assert_eq!((second.cached_tokens(), prefix_fetch(&second)), (0, None));
    assert_eq!(second.token_ids, first.token_ids);
    cluster.stop().await
}

/// The holder is stopped while it is read from, and then killed: nobody but the reader has to do with it.
#[tokio::test]
async fn a_holder_that_dies_while_it_is_read_changes_nothing() -> anyhow::Result<()> {
    let Some(model) = model("a_holder_that_dies_while_it_is_read_changes_nothing") else { return Ok(()) };
    let builder = Cluster::model(&model);
    let mut cluster = builder.clone().start().await?;
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let prompt = prompt(PROMPT_TOKENS);
    let with_decode = Ask::tokens(prompt.clone()).max_tokens(6).ignore_eos();
    // One token needs no decode node, so the holder is none of the request's own.
    let alone = Ask::tokens(prompt).max_tokens(1).ignore_eos().sampling(|sampling| sampling.logprobs = Some(5));
    let (expected, expected_alone) = (cluster.ask(with_decode.clone()).await?, cluster.ask(alone.clone()).await?);
    let mut cut_off = 0;
    for round in 0..8 {
        restart_prefill(&mut cluster, &builder, 2).await?;
        let holder = cluster.decode.remove(0);
        let http = holder.ready.http.clone().unwrap();
        let granted = "baton_node_leases_total{outcome=\"granted\"}";
        let before = metric(&http, granted).await?;
        let (answer, ()) = tokio::try_join!(cluster.ask(alone.clone()), async {
            let began = Instant::now();
            while metric(&http, granted).await? == before && began.elapsed() < Duration::from_secs(20) {}
            // What is on its way stops in the middle, and then its source is gone.
            signal(holder.pid(), "STOP");
            tokio::time::sleep(Duration::from_millis(100)).await;
            holder.kill().await
        })?;
        assert_eq!(answer.token_ids, expected_alone.token_ids, "round {round}");
        assert_eq!(answer.logprobs, expected_alone.logprobs, "round {round}");
        cut_off += u32::from(prefix_fetch(&answer).is_none());
        println!("round {round}: brought {:?}, TTFT {:?}", prefix_fetch(&answer), answer.ttft);
        // The way it was: a decode node that holds the prefix.
        cluster.wait_ready(1).await?;
        cluster.decode.push(builder.start_node("decode", 0, &conductor, cluster.folder()).await?);
        cluster.wait_ready(2).await?;
        assert_eq!(cluster.ask(with_decode.clone()).await?.token_ids, expected.token_ids, "round {round}");
        if cut_off > 0 {
            break;
        }
    }
    assert!(cut_off > 0, "the holder was never stopped in time");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

/// Tokens of the prompt that no node could hold: everything but whole blocks of what was there before.
fn new_tokens(before: &[u32], prompt: &[u32]) -> u32 {
    let common = before.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    // The KV of the last token of an answer is never computed.
    let held = common.min(before.len() - 1).min(prompt.len() - 1) / 16 * 16;
    (prompt.len() - held) as u32
}

#[tokio::test]
async fn each_turn_of_a_conversation_computes_its_new_text_alone() -> anyhow::Result<()> {
    let Some(model) = model("each_turn_of_a_conversation_computes_its_new_text_alone") else { return Ok(()) };
    let builder = Cluster::model(&model).prefill(1).decode(2);
    let mut cluster = builder.clone().start().await?;
    let subjects = ["bees", "rivers", "clocks", "bread", "stars", "boats", "wool", "salt", "kites", "moss"];
    let mut messages: Vec<(String, String)> = Vec::new();
    let (mut before, mut nodes) = (Vec::new(), std::collections::BTreeSet::new());
    for (turn, subject) in subjects.iter().enumerate() {
        if turn % 3 == 2 {
            // The next turn is computed on a node that has seen nothing of the conversation.
            restart_prefill(&mut cluster, &builder, 3).await?;
        }
        messages.push(("user".into(), format!("Turn {turn}: say something short about {subject}, please.")));
        let asked: Vec<_> = messages.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect();
        let answer = cluster.ask(Ask::messages(&asked).max_tokens(24)).await?;
        let prompt = answer.prompt_token_ids.clone();
        let computed = prompt.len() as u32 - answer.cached_tokens();
        let new = if turn == 0 { prompt.len() as u32 } else { new_tokens(&before, &prompt) };
        println!(
            "turn {turn}: {} tokens, {computed} computed, {new} new; {} -> {}; brought {:?}",
            prompt.len(),
            answer.finished.prefill_node,
            answer.finished.decode_node,
            prefix_fetch(&answer).map(|fetch| fetch.bytes)
        );
        assert_eq!(computed, new, "turn {turn}");
        nodes.insert(answer.finished.decode_node.clone());
        before = prompt;
        before.extend(&answer.token_ids);
        messages.push(("assistant".into(), answer.text));
    }
    println!("decode nodes: {nodes:?}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}
