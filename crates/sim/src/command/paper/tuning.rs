//! What mooncake runs with: the best threshold and the better eviction of the first half of the trace's time, which no table counts.

use baton_kv_cache::EvictionKind;

use super::super::args::{SimulateArgs, WindowName};
use super::super::plan::{Setting, Varied};
use super::super::runs::run_all;
use super::super::workload::Workload;
use super::PaperTable;
use super::cell::{Cell, Form};
use super::study::Study;
use crate::options::SimOptions;
use crate::policy::SimPlacement;

/// The papers name the threshold and give no figure.
const THRESHOLDS: [f64; 5] = [1.0, 1.5, 2.0, 4.0, 8.0];
/// Fast enough that queues tell the thresholds apart.
const SPEED: f64 = 1.3;

/// What was tried, and what it came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Trial {
    pub threshold: f64,
    pub eviction: EvictionKind,
    pub ttft_mean_s: f64,
}

/// Everything that was tried.
#[derive(Debug)]
pub(super) struct Tuning(Vec<Trial>);

impl Tuning {
    pub(super) fn new(args: &SimulateArgs, workload: &Workload, progress: bool) -> Self {
        let settings = settings(args);
        let means = run_all(workload, &settings, progress).into_iter().map(|run| run.summary.ttft_mean_s);
        let trial = |((threshold, eviction), ttft_mean_s)| Trial { threshold, eviction, ttft_mean_s };
        Self(candidates(args).into_iter().zip(means).map(trial).collect())
    }

    /// The least mean time to first token; of equal ones, the first that was tried.
    pub(super) fn best(&self) -> Trial {
        let best = self.0.iter().min_by(|one, other| one.ttft_mean_s.total_cmp(&other.ttft_mean_s));
        *best.expect("there is always a candidate")
    }

    /// In a few words.
    pub(super) fn note(&self) -> String {
        let Trial { threshold, eviction, .. } = self.best();
        format!("threshold {threshold}, eviction {}: the best of the first half at {SPEED}x", eviction.as_str())
    }
}

/// Thresholds with each eviction policy that may suit it; what is given is not chosen.
fn candidates(args: &SimulateArgs) -> Vec<(f64, EvictionKind)> {
    let thresholds = args.balancing_threshold.map_or(THRESHOLDS.to_vec(), |given| vec![given]);
    let pairs = evictions(args).into_iter().flat_map(|eviction| thresholds.iter().map(move |value| (*value, eviction)));
    pairs.collect()
}

/// Mooncake's own, and the one that the other policies run with.
fn evictions(args: &SimulateArgs) -> Vec<EvictionKind> {
    let mut kinds = vec![EvictionKind::Lru, args.eviction];
    kinds.dedup();
    kinds
}

fn settings(args: &SimulateArgs) -> Vec<Setting> {
    let base = Setting::new(Varied::Placement, args);
    let window = WindowName::FirstHalf.window();
    let with = |(balancing_threshold, eviction)| {
        let placement = SimPlacement::Mooncake { balancing_threshold };
        SimOptions { placement, eviction, window, prefill: 8, decode: 8, speed: SPEED, ..base.options }
    };
    candidates(args).into_iter().map(|candidate| Setting { options: with(candidate), ..base }).collect()
}

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let best = study.tuning.best();
    let row = |trial: &Trial| {
        let taken = if *trial == best { Cell::text("yes") } else { Cell::None };
        let eviction = Cell::text(trial.eviction.as_str());
        vec![eviction, Cell::times(trial.threshold), Cell::Figure(trial.ttft_mean_s, Form::Milliseconds), taken]
    };
    PaperTable {
        title: "What placement mooncake runs with in every table: the least mean TTFT of the first half of the time",
        ours: format!("8 prefill + 8 decode nodes at {SPEED}x, requests of the first half"),
        names: 1,
        header: vec!["EVICTION", "THRESHOLD", "TTFT", "TAKEN"],
        rows: study.tuning.0.iter().map(row).collect(),
        ..PaperTable::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::args::tests::parse;
    use super::*;
    use crate::options::Window;

    #[test]
    fn the_least_mean_is_taken_and_named() {
        let trial = |threshold, eviction, ttft_mean_s| Trial { threshold, eviction, ttft_mean_s };
        let trials = [
            trial(1.0, EvictionKind::Lru, 3.0),
            trial(4.0, EvictionKind::Lru, 1.0),
            trial(4.0, EvictionKind::HitDensity, 1.0),
            trial(8.0, EvictionKind::HitDensity, 2.0),
        ];
        let tuning = Tuning(trials.to_vec());
        assert_eq!(tuning.best(), trials[1]);
        assert!(tuning.note().starts_with("threshold 4, eviction lru"), "{}", tuning.note());
    }

    #[test]
    fn every_threshold_is_tried_with_both_evictions_on_the_first_half() {
        let tried = settings(&parse("--trace t --paper --window all").unwrap());
        let thresholds = tried.iter().filter_map(|setting| match setting.options.placement {
            SimPlacement::Mooncake { balancing_threshold } => Some((setting.options.eviction, balancing_threshold)),
            _ => None,
        });
        let expected = [EvictionKind::Lru, EvictionKind::HitDensity].map(|kind| THRESHOLDS.map(|value| (kind, value)));
        assert_eq!(thresholds.collect::<Vec<_>>(), expected.concat());
        assert!(tried.iter().all(|setting| setting.options.window == Window::FIRST_HALF));
    }

    #[test]
    fn what_is_given_is_not_chosen() {
        let candidates = |rest: &str| candidates(&parse(&format!("--trace t --paper {rest}")).unwrap());
        assert_eq!(candidates("--balancing-threshold 3 --eviction lru"), [(3.0, EvictionKind::Lru)]);
        assert_eq!(candidates("--balancing-threshold 3").len(), 2);
    }
}
