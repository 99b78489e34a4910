//! `baton bench transfer`, as a person uses it: two processes, every byte compared.

use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{bench_output, bench_report};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const LIMIT: Duration = Duration::from_secs(60);
/// 16 MiB on each side: small enough to go round many times in a second.
const BLOCKS: [&str; 8] = ["--working-set", "16MiB", "--block-bytes", "12KiB", "--spans", "100", "--seconds", "1"];

fn bench(arguments: &[&str]) -> anyhow::Result<Command> {
    baton_cluster_tests::bench(&[&["transfer"], arguments].concat())
}

async fn output(arguments: &[&str]) -> anyhow::Result<Output> {
    bench_output(&[&["transfer"], arguments].concat()).await
}

async fn report(arguments: &[&str]) -> anyhow::Result<Value> {
    bench_report(&[&["transfer"], arguments].concat()).await
}

#[track_caller]
fn adds_up(report: &Value, transport: &str, batch_bytes: u64) {
    let number = |field: &str| report[field].as_f64().unwrap_or_else(|| panic!("{field}: {report}"));
    assert_eq!(report["transport"], transport, "{report}");
    assert_eq!(report["verified"], true, "{report}");
    assert!(number("batches") > 0.0, "{report}");
    assert_eq!(number("bytes"), number("batches") * batch_bytes as f64, "{report}");
    let rate = number("bytes") / number("seconds") / 1e9;
    assert!((number("gb_s") / rate - 1.0).abs() < 1e-6, "{report}");
    assert!(number("seconds") >= 0.9 && number("seconds") < 30.0, "{report}");
    assert!(number("p50_us") > 0.0 && number("p50_us") <= number("p99_us"), "{report}");
    // Neither end moves bytes for nothing, and two cores at most are busy for each second of the
    // run.
    assert!(number("initiator_cpu_s") > 0.0 && number("cpu_seconds_per_gb") > 0.0, "{report}");
}

#[tokio::test]
async fn bench_transfer_verifies_writes_by_engine_and_baselines() -> anyhow::Result<()> {
    let tcp = report(&[&["--transport", "tcp", "--verify", "--json"][..], &BLOCKS].concat()).await?;
    adds_up(&tcp, "tcp", 12 * 1024 * 100);
    assert!(tcp["target_cpu_s"].as_f64().unwrap() > 0.0, "{tcp}");
    let shm = report(&[&["--transport", "shm", "--verify", "--json"][..], &BLOCKS].concat()).await?;
    adds_up(&shm, "shm", 12 * 1024 * 100);
    for baseline in ["copy-loop", "memcpy"] {
        let line = ["--baseline", baseline, "--verify", "--json", "--working-set", "16MiB", "--seconds", "1"];
        adds_up(&report(&line).await?, baseline, 1 << 20);
    }
    Ok(())
}

#[tokio::test]
async fn bench_transfer_verifies_reads() -> anyhow::Result<()> {
    for transport in ["tcp", "shm"] {
        let line = ["--transport", transport, "--op", "read", "--verify", "--json"];
        let read = report(&[&line[..], &BLOCKS].concat()).await?;
        adds_up(&read, transport, 12 * 1024 * 100);
        assert_eq!(read["op"], "read", "{read}");
    }
    Ok(())
}

#[tokio::test]
async fn bench_transfer_runs_between_two_processes() -> anyhow::Result<()> {
    let mut target = bench(&["--listen", "127.0.0.1:0"])?.stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(target.stdout.take().unwrap()).read_line(&mut line).await?;
    let address = line.trim().strip_prefix("LISTENING ").context(line.clone())?.to_owned();
    let connected = report(&[&["--connect", &address, "--verify", "--json"][..], &BLOCKS].concat()).await?;
    adds_up(&connected, "tcp", 12 * 1024 * 100);
    let status = tokio::time::timeout(LIMIT, target.wait()).await.context("the target outlived its run")??;
    assert!(status.success(), "{status}");
    Ok(())
}

#[tokio::test]
async fn bench_transfer_names_the_invalid_flag() -> anyhow::Result<()> {
    for (arguments, flag, status) in [
        (&["--spans", "257"][..], "--spans", 2),
        (&["--op", "sideways"], "--op", 2),
        (&["--block-bytes", "1GiB"], "--block-bytes", 2),
        (&["--connect", "127.0.0.1:1"], "127.0.0.1:1", 4),
    ] {
        let output = output(arguments).await?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {stderr}");
        assert!(stderr.contains(flag), "{arguments:?}: {stderr}");
    }
    Ok(())
}

/// Children of a process, from /proc.
fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task");
    let tasks = std::fs::read_dir(path).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) -> anyhow::Result<()> {
    for _ in 0..200 {
        if holds() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("{what}: not within 10 s")
}

async fn interrupt(bench: &mut Child, signal: &str) -> anyhow::Result<std::process::ExitStatus> {
    let pid = bench.id().context("it has ended")?;
    Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().await?;
    Ok(tokio::time::timeout(Duration::from_secs(10), bench.wait()).await.context("it did not end")??)
}

#[tokio::test]
async fn bench_transfer_target_ends_when_its_initiator_does() -> anyhow::Result<()> {
    for (signal, code, carrier) in [("INT", Some(130), "--transport=tcp"), ("KILL", None, "--baseline=copy-loop")] {
        let mut bench =
            bench(&[carrier, "--working-set", "64MiB", "--seconds", "60"])?.stderr(Stdio::null()).spawn()?;
        let pid = bench.id().context("it has ended")?;
        eventually("a target", || !children(pid).is_empty()).await?;
        let target = children(pid)[0];
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert_eq!(interrupt(&mut bench, signal).await?.code(), code, "{signal}");
        let running =
            || std::fs::read_to_string(format!("/proc/{target}/comm")).is_ok_and(|name| name.trim() == "baton");
        let zombie = || std::fs::read_to_string(format!("/proc/{target}/stat")).is_ok_and(|stat| stat.contains(") Z "));
        eventually("the end of the target", || !running() || zombie()).await?;
    }
    Ok(())
}
