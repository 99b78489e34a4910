//! Hit rates of one cache by eviction policy.

use super::super::args::SimulateArgs;
use super::super::workload::Workload;
use super::PaperTable;
use crate::cache_replay::{EVICTION_SIZES, Row, eviction_table};

pub(super) fn table(_: &SimulateArgs, workload: &Workload, _: bool) -> PaperTable {
    PaperTable {
        title: "Block hits of one cache by eviction policy, % of the blocks of the second half of the time",
        ours: "warmed by the first half; the papers give none for the published traces".to_owned(),
        header: vec!["BLOCKS", "LRU", "LFU", "LENGTH-AWARE", "HIT-DENSITY", "BELADY", "INFINITE", "GAP CLOSED"],
        rows: eviction_table(&workload.trace, &EVICTION_SIZES).iter().map(row).collect(),
        runs: Vec::new(),
    }
}

fn row(row: &Row) -> Vec<String> {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let replays = [&row.lru, &row.lfu, &row.length_aware, &row.hit_density, &row.belady, &row.infinite];
    let rates = replays.map(|replay| percent(replay.second_half.rate()));
    std::iter::once(row.num_blocks.to_string()).chain(rates).chain([percent(row.gap_closed())]).collect()
}
