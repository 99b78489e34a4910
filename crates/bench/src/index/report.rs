//! The figures, as a table or as JSON.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use super::large::Figures;
use super::workload::Workload;

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

/// How many times as good as the best of the others Baton is, a figure at a time.
#[derive(Debug, Clone, Copy, Serialize)]
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
    /// Baton's first.
    rows: Vec<Row>,
    baton_over_best: Ratios,
}

impl Table {
    /// Puts what was measured next to what it was measured on.
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
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{} nodes: the trace {} times, {} requests; {:.2} M blocks stored, {:.2} M removed, {:.2} M entries of {:.2} M different blocks.",
            self.nodes,
            self.copies,
            self.requests,
            self.blocks_stored as f64 / 1e6,
            self.blocks_removed as f64 / 1e6,
            self.entries as f64 / 1e6,
            self.different_blocks as f64 / 1e6
        )?;
        writeln!(
            f,
            "{} lookups of {:.1} blocks: {:.1} nodes hold some of it, the best one {:.1} blocks (means).\n",
            self.lookups, self.blocks_per_lookup, self.nodes_per_lookup, self.best_depth_per_lookup
        )?;
        writeln!(
            f,
            "{:26}  {:22}  {:22}  {:22}  {:20}  {:>11}",
            "", "lookup p50, us", "p99, us", "mean in a row, us", "events, M blocks/s", "bytes/entry"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:26}  {:22}  {:22}  {:22}  {:20}  {:>11.1}",
                row.name,
                row.lookup_p50_ns.cell(1e3),
                row.lookup_p99_ns.cell(1e3),
                row.lookup_mean_ns.cell(1e3),
                row.events_m_blocks_s.cell(1.0),
                row.bytes_per_entry
            )?;
        }
        let Ratios { lookup_p50, lookup_p99, lookup_mean, events, memory } = self.baton_over_best;
        let [p50, p99, mean, events] = [lookup_p50, lookup_p99, lookup_mean, events].map(|r| format!("{r:.2} x"));
        writeln!(f, "{:26}  {p50:22}  {p99:22}  {mean:22}  {events:20}  {memory:>9.2} x", "baton : best (>1 better)")
    }
}

impl Ratios {
    /// Of Baton's row, the first, and those of others.
    fn of(rows: &[Row]) -> Self {
        let (baton, others) = rows.split_first().expect("Baton's row is there");
        let least = |figure: fn(&Row) -> f64| {
            let best = others.iter().map(figure).fold(f64::INFINITY, f64::min);
            best / figure(baton)
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
    pub fn print(&self, json: bool) -> io::Result<()> {
        print(self, json)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, trace, rounds, clock_ns, tables } = self;
        writeln!(
            f,
            "{trace}, one core of an {processor}; medians of {rounds} rounds (least-most). The clock adds {clock_ns} ns to each lookup that is timed alone."
        )?;
        tables.iter().try_for_each(|table| write!(f, "{table}"))
    }
}

/// The processor's name, if the system tells.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| "unknown processor".to_owned(), |(_, name)| name.to_owned())
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "baton, {} nodes, {:.2} M entries, lookups of {} blocks, filled at {:.2} M blocks/s, {:.1} bytes/entry\n",
            self.nodes,
            self.entries as f64 / 1e6,
            self.blocks_per_lookup,
            self.fill_m_blocks_s,
            self.bytes_per_entry
        )?;
        let [p50, p99, p999, longest, count] = ["p50", "p99", "p99.9", "longest", "lookups"];
        writeln!(f, "{:26}  {p50:>9}  {p99:>9}  {p999:>9}  {longest:>9}  {count:>10}", "lookups, us")?;
        for (name, lookups) in [("no events", &self.alone), ("events at full rate", &self.beside_events)] {
            writeln!(
                f,
                "{name:26}  {:>9.2}  {:>9.2}  {:>9.2}  {:>9.1}  {:>10}",
                lookups.p50_ns / 1e3,
                lookups.p99_ns / 1e3,
                lookups.p999_ns / 1e3,
                lookups.longest_ns / 1e3,
                lookups.count
            )?;
        }
        writeln!(f, "\nevents beside the lookups: {:.2} M blocks/s", self.events_m_blocks_s)
    }
}

impl Figures {
    /// To stdout.
    pub fn print(&self, json: bool) -> io::Result<()> {
        print(self, json)
    }
}

fn print(figures: &(impl fmt::Display + Serialize), json: bool) -> io::Result<()> {
    let text = if json { serde_json::to_string(figures)? } else { figures.to_string() };
    writeln!(io::stdout(), "{}", text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, [p50, p99, mean, events, bytes_per_entry]: [f64; 5]) -> Row {
        let [lookup_p50_ns, lookup_p99_ns, lookup_mean_ns, events_m_blocks_s] =
            [p50, p99, mean, events].map(|figure| Spread::of(vec![figure]));
        Row { name, lookup_p50_ns, lookup_p99_ns, lookup_mean_ns, events_m_blocks_s, bytes_per_entry }
    }

    #[test]
    fn index_bench_ratio_is_to_the_best_other_of_each_figure() {
        let rows = [
            row("baton", [1.0, 2.0, 4.0, 10.0, 20.0]),
            row("a", [3.0, 9.0, 9.0, 5.0, 90.0]),
            row("b", [9.0, 4.0, 2.0, 4.0, 50.0]),
        ];
        let Ratios { lookup_p50, lookup_p99, lookup_mean, events, memory } = Ratios::of(&rows);
        assert_eq!([lookup_p50, lookup_p99, lookup_mean, events, memory], [3.0, 2.0, 0.5, 2.0, 2.5]);
    }

    #[test]
    fn index_bench_spread_shows_median_and_range() {
        assert_eq!(Spread::of(vec![9.0, 1.0, 4.0]).cell(1.0), "4.00 (1.00-9.00)");
    }
}
