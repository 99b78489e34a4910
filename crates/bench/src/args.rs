//! Flags of `baton bench`.

use std::net::SocketAddr;

use baton_transfer_engine::{TransferConfig, TransportChoice, TransportKind};
use clap::builder::ArgPredicate::IsPresent;
use clap::{Args, Subcommand};

use crate::inference::EngineArgs;
use crate::plan::{Method, Op, Plan};
use crate::serve::ServeArgs;
use crate::{BenchError, engine};

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Measure how fast blocks move between the memory of two processes
    Transfer(TransferArgs),
    /// Send requests to any server at set times, and measure TTFT, TBT and goodput. Speaks OpenAI's
    /// HTTP (Baton, llama-server, vllm serve) or Baton's gRPC
    Serve(Box<ServeArgs>),
    /// Measure prefill and decode of a model on this machine's CPU. Needs no cluster
    Engine(EngineArgs),
}

/// Of `baton bench transfer`. Sizes are bytes, or have a suffix: KiB, MiB, GiB.
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// What carries the blocks.
    #[arg(long, help = transport_help(), default_value_t = TransportChoice::Only(TransportKind::Tcp), value_name = "TRANSPORT", value_parser = parse_transport)]
    pub transport: TransportChoice,
    /// Measure instead: copy-loop (blocking write and read, one connection) or memcpy (one thread,
    /// one process)
    #[arg(long, value_name = "BASELINE", conflicts_with = "transport", value_parser = parse_baseline)]
    pub baseline: Option<Method>,
    /// Write to the target, or read from it
    #[arg(long, value_enum, default_value_t = Op::Write)]
    pub op: Op,
    /// Use blocks of this size, in bytes or with KiB, MiB, GiB
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_size)]
    pub block_bytes: u64,
    /// Put N blocks into a batch; 1 with --baseline
    #[arg(long, value_name = "N", default_value_t = 16, default_value_if("baseline", IsPresent, "1"))]
    pub spans: u32,
    /// Keep N batches under way; 1 with --baseline
    #[arg(long, value_name = "N", default_value_t = 2, default_value_if("baseline", IsPresent, "1"))]
    pub depth: u32,
    /// Open N connections to the target; 1 with --baseline
    #[arg(long, value_name = "N", default_value_t = default_lanes(), default_value_if("baseline", IsPresent, "1"))]
    pub lanes: u32,
    /// Scatter the blocks over this memory per side, in bytes or with KiB, MiB, GiB
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    pub working_set: u64,
    /// Measure for this long, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub seconds: f64,
    /// Seed the order of blocks
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Fill the source with a pattern, clear the destination, compare every byte at the end
    #[arg(long)]
    pub verify: bool,
    /// Be the target for one run of an initiator elsewhere (--connect), and print the address. The
    /// initiator chooses what is measured
    #[arg(long, value_name = "IP:PORT", conflicts_with = "connect")]
    pub listen: Option<SocketAddr>,
    /// Use the target (--listen) at this address instead of starting one here
    #[arg(long, value_name = "HOST:PORT")]
    pub connect: Option<String>,
}

impl TransferArgs {
    /// What the flags ask for, checked.
    pub(crate) fn plan(&self) -> Result<Plan, BenchError> {
        let carrier = self.baseline.unwrap_or(Method::Engine(self.transport));
        let plan = Plan {
            carrier,
            op: self.op,
            block_bytes: self.block_bytes,
            spans: self.spans,
            depth: self.depth,
            lanes: self.lanes,
            working_set: self.working_set,
            seconds: self.seconds,
            seed: self.seed,
            verify: self.verify,
        };
        plan.check()?;
        if self.connect.is_some() && carrier == Method::Memcpy {
            return Err(BenchError::invalid("--connect", "memcpy has no other end"));
        }
        Ok(plan)
    }
}

/// Bytes, or bytes with a binary suffix.
fn parse_size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let shift = match suffix {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err("expected bytes, or a number with KiB, MiB or GiB".to_owned()),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| "expected from 1 to 2^64-1 bytes".to_owned())
}

fn transport_help() -> String {
    format!("Carry the blocks by {}", TransportChoice::names())
}

fn parse_transport(text: &str) -> Result<TransportChoice, String> {
    text.parse().map_err(|_| format!("expected {}", TransportChoice::names()))
}

fn parse_baseline(text: &str) -> Result<Method, String> {
    let found = [Method::CopyLoop, Method::Memcpy].into_iter().find(|method| method.as_str() == text);
    found.ok_or_else(|| "expected copy-loop or memcpy".to_owned())
}

/// Lanes of an engine with default settings.
fn default_lanes() -> u32 {
    let config: TransferConfig = engine::config("bench", SocketAddr::from(([127, 0, 0, 1], 0)));
    config.lanes_per_peer as u32
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::plan::tests::TCP;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: TransferArgs,
    }

    fn parse(line: &str) -> Result<TransferArgs, clap::Error> {
        Cli::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).map(|cli| cli.args)
    }

    #[test]
    fn size_arguments_accept_binary_suffixes() {
        let sizes = [("1", 1), ("4096", 4096), ("12KiB", 12 << 10), ("256MiB", 256 << 20), ("1GiB", 1 << 30)];
        for (text, bytes) in sizes {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "0", "-1", "1.5MiB", "1MB", "MiB", "99999999999GiB", "18446744073709551616"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn baseline_plan_has_one_span_and_depth() {
        let plan = parse("--baseline copy-loop --block-bytes 64KiB").unwrap().plan().unwrap();
        assert_eq!((plan.carrier, plan.block_bytes, plan.spans, plan.depth), (Method::CopyLoop, 65_536, 1, 1));
        let plan = parse("").unwrap().plan().unwrap();
        assert_eq!((plan.carrier, plan.spans, plan.depth, plan.working_set), (TCP, 16, 2, 256 << 20));
    }

    #[test]
    fn invalid_transfer_bench_argument_names_its_flag() {
        for (line, flag) in [
            ("--transport pigeon", "--transport"),
            ("--transport memcpy", "--transport"),
            ("--baseline tcp", "--baseline"),
            ("--baseline memcpy --transport tcp", "--baseline"),
            ("--block-bytes 0", "--block-bytes"),
            ("--listen here", "--listen"),
            ("--listen 127.0.0.1:0 --connect 127.0.0.1:1", "--listen"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(flag), "{line}: {error}");
        }
        let error = parse("--baseline memcpy --connect 127.0.0.1:1").unwrap().plan().unwrap_err();
        assert!(matches!(error, BenchError::Invalid { field: "--connect", .. }), "{error}");
    }
}
