//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use baton_bench::BenchCommand;
use baton_bench::score::ScoreArgs;
use baton_sim::SimulateArgs;
use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::chaos::FaultKind;
use crate::prompt::PromptArgs;
use crate::up::UpArgs;

/// Operate a Baton cluster
#[derive(Debug, Parser)]
#[command(name = "baton", version)]
pub struct Cli {
    /// Ask the first conductor that answers of these gRPC addresses, with commas. If it is lost,
    /// ask the next
    #[arg(long, global = true, value_name = "ADDR", env = "BATON_CONDUCTOR", default_value = "http://127.0.0.1:7070")]
    pub conductor: String,
    /// Whether it was given, by a flag or a variable.
    #[arg(skip)]
    pub is_conductor_given: bool,
    /// Print JSON, for programs
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads a command line. A variable that is set and empty is not set, as with the nodes'
    /// settings; clap would take it for a value.
    ///
    /// # Errors
    /// An argument is wrong, or help is asked for.
    pub fn parse_line(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut declared = without_empty_variables(Self::declared());
        let matches = declared.try_get_matches_from_mut(line)?;
        let source = matches.value_source("conductor");
        let asks_none = matches.subcommand_name().filter(|name| ASK_NONE.contains(name));
        if let (Some(name), Some(ValueSource::CommandLine)) = (asks_none, source) {
            return Err(declared.error(ErrorKind::ArgumentConflict, format!("--conductor: {name} asks no conductor")));
        }
        let cli = Self::from_arg_matches(&matches)?;
        Ok(Self { is_conductor_given: source != Some(ValueSource::DefaultValue), ..cli })
    }

    /// The command, with its arguments where they have an effect.
    pub fn declared() -> clap::Command {
        Self::command().mut_subcommands(|command| {
            if ASK_NONE.contains(&command.get_name()) { without_conductor(command) } else { command }
        })
    }
}

/// Commands that ask no conductor.
const ASK_NONE: [&str; 4] = ["up", "bench", "score", "simulate"];

/// An argument of its own takes the place of the global one.
fn without_conductor(command: clap::Command) -> clap::Command {
    let refused = |_: &str| Err::<String, _>("this command asks no conductor");
    command.arg(Arg::new("conductor").long("conductor").value_name("ADDR").hide(true).value_parser(refused))
}

/// Whether a command line asks for JSON, even if the rest of it is wrong.
pub fn wants_json(line: &[OsString]) -> bool {
    line.iter().take_while(|word| *word != "--").any(|word| word == "--json")
}

fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |arg: &Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|arg| if is_empty(&arg) { arg.env(Resettable::Reset) } else { arg });
    command.mut_subcommands(without_empty_variables)
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a conductor, prefill and decode nodes here as supervised processes; Ctrl-C drains them
    Up(Box<UpArgs>),
    /// Generate one completion, or several, and stream it
    Generate(Box<GenerateArgs>),
    /// Talk with the model
    Chat(Box<ChatArgs>),
    /// List the nodes: state, load, and the KV compatibility class within which they share cached
    /// KV
    Nodes(NodesArgs),
    /// Drain a node and wait until it is empty. It accepts nothing new, and its requests end or
    /// migrate
    Drain(DrainArgs),
    /// Let a drained node accept requests again
    Undrain(UndrainArgs),
    /// Show the nodes' load, what is admitted, and the prediction error
    Load(LoadArgs),
    /// Show, set or watch the settings that may change at run time, for all conductors
    #[command(subcommand)]
    Settings(SettingsCommand),
    /// Show cached and hot prefixes, look up a prompt in the caches, or clear them
    Cache(Box<CacheArgs>),
    /// Explain the placement that a request would get now, with every node's predicted times. With
    /// a request's id or its first 6 digits, explain its placement and outcome. Nothing is
    /// generated
    Explain(Box<ExplainArgs>),
    /// Measure KV transfers, the engine, or any server under load
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Inject faults into a cluster on this host, and check that streams only pause. Killed nodes
    /// need a supervisor that starts them again, as `baton up` does
    Chaos(ChaosArgs),
    /// Compute a text's negative log-likelihood and perplexity on this machine's CPU. Needs no
    /// cluster
    Score(ScoreArgs),
    /// Play a trace in virtual time on a simulated cluster with production's placement, admission,
    /// caches
    Simulate(Box<SimulateArgs>),
    /// Print the versions of this command and of the conductor
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
    /// Print N (up to 20) alternatives per generated token; 0 prints only its own log-probability
    #[arg(long, value_name = "N")]
    pub logprobs: Option<u32>,
    /// Print N (up to 20) alternatives per prompt position; bypasses cached prefixes
    #[arg(long, value_name = "N")]
    pub prompt_logprobs: Option<u32>,
    /// Generate N completions (up to 128); completion S has the seed plus S
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub n: u32,
    /// Constrain the output to this JSON schema: a file, - for stdin, or the schema itself
    #[arg(long, value_name = "FILE")]
    pub schema: Option<String>,
    /// Offer a tool, as in OpenAI's API: a file, - for stdin, or the JSON itself. Can be given
    /// several times
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "token_ids"])]
    pub tool: Vec<String>,
    /// Return the same answer, from its first token, to requests with the same key
    #[arg(long, value_name = "KEY", default_value = "", hide_default_value = true)]
    pub idempotency_key: String,
    /// Print on stderr how much time each stage took
    #[arg(long)]
    pub timeline: bool,
}

