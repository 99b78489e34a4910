//! The real binaries with a real model: what the cluster says is what the reference says, whichever
//! way it was computed.

use std::time::{Duration, Instant};

use baton_cluster_tests::{Ask, Cluster, model};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_types::Random;
use serde::Deserialize;

const SECOND: Duration = Duration::from_secs(1);
/// Layers, K and V heads, head size and bytes per element of SmolLM2-135M in f16: bytes of one
/// block of 16 tokens in all layers.
const BLOCK_BYTES: u64 = 30 * (3 * 2 * 16 * 64 * 2);

/// One prompt of the reference (f32, same file, Hugging Face transformers).
#[derive(Deserialize)]
struct Reference {
    messages: Option<Vec<Message>>,
    text: String,
    prompt_ids: Vec<u32>,
    greedy: Vec<Position>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

#[derive(Deserialize)]
struct Position {
    id: u32,
    top: Vec<(u32, f32)>,
}

impl Position {
    fn margin(&self) -> f32 {
        self.top[0].1 - self.top[1].1
    }
}

fn reference() -> Vec<Reference> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/text/tests/fixtures/smollm2-135m-greedy.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn top_of(position: &v1::TokenLogprobs, token: u32) -> Option<f32> {
    position.top.iter().find(|top| top.token_id == token).map(|top| top.logprob)
}

/// How near to the reference a compute dtype has to be.
struct Bounds {
    /// Margin from which on the reference's best token must be ours when it is scored; `None`: no
    /// margin decides.
    sure: Option<f32>,
    /// The same when it is generated.
    sure_generated: Option<f32>,
    /// Of the difference of log-probabilities.
    mean: f32,
    max: f32,
}

/// 8 bits swap tokens at any margin now and then: `crates/bench/tests/score.rs` counts them over a
/// whole text, next to llama.cpp's.
const QUANTIZED: Bounds = Bounds { sure: None, sure_generated: None, mean: 0.05, max: 0.5 };

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn f32_tokens_and_logprobs_match_reference() -> anyhow::Result<()> {
    let model = model();
    let cluster = Cluster::model(&model).node_flags(&["--compute-dtype", "f32"]).start().await?;
    compare(cluster, Bounds { sure: Some(0.15), sure_generated: Some(0.15), mean: 0.03, max: 0.25 }).await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn quantized_activations_give_logprobs_near_reference() -> anyhow::Result<()> {
    let model = model();
    compare(Cluster::model(&model).start().await?, QUANTIZED).await
}

/// Two KV compatibility classes: neither role caches what the other computes.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn prefill_in_f32_for_int8_decode_gives_logprobs_near_reference() -> anyhow::Result<()> {
    let model = model();
    let cluster = Cluster::model(&model).prefill_flags(&["--compute-dtype", "f32"]).start().await?;
    // Prompts are scored in single precision, tokens generated with 8 bits.
    compare(cluster, Bounds { sure: Some(0.15), sure_generated: None, mean: 0.03, max: 0.25 }).await
}

async fn compare(cluster: Cluster, bounds: Bounds) -> anyhow::Result<()> {
    let mut differences = Vec::new();
    let mut positions = 0;
    for (index, entry) in reference().iter().enumerate() {
        let text = cluster.ask(Ask::text(&entry.text).max_tokens(1)).await?;
        assert_eq!(text.prompt_token_ids, entry.prompt_ids, "entry {index}: text");
        if let Some(messages) = &entry.messages {
            let messages: Vec<_> = messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
            let templated = cluster.ask(Ask::messages(&messages).max_tokens(1)).await?;
            assert_eq!(templated.prompt_token_ids, entry.prompt_ids, "entry {index}: messages");
        }
        // Teacher-forced: the prompt and the reference's tokens, scored.
        let mut tokens = entry.prompt_ids.clone();
        tokens.extend(entry.greedy.iter().map(|p| p.id));
        let scored =
            cluster.ask(Ask::tokens(tokens.clone()).max_tokens(1).sampling(|s| s.prompt_logprobs = Some(5))).await?;
        assert_eq!(scored.prompt_logprobs.len(), tokens.len());
        for (step, expected) in entry.greedy.iter().enumerate() {
            let position = &scored.prompt_logprobs[entry.prompt_ids.len() - 1 + step];
            positions += 1;
            if bounds.sure.is_some_and(|sure| expected.margin() >= sure) {
                assert_eq!(position.top[0].token_id, expected.id, "entry {index}, step {step}");
            }
            let logprob = top_of(position, expected.top[0].0)
                .unwrap_or_else(|| panic!("entry {index}, step {step}: not in the top 5"));
            differences.push((logprob - expected.top[0].1).abs());
        }
        // Greedy: equal up to the first position where the reference itself is undecided.
        let Some(sure) = bounds.sure_generated else { continue };
        let decided = entry.greedy.iter().take_while(|p| p.margin() >= sure).count();
        let greedy = cluster.ask(Ask::tokens(entry.prompt_ids.clone()).max_tokens(entry.greedy.len() as u32)).await?;
        let expected: Vec<_> = entry.greedy.iter().take(decided).map(|p| p.id).collect();
        assert_eq!(greedy.token_ids[..decided.min(greedy.token_ids.len())], expected, "entry {index}");
    }
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    let max = differences.iter().copied().fold(0.0, f32::max);
    println!("{positions} positions: difference of log-probabilities {mean:.5} on average, {max:.5} at most");
    assert!(mean < bounds.mean && max < bounds.max, "mean {mean}, max {max}");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

/// Text of about that many tokens.
fn long_text(words: usize) -> String {
    let names = ["river", "stone", "lamp", "garden", "window", "paper", "cloud", "bridge", "winter", "song"];
    let sentence =
        |i: usize| format!("The {} number {} stands near the {}. ", names[i % 10], i, names[(i * 7 + 3) % 10]);
    (0..words).map(sentence).collect()
}

async fn prompt_of(cluster: &Cluster, tokens: usize) -> anyhow::Result<Vec<u32>> {
    let ids = cluster.ask(Ask::text(&long_text(tokens / 8)).max_tokens(1)).await?.prompt_token_ids;
    anyhow::ensure!(ids.len() >= tokens, "{} tokens", ids.len());
    Ok(ids[..tokens].to_vec())
}

/// What prefill nodes score and what decode nodes generate are the same bits. So each generated
/// token is the best one when it is scored.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn generated_tokens_are_the_best_when_prefill_nodes_score_them() -> anyhow::Result<()> {
    let cluster = Cluster::model(&model()).start().await?;
    for (index, entry) in reference().iter().enumerate() {
        let count = entry.greedy.len() as u32;
        let greedy = cluster.ask(Ask::tokens(entry.prompt_ids.clone()).max_tokens(count)).await?.token_ids;
        let tokens: Vec<u32> = entry.prompt_ids.iter().chain(&greedy).copied().collect();
        let scored = cluster.ask(Ask::tokens(tokens).max_tokens(1).sampling(|s| s.prompt_logprobs = Some(1))).await?;
        let best = scored.prompt_logprobs[entry.prompt_ids.len() - 1..].iter().map(|position| position.top[0].token_id);
        assert_eq!(best.take(greedy.len()).collect::<Vec<_>>(), greedy, "entry {index}");
    }
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

/// With the defaults: part of the prompt is computed at the decode node, and its KV need not be
/// pushed.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn kv_of_long_prompt_is_pushed_at_most_once_and_reused() -> anyhow::Result<()> {
    let model = model();
    let cluster = Cluster::model(&model).start().await?;
    let mut prompt = prompt_of(&cluster, 1500).await?;
    prompt.rotate_left(700);
    let ask = Ask::tokens(prompt).max_tokens(4).ignore_eos();
    let first = cluster.ask(ask.clone()).await?;
    let transfer = first.kv_transfer();
    println!("1,500 tokens: TTFT {:?}, {} of 94 blocks pushed", first.ttft, transfer.bytes / BLOCK_BYTES);
    assert!(transfer.bytes > 0 && transfer.bytes <= 94 * BLOCK_BYTES, "{}", transfer.bytes);

    let second = cluster.ask(ask).await?;
    println!("again: TTFT {:?}, {} bytes transferred", second.ttft, second.kv_transfer().bytes);
    assert_eq!(second.token_ids, first.token_ids);
    assert_eq!((first.cached_tokens(), second.cached_tokens()), (0, 1488));
    assert_eq!(second.kv_transfer().bytes, BLOCK_BYTES, "only the last, partial block");
    assert!(second.ttft * 4 < first.ttft, "{:?} after {:?}", second.ttft, first.ttft);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

/// One chunk as long as the prompt, at one node: the bytes are known exactly.
#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn kv_of_prompt_computed_at_one_node_is_pushed_once_and_reused() -> anyhow::Result<()> {
    let model = model();
    let builder = Cluster::model(&model).prefill_flags(&["--chunk-tokens", "2048", "--threads", "2"]);
    let cluster = builder.conductor_flags(&["--partial-prefill", "false"]).start().await?;
    // Another prompt than the one that is measured: its blocks must not be cached.
    let mut prompt = prompt_of(&cluster, 1500).await?;
    prompt.rotate_left(700);
    let ask = Ask::tokens(prompt).max_tokens(4).ignore_eos();
    let began = Instant::now();
    let first = cluster.ask(ask.clone()).await?;
    let took = began.elapsed();
    let transfer = first.kv_transfer();
    assert_eq!(transfer.bytes, 94 * BLOCK_BYTES);
    let early = transfer.bytes_at_compute_end as f64 / transfer.bytes as f64;
    println!(
        "1,500 tokens: TTFT {:?}, {} bytes in {:.3} s, {:.1} % acknowledged when the last layer ended, {:.4} s exposed",
        first.ttft,
        transfer.bytes,
        transfer.seconds,
        early * 100.0,
        transfer.exposed_seconds
    );
    assert!(early >= 0.8, "{early}");
    assert!(took < Duration::from_secs(60), "{took:?}");

    let second = cluster.ask(ask).await?;
    println!(
        "again: TTFT {:?}, {} cached tokens, {} bytes transferred",
        second.ttft,
        second.cached_tokens(),
        second.kv_transfer().bytes
    );
    assert_eq!(second.token_ids, first.token_ids);
    assert_eq!((first.cached_tokens(), second.cached_tokens()), (0, 1488));
    assert_eq!(second.kv_transfer().bytes, BLOCK_BYTES, "only the last, partial block");
    assert!(second.ttft * 4 < first.ttft, "{:?} after {:?}", second.ttft, first.ttft);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

async fn all_at_once(cluster: &Cluster, asks: &[Ask]) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut tasks = tokio::task::JoinSet::new();
    for (index, ask) in asks.iter().enumerate() {
        let mut client = cluster.inference();
        let ask = ask.clone();
        tasks.spawn(async move {
            let mut stream = client.generate(ask.0).await?.into_inner();
            let mut tokens = Vec::new();
            while let Some(response) = stream.message().await? {
                if let Some(Event::Delta(delta)) = response.event {
                    tokens.extend(delta.token_ids);
                }
            }
            anyhow::Ok((index, tokens))
        });
    }
    let mut outputs = vec![Vec::new(); asks.len()];
    while let Some(done) = tasks.join_next().await {
        let (index, tokens) = done??;
        outputs[index] = tokens;
    }
    Ok(outputs)
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn tokens_are_the_same_on_1_1_and_2_2_nodes_alone_and_batched() -> anyhow::Result<()> {
    let model = model();
    let topics = ["rain", "bread", "trains", "chess", "whales", "maps", "violins", "ice"];
    let asks: Vec<_> = (0..16)
        .map(|i| {
            let ask =
                Ask::user(&format!("Tell me something about {}{}", topics[i % 8], ".".repeat(i * 3))).max_tokens(12);
            if i % 2 == 0 { ask } else { ask.seeded(i as u64, 0.9) }
        })
        .collect();
    let small = Cluster::model(&model).start().await?;
    let mut alone = Vec::new();
    for ask in &asks {
        alone.push(small.ask(ask.clone()).await?.token_ids);
    }
    assert_eq!(all_at_once(&small, &asks).await?, alone, "1 + 1, 16 at once");
    small.wait_idle(SECOND).await?;
    small.stop().await?;

    let large = Cluster::model(&model).prefill(2).decode(2).prefill_flags(&["--chunk-tokens", "64"]).start().await?;
    assert_eq!(all_at_once(&large, &asks).await?, alone, "2 + 2, 16 at once");
    for (ask, expected) in asks.iter().zip(&alone).take(4) {
        assert_eq!(&large.ask(ask.clone()).await?.token_ids, expected, "2 + 2, alone");
    }
    large.wait_idle(SECOND).await?;
    large.stop().await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn aborted_and_finished_requests_leak_no_blocks_or_memory() -> anyhow::Result<()> {
    /// Longest step of a slow machine: what is aborted meanwhile is released after it.
    const STEP: Duration = Duration::from_secs(10);
    let model = model();
    let cache_bytes: u64 = 200 << 20;
    let cache = cache_bytes.to_string();
    let builder = Cluster::model(&model).prefill(2).decode(2).node_flags(&["--cache-bytes", &cache]);
    // A slow machine is overloaded by these requests; that they are all served is another test's.
    let cluster = builder.conductor_flags(&["--max-wait-ms", "600000"]).start().await?;
    let text = prompt_of(&cluster, 400).await?;
    // What each process may grow by: its cache, and 64 MiB for buffers that are made when first
    // used. A decode node also maps the prefill nodes' caches to read from; those pages are theirs
    // and are not counted twice.
    let nodes = cluster.prefill.iter().chain(&cluster.decode).map(|process| (process, cache_bytes));
    let processes: Vec<_> = nodes.chain([(&cluster.conductor, 0)]).collect();
    let before: Vec<u64> = processes.iter().map(|(p, _)| p.resident_bytes()).collect::<Result<_, _>>()?;

    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(16));
    let mut tasks = tokio::task::JoinSet::new();
    let mut random = Random::new(7);
    for index in 0..100u64 {
        let length = 8 + random.next_u64() as usize % 240;
        let start = random.next_u64() as usize % 100;
        let abort_after = (index % 3 == 0).then(|| Duration::from_millis(random.next_u64() % 1500));
        let ask = Ask::tokens(text[start..start + length].to_vec())
            // What is to be aborted does not end before, however fast the machine.
            .max_tokens(4 + (random.next_u64() % 20) as u32 + if abort_after.is_some() { 1000 } else { 0 })
            .ignore_eos();
        let mut client = cluster.inference();
        let places = places.clone();
        tasks.spawn(async move {
            let _place = places.acquire_owned().await?;
            let whole = async {
                let mut stream = client.generate(ask.0).await?.into_inner();
                let mut finished = false;
                while let Some(response) = stream.message().await? {
                    finished = matches!(response.event, Some(Event::Finished(_)));
                }
                anyhow::Ok(finished)
            };
            match abort_after {
                None => whole.await,
                // Dropping the stream is the client going away.
                Some(after) => match tokio::time::timeout(after, whole).await {
                    Ok(ended) => anyhow::bail!("it was to be aborted after {after:?}: {ended:?}"),
                    Err(_) => Ok(true),
                },
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        assert!(done??, "a request ended without Finished");
    }
    cluster.wait_idle(STEP).await?;
    // One by one, so that each abort's own release is seen: before the prompt is computed,
    // meanwhile, and among tokens. Each has a prompt of its own, of which no block is cached.
    let ask = |from: usize| Ask::tokens(text[from..340].to_vec()).max_tokens(1500).ignore_eos();
    for (from, after) in (100..).zip([0, 10, 30, 120]) {
        let aborted = tokio::time::timeout(Duration::from_millis(after), cluster.ask(ask(from))).await;
        assert!(aborted.is_err(), "it was to be aborted after {after} ms");
        cluster.wait_idle(STEP).await?;
    }
    for (from, deltas) in (104..).zip([1, 20, 300]) {
        let mut stream = cluster.inference().generate(ask(from).0).await?.into_inner();
        for _ in 0..=deltas {
            let event = stream.message().await?.and_then(|response| response.event);
            assert!(matches!(event, Some(Event::Accepted(_) | Event::Delta(_))), "it was to be aborted: {event:?}");
        }
        drop(stream);
        cluster.wait_idle(STEP).await?;
    }
    for ((process, cache), before) in processes.iter().zip(before) {
        let grown = process.resident_bytes()?.saturating_sub(before);
        println!(
            "{} grew by {:.1} MB; its cache holds up to {:.1} MB",
            process.log.display(),
            grown as f64 / 1e6,
            *cache as f64 / 1e6
        );
        assert!(grown < cache + (64 << 20), "{grown} bytes");
    }
    cluster.stop().await
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn idle_processes_use_less_than_one_percent_of_a_core() -> anyhow::Result<()> {
    let model = model();
    // Helper threads are there, and have worked before they sleep.
    let cluster = Cluster::model(&model).node_flags(&["--threads", "2"]).start().await?;
    cluster.ask(Ask::tokens(prompt_of(&cluster, 200).await?).max_tokens(8)).await?;
    cluster.wait_idle(SECOND).await?;
    let processes: Vec<_> = cluster.prefill.iter().chain(&cluster.decode).chain([&cluster.conductor]).collect();
    let times = || processes.iter().map(|process| process.cpu_time()).collect::<anyhow::Result<Vec<_>>>();
    let before = times()?;
    let began = Instant::now();
    tokio::time::sleep(10 * SECOND).await;
    let after = times()?;
    let took = began.elapsed();
    for (process, (before, after)) in processes.iter().zip(before.into_iter().zip(after)) {
        let share = (after - before).as_secs_f64() / took.as_secs_f64();
        println!("{}: {:.2} % of a core", process.log.display(), 100.0 * share);
        assert!(share < 0.01, "{}: {share} of a core", process.log.display());
    }
    cluster.stop().await
}
