//! The command line.

use std::path::PathBuf;

use baton_bench::BenchCommand;
use baton_bench::score::ScoreArgs;
use baton_sim::SimulateArgs;
use clap::builder::Resettable;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::chaos::FaultKind;
use crate::prompt::PromptArgs;
use crate::up::UpArgs;

/// The operator's command of a Baton cluster
#[derive(Debug, Parser)]
#[command(name = "baton", version)]
pub struct Cli {
    /// gRPC addresses of the conductors, with commas between them: the first that answers is asked, and the next one if it is lost
    #[arg(long, global = true, value_name = "ADDR", env = "BATON_CONDUCTOR", default_value = "http://127.0.0.1:7070")]
    pub conductor: String,
    /// Print JSON, for programs
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The command line of this process. A variable that is set and empty is not set, as with the nodes' settings; clap would take it for a value.
    pub fn of_process() -> Self {
        let matches = without_empty_variables(Self::command()).get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |arg: &clap::Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|arg| if is_empty(&arg) { arg.env(Resettable::Reset) } else { arg });
    command.mut_subcommands(without_empty_variables)
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a cluster on this machine: a conductor, prefill and decode nodes, each a supervised process; Ctrl-C drains it
    Up(Box<UpArgs>),
    /// Generate one completion and stream it
    Generate(Box<GenerateArgs>),
    /// Talk with the model
    Chat(Box<ChatArgs>),
    /// List the nodes, their state and load
    Nodes(NodesArgs),
    /// Have a node finish what it has, or hand it on, and take nothing new; wait until nothing is left there
    Drain(DrainArgs),
    /// Have a node that was drained take requests again
    Undrain(UndrainArgs),
    /// Show what the nodes have before them, what is taken in, and how good the predictions are
    Load(LoadArgs),
    /// Show the settings that may change while the cluster runs, set them for all conductors, or say when they change
    #[command(subcommand)]
    Settings(SettingsCommand),
    /// Show what the prefix caches hold and which prefixes are hot, look a prompt up in them, or clear them
    Cache(Box<CacheArgs>),
    /// Say where a request would go now and why, every node with the terms of its estimate; or, given a request's id or its first 6 digits, where that one went and what came of it. Nothing is generated
    Explain(Box<ExplainArgs>),
    /// Measure: what the transfer engine moves here, a model on this CPU (engine), the prefix index, what a conductor adds to gaps between tokens, a trace against the cluster, an open loop of requests against any server
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Hurt the nodes of a running cluster on this host, and see whether streams notice more than a pause. Whoever started the nodes has to start them again, as `baton up` does
    Chaos(ChaosArgs),
    /// Say how likely a model finds a text: negative log-likelihood and perplexity, on this machine's CPU. Needs no cluster
    Score(ScoreArgs),
    /// Play a trace of requests against a simulated cluster: production's placement, admission and caches on virtual time
    Simulate(Box<SimulateArgs>),
    /// Versions of this command and of the conductor
    Version,
}

/// Of `baton generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Where the prompt is.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// How to generate.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Alternatives with each generated token, up to 20; 0 gives each token's own log-probability
    #[arg(long, value_name = "N")]
    pub logprobs: Option<u32>,
    /// Alternatives at each position of the prompt, up to 20; bypasses cached prefixes
    #[arg(long, value_name = "N")]
    pub prompt_logprobs: Option<u32>,
    /// Who asks again with the same key gets the same answer, from its first token
    #[arg(long, value_name = "KEY", default_value = "", hide_default_value = true)]
    pub idempotency_key: String,
    /// Print where the time went, on stderr
    #[arg(long)]
    pub timeline: bool,
}

/// Of `baton explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Where the prompt is.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Explain the request that has this id, the conductor's or the client's own
    #[arg(long = "request", conflicts_with_all = ["raw", "prompt_file", "messages", "token_ids"])]
    pub is_request: bool,
    /// How it would be generated.
    #[command(flatten)]
    pub request: RequestArgs,
}