/// Of `baton explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Where the prompt is.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Explain the request with this id, the conductor's or the client's own
    #[arg(long = "request", conflicts_with_all = ["raw", "prompt_file", "messages", "token_ids"])]
    pub is_request: bool,
    /// How to place it.
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// Of `baton chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// How to generate.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Begin with this message of the role `system`
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
}

/// Of `baton load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Print again at this interval, in seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<f64>,
}

/// Of `baton settings`.
#[derive(Debug, Subcommand)]
pub enum SettingsCommand {
    /// Show the values in force and the source of each
    Get {
        /// Show only these settings. Without any, all
        #[arg(value_name = "KEY")]
        keys: Vec<String>,
    },
    /// Set values for all conductors, and wait until all of --conductor apply them
    Set(SettingsSetArgs),
    /// Show the values in force and each change, until Ctrl-C
    Watch,
}

/// Of `baton settings set`.
#[derive(Debug, Args)]
pub struct SettingsSetArgs {
    /// Set these; an empty VALUE returns each conductor to the one it was started with
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = parse_setting)]
    pub values: Vec<(String, String)>,
    /// Log this name as the author of the change. Without it, user@host
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
    /// Print again at this interval, in seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<f64>,
    /// Show the N hottest prefixes
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub top: u32,
}

/// Of `baton cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Show how much of a prompt each node has cached. Nothing is generated
    Lookup(CacheLookupArgs),
    /// Free cached blocks that are not in use, on all nodes or one
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
    /// Clear this node. Without it, every node
    pub node: Option<String>,
}

/// Of `baton nodes`.
#[derive(Debug, Args)]
pub struct NodesArgs {
    /// Print again at this interval, in seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<f64>,
    /// Check that each node accounts for every KV block; exit status 1 if one cannot
    #[arg(long, conflicts_with = "watch")]
    pub check: bool,
    /// Show KV transfers between nodes instead: a row per pair that has any
    #[arg(long, conflicts_with = "check")]
    pub transport: bool,
    /// Show generation, KV dtype, KV class and address too
    #[arg(long, conflicts_with_all = ["check", "transport"])]
    pub wide: bool,
}

/// Of `baton chaos`.
#[derive(Debug, Args)]
pub struct ChaosArgs {
    /// Run for this long, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = parse_interval)]
    pub duration: f64,
    /// Inject a fault at this interval, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_interval)]
    pub every: f64,
    /// Inject faults into this etcd of several conductors too: HOST:PORT on this host
    #[arg(long, value_name = "ADDR")]
    pub etcd: Option<String>,
    /// Choose from kill, pause, drain, terminate; with `up --namespaces` also isolate, slow,
    /// partition
    #[arg(long, value_name = "FAULTS", value_delimiter = ',', default_value = "kill,pause,drain,terminate")]
    pub faults: Vec<FaultKind>,
    /// Limit how long a node is paused, isolated or slow, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, value_parser = parse_longest)]
    pub longest: f64,
    /// Keep N streams open at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = parse_streams)]
    pub streams: usize,
    /// Send N different requests
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub requests: u64,
    /// Generate at most N tokens per request
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_tokens: u32,
    /// Seed the requests and the faults
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
    /// Drain this node
    pub node: String,
    /// Wait at most this long, in seconds; exit status 1 if something is left. The node goes on
    /// draining
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = parse_timeout)]
    pub timeout: f64,
    /// Return without waiting
    #[arg(long, conflicts_with = "timeout")]
    pub no_wait: bool,
}

