//! `baton bench engine` and `baton score`, as a person uses them.

use baton_cluster_tests::{bench_output, bench_report, binary, model};
use serde_json::Value;
use tokio::process::Command;

const FIGURES: [&str; 7] = [
    "prefill_512_tok_s",
    "prefill_2048_tok_s",
    "decode_1_tok_s",
    "decode_8_tok_s",
    "decode_32_tok_s",
    "load_s",
    "rss_bytes",
];

/// A tiny model.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/engine/tests/fixtures/smollm");

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn bench_engine_reports_every_figure() -> anyhow::Result<()> {
    let model = model();
    let arguments = ["engine", "--model", model.to_str().unwrap(), "--threads", "1", "--rounds", "1", "--json"];
    let report = bench_report(&arguments).await?;
    println!("{report}");
    for figure in FIGURES {
        assert!(report[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure}: {report}");
    }
    assert!(report["isa"].is_string() && report["threads"] == 1, "{report}");
    Ok(())
}

#[tokio::test]
async fn bench_engine_names_the_invalid_flag() -> anyhow::Result<()> {
    for (arguments, named) in [
        (["engine", "--model", "/no/such/model", "--threads", "1"], "--model"),
        (["engine", "--model", FIXTURE, "--threads", "0"], "threads"),
    ] {
        let output = bench_output(&arguments).await?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(named), "{arguments:?}: {said}");
    }
    Ok(())
}

#[tokio::test]
#[ignore = "needs a model: BATON_MODEL"]
async fn score_reports_nll_and_perplexity_of_text() -> anyhow::Result<()> {
    let model = model();
    let text = tempfile::NamedTempFile::new()?;
    std::fs::write(text.path(), "The quick brown fox jumps over the lazy dog. The dog sleeps on.")?;
    let output = Command::new(binary("baton")?)
        .args(["score", "--json", "--model"])
        .arg(&model)
        .arg("--text")
        .arg(text.path())
        .output()
        .await?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let nll = report["nll"].as_f64().unwrap();
    let perplexity = report["perplexity"].as_f64().unwrap();
    assert!((nll.exp() / perplexity - 1.0).abs() < 1e-6 && (2.0..200.0).contains(&perplexity), "{report}");
    Ok(())
}
