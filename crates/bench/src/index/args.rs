//! Flags of `baton bench index`.

use std::path::{Path, PathBuf};

use baton_sim::{BLOCK_TOKENS, Trace};
use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::large;
use crate::BenchError;

/// Of `baton bench index`.
#[derive(Debug, Args)]
pub struct IndexArgs {
    /// Look up the prompts of this trace (as for baton simulate). Only full blocks count
    #[arg(long, value_name = "FILE", required_unless_present = "large")]
    pub trace: Option<PathBuf>,
    /// Let N nodes report to the index; several numbers give a figure for each
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64,1000", value_parser = between(1, 60_000))]
    pub nodes: Vec<u32>,
    /// Cache this many blocks per node; the least recently used is evicted
    #[arg(long, value_name = "BLOCKS", default_value = "5000", value_parser = between(1, 10_000_000))]
    pub capacity: u32,
    /// Fill and query the index N times, and print medians
    #[arg(long, value_name = "N", default_value = "5", value_parser = between(1, 1000))]
    pub rounds: u32,
    /// Seed the choice of nodes
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Use 1,000 nodes and prompts of 128 blocks instead of a trace. Lookups run in one thread
    /// alone, then while another applies events at full rate. Takes two cores
    #[arg(long, conflicts_with_all = ["trace", "nodes", "capacity", "rounds"])]
    pub large: bool,
    /// Store N pairs of a block and a node that has it (--large)
    #[arg(long, value_name = "N", default_value = "10000000", requires = "large", conflicts_with = "trace", value_parser = between(large::LEAST_ENTRIES, 1_000_000_000))]
    pub entries: u32,
    /// Run each part of --large for this long, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", requires = "large", conflicts_with = "trace", value_parser = between(1, 600))]
    pub seconds: u32,
}

fn between(least: u64, most: u64) -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(least..=most)
}

impl IndexArgs {
    /// Ids of the full blocks of every prompt that has any, in the order of the requests, and where
    /// they were read.
    pub(super) fn prompts(&self) -> Result<(&Path, Vec<Vec<u64>>), BenchError> {
        let path = self.trace.as_deref().ok_or_else(|| BenchError::invalid("--trace", "expected a file"))?;
        let wrong = |problem: String| BenchError::invalid("--trace", format!("{}: {problem}", path.display()));
        let trace = Trace::open(path).map_err(|error| wrong(error.to_string()))?;
        let full = |input_length: u32| (input_length / BLOCK_TOKENS) as usize;
        let blocks = |request: baton_sim::TraceRequest| {
            let mut ids = request.hash_ids;
            ids.truncate(full(request.input_length));
            ids
        };
        let mut prompts: Vec<_> = trace.requests.into_iter().map(blocks).collect();
        prompts.retain(|prompt| !prompt.is_empty());
        if prompts.is_empty() { Err(wrong("no prompt has a full block".to_owned())) } else { Ok((path, prompts)) }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: IndexArgs,
    }

    fn parse(line: &str) -> Result<IndexArgs, clap::Error> {
        Cli::try_parse_from(std::iter::once("index").chain(line.split_whitespace())).map(|cli| cli.args)
    }

    #[test]
    fn invalid_index_bench_argument_names_its_flag() {
        assert_eq!(parse("--trace t --nodes 8,16").unwrap().nodes, [8, 16]);
        assert_eq!(parse("--large --seconds 3").unwrap().entries, 10_000_000);
        for (line, flag) in [
            ("", "--trace"),
            ("--trace t --nodes 0", "--nodes"),
            ("--trace t --nodes 8,x", "--nodes"),
            ("--trace t --capacity 0", "--capacity"),
            ("--trace t --rounds 0", "--rounds"),
            ("--trace t --large", "--large"),
            ("--trace t --seconds 3", "--seconds"),
            ("--large --entries 7", "--entries"),
            ("--large --nodes 7", "--nodes"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(flag), "{line}: {error}");
        }
    }

    #[test]
    fn index_bench_names_a_trace_missing_or_without_full_block() {
        let error = parse("--trace /nowhere/t").unwrap().prompts().unwrap_err().to_string();
        assert!(error.starts_with("--trace: /nowhere/t: "), "{error}");
        let error = parse("--trace /dev/null").unwrap().prompts().unwrap_err().to_string();
        assert_eq!(error, "--trace: /dev/null: no prompt has a full block");
    }
}
