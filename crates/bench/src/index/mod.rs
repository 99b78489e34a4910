//! `baton bench index`: the conductor's prefix index under a trace, on one core. It measures
//! lookups, the rate of events, and the weight of an entry.
//!
//! [`Workload`] makes of a trace what nodes would report and what would be asked. An [`Index`] is
//! what can be put under it. Baton's and a naive map are here; `benches/index`, a workspace of its
//! own, adds those of others. `large` is Baton's alone, with lookups in one thread while events
//! come in another.
//!
//! **Invariant**: before anything is timed, every answer is compared with what the nodes' caches
//! hold.

mod allocator;
mod args;
mod baton;
mod contender;
mod cores;
mod large;
mod measure;
mod naive;
mod report;
mod workload;

use std::io::IsTerminal;

pub use allocator::CountingAllocator;
pub use args::IndexArgs;
pub use contender::{Contender, Index};
pub use workload::{Batch, Block, Change, Workload};

use crate::BenchError;
use report::Report;

/// Measures Baton's index and the others, and prints the figures.
///
/// # Errors
/// What is wrong with an argument or with the trace, an answer that is wrong, and a program whose
/// allocator is not [`CountingAllocator`].
pub fn run(args: &IndexArgs, others: &[Contender], json: bool) -> Result<(), BenchError> {
    if args.large {
        return large::run(args)?.print(json).map_err(BenchError::Output);
    }
    let (path, prompts) = args.prompts()?;
    let [core] = cores::usable("--trace")?;
    cores::bind(core)?;
    let mut contenders = vec![Contender::of::<baton::Baton>(), Contender::of::<naive::Naive>()];
    contenders.extend_from_slice(others);
    let mut report = Report::new(path, args.rounds, measure::clock_ns());
    for nodes in &args.nodes {
        progress(&format!("{nodes} nodes: the trace is played"));
        let workload = Workload::new(&prompts, *nodes, args.capacity, args.seed)?;
        report.tables.push(measure::table(&workload, &contenders, args.rounds)?);
    }
    report.print(json).map_err(BenchError::Output)
}

/// A line on stderr, if that is a terminal.
fn progress(line: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("bench index: {line}");
    }
}