/// Of `baton undrain`.
#[derive(Debug, Args)]
pub struct UndrainArgs {
    /// Undrain this node
    pub node: String,
    /// Wait at most this long for the node to be ready, in seconds
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

/// What a placement goes by, besides the prompt. What is not given is left to the conductor.
#[derive(Debug, Clone, Default, Args)]
pub struct PlacementArgs {
    /// Use this model. Without it, the one that the cluster serves
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub model: String,
    /// Generate at most N tokens. Without it, 256
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_tokens: Option<u32>,
    /// Serve the request before those with smaller values
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 0)]
    pub priority: i32,
    /// Reject the request if its time to first token would be longer, in milliseconds
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub ttft_slo_ms: Option<f64>,
    /// Reject the request if its time between tokens would be longer, in milliseconds
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub tbt_slo_ms: Option<f64>,
}

/// How to place a request, and how to generate. What is not given is left to the conductor.
#[derive(Debug, Clone, Default, Args)]
pub struct RequestArgs {
    /// How to place it.
    #[command(flatten)]
    pub placement: PlacementArgs,
    /// Sample at this temperature. Without it, or at 0, sampling is greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K most probable tokens; 0 keeps all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<u32>,
    /// Keep the most probable tokens that reach this probability together; 1 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens with at least this share of the best one's probability; 0 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Penalise tokens of the prompt and the output by this factor; 1 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtract this once from the logit of each output token; 0 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this from a token's logit per occurrence in the output; 0 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Sample with this seed; the same seed and request give the same tokens. Without it, a random
    /// one
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// End the output before this text; can be given up to 16 times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// End the output at this token; can be given several times
    #[arg(long, value_name = "ID", allow_negative_numbers = true)]
    pub stop_token_id: Vec<u32>,
    /// Treat the model's end tokens as ordinary tokens
    #[arg(long)]
    pub ignore_eos: bool,
}

impl GenerateArgs {
    /// The flag that sets a field of the request.
    pub fn flag_of(field: &str) -> Option<String> {
        let id = match field {
            "structured_output" => "schema",
            "tools" => "tool",
            field => field,
        };
        let flags = Self::augment_args(clap::Command::new("request"));
        let flag = flags.get_arguments().find(|flag| flag.get_id() == id)?;
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
    fn clap_definitions_are_consistent() {
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
    fn conductor_is_an_argument_only_of_commands_that_ask_one() {
        let line =
            |line: &str| Cli::parse_line(std::iter::once("baton").chain(line.split_whitespace()).map(Into::into));
        let up = "up --engine mock";
        for wrong in [
            "--conductor h:1 up --engine mock",
            "up --engine mock --conductor h:1",
            "bench engine --model f --conductor h:1",
            "--conductor h:1 simulate --trace f",
            "score --model m --text t --conductor h:1",
        ] {
            let error = line(wrong).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("--conductor"), "{wrong}: {error}");
        }
        assert!(!line(up).unwrap().is_conductor_given);
        assert!(line("version --conductor h:1").unwrap().is_conductor_given);
        let mut declared = Cli::declared();
        declared.build();
        for name in ASK_NONE {
            let help = declared.find_subcommand_mut(name).unwrap().render_long_help().to_string();
            assert!(!help.contains("--conductor <"), "{name}: {help}");
        }
    }

    #[test]
    fn invalid_numbers_reach_the_conductor_or_name_their_flag() {
        let Command::Generate(args) = parse("generate hi --temperature -1 --top-p NaN --max-tokens 0").unwrap().command
        else {
            panic!("another command");
        };
        assert_eq!((args.request.temperature, args.request.placement.max_tokens), (Some(-1.0), Some(0)));
        assert!(args.request.top_p.unwrap().is_nan());
        let error = parse("generate hi --max-tokens -5").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--max-tokens"), "{error}");
    }

    #[test]
    fn prompt_comes_from_exactly_one_argument() {
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
    fn cache_arguments_are_a_listing_or_a_subcommand() {
        for right in ["cache", "cache --watch --top 5", "cache lookup hi", "cache clear", "cache clear p0 --json"] {
            assert!(parse(right).is_ok(), "{right}");
        }
        for wrong in ["cache hi", "cache lookup", "cache --watch 1 clear", "cache --top 0", "cache clear a b"] {
            assert_eq!(parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn watch_interval_is_bounded() {
        let Command::Nodes(args) = parse("nodes --watch").unwrap().command else { panic!("another command") };
        assert_eq!(args.watch, Some(1.0));
        assert!(parse("nodes --watch 0").is_err() && parse("nodes --watch NaN").is_err());
    }
}
