//! Prefix indexes side by side: `baton bench index`, with NVIDIA Dynamo's beside Baton's, in the
//! same run.

mod dynamo;

use std::process::ExitCode;

use baton_bench::index::{self, CountingAllocator, IndexArgs};
use clap::Parser;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Prefix indexes side by side: the same trace, in the same run, on one core.
#[derive(Debug, Parser)]
#[command(name = "bench-index")]
struct Options {
    #[command(flatten)]
    index: IndexArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match index::run(&options.index, &dynamo::CONTENDERS, options.json) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-index: {error}");
            ExitCode::FAILURE
        }
    }
}
