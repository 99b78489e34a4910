//! Requests that leave the length of their answer open, in clusters that hold less than the
//! model's context.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{Ask, Cluster, HttpAnswer, model};
use futures::future::try_join_all;
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);
/// Context of the models below, in tokens.
const CONTEXT: u32 = 131_072;
/// Requests of each API at once.
const REQUESTS: usize = 50;
const ANSWER: &str = "An answer that ends by itself.";

/// Posts a request that must be served; gives its answer.
async fn post(cluster: &Cluster, path: &str, body: Value) -> anyhow::Result<Value> {
    let HttpAnswer { status, body, .. } = cluster.http_with(path, &[], Some(&body.to_string())).await?;
    anyhow::ensure!(status == 200, "{path}: {status}: {body}");
    Ok(serde_json::from_str(&body)?)
}

async fn max_model_len(cluster: &Cluster) -> anyhow::Result<u64> {
    let (_, models) = cluster.http("/v1/models", None).await?;
    let models: Value = serde_json::from_str(&models)?;
    models["data"][0]["max_model_len"].as_u64().context("no max_model_len")
}

/// A cluster of one prefill and two decode nodes, of which the second has `large` blocks of 16
/// tokens, and the first half as many.
async fn two_sizes(builder: baton_cluster_tests::Builder, large: u32) -> anyhow::Result<Cluster> {
    let blocks = large.to_string();
    let half = (large / 2).to_string();
    let own = builder.clone();
    let mut cluster = builder.prefill_flags(&["--cache-blocks", &blocks]).decode_flags(&["--cache-blocks", &half]);
    cluster = cluster.conductor_flags(&["--prompts-at-decode", "never"]);
    let mut cluster = cluster.start().await?;
    let conductor = format!("http://{}", cluster.conductor.ready.grpc);
    let node = own.decode_flags(&["--cache-blocks", &blocks]);
    let node = node.start_node("decode", 1, &conductor, cluster.folder()).await?;
    cluster.decode.push(node);
    cluster.wait_ready(3).await?;
    Ok(cluster)
}

fn answers(folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join("answers.json");
    std::fs::write(&path, json!([{"text": ANSWER}]).to_string())?;
    Ok(path)
}

#[tokio::test]
async fn requests_without_a_limit_are_served_over_each_api() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = answers(folder.path())?;
    let builder = Cluster::mock().node_flags(&["--mock-answers", &file.display().to_string()]);
    // 2,048 and 1,024 tokens of KV, in a context of 131,072.
    let cluster = two_sizes(builder, 128).await?;
    let fits = max_model_len(&cluster).await?;
    assert_eq!(fits, 2049);
    let message = json!([{"role": "user", "content": "Say something."}]);
    let chat = json!({"messages": message});
    let response = json!({"input": "Say something."});
    // Anthropic's clients name the largest limit that they know.
    let anthropic = json!({"messages": message, "max_tokens": 128_000});
    // As the template begins an answer: its mark is token 258.
    let tokens: Vec<u32> = [258].into_iter().chain("assistant\n".bytes().map(u32::from)).collect();
    let completion = json!({"prompt": tokens, "max_tokens": 1_000_000});
    let apis = [
        ("/v1/chat/completions", &chat, "/choices/0/message/content"),
        ("/v1/responses", &response, "/output/0/content/0/text"),
        ("/v1/messages", &anthropic, "/content/0/text"),
        ("/v1/completions", &completion, "/choices/0/text"),
    ];
    for (path, body, text) in apis {
        let whole = try_join_all((0..REQUESTS).map(|_| post(&cluster, path, body.clone()))).await?;
        assert!(whole.iter().all(|answer| answer.pointer(text) == Some(&json!(ANSWER))), "{path}: {}", whole[0]);
    }
    let asks = (0..REQUESTS).map(|_| cluster.ask(Ask::user("Say something.").max_tokens(u32::MAX)));
    for answer in try_join_all(asks).await? {
        assert_eq!(answer.text, ANSWER);
    }
    let capped = cluster.conductor.metric("baton_conductor_requests_capped_total{reason=\"nodes\"}").await?;
    assert_eq!(capped as usize, 5 * REQUESTS);
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(3000)}]});
    let refused = cluster.http_with("/v1/chat/completions", &[], Some(&long.to_string())).await?;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("context_length_exceeded"), "{}", refused.body);
    // The alert for nodes that are too small goes by this.
    let rejections = "baton_conductor_rejections_total{kind=\"invalid\",stage=\"placement\"}";
    assert_eq!(cluster.conductor.metric(rejections).await? as usize, 1);
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

#[tokio::test]
async fn answer_that_outgrows_its_node_migrates_or_ends_with_length() -> anyhow::Result<()> {
    // Noise that never ends: 641 tokens at one node, 1,281 at the other.
    let cluster = two_sizes(Cluster::mock(), 80).await?;
    let chat = json!({"messages": [{"role": "user", "content": "Go on."}]});
    let answers = try_join_all((0..6).map(|_| post(&cluster, "/v1/chat/completions", chat.clone()))).await?;
    let mut totals = Vec::new();
    for answer in &answers {
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        totals.push(answer["usage"]["total_tokens"].as_u64().context("usage")?);
    }
    let migrated = cluster.conductor.metric("baton_conductor_migrations_total{outcome=\"done\"}").await?;
    println!("tokens of the answers and their prompts: {totals:?}, {migrated} migrations");
    // What the larger node has no room for at the time ends at the smaller one.
    assert!(totals.iter().all(|total| [641, 1281].contains(total)), "{totals:?}");
    assert!(totals.contains(&1281) && migrated > 0.0, "{totals:?}, {migrated} migrations");
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}

/// The model's file with another context length.
fn with_context(model: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let mut bytes = std::fs::read(model)?;
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|found| found == key).context("no context length")?;
    let value = at + key.len();
    // A u32 of GGUF: its type, 4, and then the number.
    anyhow::ensure!(bytes[value..value + 4] == 4u32.to_le_bytes(), "another type");
    bytes[value + 4..value + 8].copy_from_slice(&CONTEXT.to_le_bytes());
    let path = folder.join("long.gguf");
    std::fs::write(&path, bytes)?;
    Ok(path)
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn model_with_a_long_context_serves_chats_without_a_limit() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let long = with_context(&model(), folder.path())?;
    let cluster = two_sizes(Cluster::model(&long), 64).await?;
    assert_eq!(max_model_len(&cluster).await?, 1025);
    let questions = ["Say hello.", "Name a colour.", "What is 1 + 1?", "Name a river.", "Name a month."];
    let chats = questions.map(|question| {
        let body = json!({"messages": [{"role": "user", "content": question}], "temperature": 0});
        post(&cluster, "/v1/chat/completions", body)
    });
    for answer in try_join_all(chats).await? {
        let tokens = answer["usage"]["total_tokens"].as_u64().context("usage")?;
        assert!(tokens <= 1025, "{answer}");
        assert!(["stop", "length"].contains(&answer["choices"][0]["finish_reason"].as_str().unwrap_or_default()));
    }
    cluster.wait_idle(SECOND).await?;
    cluster.stop().await
}
