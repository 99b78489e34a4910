//! The published claims, on traces that `fixtures/make_traces.py` makes with the statistics of
//! Mooncake's.

mod claims;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_sim::{SimOptions, Trace, TraceRequest};
use claims::Source;

fn fixture(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(file)
}

fn conversation() -> Source {
    Source { path: fixture("conversation_small.jsonl"), rounded_to: Duration::from_secs(3) }
}

fn synthetic() -> Source {
    Source { path: fixture("synthetic_small.jsonl"), rounded_to: Duration::ZERO }
}

fn open(source: &Source) -> Trace {
    Trace::open(&source.path, None).expect("a trace")
}

/// Leading blocks of each prompt that came before, as a part of all, in a cache that holds all.
fn hit_rate_without_bound(trace: &Trace) -> f64 {
    let mut cached = HashSet::<u64>::new();
    let mut blocks = 0;
    let mut hits = 0;
    for ids in trace.requests.iter().map(|request| &request.hash_ids) {
        blocks += ids.len();
        hits += ids.iter().take_while(|id| cached.contains(*id)).count();
        cached.extend(ids);
    }
    hits as f64 / blocks as f64
}

#[test]
fn placements_rank_as_in_mooncake_paper_on_small_trace() {
    claims::check_order_of_placements(&conversation());
}

/// The published trace takes three times as long, and evicts more. Here the caches of prefill nodes
/// are a third as large, and a third as many decode nodes offer prefixes.
#[test]
fn baton_ttft_beats_mooncake_on_small_conversation_trace() {
    let options = SimOptions { speed: 1.3, cache_blocks: Some(2000), decode: 3, ..claims::without_admission() };
    claims::check_baton_against_mooncake(&conversation(), options);
}

/// As above: the published trace takes 1.7 times as long.
#[test]
fn baton_ttft_beats_mooncake_on_small_document_trace() {
    let options = SimOptions { cache_blocks: Some(1500), decode: 5, ..claims::without_admission() };
    claims::check_baton_against_mooncake(&synthetic(), options);
}

#[test]
fn value_density_serves_more_within_objectives_on_small_trace() {
    claims::check_admission_under_overload(&conversation());
}

#[test]
fn fetched_prefixes_double_cache_hits_on_small_trace() {
    claims::check_hits_of_fetched_prefixes(&conversation());
}

/// A changed generator still makes traces that are like the published ones, whose figures these
/// are.
#[test]
fn small_traces_have_the_published_means_and_hits() {
    let check = |source: Source, per_hour: f64, prompt: f64, answer: f64, block_hits: f64| {
        let trace = open(&source);
        let count = trace.requests.len() as f64;
        let mean = |tokens: fn(&TraceRequest) -> u32| {
            trace.requests.iter().map(|request| f64::from(tokens(request))).sum::<f64>() / count
        };
        let figures = [
            (count * 6.0, per_hour),
            (mean(|request| request.input_length), prompt),
            (mean(|request| request.output_length), answer),
            (hit_rate_without_bound(&trace), block_hits),
        ];
        for (made, published) in figures {
            assert!((made / published - 1.0).abs() < 0.02, "{}: {made} for {published}", trace.name);
        }
    };
    check(conversation(), 12_031.0, 12_035.0, 343.0, 0.366);
    check(synthetic(), 14_065.0, 15_325.0, 149.0, 0.640);
}
