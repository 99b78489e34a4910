//! `baton bench index`, as a person uses it: on a trace, and at size.

use std::process::Output;

use baton_cluster_tests::{bench_output, bench_report};
use serde_json::Value;

const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/sim/tests/fixtures/small.jsonl");

async fn output(arguments: &[&str]) -> anyhow::Result<Output> {
    bench_output(&[&["index"], arguments].concat()).await
}

async fn report(arguments: &[&str]) -> anyhow::Result<Value> {
    bench_report(&[&["index"], arguments].concat()).await
}

#[track_caller]
fn number(figures: &Value, path: &str) -> f64 {
    figures.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path}: {figures}"))
}

#[tokio::test]
async fn bench_index_reports_a_table_for_each_number_of_nodes() -> anyhow::Result<()> {
    let options = ["--trace", TRACE, "--nodes", "3,40", "--capacity", "200", "--rounds", "2"];
    let figures = report(&[&options[..], &["--json"]].concat()).await?;
    assert_eq!((&figures["trace"], &figures["rounds"]), (&"small.jsonl".into(), &2.into()));
    assert_eq!(figures["tables"].as_array().unwrap().len(), 2);
    for (table, nodes) in ["/tables/0", "/tables/1"].into_iter().zip([3.0, 40.0]) {
        let figure = |path: &str| number(&figures, &format!("{table}{path}"));
        assert_eq!(figure("/nodes"), nodes);
        let entries = figure("/blocks_stored") - figure("/blocks_removed");
        assert!(figure("/entries") == entries && entries <= nodes * 200.0 && entries > nodes * 100.0, "{entries}");
        assert!(figure("/rows/0/lookup_p50_ns/median") > 0.0);
        assert!(figure("/rows/0/lookup_p99_ns/median") >= figure("/rows/0/lookup_p50_ns/median"));
        assert!(figure("/rows/0/events_m_blocks_s/median") > 0.0);
        // A slot of the table has 16 bytes, and a block may have all nodes as its holders. What the
        // table has from the beginning weighs on few entries.
        let bytes = figure("/rows/0/bytes_per_entry");
        assert!((1.0..2000.0).contains(&bytes), "{bytes} bytes per entry");
        assert_eq!(figures.pointer(&format!("{table}/rows/1/name")), Some(&"naive map".into()));
        assert!(figure("/baton_over_best/lookup_mean") > 0.0);
    }
    let text = String::from_utf8(output(&options).await?.stdout)?;
    for part in ["small.jsonl, one core of", "\n3 nodes: ", "\n40 nodes: ", "baton PrefixIndex"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    Ok(())
}

#[tokio::test]
async fn bench_index_large_measures_lookups_during_events() -> anyhow::Result<()> {
    let figures = report(&["--large", "--entries", "100000", "--seconds", "1", "--json"]).await?;
    assert!((90_000.0..110_000.0).contains(&number(&figures, "/entries")), "{figures}");
    for part in ["/alone", "/beside_events"] {
        let quantile = |name: &str| number(&figures, &format!("{part}/{name}"));
        assert!(quantile("count") > 0.0 && quantile("p50_ns") > 0.0, "{figures}");
        assert!(quantile("p99_ns") >= quantile("p50_ns") && quantile("longest_ns") >= quantile("p999_ns"), "{figures}");
    }
    assert!(number(&figures, "/events_m_blocks_s") > 0.0 && number(&figures, "/bytes_per_entry") > 1.0, "{figures}");
    Ok(())
}

#[tokio::test]
async fn bench_index_names_the_invalid_flag() -> anyhow::Result<()> {
    for (arguments, named) in [
        (&["--trace", "/nowhere/t"][..], "baton: --trace: /nowhere/t: "),
        (&["--trace", "/dev/null"], "baton: --trace: /dev/null: no prompt has a full block"),
        (&["--trace", TRACE, "--capacity", "5"], "baton: --capacity: expected "),
        (&["--trace", TRACE, "--nodes", "0"], "--nodes"),
        (&[], "--trace"),
    ] {
        let output = output(arguments).await?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]), "{stderr}");
        assert!(stderr.contains(named), "{named}: {stderr}");
    }
    Ok(())
}
