//! What is rejected where more comes than can be served.

use baton_scheduler::AdmissionKind;

use super::super::args::SimulateArgs;
use super::super::plan::{self, Setting};
use super::super::runs::{Run, run_all};
use super::super::workload::Workload;
use super::{NONE, PaperTable, replayed};

/// Policy, and the requests of 23,000 that it rejected (arXiv 2407.00079, section 7: 8 + 8 nodes at 2x).
const PUBLISHED: [(&str, u32); 3] = [("baseline", 4183), ("early", 3771), ("predictive", 3589)];

/// How much faster than recorded.
const SPEED: f64 = 2.0;

fn settings(args: &SimulateArgs) -> Vec<Setting> {
    let compared: Vec<_> = AdmissionKind::ALL.into_iter().filter(|kind| *kind != AdmissionKind::None).collect();
    let (prefill, decode) = (args.overload_split.prefill as usize, args.overload_split.decode as usize);
    let settings = plan::admissions(args, &compared);
    settings.into_iter().map(|setting| replayed(setting, prefill, decode, SPEED)).collect()
}

pub(super) fn table(args: &SimulateArgs, workload: &Workload, progress: bool) -> PaperTable {
    let runs = run_all(workload, &settings(args), progress);
    let (split, requests) = (args.overload_split, runs.first().map_or(0, |run| run.summary.requests));
    let (prefill, decode, placement) = (split.prefill, split.decode, args.placement.as_str());
    PaperTable {
        title: "Overload: requests rejected by admission",
        ours: format!(
            "{prefill} prefill + {decode} decode nodes at {SPEED}x, placement {placement}, {requests} requests"
        ),
        header: vec!["ADMISSION", "ARXIV, 8+8", "AT ARRIVAL", "LATE", "WASTED TOKENS", "DECODE SWING", "WITHIN SLO"],
        rows: runs.iter().map(row).collect(),
        runs,
    }
}

fn row(run: &Run) -> Vec<String> {
    let (name, summary) = (run.setting.name(), &run.summary);
    let figure = PUBLISHED.iter().find(|row| row.0 == name);
    vec![
        name.to_owned(),
        figure.map_or_else(|| NONE.to_owned(), |row| row.1.to_string()),
        summary.rejected_at_arrival.to_string(),
        summary.rejected_after_prefill.to_string(),
        summary.wasted_prefill_tokens.to_string(),
        format!("{:.3}", summary.decode_load_swing),
        summary.slo_met.to_string(),
    ]
}
