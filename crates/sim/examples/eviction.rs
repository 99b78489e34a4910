//! Block hit rates of every eviction policy over the second half of traces: `cargo run --release -p baton-sim --example eviction TRACE.jsonl ..`

use std::path::Path;
use std::process::ExitCode;

use baton_sim::{EVICTION_SIZES, Row, Trace, TraceError, eviction_table};

fn main() -> ExitCode {
    for path in std::env::args().skip(1) {
        if let Err(error) = print(Path::new(&path)) {
            eprintln!("{path}: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn print(path: &Path) -> Result<(), TraceError> {
    let trace = Trace::open(path)?;
    println!("{}: {} requests, {} blocks", trace.name, trace.requests.len(), trace.blocks());
    println!(
        "{:>8} {:>7} {:>7} {:>12} {:>11} {:>7} {:>8} {:>10}",
        "blocks", "lru", "lfu", "length-aware", "hit-density", "belady", "infinite", "gap closed"
    );
    for row in eviction_table(&trace, &EVICTION_SIZES) {
        print_row(&row);
    }
    Ok(())
}

fn print_row(row: &Row) {
    let replays = [row.lru, row.lfu, row.length_aware, row.hit_density, row.belady, row.infinite];
    let [lru, lfu, length_aware, hit_density, belady, infinite] = replays.map(|replay| replay.second_half.rate());
    let gap = 100.0 * row.gap_closed();
    println!(
        "{:>8} {lru:>7.4} {lfu:>7.4} {length_aware:>12.4} {hit_density:>11.4} {belady:>7.4} {infinite:>8.4} {gap:>8.1} %",
        row.num_blocks
    );
}
