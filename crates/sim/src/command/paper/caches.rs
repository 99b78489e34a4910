//! What caches are worth that other nodes can fetch from.

use baton_scheduler::PlacementKind;

use super::super::plan::Setting;
use super::super::runs::Run;
use super::PaperTable;
use super::cell::{Cell, Form};
use super::study::Study;
use crate::options::SimOptions;
use crate::policy::SimPlacement;

/// Hits of one cache for all nodes over those of caches that each node has for itself (FAST'25).
const PUBLISHED: [(&str, f64); 2] = [("load-balance", 1.0), ("mooncake", 2.22)];
/// As many as in the paper.
const PREFILL_NODES: usize = 16;

/// The policies from the one on that does not look at caches.
fn settings(study: &Study<'_>) -> Vec<Setting> {
    let compared =
        super::placement::compared().skip_while(|kind| *kind != SimPlacement::Production(PlacementKind::LoadBalance));
    let placed = |kind| {
        let setting = study.placed(kind, 1.0);
        Setting { options: SimOptions { prefill: PREFILL_NODES, ..setting.options }, ..setting }
    };
    compared.map(placed).collect()
}

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let runs = study.runs(&settings(study));
    let local = runs.first().map_or(0.0, |run| run.summary.cache_hit_ratio);
    PaperTable {
        title: "Cache hits: a node's own cache under load-balance against caches that nodes fetch from",
        published: true,
        ours: format!("{PREFILL_NODES} prefill + 8 decode nodes at 1x, tokens of prompts"),
        names: 1,
        header: vec!["PLACEMENT", "FAST'25, GAIN", "OUR GAIN", "HITS", "OWN", "FETCHED"],
        rows: runs.iter().map(|run| row(run, local)).collect(),
        runs,
    }
}

fn row(run: &Run, local: f64) -> Vec<Cell> {
    let (name, summary) = (run.setting.name(), &run.summary);
    let published = PUBLISHED.iter().find(|row| row.0 == name);
    vec![
        Cell::text(name),
        Cell::of(published.map(|row| row.1), Form::Times),
        Cell::times(summary.cache_hit_ratio / local.max(f64::MIN_POSITIVE)),
        Cell::share(summary.cache_hit_ratio),
        Cell::share(summary.cache_hit_ratio_local),
        Cell::share(summary.cache_hit_ratio_fetched),
    ]
}
