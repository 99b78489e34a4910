//! Runs over traces made here: what must hold whatever the figures are.

mod made;

use std::collections::BTreeSet;
use std::time::Duration;

use baton_scheduler::PlacementKind;
use baton_sim::{
    BLOCK_TOKENS, Feature, ModelProfile, Outcome, Random, SimAdmission, SimOptions, SimPlacement, Summary, Trace,
    TraceRequest, Window, simulate,
};
use made::Conversations;
use proptest::prelude::*;

fn profile() -> ModelProfile {
    ModelProfile::load("llama3-70b-a800").expect("a built-in profile")
}

/// Conversations that come back, one of three with a shared beginning; `per_second` requests a
/// second.
fn conversations(requests: usize, per_second: f64, seed: u64) -> Trace {
    let conversations = Conversations { per_second, shared: 7, most_new: 30, most_output: 500 };
    made::trace(conversations.requests(seed).take(requests))
}

/// A prompt of whole blocks but for its last 100 tokens.
fn request(at: f64, mut hash_ids: Vec<u64>, output_length: u32) -> TraceRequest {
    let input_length = hash_ids.len() as u32 * BLOCK_TOKENS + 100;
    hash_ids.push(u64::MAX - (at * 1e6) as u64);
    TraceRequest { timestamp: Duration::from_secs_f64(at), input_length, output_length, hash_ids }
}

/// Every request ends once, in one way, and took some time.
fn check_ends(outcome: &Outcome) {
    for record in &outcome.records {
        let served = record.finished.is_some();
        let ends = [served, record.rejected, record.failed.is_some()];
        assert_eq!(ends.iter().filter(|end| **end).count(), 1, "{record:?}");
        assert!(!served || record.ttft.is_some_and(|ttft| !ttft.is_zero()), "{record:?}");
        // A first token that is kept back may come with the second: then there is no gap between
        // two.
        let some = served && record.output_tokens > 1;
        let all = served && record.output_tokens > 2;
        assert!(if record.tbt.is_some() { some } else { !all }, "{record:?}");
        let tokens = record.local_tokens + record.fetched_tokens + record.ssd_tokens + record.computed_tokens;
        assert!(!served || tokens == record.prompt_tokens, "{record:?}");
    }
}

#[test]
fn same_seed_gives_the_same_simulated_run() {
    let trace = conversations(300, 6.0, 1);
    let run = |seed| simulate(&trace, &profile(), &SimOptions { seed, ..SimOptions::default() });
    let first = run(1);
    let again = run(1);
    let other = run(2);
    assert_eq!((first.events, first.elapsed), (again.events, again.elapsed));
    assert_eq!(first, again);
    assert_ne!((first.events, first.elapsed), (other.events, other.elapsed));
}

#[test]
fn ttft_of_prompts_of_all_lengths_is_predicted() {
    // A small model on a core, a token in 2.7 ms, with prompts of 20 to 2,000 tokens at 70 % of
    // what the node can compute. Here each token stands for 32.
    const SCALE: f64 = 32.0;
    let profile = ModelProfile {
        prefill_base: 0.04,
        prefill_per_token: 2.7e-3 / SCALE,
        prefill_per_token_pair: 2e-7 / (SCALE * SCALE),
        chunk_tokens: 512 * SCALE as u32,
        decode_base: 0.02,
        decode_per_sequence: 0.003,
        decode_per_kv_token: 0.0,
        step_noise: 0.12,
        ..profile()
    };
    let mut random = Random::new(5);
    let mut at = 0.0;
    let requests = (0..2000_u64).map(|n| {
        at += random.exponential(1.0);
        let input_length = (20.0 * 100_f64.powf(random.unit()) * SCALE) as u32;
        let blocks = u64::from(input_length.div_ceil(BLOCK_TOKENS));
        let hash_ids = (0..blocks).map(|block| n << 32 | block).collect();
        let timestamp = Duration::from_secs_f64(at * 1.7);
        let output_length = 8 + random.below(25) as u32;
        TraceRequest { timestamp, input_length, output_length, hash_ids }
    });
    let trace = Trace { name: "lengths".to_owned(), requests: requests.collect(), block_tokens: BLOCK_TOKENS };
    let options = SimOptions { prefill: 1, decode: 1, max_wait: None, ..SimOptions::default() };
    let summary = Summary::of(&simulate(&trace, &profile, &options), &options);
    let half = summary.ttft_error_p50;
    let most = summary.ttft_error_p90;
    let load = summary.ttft_mean_s;
    println!(
        "|predicted - measured| / measured: median {half:.3}, p90 {most:.3}; mean time to first token {load:.2} s"
    );
    assert!(half < 0.15 && most < 0.35, "median {half}, p90 {most}");
    assert!(load > 2.0, "{load}: no request waits");
}

