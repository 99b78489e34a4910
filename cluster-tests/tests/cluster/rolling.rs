//! A cluster goes from one version to the next, one process after the other, and clients do not
//! notice.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use baton_cluster_tests::{binary, signal};
use serde_json::Value;

use crate::up::{baton, conductors, read_ready, start, stop};

/// How long clients ask. All processes must be new by then.
const SECONDS: &str = "60";
/// How long one process may take to drain and to be back.
const LIMIT: Duration = Duration::from_secs(40);
const BINARIES: [&str; 3] = ["baton-conductor", "baton-prefill", "baton-decode"];

/// Name and process of each conductor, then of each node.
fn members(ready: &Value) -> Vec<(String, u64)> {
    let all = ["conductors", "nodes"].into_iter().filter_map(|role| ready[role].as_array()).flatten();
    all.filter_map(|member| Some((member["name"].as_str()?.to_owned(), member["pid"].as_u64()?))).collect()
}

/// Has these names stand for the binaries of a folder.
fn install(bin: &Path, from: &Path) -> anyhow::Result<()> {
    for name in BINARIES {
        let new = bin.join("new");
        symlink(from.join(name), &new)?;
        std::fs::rename(&new, bin.join(name))?;
    }
    Ok(())
}

/// Asks a process to end, and waits until another one is in its place.
async fn restart(ready_file: &Path, name: &str, pid: u64) -> anyhow::Result<u64> {
    signal(u32::try_from(pid)?, "TERM");
    let restarted = async {
        loop {
            let ready = read_ready(ready_file, None).await?;
            match members(&ready).into_iter().find(|(other, _)| other == name) {
                Some((_, new)) if new != pid && new != 0 => return anyhow::Ok(new),
                _ => baton_runtime::sleep(Duration::from_millis(100)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, restarted).await.with_context(|| format!("{name} is not back"))?
}

#[tokio::test]
#[ignore = "needs etcd and the binaries of the commit before: BATON_PREVIOUS_BIN"]
async fn etcd_rolling_upgrade_of_conductors_and_nodes_fails_no_request() -> anyhow::Result<()> {
    let previous = PathBuf::from(std::env::var_os("BATON_PREVIOUS_BIN").context("BATON_PREVIOUS_BIN")?);
    let previous = previous.canonicalize().with_context(|| previous.display().to_string())?;
    let next = binary("baton")?.parent().context("a folder")?.canonicalize()?;
    let folder = tempfile::tempdir()?;
    let [bin, ready_file] = ["bin", "ready.json"].map(|name| folder.path().join(name));
    std::fs::create_dir(&bin)?;
    install(&bin, &previous)?;
    let bin_path = bin.display().to_string();
    let cluster = ["--engine", "mock", "--prefill", "2", "--decode", "2", "--conductors", "2", "--etcd", "spawn"];
    let arguments = [&["--grace", "20", "--bin-dir", &bin_path][..], &cluster].concat();
    let (up, ready) = start(folder.path(), &arguments).await?;
    let version = |pid: u64| std::fs::read_link(format!("/proc/{pid}/exe"));

    // Clients, and no faults.
    let clients = ["--duration", SECONDS, "--every", "3000", "--max-tokens", "100"];
    let clients = baton(&[&["--json", "--conductor", &conductors(&ready)?, "chaos"][..], &clients].concat())?
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let began = baton_runtime::now();
    baton_runtime::sleep(Duration::from_secs(5)).await;
    install(&bin, &next)?;
    for (name, pid) in members(&ready) {
        assert!(version(pid)?.starts_with(&previous), "{name} is of the version before: {:?}", version(pid));
        let asked = baton_runtime::now();
        let new = restart(&ready_file, &name, pid).await?;
        assert!(version(new)?.starts_with(&next), "{name} is of this version: {:?}", version(new));
        println!("{name} was replaced within {:.1} s", asked.elapsed().as_secs_f64());
        baton_runtime::sleep(Duration::from_secs(1)).await;
    }
    let took = began.elapsed();
    let output = clients.wait_with_output().await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value = serde_json::from_slice(&output.stdout).with_context(|| said.clone())?;
    println!("all were replaced within {:.1} s: {report:#}", took.as_secs_f64());
    assert!(output.status.success() && report["requests"].as_u64() > Some(100), "{said} {report}");
    assert_eq!(report["right"], report["requests"], "no request failed, was refused or came out differently: {report}");
    assert_eq!(report["left"], Value::Null, "{report}");
    assert!(took.as_secs_f64() < SECONDS.parse()?, "clients asked until the end: {took:?}");
    stop(up).await
}
