//! `baton up`: a cluster on one machine, each role a process of its own.
//!
//! `plan` turns the command line into what is to run; `supervisor` keeps one process running; `cluster` puts them together: order of start, readiness,
//! drain; `process` is what the operating system does; `console` is what people see.
//!
//! **Invariant**: no child outlives this process, however it ends.

mod cluster;
mod console;
mod lines;
mod network;
mod plan;
mod process;
mod supervisor;

use std::path::PathBuf;
use std::time::Duration;

use baton_runtime::{Signals, TaskSet};
use baton_types::KvDtype;
use clap::Args;

use crate::error::CliError;
use cluster::Cluster;
use network::Network;
use plan::Plan;

/// How long the tasks of this process may take to end, once the children have.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Of `baton up`.
#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Model file (GGUF) or folder (safetensors) [env: BATON_MODEL]
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// cpu, or mock, which needs no model
    #[arg(long, value_name = "ENGINE", env = "BATON_ENGINE", default_value = "cpu")]
    pub engine: String,
    /// Name of the model for clients [default: that of the file]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Prefill nodes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub prefill: u32,
    /// Decode nodes
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub decode: u32,
    /// Conductors; of several, one places the requests of all, and each takes the ports after those of the one before. They need --etcd
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub conductors: u32,
    /// The etcd of several conductors, HOST:PORT[,HOST:PORT], or spawn: one of this cluster's own, which must be installed (Debian: etcd-server)
    #[arg(long, value_name = "ADDR")]
    pub etcd: Option<String>,
    /// Where the conductor serves gRPC; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7070")]
    pub grpc: String,
    /// Where the conductor serves HTTP; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// Where the conductor serves operators alone (baton nodes, metrics); port 0 takes a free one [default: the gRPC and HTTP ports, on loopback]
    #[arg(long, value_name = "ADDR")]
    pub operators: Option<String>,
    /// Chat template to use instead of the model file's, for example one with tools (Jinja)
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Tokens of a KV block [default: 16]
    #[arg(long, value_name = "N")]
    pub block_tokens: Option<u32>,
    /// Most tokens of a prefill chunk [default: the node's]
    #[arg(long, value_name = "N")]
    pub chunk_tokens: Option<u32>,
    /// Threads of each node [default: the cores of this machine, shared out between the nodes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// KV blocks of each prefill node [default: the node's]
    #[arg(long, value_name = "N")]
    pub prefill_cache_blocks: Option<u32>,
    /// KV blocks of each decode node [default: the node's]
    #[arg(long, value_name = "N")]
    pub decode_cache_blocks: Option<u32>,
    /// Element type of stored K and V: f16, bf16, f32 or int8 [default: the node's]
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<KvDtype>,
    /// What KV may travel over: the best that both ends have, or one transport and nothing else [default: the node's, auto]
    #[arg(long, value_name = "TRANSPORT", env = "BATON_TRANSPORT", value_parser = ["auto", "rdma", "shm", "tcp"])]
    pub transport: Option<String>,
    /// Give each node, and each of several conductors, a network namespace, for baton chaos to cut it off; KV travels over TCP (root)
    #[arg(long)]
    pub namespaces: bool,
    /// How the conductor chooses nodes [default: the conductor's]
    #[arg(long, value_name = "POLICY")]
    pub placement: Option<String>,
    /// Refuse what would wait longer than this for others, milliseconds, or off [default: 30000]
    #[arg(long, value_name = "MS")]
    pub max_wait_ms: Option<String>,
    /// Longest wait for room at a prefill node, seconds [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub queue_timeout_s: Option<f64>,
    /// Longest that a prompt is put off for others, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub max_overtaken_s: Option<f64>,
    /// Objective of the time to first token where a request has none, milliseconds [default: none]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub ttft_slo_ms: Option<f64>,
    /// Objective of the time between tokens where a request has none, milliseconds [default: none]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub tbt_slo_ms: Option<f64>,
    /// One more argument for the conductor, as in --conductor-arg=--max-requests=8; can be given several times
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub conductor_arg: Vec<String>,
    /// One more argument for each prefill node
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub prefill_arg: Vec<String>,
    /// One more argument for each decode node
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub decode_arg: Vec<String>,
    /// Filter of every role's log lines [default: warn; info with --log-dir]
    #[arg(long, value_name = "FILTER", env = "BATON_LOG")]
    pub log: Option<String>,
    /// Keep each role's log in DIR/NAME.log, instead of on stderr
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Write what --json prints into this file when all are ready, and again after a restart; removed at the end
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,
    /// How long requests may take to end after Ctrl-C
    #[arg(long, value_name = "SECONDS", env = "BATON_GRACE_S", default_value_t = 30.0, value_parser = parse_seconds)]
    pub grace: f64,
    /// How long all roles together may take to be ready
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = parse_seconds)]
    pub start_timeout: f64,
    /// Where the other binaries are [default: beside this one]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected seconds from 0 to 86400".to_owned()),
    }
}

/// Starts everything, runs until a signal, drains.
pub async fn run(args: &UpArgs, json: bool) -> Result<(), CliError> {
    let mut signals = Signals::new()?;
    let mut plan = Plan::new(args)?;
    let network = args.namespaces.then(|| Network::new(&mut plan)).transpose()?;
    let tasks = TaskSet::new();
    let mut cluster = Cluster::new(plan, tasks.clone())?;
    let outcome = serve(&mut cluster, &mut signals, json).await;
    let stopped = cluster.stop(&mut signals).await;
    let joined = tasks.join(CLOSE_TIMEOUT).await.map_err(|failure| CliError::Cluster(failure.to_string()));
    drop(network);
    outcome.and(stopped).and(joined)
}

async fn serve(cluster: &mut Cluster, signals: &mut Signals, json: bool) -> Result<(), CliError> {
    tokio::select! {
        started = cluster.start() => started?,
        signal = signals.recv() => return Err(CliError::Interrupted(format!("{signal} before the cluster was ready"))),
    }
    cluster.announce(json)?;
    tokio::select! {
        result = cluster.watch() => result,
        signal = signals.recv() => {
            cluster.say(&format!("{signal}: draining; once more to hurry"));
            Ok(())
        }
    }
}