#[test]
fn prompt_that_takes_minutes_is_not_ended_as_stalled() {
    // 10 ms a token: 205 s for 20,580 tokens, at the prefill node or, if none is left, at the
    // decode node.
    let slow = ModelProfile { prefill_per_token: 0.01, decode_per_sequence: 0.01, ..profile() };
    let trace = made::trace([request(0.0, (0..40).collect(), 5)].into_iter());
    for without in [None, Some(Feature::PartialPrefill)] {
        let options = SimOptions { prefill: 1, decode: 1, without, ..SimOptions::default() };
        let outcome = simulate(&trace, &slow, &options);
        let record = &outcome.records[0];
        assert!(record.finished.is_some() && record.ttft > Some(Duration::from_secs(100)), "{record:?}");
    }
}

#[test]
fn hot_prefix_spreads_over_nodes_without_imbalance() {
    let mut random = Random::new(3);
    let mut at = 0.0;
    let requests = (0..1500_u64).map(|n| {
        at += random.exponential(1.0 / 14.0);
        // 4,000 tokens of the prefix in four of five prompts, and 2 to 11 blocks of their own.
        let mut ids: Vec<_> = if random.below(5) < 4 { (0..7).collect() } else { Vec::new() };
        ids.extend((0..2 + random.below(10)).map(|block| 1000 * (n + 1) + block));
        request(at, ids, 50)
    });
    let requests: Vec<_> = requests.collect();
    let trace = Trace { name: "hot".to_owned(), requests, block_tokens: BLOCK_TOKENS };
    let options = SimOptions { window: Window::SecondHalf, ..SimOptions::default() };
    let outcome = simulate(&trace, &profile(), &options);
    let summary = Summary::of(&outcome, &options);
    assert!(summary.prefill_load_mean > 0.005, "there is some load: {summary:?}");
    assert!(summary.prefill_imbalance < 1.5, "{}", summary.prefill_imbalance);
    let second_half = &outcome.records[outcome.records.len() / 2..];
    let holders: BTreeSet<_> =
        second_half.iter().filter(|record| record.local_tokens >= 7 * BLOCK_TOKENS).filter_map(|r| r.prefill).collect();
    println!("imbalance {:.2}, the prefix is on {} of 8 nodes", summary.prefill_imbalance, holders.len());
    assert!(holders.len() >= 4, "{holders:?}");
}

#[test]
fn ssd_tier_serves_blocks_that_a_small_memory_evicted() {
    let trace = conversations(400, 3.0, 7);
    let with = |ssd_blocks| {
        let placement = SimPlacement::Production(PlacementKind::CacheAware);
        let options = SimOptions { ssd_blocks, placement, cache_blocks: Some(150), ..SimOptions::default() };
        let outcome = simulate(&trace, &profile(), &options);
        check_ends(&outcome);
        Summary::of(&outcome, &options)
    };
    let without = with(0);
    let small = with(300);
    let large = with(5000);
    assert_eq!(without.cache_hit_ratio_ssd, 0.0);
    assert!(large.cache_hit_ratio_ssd > 0.05, "{}", large.cache_hit_ratio_ssd);
    assert!(large.cache_hit_ratio > small.cache_hit_ratio && small.cache_hit_ratio > without.cache_hit_ratio);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Whatever the cluster is like, every request ends exactly once, nothing stays charged, and
    /// every node's blocks are accounted for. `simulate` checks the latter at its end.
    #[test]
    fn every_request_ends_once_in_random_clusters(
        prefill in 1usize..5,
        decode in 1usize..4,
        placement in 0..SimPlacement::ALL.len(),
        admission in 0usize..5,
        cache_blocks in 40u32..600,
        ssd_blocks in prop_oneof![Just(0), 10u32..2000],
        per_second in 0.5f64..30.0,
        has_slo: bool,
        block_tokens in prop::sample::select(vec![64u32, 512]),
        without in 0..=Feature::ALL.len(),
        seed: u64,
    ) {
        let trace = conversations(120, per_second, seed);
        let options = SimOptions {
            prefill,
            decode,
            placement: SimPlacement::ALL[placement],
            admission: SimAdmission::ALL[admission],
            cache_blocks: Some(cache_blocks * BLOCK_TOKENS / block_tokens),
            ssd_blocks,
            ttft_slo: has_slo.then_some(Duration::from_secs(30)),
            tbt_slo: has_slo.then_some(Duration::from_millis(100)),
            block_tokens,
            without: Feature::ALL.get(without).copied(),
            seed,
            ..SimOptions::default()
        };
        check_ends(&simulate(&trace, &profile(), &options));
    }
}