/// Of `baton chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// How to generate.
    #[command(flatten)]
    pub request: RequestArgs,
    /// First message, of the role `system`
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
}

/// Of `baton load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Print again every so many seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<f64>,
}

/// Of `baton settings`.
#[derive(Debug, Subcommand)]
pub enum SettingsCommand {
    /// Show what is in force, and where each value is from
    Get {
        /// Settings to show [default: all]
        #[arg(value_name = "KEY")]
        keys: Vec<String>,
    },
    /// Set values for all conductors, and wait until all that --conductor names go by them
    Set(SettingsSetArgs),
    /// Show what is in force, and each change of it, until Ctrl-C
    Watch,
}

/// Of `baton settings set`.
#[derive(Debug, Args)]
pub struct SettingsSetArgs {
    /// With nothing after the =, each conductor goes by the value that it was started with
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = parse_setting)]
    pub values: Vec<(String, String)>,
    /// Who sets them, for the log [default: user@host]
    #[arg(long, value_name = "NAME")]
    pub by: Option<String>,
}

fn parse_setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| "expected KEY=VALUE, as in ttft_slo_ms=500".to_owned())?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// Of `baton cache`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CacheArgs {
    /// What to do instead of showing it.
    #[command(subcommand)]
    pub command: Option<CacheCommand>,
    /// Print again every so many seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<f64>,
    /// Prefixes to show
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub top: u32,
}

/// Of `baton cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Say which nodes hold how much of a prompt. Nothing is generated
    Lookup(CacheLookupArgs),
    /// Have the nodes, or one of them, free what is cached and not in use
    Clear(CacheClearArgs),
}

/// Of `baton cache lookup`.
#[derive(Debug, Args)]
pub struct CacheLookupArgs {
    /// Where the prompt is.
    #[command(flatten)]
    pub prompt: PromptArgs,
}

/// Of `baton cache clear`.
#[derive(Debug, Args)]
pub struct CacheClearArgs {
    /// The node [default: every node]
    pub node: Option<String>,
}

/// Of `baton nodes`.
#[derive(Debug, Args)]
pub struct NodesArgs {
    /// Print again every so many seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<f64>,
    /// Have each node prove that every KV block is accounted for; exit status 1 where one cannot
    #[arg(long, conflicts_with = "watch")]
    pub check: bool,
    /// Show how the nodes move KV to each other instead: a row for each pair that has
    #[arg(long, conflicts_with = "check")]
    pub transport: bool,
}

/// Of `baton chaos`.
#[derive(Debug, Args)]
pub struct ChaosArgs {
    /// How long, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = parse_interval)]
    pub duration: f64,
    /// Time from one fault to the next, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_interval)]
    pub every: f64,
    /// The etcd of several conductors, HOST:PORT on this host: it may be hurt, too
    #[arg(long, value_name = "ADDR")]
    pub etcd: Option<String>,
    /// What may happen to a process; of several conductors each but drain, and etcd is killed, stopped or asked to end
    #[arg(long, value_name = "FAULTS", value_delimiter = ',', default_value = "kill,stop,drain,term")]
    pub faults: Vec<FaultKind>,
    /// Longest that a node is stopped, cut off or slow, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, value_parser = parse_longest)]
    pub longest: f64,
    /// Streams at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = parse_streams)]
    pub streams: usize,
    /// Different requests
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub requests: u64,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_tokens: u32,
    /// Of the requests and the faults
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

fn parse_longest(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|longest| (1.0..=3600.0).contains(longest)).ok_or_else(|| "expected 1 to 3600".to_owned())
}

fn parse_streams(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=10_000).contains(count)).ok_or_else(|| "expected 1 to 10000".to_owned())
}

/// Of `baton drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The node
    pub node: String,
    /// Wait for no longer than this, seconds; exit status 1 if something is left. The node goes on draining
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = parse_timeout)]
    pub timeout: f64,
    /// Do not wait
    #[arg(long, conflicts_with = "timeout")]
    pub no_wait: bool,
}

