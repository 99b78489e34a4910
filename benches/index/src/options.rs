//! Command line.

use std::path::PathBuf;

use clap::Parser;
use clap::builder::RangedU64ValueParser;

/// Prefix indexes side by side: the same trace, in the same run, on one core.
#[derive(Debug, Parser)]
#[command(name = "bench-index")]
pub struct Options {
    /// Trace in Mooncake's format
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Nodes that report to the index; a table each
    #[arg(long, value_delimiter = ',', default_value = "64,1000", value_parser = between(1, 60_000))]
    pub nodes: Vec<u32>,
    /// Blocks of a node's cache; what was not used for the longest time goes
    #[arg(long, default_value = "5000", value_parser = between(1, 10_000_000))]
    pub capacity: u32,
    /// Times that every index is filled and asked, in turn; the figures are medians
    #[arg(long, default_value = "5", value_parser = between(1, 1000))]
    pub rounds: u32,
    /// Of the choice of nodes
    #[arg(long, default_value = "1")]
    pub seed: u64,
    /// Instead: Baton alone, 1,000 nodes, 10 million entries, lookups while events come at full rate, on two cores
    #[arg(long, conflicts_with_all = ["trace", "nodes", "capacity", "rounds"])]
    pub large: bool,
    /// Seconds of each part of --large
    #[arg(long, default_value = "10", value_parser = between(1, 600))]
    pub seconds: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn between(least: u64, most: u64) -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(least..=most)
}
