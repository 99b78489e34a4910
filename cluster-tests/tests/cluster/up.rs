//! `baton up` and the commands, as a person uses them.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_cluster_tests::binary;
use serde_json::Value;
use tokio::process::{Child, Command};

const READY: Duration = Duration::from_secs(30);

pub fn baton(arguments: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(binary("baton")?);
    for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("BATON_")) {
        command.env_remove(key);
    }
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

async fn json(arguments: &[&str]) -> anyhow::Result<Value> {
    let output = baton(arguments)?.output().await?;
    anyhow::ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// Starts a cluster with these arguments on free ports. What it is: where its processes listen,
/// once they do; `ready.json` in the folder has it, too.
pub async fn start(folder: &Path, arguments: &[&str]) -> anyhow::Result<(Child, Value)> {
    let ready_file = folder.join("ready.json");
    let ready_path = ready_file.display().to_string();
    let ports = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ready-file", &ready_path];
    let up = baton(&[&["up"][..], arguments, &ports].concat())?.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    Ok((up, read_ready(&ready_file, None).await?))
}

/// The conductors of a cluster, as `--conductor` takes them.
pub fn conductors(ready: &Value) -> anyhow::Result<String> {
    let conductors = ready["conductors"].as_array().context("conductors")?;
    Ok(conductors.iter().filter_map(|conductor| conductor["grpc"].as_str()).collect::<Vec<_>>().join(","))
}

pub async fn read_ready(path: &Path, other_than: Option<&Value>) -> anyhow::Result<Value> {
    let began = Instant::now();
    while began.elapsed() < READY {
        let read = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        if let Some(ready) = read.filter(|ready| Some(ready) != other_than) {
            return Ok(ready);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("{} was not written within {READY:?}", path.display())
}

pub async fn stop(mut up: Child) -> anyhow::Result<()> {
    let pid = up.id().context("it has ended")?;
    Command::new("sh").args(["-c", &format!("kill -TERM {pid}")]).status().await?;
    let status = tokio::time::timeout(Duration::from_secs(30), up.wait()).await??;
    anyhow::ensure!(status.success(), "baton up ended with {status}");
    Ok(())
}

/// Where a prompt would go is where it goes, what is cached is seen, and a refusal has its
/// estimate.
async fn check_explanations(conductor: &str) -> anyhow::Result<()> {
    let prompt = "What is worth saying is worth saying twice. ".repeat(20);
    let explain = async |rest: &[&str]| {
        json(&[&["--conductor", conductor, "--json", "explain"], rest, &[prompt.as_str()]].concat()).await
    };
    let before = explain(&[]).await?;
    let names = |of: &str| before[of].as_array().unwrap().iter().map(|row| row["node"].clone()).collect::<Vec<_>>();
    assert_eq!((names("prefill"), names("decode").len()), (vec!["prefill-0".into()], 2), "{before}");
    assert_eq!((&before["placed"]["cached_tokens"], &before["prefill"][0]["verdict"]), (&0.into(), &"chosen".into()));
    let answer = json(&["--conductor", conductor, "--json", "generate", "--max-tokens", "3", &prompt]).await?;
    assert_eq!((&answer["prefill_node"], &answer["cached_tokens"]), (&before["placed"]["prefill"], &0.into()));
    let began = Instant::now();
    let after = loop {
        let after = explain(&[]).await?;
        if after["placed"]["cached_tokens"] != 0 || began.elapsed() > READY {
            break after;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let again = json(&["--conductor", conductor, "--json", "generate", "--max-tokens", "3", &prompt]).await?;
    assert_eq!(again["cached_tokens"], after["placed"]["cached_tokens"], "{after}");
    assert!(again["cached_tokens"].as_u64() > Some(100), "{again}");
    let refused = explain(&["--ttft-slo-ms", "0.001"]).await?;
    let message = refused["rejected"]["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("the time to first token would be"), "{refused}");
    Ok(())
}

#[tokio::test]
async fn up_command_serves_restarts_a_dead_node_and_drains() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let ready_file = folder.path().join("ready.json");
    let ready_path = ready_file.display().to_string();
    let logs = folder.path().join("logs").display().to_string();
    let up = baton(&[
        "up",
        "--engine",
        "mock",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--ready-file",
        &ready_path,
        "--log-dir",
        &logs,
    ])?
    .stdout(Stdio::null())
    .stderr(Stdio::null())
    .spawn()?;
    let ready = read_ready(&ready_file, None).await?;
    let conductor = format!("http://{}", ready["conductor"]["grpc"].as_str().unwrap());

    let answer = json(&[
        "--conductor",
        &conductor,
        "--json",
        "generate",
        "--max-tokens",
        "12",
        "--logprobs",
        "2",
        "Hello there",
    ])
    .await?;
    for key in [
        "request_id",
        "prompt_tokens",
        "cached_tokens",
        "prompt_token_ids",
        "token_ids",
        "logprobs",
        "prompt_logprobs",
        "text",
        "finish_reason",
        "ttft_s",
        "prefill_node",
        "decode_node",
    ] {
        assert!(answer.get(key).is_some(), "{key} is missing in {answer}");
    }
    for (object, keys) in [
        ("tbt_s", &["mean", "p50", "p99", "max", "tail10"][..]),
        ("kv_transfer", &["bytes", "transport", "seconds", "exposed_seconds"]),
    ] {
        assert!(keys.iter().all(|key| answer[object].get(key).is_some()), "{object} in {answer}");
    }
    assert_eq!(answer["token_ids"].as_array().unwrap().len(), 12);
    assert_eq!(answer["logprobs"].as_array().unwrap().len(), 12);

    check_explanations(&conductor).await?;
    let nodes = json(&["--conductor", &conductor, "--json", "nodes"]).await?;
    let text = nodes.to_string();
    assert!(["prefill-0", "decode-0", "decode-1"].iter().all(|name| text.contains(name)), "{text}");
    let version = json(&["--conductor", &conductor, "--json", "version"]).await?.to_string();
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");

    // A node that dies is started again, and the ready file says so.
    let victim =
        ready["nodes"].as_array().unwrap().iter().find(|node| node["name"] == "decode-1").unwrap()["pid"].to_string();
    Command::new("sh").args(["-c", &format!("kill -KILL {victim}")]).status().await?;
    let again = read_ready(&ready_file, Some(&ready)).await?;
    assert_ne!(again["nodes"], ready["nodes"]);
    let answer = json(&["--conductor", &conductor, "--json", "generate", "--max-tokens", "3", "Still there?"]).await?;
    assert_eq!(answer["token_ids"].as_array().unwrap().len(), 3);
    stop(up).await
}
