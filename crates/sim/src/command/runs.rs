//! Makes the runs, two at a time.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::plan::Setting;
use super::workload::Workload;
use crate::bounds::most_met;
use crate::cluster::simulate;
use crate::faults::FaultKind;
use crate::summary::Summary;

/// However many processors there are: a comparison leaves the machine usable, and each run holds
/// the records of all requests.
const THREADS: usize = 2;

/// What a run came to.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub setting: Setting,
    pub summary: Summary,
    /// What went wrong, and how often.
    pub faults: BTreeMap<FaultKind, u64>,
    /// Share of the requests that any policy can serve within the objectives, at most.
    pub bound: f64,
}

/// Makes the runs. Their order is that of the settings, whichever ends first.
pub(crate) fn run_all(workload: &Workload, settings: &[Setting]) -> Vec<Run> {
    let next = AtomicUsize::new(0);
    let is_watched = settings.len() > 1 && io::stderr().is_terminal();
    let worker = || {
        let mut runs = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(setting) = settings.get(index) else { return runs };
            if is_watched {
                eprintln!(
                    "baton: run {} of {}: {} at {}x",
                    index + 1,
                    settings.len(),
                    setting.name,
                    setting.options.speed
                );
            }
            runs.push((index, run(workload, setting)));
        }
    };
    let mut runs: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS.min(settings.len())).map(|_| scope.spawn(worker)).collect();
        let results = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        results.flatten().collect()
    });
    runs.sort_by_key(|(index, _)| *index);
    runs.into_iter().map(|(_, run)| run).collect()
}

fn run(workload: &Workload, setting: &Setting) -> Run {
    let outcome = simulate(&workload.trace, &workload.profile, &setting.options);
    let summary = Summary::of(&outcome, &setting.options);
    let bound = most_met(&workload.trace, &workload.profile, &setting.options);
    Run { setting: setting.clone(), summary, faults: outcome.faults, bound }
}
