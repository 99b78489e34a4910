//! What Baton claims of placement and admission, as checks of any trace.
//!
//! Each figure is the mean of three seeds, over the second half of the trace's time.

use std::path::PathBuf;
use std::time::Duration;

use baton_scheduler::AdmissionKind;
use baton_sim::{Feature, ModelProfile, SimAdmission, SimOptions, SimPlacement, Summary, Trace, Window, simulate};

/// A trace's file, and to what its timestamps are rounded.
pub struct Source {
    /// JSON lines.
    pub path: PathBuf,
    /// Requests are spread over this time, or their batches would be bursts that no client sent.
    pub rounded_to: Duration,
}

/// A run with each seed.
struct Runs(Vec<Summary>);

impl Runs {
    fn of(source: &Source, placement: SimPlacement, options: SimOptions) -> Self {
        let profile = ModelProfile::load("llama3-70b-a800").expect("a built-in profile");
        let trace =
            Trace::open(&source.path, None).unwrap_or_else(|error| panic!("{}: {error}", source.path.display()));
        // The others evict as their papers say.
        let without = (placement != SimPlacement::MIN_TOTAL_DELAY).then_some(Feature::Lhd);
        let summary = |seed| {
            let trace = trace.clone().played(None, source.rounded_to, seed);
            let options = SimOptions { placement, without, seed, window: Window::SecondHalf, ..options };
            Summary::of(&simulate(&trace, &profile, &options), &options)
        };
        Self((1..=3).map(summary).collect())
    }

    fn mean(&self, figure: impl Fn(&Summary) -> f64) -> f64 {
        self.0.iter().map(figure).sum::<f64>() / self.0.len() as f64
    }
}

/// Everything is taken in.
pub fn without_admission() -> SimOptions {
    SimOptions { admission: SimAdmission::NONE, max_wait: None, ..SimOptions::default() }
}

/// The objectives of the papers.
fn with_objectives() -> SimOptions {
    let ttft_slo = Some(Duration::from_secs(30));
    let tbt_slo = Some(Duration::from_millis(100));
    SimOptions { ttft_slo, tbt_slo, ..SimOptions::default() }
}

fn mooncake() -> SimPlacement {
    "mooncake".parse().expect("a placement")
}

/// Random is worst and Mooncake's Algorithm 1 best, by the steps that its paper has.
pub fn check_order_of_placements(source: &Source) {
    let ttft = |name: &str| {
        let runs = Runs::of(source, name.parse().expect("a placement"), without_admission());
        let ttft = runs.mean(|run| run.ttft_mean_s);
        println!("{name}: {ttft:.2} s");
        ttft
    };
    let means = ["random", "load-balance", "cache-aware", "mooncake"].map(ttft);
    for pair in means.windows(2) {
        assert!(pair[1] <= 0.9 * pair[0], "{means:?}");
    }
    assert!(means[0] >= 4.0 * means[3], "{means:?}");
}

/// Baton's mean time to first token is below that of Mooncake's Algorithm 1, and its tail is hardly
/// longer.
pub fn check_baton_against_mooncake(source: &Source, options: SimOptions) {
    let [theirs, ours] =
        [mooncake(), SimPlacement::MIN_TOTAL_DELAY].map(|placement| Runs::of(source, placement, options));
    let [theirs_mean, ours_mean] = [&theirs, &ours].map(|runs| runs.mean(|run| run.ttft_mean_s));
    let [theirs_tail, ours_tail] = [&theirs, &ours].map(|runs| runs.mean(|run| run.ttft_p99_s));
    println!(
        "{}: mean {ours_mean:.3} s for {theirs_mean:.3} s, p99 {ours_tail:.1} s for {theirs_tail:.1} s; \
         Mooncake's prefill load {:.3}, hits {:.3}",
        source.path.display(),
        theirs.mean(|run| run.prefill_load_mean),
        theirs.mean(|run| run.cache_hit_ratio),
    );
    assert!(ours_mean < 0.9 * theirs_mean, "{ours_mean} for {theirs_mean}");
    // Shorter prompts go first: the longest pay for it.
    assert!(ours_tail < 1.15 * theirs_tail, "{ours_tail} for {theirs_tail}");
}

/// Under overload our own admission serves more within the objectives than the papers' does.
pub fn check_admission_under_overload(source: &Source) {
    let runs = |admission| {
        let options = SimOptions { admission, prefill: 14, decode: 2, speed: 3.0, ..with_objectives() };
        Runs::of(source, SimPlacement::MIN_TOTAL_DELAY, options)
    };
    let [early, predictive, ours] = [
        SimAdmission::Production(AdmissionKind::Early),
        SimAdmission::Predictive,
        SimAdmission::Production(AdmissionKind::ValueDensity),
    ]
    .map(runs);
    /// A share, and how many times theirs ours must be.
    type Measure = (fn(&Summary) -> f64, f64);
    let measures: [Measure; 2] = [(|run| run.by_requests.met, 1.05), (|run| run.by_prompt_tokens.met, 1.03)];
    for (met, gain) in measures {
        let [early, predictive, ours] = [&early, &predictive, &ours].map(|runs| runs.mean(met));
        println!("within objectives: {ours:.3} for {predictive:.3} (predictive) and {early:.3} (early)");
        assert!(ours > gain * predictive && ours > gain * early, "{ours} for {predictive} and {early}");
    }
}

/// Nodes that fetch prefixes from one another have twice the hits of nodes that do not.
pub fn check_hits_of_fetched_prefixes(source: &Source) {
    let hits = |name: &str| {
        let options = SimOptions { prefill: 16, ..without_admission() };
        Runs::of(source, name.parse().expect("a placement"), options).mean(|run| run.cache_hit_ratio)
    };
    let [apart, fetched] = ["load-balance", "min-total-delay"].map(hits);
    println!("hits: {fetched:.3} for {apart:.3}");
    assert!(fetched > 2.0 * apart, "{fetched} for {apart}");
}
