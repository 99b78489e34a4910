//! The published claims on Mooncake's own traces, `$BATON_FIXTURES/traces/*.jsonl`: too large to
//! commit.
//!
//! `published` has the same claims on small traces.

mod claims;

use std::path::PathBuf;
use std::time::Duration;

use baton_sim::SimOptions;
use claims::Source;

fn trace_file(file: &str) -> PathBuf {
    let folder = std::env::var_os("BATON_FIXTURES").unwrap_or_else(|| {
        panic!("BATON_FIXTURES is not set: it names the folder that holds traces/{file}, of the Mooncake release")
    });
    let path = PathBuf::from(folder).join("traces").join(file);
    assert!(path.is_file(), "{}: no such file; it comes with the Mooncake release", path.display());
    path
}

fn conversation() -> Source {
    Source { path: trace_file("conversation_trace_first_half.jsonl"), rounded_to: Duration::from_secs(3) }
}

fn synthetic() -> Source {
    Source { path: trace_file("synthetic_trace.jsonl"), rounded_to: Duration::ZERO }
}

#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn placements_rank_as_in_mooncake_paper_on_real_trace() {
    claims::check_order_of_placements(&conversation());
}

#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn baton_ttft_beats_mooncake_on_real_conversation_trace() {
    claims::check_baton_against_mooncake(&conversation(), SimOptions { speed: 1.3, ..claims::without_admission() });
}

#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn baton_ttft_beats_mooncake_on_real_document_trace() {
    let options = SimOptions { cache_blocks: Some(2500), ..claims::without_admission() };
    claims::check_baton_against_mooncake(&synthetic(), options);
}

#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn value_density_serves_more_within_objectives_on_real_trace() {
    claims::check_admission_under_overload(&conversation());
}

#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn fetched_prefixes_double_cache_hits_on_real_trace() {
    claims::check_hits_of_fetched_prefixes(&conversation());
}
