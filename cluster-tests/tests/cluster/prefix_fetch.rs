//! Prefixes that another node holds: fetched instead of computed, with the same tokens, whatever
//! becomes of the holder.

use std::time::{Duration, Instant};

use baton_cluster_tests::{Answer, Ask, Cluster, model, signal};
use baton_proto::v1;

const SECOND: Duration = Duration::from_secs(1);
/// Bytes of a row of 64 elements in f16, and as bytes with a scale.
const F16_ROW: u64 = 64 * 2;
const INT8_ROW: u64 = 64 + 4;
/// Of the long prompt; the last one is always computed.
const PROMPT_TOKENS: usize = 1500;
const REUSABLE_BLOCKS: u64 = (PROMPT_TOKENS as u64 - 1) / 16;

/// Of SmolLM2-135M, bytes of a block of 16 tokens in all 30 layers: 3 heads of K and of V.
const fn block_bytes(row_bytes: u64) -> u64 {
    30 * (3 * 2 * 16 * row_bytes)
}

/// A prompt: any tokens will do.
fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| 1000 + i * 7919 % 40_000).collect()
}

fn prefix_fetch(answer: &Answer) -> Option<v1::KvTransfer> {
    answer.finished.timeline.as_ref().and_then(|timeline| timeline.prefix_fetch.clone())
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn prefix_cached_at_another_node_is_fetched_faster_than_computed() -> anyhow::Result<()> {
    let model = model();
    for (transport, kv_dtype, row_bytes) in
        [("shm", "f16", F16_ROW), ("tcp", "f16", F16_ROW), ("shm", "int8", INT8_ROW), ("tcp", "int8", INT8_ROW)]
    {
        let block_bytes = block_bytes(row_bytes);
        let builder = Cluster::model(&model).node_flags(&["--transport", transport, "--kv-dtype", kv_dtype]);
        let builder = builder.conductor_flags(&["--kv-dtype", kv_dtype]);
        let mut cluster = builder.clone().start().await?;
        let ask = Ask::tokens(prompt(PROMPT_TOKENS)).max_tokens(8).ignore_eos();
        let computed = cluster.ask(ask.clone()).await?;
        assert_eq!((computed.cached_tokens(), prefix_fetch(&computed)), (0, None));
        cluster.restart(&builder, "prefill").await?;
        let brought = cluster.ask(ask.clone()).await?;
        let fetch = prefix_fetch(&brought).unwrap();
        println!(
            "{transport}, {kv_dtype}: TTFT {:?} computed, {:?} fetched: {} bytes in {:.4} s",
            computed.ttft, brought.ttft, fetch.bytes, fetch.seconds
        );
        assert_eq!(brought.token_ids, computed.token_ids);
        assert_eq!((fetch.bytes, fetch.transport.as_str()), (REUSABLE_BLOCKS * block_bytes, transport));
        assert_eq!(u64::from(brought.cached_tokens()), REUSABLE_BLOCKS * 16);
        assert_eq!(brought.kv_transfer().bytes, block_bytes, "the decode node had the rest");
        assert!(brought.ttft < computed.ttft, "{:?} for {:?}", brought.ttft, computed.ttft);

        let again = cluster.ask(ask).await?;
        assert_eq!((&again.token_ids, prefix_fetch(&again)), (&computed.token_ids, None));
        assert_eq!(u64::from(again.cached_tokens()), REUSABLE_BLOCKS * 16, "the node that fetched it keeps it");
        cluster.wait_idle(SECOND).await?;
        cluster.stop().await?;
    }
    Ok(())
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn prefix_is_computed_if_fetching_is_off() -> anyhow::Result<()> {
    let model = model();
    let builder = Cluster::model(&model).conductor_flags(&["--fetch-prefixes", "false"]);
    let mut cluster = builder.clone().start().await?;
    let ask = Ask::tokens(prompt(400)).max_tokens(2).ignore_eos();
    let first = cluster.ask(ask.clone()).await?;
    cluster.restart(&builder, "prefill").await?;
    let second = cluster.ask(ask).await?;
    assert_eq!((second.cached_tokens(), prefix_fetch(&second)), (0, None));
    assert_eq!(second.token_ids, first.token_ids);
    cluster.stop().await
}

/// The holder is stopped while it is read from, and then killed: only the reader has to do with it.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn death_of_holder_during_fetch_changes_no_token() -> anyhow::Result<()> {
    let model = model();
    let builder = Cluster::model(&model);
    let mut cluster = builder.clone().start().await?;
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let prompt = prompt(PROMPT_TOKENS);
    let with_decode = Ask::tokens(prompt.clone()).max_tokens(6).ignore_eos();
    // One token needs no decode node, so the holder is none of the request's own.
    let alone = Ask::tokens(prompt).max_tokens(1).ignore_eos().sampling(|sampling| sampling.logprobs = Some(5));
    let expected = cluster.ask(with_decode.clone()).await?;
    let expected_alone = cluster.ask(alone.clone()).await?;
    let mut cut_off = 0;
    for round in 0..8 {
        cluster.restart(&builder, "prefill").await?;
        let holder = cluster.decode.remove(0);
        let granted = "baton_node_leases_total{outcome=\"granted\"}";
        let before = holder.metric(granted).await?;
        let (answer, ()) = tokio::try_join!(cluster.ask(alone.clone()), async {
            let began = Instant::now();
            while holder.metric(granted).await? == before && began.elapsed() < Duration::from_secs(20) {}
            // What is on its way stops in the middle, and then its source is gone.
            signal(holder.pid(), "STOP");
            tokio::time::sleep(Duration::from_millis(100)).await;
            holder.kill().await
        })?;
        assert_eq!(answer.token_ids, expected_alone.token_ids, "round {round}");
        assert_eq!(answer.logprobs, expected_alone.logprobs, "round {round}");
        cut_off += u32::from(prefix_fetch(&answer).is_none());
        println!("round {round}: fetched {:?}, TTFT {:?}", prefix_fetch(&answer), answer.ttft);
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

/// A holder that stands still delays the other requests of its reader's step for half a second at
/// most. The reader's part of the step is thrown away, and computed later.
#[tokio::test]
async fn stalled_holder_does_not_delay_other_prompts() -> anyhow::Result<()> {
    let profile = tempfile::NamedTempFile::new()?;
    // 500 tokens a second are computed, and 2000 come from another node: of the 4 layers one in 132
    // ms.
    let numbers = r#"{"name": "slow", "prefill_base": 0.001, "prefill_per_token": 0.002, "prefill_per_token_pair": 0.0, "decode_base": 0.002,
        "decode_per_sequence": 0.0, "decode_per_kv_token": 0.0, "chunk_tokens": 1024, "layers": 80, "kv_bytes_per_token": 327680, "decode_kv_tokens": 4096,
        "cache_tokens": 8192, "max_running": 8, "network_bytes_per_s": 655360000, "network_latency_s": 0.001, "ssd_bytes_per_s": 1.0, "step_noise": 0.0}"#;
    std::fs::write(profile.path(), numbers)?;
    let fitted = format!("fitted:{}", profile.path().display());
    let builder = Cluster::mock().node_flags(&["--mock-profile", &fitted]);
    let mut cluster = builder.clone().start().await?;
    let tokens = |n: usize, from: usize| -> Vec<u32> { (from..from + n).map(|i| (i * 7 % 250) as u32).collect() };
    let whole = Ask::tokens(tokens(1056 + 512, 0)).max_tokens(1);
    let late = "baton_prefill_prefixes_late_total";
    let granted = "baton_node_leases_total{outcome=\"granted\"}";
    cluster.ask(Ask::tokens(tokens(1056, 0)).max_tokens(2).ignore_eos()).await?;
    let expected = cluster.ask(whole.clone()).await?.token_ids;
    let mut was_late = false;
    for round in 0..6 {
        cluster.restart(&builder, "prefill").await?;
        let holder = &cluster.decode[0];
        let before = holder.metric(granted).await?;
        let (answer, other) = tokio::try_join!(cluster.ask(whole.clone()), async {
            let began = Instant::now();
            while holder.metric(granted).await? == before && began.elapsed() < 10 * SECOND {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            // The first layer is there, and the step begins; the second one is not.
            tokio::time::sleep(Duration::from_millis(200)).await;
            signal(holder.pid(), "STOP");
            let other = cluster.ask(Ask::tokens(tokens(256, 1 + round)).max_tokens(1)).await;
            signal(holder.pid(), "CONT");
            other
        })?;
        assert_eq!(answer.token_ids, expected, "round {round}");
        was_late = cluster.prefill[0].metric(late).await? > 0.0;
        println!("round {round}: late: {was_late}, TTFT {:?}, of the other prompt {:?}", answer.ttft, other.ttft);
        // The step would have been over 1 s after the stop, and the other prompt takes half a
        // second.
        assert!(other.ttft < 5 * SECOND / 2, "round {round}: {:?}", other.ttft);
        if was_late {
            assert_eq!(prefix_fetch(&answer), None);
            break;
        }
    }
    assert!(was_late, "no step ever waited for the holder");

    // It stands still before it is asked: its reader does not wait for its answer for long, and a
    // lease that it gives later comes back to it.
    cluster.restart(&builder, "prefill").await?;
    let holder = &cluster.decode[0];
    let before = holder.metric(granted).await?;
    signal(holder.pid(), "STOP");
    let computed = cluster.ask(whole).await;
    signal(holder.pid(), "CONT");
    let computed = computed?;
    println!("stopped before it is asked: TTFT {:?}", computed.ttft);
    assert_eq!((computed.token_ids.clone(), prefix_fetch(&computed)), (expected, None));
    assert!(computed.ttft > 2 * SECOND, "it was not asked: {:?}", computed.ttft);
    // Its reader has given the connection up, too. Whether it still answers the question or not, it
    // keeps nothing for it.
    baton_runtime::sleep(SECOND).await;
    println!("leases that no reader waited for: {}", holder.metric(granted).await? - before);
    cluster.wait_idle(5 * SECOND).await?;
    cluster.stop().await
}

/// Tokens of the prompt that no node could hold: everything but whole blocks of what was there
/// before.
fn new_tokens(before: &[u32], prompt: &[u32]) -> u32 {
    let common = before.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    // The KV of the last token of an answer is never computed.
    let held = common.min(before.len() - 1).min(prompt.len() - 1) / 16 * 16;
    (prompt.len() - held) as u32
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn conversation_turn_computes_only_its_new_tokens() -> anyhow::Result<()> {
    let model = model();
    let builder = Cluster::model(&model).prefill(1).decode(2);
    let mut cluster = builder.clone().start().await?;
    let subjects = ["bees", "rivers", "clocks", "bread", "stars", "boats", "wool", "salt", "kites", "moss"];
    let mut messages: Vec<(String, String)> = Vec::new();
    let mut before = Vec::new();
    let mut nodes = std::collections::BTreeSet::new();
    for (turn, subject) in subjects.iter().enumerate() {
        if turn % 3 == 2 {
            // The next turn is computed on a node that has seen nothing of the conversation.
            cluster.restart(&builder, "prefill").await?;
        }
        messages.push(("user".into(), format!("Turn {turn}: say something short about {subject}, please.")));
        let asked: Vec<_> = messages.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect();
        let answer = cluster.ask(Ask::messages(&asked).max_tokens(24)).await?;
        let prompt = answer.prompt_token_ids.clone();
        let computed = prompt.len() as u32 - answer.cached_tokens();
        let new = if turn == 0 { prompt.len() as u32 } else { new_tokens(&before, &prompt) };
        println!(
            "turn {turn}: {} tokens, {computed} computed, {new} new; {} -> {}; fetched {:?}",
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

#[tokio::test]
async fn reader_of_another_kv_compatibility_class_gets_no_lease() -> anyhow::Result<()> {
    let cluster = Cluster::mock().start().await?;
    for node in cluster.nodes().await? {
        let info = node.info.unwrap();
        let mut client = v1::node_client::NodeClient::connect(info.address.clone()).await?;
        let key = baton_types::RequestKey { request: baton_types::RequestId(1), attempt: baton_types::Attempt(0) };
        let mut ask = async |kv_class: &str| {
            let request = v1::LeaseRequest {
                protocol_version: baton_proto::PROTOCOL_VERSION,
                key: Some(key.into()),
                reader_node: "p9".into(),
                reader_generation: info.generation.clone(),
                target_generation: info.generation.clone(),
                layout: info.layout.clone(),
                block_hashes: vec![7; 16],
                kv_class: kv_class.into(),
            };
            client.lease(request).await.unwrap_err()
        };
        let refused = ask("another").await;
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        assert!(refused.message().starts_with("kv_class: "), "{}", refused.message());
        // Its own reader's block is not there; one that names no class is refused.
        assert_eq!(ask(&info.kv_class).await.code(), tonic::Code::NotFound);
        assert_eq!(ask("").await.code(), tonic::Code::InvalidArgument);
    }
    cluster.stop().await
}
