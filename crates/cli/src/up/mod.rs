//! `baton up`: a cluster on one machine, each role a process of its own.
//!
//! `plan` turns the command line into what is to run, with what `setting` passes on. `supervisor`
//! keeps one process running.
//! `cluster` puts them together: order of start, readiness, drain. `process` is what the operating
//! system does; `console` is what people see.
//!
//! **Invariant**: no child outlives this process, however it ends.

mod cluster;
mod console;
mod lines;
mod network;
mod plan;
mod process;
mod setting;
mod supervisor;

use std::path::PathBuf;
use std::time::Duration;

use baton_runtime::{Signals, TaskSet};
use clap::Args;

use crate::error::CliError;
use cluster::Cluster;
use network::Network;
use plan::Plan;
use setting::RoleSetting;

/// How long the tasks of this process may take to end, once the children have.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Of `baton up`.
#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Load this model: GGUF file or safetensors folder. Without it, that of BATON_MODEL
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Run the engine cpu, or mock, which needs no model
    #[arg(long, value_name = "ENGINE", env = "BATON_ENGINE", default_value = "cpu")]
    pub engine: String,
    /// Mock engine: give the answers of this JSON file, one per turn of the assistant
    #[arg(long, value_name = "FILE")]
    pub mock_answers: Option<PathBuf>,
    /// Run N prefill nodes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    #[arg(overrides_with = "prefill")]
    pub prefill: u32,
    /// Run M decode nodes
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    #[arg(overrides_with = "decode")]
    pub decode: u32,
    /// Run N conductors, one of them the leader; several need --etcd. Each takes the ports after
    /// those of the one before
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub conductors: u32,
    /// Use the etcd at HOST:PORT[,HOST:PORT] for several conductors, or spawn to start one. spawn
    /// needs an installed etcd (Debian: etcd-server)
    #[arg(long, value_name = "ADDR")]
    pub etcd: Option<String>,
    /// Serve the conductor's gRPC on this address; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7070")]
    pub grpc: String,
    /// Serve the conductor's HTTP on this address; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// Serve operators (baton nodes, metrics) on this address; port 0 takes a free one. Without it,
    /// the gRPC and HTTP ports serve them
    #[arg(long, value_name = "ADDR")]
    pub operators: Option<String>,
    /// Compute with N threads per node. Without it, the nodes share the cores of this machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Serve the model under these names; answers have the first. Without it, under that of the
    /// file
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,
    /// Take at most N tokens of prompt and output together. Without it, the context length of the
    /// model
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<u32>,
    /// Give each node, and each of several conductors, a network namespace for baton chaos. Needs
    /// root; KV travels over TCP
    #[arg(long)]
    pub namespaces: bool,
    /// Set a setting of a role: conductor, prefill, decode or node (prefill and decode), as in
    /// conductor.max_wait_ms=5000. Can be given several times; docs/configuration.md has the keys
    #[arg(long, value_name = "ROLE.KEY=VALUE")]
    pub set: Vec<RoleSetting>,
    /// Filter every role's log lines. Without it, warn, or info with --log-dir
    #[arg(long, value_name = "FILTER", env = "BATON_LOG")]
    pub log: Option<String>,
    /// Write each role's log to DIR/NAME.log instead of stderr
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Write the output of --json to this file when all are ready, and after restarts. It is
    /// removed at the end
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,
    /// Let requests end for at most this long after Ctrl-C, in seconds
    #[arg(long, value_name = "SECONDS", env = "BATON_GRACE_S", default_value_t = 30.0, value_parser = parse_seconds)]
    pub grace: f64,
    /// Wait at most this long for all roles together to be ready, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = parse_seconds)]
    pub start_timeout: f64,
    /// Run the other binaries of this folder. Without it, those beside this one
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
    let mut cluster = Cluster::new(plan, json, tasks.clone())?;
    let outcome = serve(&mut cluster, &mut signals).await;
    let stopped = cluster.stop(&mut signals).await;
    let joined = tasks.join(CLOSE_TIMEOUT).await.map_err(|failure| CliError::Cluster(failure.to_string()));
    drop(network);
    outcome.and(stopped).and(joined)
}

async fn serve(cluster: &mut Cluster, signals: &mut Signals) -> Result<(), CliError> {
    tokio::select! {
        started = cluster.start() => started?,
        signal = signals.recv() => return Err(CliError::Interrupted(format!("{signal} before the cluster was ready"))),
    }
    cluster.announce()?;
    tokio::select! {
        result = cluster.watch() => result,
        signal = signals.recv() => {
            cluster.say(&format!("{signal}: draining; once more to hurry"));
            Ok(())
        }
    }
}
