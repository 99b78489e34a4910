//! The figures, as a table or as JSON.

use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use crate::large::Figures;
use crate::workload::Workload;

/// Median of the rounds, and the range.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    /// Of at least one figure.
    pub fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_by(f64::total_cmp);
        Self { median: figures[(figures.len() - 1) / 2], least: figures[0], most: figures[figures.len() - 1] }
    }

    /// In other units.
    fn cell(self, unit: f64) -> String {
        let [median, least, most] = [self.median, self.least, self.most].map(|figure| figure / unit);
        format!("{median:.2} ({least:.2}-{most:.2})")
    }
}

/// An index.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Whose, and which.
    pub name: &'static str,
    /// Of lookups timed one by one, clock included.
    pub lookup_p50_ns: Spread,
    /// Likewise.
    pub lookup_p99_ns: Spread,
    /// Of lookups in a row.
    pub lookup_mean_ns: Spread,
    /// Blocks stored and removed in a second.
    pub events_m_blocks_s: Spread,
    /// Bytes per pair of a block and a node that holds it.
    pub bytes_per_entry: f64,
}

/// How often Baton is better than the best of the others, a figure at a time.
#[derive(Debug, Serialize)]
pub struct Ratios {
    lookup_p50: f64,
    lookup_p99: f64,
    lookup_mean: f64,
    events: f64,
    memory: f64,
}

/// All indexes with one number of nodes.
#[derive(Debug, Serialize)]
pub struct Table {
    nodes: u32,
    copies: u32,
    requests: usize,
    blocks_stored: usize,
    blocks_removed: usize,
    different_blocks: usize,
    entries: usize,
    lookups: usize,
    blocks_per_lookup: f64,
    nodes_per_lookup: f64,
    best_depth_per_lookup: f64,
    rows: Vec<Row>,
    baton_over_best: Ratios,
}

impl Table {
    /// Puts what was measured beside what it was measured on.
    pub fn new(workload: &Workload, rows: Vec<Row>) -> Self {
        let lookups = &workload.one_by_one;
        let mean = |figure: &dyn Fn(usize) -> usize| {
            (0..lookups.len()).map(figure).sum::<usize>() as f64 / lookups.len() as f64
        };
        let best = |n: usize| lookups[n].depths.iter().map(|(_, depth)| *depth as usize).max().unwrap_or(0);
        Self {
            nodes: workload.nodes,
            copies: workload.copies,
            requests: workload.requests,
            blocks_stored: workload.stored,
            blocks_removed: workload.removed,
            different_blocks: workload.parents.len(),
            entries: workload.entries,
            lookups: lookups.len(),
            blocks_per_lookup: mean(&|n| lookups[n].blocks.len()),
            nodes_per_lookup: mean(&|n| lookups[n].depths.len()),
            best_depth_per_lookup: mean(&best),
            baton_over_best: Ratios::of(&rows),
            rows,
        }
    }

    fn print(&self) {
        println!(
            "\n{} nodes: the trace {} times, {} requests; {:.2} M blocks stored, {:.2} M removed, {:.2} M entries of {:.2} M different blocks.",
            self.nodes,
            self.copies,
            self.requests,
            self.blocks_stored as f64 / 1e6,
            self.blocks_removed as f64 / 1e6,
            self.entries as f64 / 1e6,
            self.different_blocks as f64 / 1e6
        );
        println!(
            "{} lookups of {:.1} blocks: {:.1} nodes hold some of it, the best one {:.1} blocks (means).\n",
            self.lookups, self.blocks_per_lookup, self.nodes_per_lookup, self.best_depth_per_lookup
        );
        println!(
            "{:26}  {:22}  {:22}  {:22}  {:20}  {:>11}",
            "", "lookup p50, us", "p99, us", "mean in a row, us", "events, M blocks/s", "bytes/entry"
        );
        for row in &self.rows {
            println!(
                "{:26}  {:22}  {:22}  {:22}  {:20}  {:>11.1}",
                row.name,
                row.lookup_p50_ns.cell(1e3),
                row.lookup_p99_ns.cell(1e3),
                row.lookup_mean_ns.cell(1e3),
                row.events_m_blocks_s.cell(1.0),
                row.bytes_per_entry
            );
        }
        let Ratios { lookup_p50, lookup_p99, lookup_mean, events, memory } = self.baton_over_best;
        let [p50, p99, mean, events] = [lookup_p50, lookup_p99, lookup_mean, events].map(|r| format!("{r:.2} x"));
        println!("{:26}  {p50:22}  {p99:22}  {mean:22}  {events:20}  {memory:>9.2} x", "baton : best (>1 better)");
    }
}

impl Ratios {
    fn of(rows: &[Row]) -> Self {
        let (baton, others): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.name.starts_with("baton"));
        let least = |figure: fn(&Row) -> f64| {
            let best = others.iter().map(|row| figure(row)).fold(f64::INFINITY, f64::min);
            best / figure(baton[0])
        };
        Self {
            lookup_p50: least(|row| row.lookup_p50_ns.median),
            lookup_p99: least(|row| row.lookup_p99_ns.median),
            lookup_mean: least(|row| row.lookup_mean_ns.median),
            events: least(|row| row.events_m_blocks_s.median.recip()),
            memory: least(|row| row.bytes_per_entry),
        }
    }
}

/// A run over a trace.
#[derive(Debug, Serialize)]
pub struct Report {
    processor: String,
    trace: String,
    rounds: u32,
    /// What the clock adds to each lookup that is timed alone.
    clock_ns: f64,
    /// One per number of nodes.
    pub tables: Vec<Table>,
}

impl Report {
    /// Without tables yet.
    pub fn new(trace: &Path, rounds: u32, clock_ns: f64) -> Self {
        let trace = trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { processor: processor(), trace, rounds, clock_ns, tables: Vec::new() }
    }

    /// To stdout.
    pub fn print(&self, json: bool) -> Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        println!(
            "{}, one core of an {}; medians of {} rounds (least-most). The clock adds {} ns to each lookup that is timed alone.",
            self.trace, self.processor, self.rounds, self.clock_ns
        );
        self.tables.iter().for_each(Table::print);
        Ok(())
    }
}

/// The processor's name, where the system tells.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| "unknown processor".to_owned(), |(_, name)| name.to_owned())
}

/// The figures of `--large`.
pub fn print_large(figures: &Figures, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(figures)?);
        return Ok(());
    }
    println!(
        "baton, {} nodes, {:.2} M entries, lookups of {} blocks, filled at {:.2} M blocks/s, {:.1} bytes/entry\n",
        figures.nodes,
        figures.entries as f64 / 1e6,
        figures.blocks_per_lookup,
        figures.fill_m_blocks_s,
        figures.bytes_per_entry
    );
    println!("{:26}  {:>9}  {:>9}  {:>9}  {:>9}  {:>10}", "lookups, us", "p50", "p99", "p99.9", "longest", "lookups");
    for (name, lookups) in [("no events", &figures.alone), ("events at full rate", &figures.beside_events)] {
        println!(
            "{name:26}  {:>9.2}  {:>9.2}  {:>9.2}  {:>9.1}  {:>10}",
            lookups.p50_ns / 1e3,
            lookups.p99_ns / 1e3,
            lookups.p999_ns / 1e3,
            lookups.longest_ns / 1e3,
            lookups.count
        );
    }
    println!("\nevents beside the lookups: {:.2} M blocks/s", figures.events_m_blocks_s);
    Ok(())
}