/// Of `baton undrain`.
#[derive(Debug, Args)]
pub struct UndrainArgs {
    /// The node
    pub node: String,
    /// Wait for no longer than this until it is ready, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = parse_timeout)]
    pub timeout: f64,
}

fn parse_timeout(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected seconds from 0 to 86400".to_owned()),
    }
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected seconds from 0.1 to 3600".to_owned()),
    }
}

/// How to generate. What is not given is left to the conductor.
#[derive(Debug, Clone, Default, Args)]
pub struct RequestArgs {
    /// Name of the model [default: the one that the cluster serves]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// Most tokens to generate [default: 256, or what the context still holds]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_tokens: Option<u32>,
    /// 0 is greedy [default: 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K most probable tokens; 0 keeps all [default: 0]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<u32>,
    /// Keep the most probable tokens that reach this probability together [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens of at least this share of the best one's probability [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// 1 is off [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// 0 is off [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// 0 is off [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// The same seed and request give the same tokens [default: random]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// The output ends before this text; can be given up to 16 times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// This token ends the output; can be given several times
    #[arg(long, value_name = "ID", allow_negative_numbers = true)]
    pub stop_token_id: Vec<u32>,
    /// The model's end tokens are ordinary tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Larger goes first [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0, hide_default_value = true)]
    pub priority: i32,
    /// Refuse the request where the time to first token would be longer, milliseconds
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub ttft_slo_ms: Option<f64>,
    /// Refuse the request where the time between tokens would be longer, milliseconds
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub tbt_slo_ms: Option<f64>,
}

impl RequestArgs {
    /// The flag that sets a field of the request.
    pub fn flag_of(field: &str) -> Option<String> {
        let flags = Self::augment_args(clap::Command::new("request"));
        let flag = flags.get_arguments().find(|flag| flag.get_id() == field)?;
        Some(format!("--{}", flag.get_long()?))
    }
}

/// A file, or `-` for stdin.
pub(crate) fn parse_file(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("expected a file, or - for stdin".to_owned()) } else { Ok(PathBuf::from(text)) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("baton").chain(line.split_whitespace()))
    }

    #[test]
    fn the_definitions_hold_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_go_before_or_after_the_command() {
        for line in ["--json --conductor h:1 nodes", "nodes --json --conductor h:1"] {
            let cli = parse(line).unwrap();
            assert!(cli.json && cli.conductor == "h:1", "{line}");
        }
    }

    #[test]
    fn bad_numbers_reach_the_conductor_or_name_their_flag() {
        let Command::Generate(args) = parse("generate hi --temperature -1 --top-p NaN --max-tokens 0").unwrap().command
        else {
            panic!("another command");
        };
        assert_eq!((args.request.temperature, args.request.max_tokens), (Some(-1.0), Some(0)));
        assert!(args.request.top_p.unwrap().is_nan());
        let error = parse("generate hi --max-tokens -5").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--max-tokens"), "{error}");
    }

    #[test]
    fn a_prompt_comes_from_exactly_one_place() {
        for wrong in
            ["generate", "generate a --messages f", "generate --raw --messages f", "generate --raw --token-ids f"]
        {
            assert_eq!(parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
        for right in [
            "generate a",
            "generate --raw a",
            "generate --prompt-file -",
            "generate --messages f",
            "generate --token-ids f",
        ] {
            assert!(parse(right).is_ok(), "{right}");
        }
    }

    #[test]
    fn a_cache_is_shown_or_something_is_done_with_it() {
        for right in ["cache", "cache --watch --top 5", "cache lookup hi", "cache clear", "cache clear p0 --json"] {
            assert!(parse(right).is_ok(), "{right}");
        }
        for wrong in ["cache hi", "cache lookup", "cache --watch 1 clear", "cache --top 0", "cache clear a b"] {
            assert_eq!(parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn watching_has_a_bounded_pace() {
        let Command::Nodes(args) = parse("nodes --watch").unwrap().command else { panic!("another command") };
        assert_eq!(args.watch, Some(1.0));
        assert!(parse("nodes --watch 0").is_err() && parse("nodes --watch NaN").is_err());
    }
}
