//! Mean time to first token over the speed: the order of the policies must not hang on one point.

use super::super::runs::Run;
use super::PaperTable;
use super::cell::Cell;
use super::placement::compared;
use super::study::Study;

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let speeds = study.extent.means.all();
    let policies: Vec<_> = compared().collect();
    let at = |speed: &f64| policies.iter().map(|kind| study.placed(*kind, *speed)).collect::<Vec<_>>();
    let settings: Vec<_> = speeds.iter().flat_map(at).collect();
    let runs = study.runs(&settings);
    let floor = study.workload.floor_ttft_mean_s;
    PaperTable {
        title: "Mean time to first token by speed, seconds",
        ours: "8 prefill + 8 decode nodes, nothing rejected; floor: infinite cache, no queue".to_owned(),
        names: 0,
        header: vec!["SPEED", "RANDOM", "LOAD-BALANCE", "CACHE-AWARE", "MOONCAKE", "BATON", "FLOOR"],
        rows: runs.chunks(policies.len()).map(|runs| row(runs, floor)).collect(),
        runs,
        ..PaperTable::default()
    }
}

/// The runs of one speed.
fn row(runs: &[Run], floor: f64) -> Vec<Cell> {
    let speed = runs.iter().take(1).map(|run| Cell::times(run.setting.options.speed));
    let means = runs.iter().map(|run| Cell::seconds(run.summary.ttft_mean_s));
    speed.chain(means).chain([Cell::seconds(floor)]).collect()
}
