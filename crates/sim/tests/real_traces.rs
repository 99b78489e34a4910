//! Eviction over Mooncake's traces, which are too large to be committed: `$BATON_FIXTURES/traces/*.jsonl`.

use std::path::PathBuf;

use baton_sim::{Row, Trace, eviction_table};

const SIZES: [u32; 4] = [1_000, 5_000, 10_000, 30_000];

/// The traces that there are; none, and a line that says so, where the folder is not named.
fn traces(test: &str) -> Vec<Trace> {
    let Some(fixtures) = std::env::var_os("BATON_FIXTURES") else {
        println!("SKIPPED {test}: BATON_FIXTURES is not set");
        return Vec::new();
    };
    let folder = PathBuf::from(fixtures).join("traces");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    assert!(!paths.is_empty(), "no traces in {}", folder.display());
    paths.iter().map(|path| Trace::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).collect()
}

/// Whether hit density beats LRU and LFU here; it must not lose.
fn wins(trace: &Trace, row: &Row) -> bool {
    let (rate, baseline) = (row.hit_density.second_half.rate(), row.baseline());
    assert!(rate >= baseline, "{}, {} blocks: {rate:.4}, but {baseline:.4}", trace.name, row.num_blocks);
    rate > baseline
}

#[test]
fn hit_density_is_nowhere_worse_than_lru_or_lfu_and_mostly_better() {
    for trace in traces("hit_density_is_nowhere_worse_than_lru_or_lfu_and_mostly_better") {
        let rows = eviction_table(&trace, &SIZES);
        let won = rows.iter().filter(|row| wins(&trace, row)).count();
        assert!(won * 2 > SIZES.len(), "{}: better at {won} sizes", trace.name);
    }
}

/// The figure known for LRU shows that the replay counts as others do.
#[test]
fn lru_has_the_hits_that_are_known_for_the_synthetic_trace() {
    for trace in traces("lru_has_the_hits_that_are_known_for_the_synthetic_trace")
        .iter()
        .filter(|trace| trace.name == "synthetic_trace")
    {
        let rate = eviction_table(trace, &[10_000])[0].lru.whole.rate();
        assert!((rate - 0.424).abs() < 0.0005, "{rate}");
    }
}
