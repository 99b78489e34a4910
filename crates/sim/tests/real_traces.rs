//! The published claims on Mooncake's own traces, `$BATON_FIXTURES/traces/*.jsonl`: too large to
//! commit.
//!
//! `published` has the same claims on small traces.

mod claims;

use std::path::PathBuf;
use std::time::Duration;

use baton_sim::{SimOptions, Trace};
use claims::Source;
use claims::cache_replay::eviction_table;

/// Sizes that tell the policies apart on the published traces, blocks.
const EVICTION_SIZES: [u32; 4] = [1_000, 5_000, 10_000, 30_000];

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

fn open(source: &Source) -> Trace {
    Trace::open(&source.path).unwrap_or_else(|error| panic!("{}: {error}", source.path.display()))
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

#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn lhd_hits_are_never_below_lru_or_lfu_on_real_traces() {
    for source in [conversation(), synthetic()] {
        claims::check_lhd(&open(&source), &EVICTION_SIZES);
    }
}

/// The figure known for LRU shows that the replay counts as others do.
#[test]
#[ignore = "needs Mooncake's traces: BATON_FIXTURES names the folder that holds traces/"]
fn lru_hit_rate_on_real_synthetic_trace_is_the_known_one() {
    let rate = eviction_table(&open(&synthetic()), &[10_000])[0].lru.whole.rate();
    assert!((rate - 0.424).abs() < 0.0005, "{rate}");
}
