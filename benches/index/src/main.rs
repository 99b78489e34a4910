//! Prefix indexes side by side: the same trace, in the same run, on one core.

mod baton;
mod dynamo;
mod index;
mod large;
mod measure;
mod memory;
mod options;
mod report;
mod trace;
mod workload;

use anyhow::{Context, Result};
use clap::Parser;

use crate::options::Options;
use crate::report::Report;
use crate::workload::Workload;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

fn main() -> Result<()> {
    let options = Options::parse();
    if options.large {
        let figures = large::run(&options)?;
        return report::print_large(&figures, options.json);
    }
    let path = options.trace.as_ref().context("--trace: expected a file, as in --trace trace.jsonl")?;
    let prompts = trace::read(path)?;
    let [core] = measure::cores()?;
    measure::pin(core)?;
    let mut report = Report::new(path, options.rounds, measure::clock_ns());
    for nodes in &options.nodes {
        eprintln!("bench-index: {nodes} nodes: playing the trace");
        let workload = Workload::new(&prompts, *nodes, options.capacity, options.seed)?;
        report.tables.push(measure::table(&workload, options.rounds)?);
    }
    report.print(options.json)
}
