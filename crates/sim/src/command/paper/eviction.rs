//! Hit rates of one cache by eviction policy.

use super::PaperTable;
use super::cell::Cell;
use super::study::Study;
use crate::cache_replay::{EVICTION_SIZES, Row, eviction_table};

pub(super) fn table(study: &mut Study<'_>) -> PaperTable {
    PaperTable {
        title: "Block hits of one cache by eviction policy, % of the blocks of the second half of the time",
        ours: "warmed by the first half; the papers give none for the published traces".to_owned(),
        names: 0,
        header: vec!["BLOCKS", "LRU", "LFU", "LENGTH-AWARE", "HIT-DENSITY", "BELADY", "INFINITE", "GAP CLOSED"],
        rows: eviction_table(&study.workload.trace, &EVICTION_SIZES).iter().map(row).collect(),
        ..PaperTable::default()
    }
}

fn row(row: &Row) -> Vec<Cell> {
    let replays = [&row.lru, &row.lfu, &row.length_aware, &row.hit_density, &row.belady, &row.infinite];
    let rates = replays.map(|replay| Cell::share(replay.second_half.rate()));
    [Cell::count(row.num_blocks.into())].into_iter().chain(rates).chain([Cell::share(row.gap_closed())]).collect()
}
