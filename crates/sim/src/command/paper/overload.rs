//! What is rejected where more comes than can be served.

use super::super::numbers::Split;
use super::super::plan::{Setting, Varied};
use super::super::runs::Run;
use super::PaperTable;
use super::cell::{Cell, Form};
use super::study::Study;
use crate::options::SimOptions;
use crate::policy::SimAdmission;

/// Policy, and the requests of 23,000 that it rejected (arXiv 2407.00079, section 7: 8 + 8 nodes at 2x).
const PUBLISHED: [(&str, u32); 3] = [("baseline", 4183), ("early", 3771), ("predictive", 3589)];
/// Of the paper's figures.
const PUBLISHED_SPEED: f64 = 2.0;

/// How much faster than recorded.
const SPEEDS: [f64; 2] = [PUBLISHED_SPEED, 3.0];
/// One with which the conversation trace saturates both pools at both speeds, and one with which it saturates decode alone at the lower.
const SPLITS: [Split; 2] = [Split { prefill: 10, decode: 2 }, Split { prefill: 14, decode: 2 }];

/// Every admission policy at one split and speed, the one that takes everything first.
fn group(study: &Study<'_>, split: Split, speed: f64) -> Vec<Setting> {
    let base = study.placed(study.args.placement, speed).options;
    let max_wait = study.args.options().max_wait;
    let base = SimOptions { prefill: split.prefill as usize, decode: split.decode as usize, max_wait, ..base };
    let with = |admission| Setting { varied: Varied::Admission, options: SimOptions { admission, ..base } };
    SimAdmission::ALL.into_iter().map(with).collect()
}

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let splits = study.args.overload_split.map_or(SPLITS.to_vec(), |given| vec![given]);
    let at = |split: &Split| SPEEDS.map(|speed| group(study, *split, speed)).concat();
    let settings: Vec<_> = splits.iter().flat_map(at).collect();
    let runs = study.runs(&settings);
    let (placement, requests) = (study.args.placement.as_str(), runs.first().map_or(0, |run| run.summary.requests));
    let saturated: Vec<_> = runs.chunks(SimAdmission::ALL.len()).filter_map(saturated).collect();
    PaperTable {
        title: "Overload: requests rejected by admission (arXiv: of 23,000 at 2x)",
        published: true,
        ours: format!(
            "placement {placement}, {requests} requests; without admission, a mean load above 1: {}",
            saturated.join(", ")
        ),
        names: 3,
        header: vec![
            "NODES",
            "SPEED",
            "ADMISSION",
            "ARXIV, 8+8",
            "REJECTED",
            "LATE",
            "FAILED",
            "PREFILL LOAD",
            "PREFILL SWING",
            "DECODE LOAD",
            "DECODE SWING",
            "SLO MET",
            "BY TOKENS",
            "LONGEST TENTH",
        ],
        rows: runs.iter().map(row).collect(),
        runs,
    }
}

/// Which pools cannot do what comes, by the loads of the group's run that takes everything.
fn saturated(group: &[Run]) -> Option<String> {
    let run = group.first()?;
    let pools = match (run.summary.prefill_load_mean > 1.0, run.summary.decode_load_mean > 1.0) {
        (true, true) => "both pools",
        (true, false) => "prefill alone",
        (false, true) => "decode alone",
        (false, false) => "no pool",
    };
    Some(format!("{pools} at {} and {}x", nodes(run), run.setting.options.speed))
}

fn nodes(run: &Run) -> String {
    format!("{}+{}", run.setting.options.prefill, run.setting.options.decode)
}

fn row(run: &Run) -> Vec<Cell> {
    let (name, summary) = (run.setting.name(), &run.summary);
    let speed = run.setting.options.speed;
    let published = PUBLISHED.iter().find(|row| row.0 == name && speed == PUBLISHED_SPEED);
    vec![
        Cell::text(nodes(run)),
        Cell::times(speed),
        Cell::text(name),
        Cell::of(published.map(|row| f64::from(row.1)), Form::Count),
        Cell::count(summary.rejected as u64),
        Cell::count(summary.late as u64),
        Cell::count(summary.failed as u64),
        Cell::load(summary.prefill_load_mean),
        Cell::load(summary.prefill_load_swing),
        Cell::load(summary.decode_load_mean),
        Cell::load(summary.decode_load_swing),
        Cell::share(summary.slo_met_share),
        Cell::share(summary.slo_met_token_share),
        Cell::share(summary.slo_met_share_longest_tenth),
    ]
}
