//! Makes the runs, two at a time, and keeps of each what is shown.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::plan::Setting;
use super::progress::Progress;
use super::workload::Workload;
use crate::cluster::simulate;
use crate::record::{RequestRecord, Sample};
use crate::summary::Summary;

/// However many processors there are: a comparison leaves the machine usable, and each run holds the records of all requests.
const THREADS: usize = 2;
/// Points of a distribution: each hundredth.
const QUANTILES: usize = 100;

/// What a run came to.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub setting: Setting,
    pub summary: Summary,
    /// The load over time.
    pub samples: Vec<Sample>,
    /// Seconds to the first token against the share of the counted requests that had theirs by then and were completed, ascending.
    pub ttft: Vec<(f64, f64)>,
    /// The same of the time between tokens.
    pub tbt: Vec<(f64, f64)>,
}

/// Makes the runs. Their order is that of the settings, whichever ends first.
pub(crate) fn run_all(workload: &Workload, settings: &[Setting], progress: bool) -> Vec<Run> {
    let (next, progress) = (AtomicUsize::new(0), Progress::new(settings.len(), progress));
    let worker = || {
        let mut runs = Vec::new();
        while let Some((index, setting)) = take(&next, settings) {
            runs.push((index, run(workload, *setting)));
            progress.run_done();
        }
        runs
    };
    let mut runs: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS.min(settings.len())).map(|_| scope.spawn(worker)).collect();
        let results = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        results.flatten().collect()
    });
    runs.sort_by_key(|(index, _)| *index);
    runs.into_iter().map(|(_, run)| run).collect()
}

fn take<'a>(next: &AtomicUsize, settings: &'a [Setting]) -> Option<(usize, &'a Setting)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    Some((index, settings.get(index)?))
}

fn run(workload: &Workload, setting: Setting) -> Run {
    let outcome = simulate(&workload.trace, &workload.profile, &setting.options);
    let summary = Summary::of(&outcome, &setting.options);
    let counted = outcome.counted(setting.options.window);
    let (ttft, tbt) = (distribution(&counted, |record| record.ttft), distribution(&counted, |record| record.tbt));
    Run { setting, summary, samples: outcome.samples, ttft, tbt }
}

/// Seconds against the share of all these requests that were completed and took no longer, ascending.
fn distribution(counted: &[&RequestRecord], of: fn(&RequestRecord) -> Option<Duration>) -> Vec<(f64, f64)> {
    let completed = counted.iter().filter(|record| record.finished.is_some());
    let mut seconds: Vec<_> = completed.filter_map(|record| Some(of(record)?.as_secs_f64())).collect();
    seconds.sort_unstable_by(f64::total_cmp);
    let rank = |point: usize| (seconds.len() * point).div_ceil(QUANTILES).max(1);
    let at = |point| Some((*seconds.get(rank(point) - 1)?, rank(point) as f64 / counted.len() as f64));
    (0..=QUANTILES).filter_map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::super::fixture::trace_file;
    use super::super::plan::settings;
    use super::*;

    fn runs(rest: &str) -> Vec<Run> {
        let trace = trace_file(60, |n| n * 300);
        let args = parse(&format!("--trace {} {rest}", trace.path().display())).unwrap();
        run_all(&Workload::load(&args).unwrap(), &settings(&args), false)
    }

    #[test]
    fn runs_come_in_the_order_of_their_settings() {
        let names: Vec<_> = runs("--compare admission").iter().map(|run| run.setting.name()).collect();
        assert_eq!(names, ["none", "baseline", "early", "predictive", "selective"]);
    }

    #[test]
    fn a_distribution_ends_where_all_that_were_completed_are() {
        for run in runs("--window second-half --compare placement") {
            let (last, share) = (run.ttft[QUANTILES], run.summary.completed as f64 / run.summary.requests as f64);
            assert_eq!((run.ttft.len(), last.1), (QUANTILES + 1, share));
            assert!(run.ttft.is_sorted() && last.0 >= run.summary.ttft_p99_s);
            assert_eq!(run.ttft[50].0, run.summary.ttft_p50_s);
        }
    }
}
