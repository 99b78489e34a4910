//! Mean time to first token by placement policy.

use baton_scheduler::PlacementKind;

use super::super::args::SimulateArgs;
use super::super::plan::{self, Setting};
use super::super::runs::{Run, run_all};
use super::super::workload::Workload;
use super::{PaperTable, published, replayed};

/// Policy, and its mean time to first token in seconds: arXiv 2407.00079 (8 + 8 nodes, 23,000 requests), FAST'25 (16 nodes, conversation trace).
const PUBLISHED: [(&str, f64, f64); 4] =
    [("random", 92.07, 19.65), ("load-balance", 60.41, 5.27), ("cache-aware", 14.36, 3.58), ("mooncake", 6.26, 3.07)];

fn settings(args: &SimulateArgs) -> Vec<Setting> {
    let compared: Vec<_> = PlacementKind::ALL.into_iter().filter(|kind| *kind != PlacementKind::RoundRobin).collect();
    let settings = plan::placements(args, &compared);
    settings.into_iter().map(|setting| replayed(setting, 8, 8, 1.0)).collect()
}

pub(super) fn table(args: &SimulateArgs, workload: &Workload, progress: bool) -> PaperTable {
    let runs = run_all(workload, &settings(args), progress);
    PaperTable {
        title: "Mean time to first token by placement, seconds",
        ours: "8 prefill + 8 decode nodes at 1x, nothing rejected".to_owned(),
        header: vec!["PLACEMENT", "ARXIV, 8+8", "FAST'25, 16", "OURS", "OURS P90", "OURS SLO MET"],
        rows: runs.iter().map(row).collect(),
        runs,
    }
}

fn row(run: &Run) -> Vec<String> {
    let (name, summary) = (run.setting.name(), &run.summary);
    let figures = PUBLISHED.iter().find(|row| row.0 == name);
    vec![
        name.to_owned(),
        published(figures.map(|row| row.1)),
        published(figures.map(|row| row.2)),
        format!("{:.2}", summary.ttft_mean_s),
        format!("{:.2}", summary.ttft_p90_s),
        format!("{:.1} %", summary.slo_met_share * 100.0),
    ]
}
