//! Mean time to first token by placement policy.

use baton_scheduler::PlacementKind;

use super::super::runs::Run;
use super::PaperTable;
use super::cell::{Cell, Form};
use super::study::Study;
use crate::policy::SimPlacement;

/// Policy, and its mean time to first token in seconds: arXiv 2407.00079 (8 + 8 nodes, 23,000 requests), FAST'25 (16 nodes, conversation trace).
const PUBLISHED: [(&str, f64, f64); 4] =
    [("random", 92.07, 19.65), ("load-balance", 60.41, 5.27), ("cache-aware", 14.36, 3.58), ("mooncake", 6.26, 3.07)];

/// The policies that are compared, worst first in the papers. Taking turns is none of theirs.
pub(super) fn compared() -> impl Iterator<Item = SimPlacement> {
    SimPlacement::ALL.into_iter().filter(|kind| !matches!(kind, SimPlacement::Production(PlacementKind::RoundRobin)))
}

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let settings: Vec<_> = compared().map(|kind| study.placed(kind, 1.0)).collect();
    let (runs, raw) = (study.runs(&settings), study.raw_runs(&settings));
    let mut header = vec!["PLACEMENT", "ARXIV, 8+8", "FAST'25, 16", "OURS", "P90", "P99", "SLO MET"];
    let mut ours = "8 prefill + 8 decode nodes at 1x, nothing rejected".to_owned();
    if !raw.is_empty() {
        header.extend(["RAW", "RAW P90", "RAW P99", "RAW SLO MET"]);
        ours += "; raw: arrivals as they were recorded, without jitter";
    }
    PaperTable {
        title: "Mean time to first token by placement, seconds",
        published: true,
        ours,
        names: 1,
        header,
        rows: runs.iter().enumerate().map(|(index, run)| row(run, raw.get(index))).collect(),
        runs,
    }
}

fn row(run: &Run, raw: Option<&Run>) -> Vec<Cell> {
    let name = run.setting.name();
    let published = PUBLISHED.iter().find(|row| row.0 == name);
    let mut row = vec![
        Cell::text(name),
        Cell::of(published.map(|row| row.1), Form::Seconds),
        Cell::of(published.map(|row| row.2), Form::Seconds),
    ];
    row.extend(figures(run));
    row.extend(raw.into_iter().flat_map(figures));
    row
}

fn figures(run: &Run) -> [Cell; 4] {
    let summary = &run.summary;
    let times = [summary.ttft_mean_s, summary.ttft_p90_s, summary.ttft_p99_s];
    let [mean, p90, p99] = times.map(Cell::seconds);
    [mean, p90, p99, Cell::share(summary.slo_met_share)]
}
