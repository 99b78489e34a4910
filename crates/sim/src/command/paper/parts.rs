//! What each part of Baton's placement is worth, one added after the other.

use baton_kv_cache::EvictionKind;
use baton_scheduler::{BatonConfig, PlacementKind};

use super::super::plan::Setting;
use super::super::runs::Run;
use super::PaperTable;
use super::cell::Cell;
use super::study::Study;
use crate::options::SimOptions;

/// As recorded, and where queues are long.
const SPEEDS: [f64; 2] = [1.0, 1.3];

/// A row: what it is called, and what is run.
type Part = (String, Setting);

/// Mooncake, and Baton with one part more from row to row.
fn parts(study: &Study<'_>, speed: f64) -> [Part; 5] {
    let (mooncake, baton) = (study.mooncake(speed), study.baton(speed));
    let with = |options: SimOptions| Setting { options, ..baton };
    let least_recent = SimOptions { eviction: EvictionKind::Lru, ..baton.options };
    let first_come = SimOptions { placement: first_come(baton.options.placement), ..least_recent };
    let split_above = study.args.split_above.unwrap_or(baton.options.ttft_slo / 2);
    let splitting = SimOptions { split_above: Some(split_above), ..baton.options };
    [
        (format!("mooncake ({})", mooncake.options.eviction.as_str()), mooncake),
        ("min(recompute, fetch), overlapped: first come first served, lru".to_owned(), with(first_come)),
        ("+ queue order: baton, lru".to_owned(), with(least_recent)),
        (format!("+ eviction: baton, {}", baton.options.eviction.as_str()), baton),
        (format!("+ splitting of prompts above {} s", split_above.as_secs_f64()), with(splitting)),
    ]
}

/// The same policy without its order of the queue.
fn first_come(placement: PlacementKind) -> PlacementKind {
    let config = match placement {
        PlacementKind::BatonWith(config) => config,
        _ => BatonConfig::default(),
    };
    PlacementKind::BatonWith(BatonConfig { reorders: false, ..config })
}

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    let parts: Vec<_> = SPEEDS.iter().flat_map(|speed| parts(study, *speed)).collect();
    let (names, settings): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let runs = study.runs(&settings);
    let floor = study.workload.floor_ttft_mean_s;
    let at_speed = names.chunks(names.len() / SPEEDS.len()).zip(runs.chunks(runs.len() / SPEEDS.len()));
    PaperTable {
        title: "What each part is worth, times to first token in seconds",
        ours: "8 prefill + 8 decode nodes, nothing rejected; each row has the parts of those above it".to_owned(),
        names: 2,
        header: vec![
            "SPEED",
            "PLACEMENT",
            "TTFT",
            "TTFT VS MOONCAKE",
            "P99",
            "P99 VS MOONCAKE",
            "SLO MET",
            "BY TOKENS",
            "LONGEST TENTH",
        ],
        rows: at_speed.flat_map(|(names, runs)| rows(names, runs, floor)).collect(),
        runs,
        ..PaperTable::default()
    }
}

/// The rows of one speed, mooncake first.
fn rows(names: &[String], runs: &[Run], floor: f64) -> Vec<Vec<Cell>> {
    let Some(mooncake) = runs.first() else { return Vec::new() };
    let mut rows: Vec<_> = names.iter().zip(runs).map(|(name, run)| row(name, run, mooncake)).collect();
    let mut floor_row = vec![
        Cell::times(mooncake.setting.options.speed),
        Cell::text("floor: infinite cache, no queue"),
        Cell::seconds(floor),
        Cell::change(floor, mooncake.summary.ttft_mean_s),
    ];
    floor_row.resize(rows[0].len(), Cell::None);
    rows.push(floor_row);
    rows
}

fn row(name: &str, run: &Run, mooncake: &Run) -> Vec<Cell> {
    let (summary, theirs) = (&run.summary, &mooncake.summary);
    let is_mooncake = run.setting == mooncake.setting;
    let change = |ours, theirs| if is_mooncake { Cell::None } else { Cell::change(ours, theirs) };
    vec![
        Cell::times(run.setting.options.speed),
        Cell::text(name),
        Cell::seconds(summary.ttft_mean_s),
        change(summary.ttft_mean_s, theirs.ttft_mean_s),
        Cell::seconds(summary.ttft_p99_s),
        change(summary.ttft_p99_s, theirs.ttft_p99_s),
        Cell::share(summary.slo_met_share),
        Cell::share(summary.slo_met_token_share),
        Cell::share(summary.slo_met_share_longest_tenth),
    ]
}
