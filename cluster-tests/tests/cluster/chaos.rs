//! `baton chaos` against `baton up`, as an operator runs them.

use anyhow::Context;
use baton_cluster_tests::model;
use serde_json::Value;

use crate::up::{baton, conductors, start, stop};

/// Starts 3 + 3 nodes with these arguments, hurts them, and gives the report.
async fn chaos(cluster: &[&str], arguments: &[&str]) -> anyhow::Result<Value> {
    let folder = tempfile::tempdir()?;
    let (up, ready) = start(folder.path(), &[&["--prefill", "3", "--decode", "3"][..], cluster].concat()).await?;
    let conductors = conductors(&ready)?;
    let mut arguments = arguments.to_vec();
    if let Some(etcd) = ready["etcd"].as_str() {
        arguments.extend(["--etcd", etcd]);
    }
    let output = baton(&[&["--json", "--conductor", &conductors, "chaos"][..], &arguments].concat())?.output().await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value = serde_json::from_slice(&output.stdout).with_context(|| said.clone())?;
    println!("{report:#}");
    assert!(output.status.success(), "{said}");
    stop(up).await?;
    Ok(report)
}

fn count(report: &Value, key: &str) -> usize {
    report[key].as_array().map_or(usize::MAX, Vec::len)
}

#[tokio::test]
async fn streams_continue_though_nodes_die_stop_and_leave() -> anyhow::Result<()> {
    let report = chaos(&["--engine", "mock"], &["--duration", "15", "--every", "1"]).await?;
    assert!(report["requests"].as_u64() > Some(100), "{report}");
    assert_eq!((count(&report, "different"), &report["left"]), (0, &Value::Null));
    let faults: usize =
        report["faults"].as_array().context("faults")?.iter().map(|of| count(of, "longest_gap_s")).sum();
    assert!(faults >= 8, "{report}");
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_death_of_conductors_and_nodes_changes_no_answer() -> anyhow::Result<()> {
    // Most of the time, a stream goes through each conductor.
    let slow = "decode.mock_base_us=5000";
    let cluster = ["--engine", "mock", "--conductors", "3", "--etcd", "spawn", "--set", slow];
    let faults = ["--faults", "kill", "--duration", "40", "--every", "2"];
    let report = chaos(&cluster, &faults).await?;
    assert_eq!((count(&report, "different"), &report["left"]), (0, &Value::Null));
    let of = |role: &str| report["faults"].as_array().is_some_and(|all| all.iter().any(|of| of["role"] == role));
    assert!(of("conductor") && report["asked_again"].as_u64() > Some(0), "{report}");
    let [interrupted, attached, from_cache] =
        ["interrupted", "attached", "from_cache"].map(|key| report[key].as_u64().unwrap_or_default());
    assert!(interrupted > 0 && 100 * (attached + from_cache) >= 95 * interrupted, "{report}");
    Ok(())
}

#[tokio::test]
#[ignore = "needs etcd, and root to make network namespaces"]
async fn etcd_conductors_are_cut_off_and_others_serve() -> anyhow::Result<()> {
    let cluster = ["--engine", "mock", "--conductors", "3", "--etcd", "spawn", "--namespaces"];
    let faults = ["--faults", "isolate", "--longest", "15", "--duration", "60", "--every", "5", "--seed", "2"];
    let report = chaos(&cluster, &faults).await?;
    assert_eq!((count(&report, "different"), &report["left"]), (0, &Value::Null));
    let is_cut = |of: &Value| of["role"] == "conductor" && count(of, "longest_gap_s") > 0;
    assert!(report["faults"].as_array().is_some_and(|all| all.iter().any(is_cut)), "{report}");
    Ok(())
}

#[tokio::test]
#[ignore = "needs root, to make network namespaces"]
async fn nodes_are_cut_off_or_slow_and_streams_continue() -> anyhow::Result<()> {
    let cluster = ["--engine", "mock", "--namespaces"];
    for (fault, duration) in [("isolate", "20"), ("slow", "8")] {
        let faults = ["--faults", fault, "--longest", "5", "--duration", duration, "--every", "2"];
        let report = chaos(&cluster, &faults).await?;
        assert_eq!((count(&report, "different"), &report["left"]), (0, &Value::Null));
        let gaps =
            report["faults"].as_array().context("faults")?.iter().filter_map(|of| of["longest_gap_s"].as_array());
        let longest = gaps.flatten().filter_map(Value::as_f64).fold(0.0, f64::max);
        assert!(fault == "slow" || longest > 0.5, "a stream waited for a node that was cut off: {longest} s");
    }
    Ok(())
}

#[tokio::test]
#[ignore = "takes ten minutes, and root: make test-long"]
async fn ten_minutes_of_all_faults_on_model_nodes_change_no_answer() -> anyhow::Result<()> {
    let model = model();
    let cluster = ["--model", &model.display().to_string(), "--namespaces"];
    let report = chaos(&cluster, &["--duration", "600", "--faults", "kill,pause,drain,terminate,isolate,slow"]).await?;
    assert_eq!((count(&report, "different"), &report["left"]), (0, &Value::Null));
    Ok(())
}
