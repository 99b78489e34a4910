//! What caches are worth that other nodes can fetch from.

use baton_scheduler::PlacementKind;

use super::super::args::SimulateArgs;
use super::super::plan::{self, Setting};
use super::super::runs::{Run, run_all};
use super::super::workload::Workload;
use super::{NONE, PaperTable, replayed};

/// Hits of one cache for all nodes over those of caches that each node has for itself (FAST'25).
const PUBLISHED_GAIN: f64 = 2.22;
/// As many as in the paper.
const PREFILL_NODES: usize = 16;

fn settings(args: &SimulateArgs) -> Vec<Setting> {
    let compared = PlacementKind::ALL.into_iter().skip_while(|kind| *kind != PlacementKind::LoadBalance);
    let settings = plan::placements(args, &compared.collect::<Vec<_>>());
    settings.into_iter().map(|setting| replayed(setting, PREFILL_NODES, 8, 1.0)).collect()
}

pub(super) fn table(args: &SimulateArgs, workload: &Workload, progress: bool) -> PaperTable {
    let runs = run_all(workload, &settings(args), progress);
    // The policies begin with the one that does not look at caches.
    let local = runs.first().map_or(0.0, |run| run.summary.cache_hit_ratio);
    PaperTable {
        title: "Cache hits: a node's own cache under load-balance against caches that nodes fetch from",
        ours: format!("{PREFILL_NODES} prefill + 8 decode nodes at 1x, tokens of prompts"),
        header: vec!["PLACEMENT", "FAST'25, GAIN", "OUR GAIN", "HITS", "OWN", "FETCHED"],
        rows: runs.iter().map(|run| row(run, local)).collect(),
        runs,
    }
}

fn row(run: &Run, local: f64) -> Vec<String> {
    let (name, summary) = (run.setting.name(), &run.summary);
    let published = match name {
        "load-balance" => "1.00x".to_owned(),
        "mooncake" => format!("{PUBLISHED_GAIN}x"),
        _ => NONE.to_owned(),
    };
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    vec![
        name.to_owned(),
        published,
        format!("{:.2}x", summary.cache_hit_ratio / local.max(f64::MIN_POSITIVE)),
        percent(summary.cache_hit_ratio),
        percent(summary.cache_hit_ratio_local),
        percent(summary.cache_hit_ratio_fetched),
    ]
}
