//! Flags of `baton bench serve`.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use clap::builder::ArgPredicate::IsPresent;
use serde_json::Value;

use super::outcome::Limits;

/// Of `baton bench serve`. Times have a unit: 100ms, 5s, 2m; a bare number is seconds.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Send to http://HOST:PORT with OpenAI's completions (Baton, llama-server, vllm serve), or to
    /// a conductor's grpc://HOST:PORT. Requests take turns over several URLs, with commas
    #[arg(value_name = "URL", required = true, num_args = 1, value_delimiter = ',', value_parser = parse_target)]
    pub url: Vec<Target>,
    /// Send R independent requests per second (Poisson)
    #[arg(long, value_name = "R", allow_negative_numbers = true, required_unless_present = "trace", value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Play the requests of this file instead, one JSON object per line, as in Mooncake's traces,
    /// also gzipped
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rate", "prompt_chars", "max_tokens", "shared_prefix_chars", "prefixes"])]
    pub trace: Option<PathBuf>,
    /// Take the trace's hash_ids as of blocks of N tokens. Without it, as the lengths of the
    /// prompts tell
    #[arg(long, value_name = "N", conflicts_with = "rate", value_parser = clap::value_parser!(u32).range(1..=i64::from(baton_sim::MAX_BLOCK_TOKENS)))]
    pub trace_block_tokens: Option<u32>,
    /// Play the trace X times as fast as recorded
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true, conflicts_with = "rate", value_parser = parse_rate)]
    pub speed: f64,
    /// Delay each of a trace's requests by a random time up to this (ms, s, m). Use it for traces
    /// with coarse timestamps
    #[arg(long, value_name = "TIME", conflicts_with = "rate", value_parser = parse_time)]
    pub jitter: Option<Duration>,
    /// Send at most N requests. With --duration or --trace, the default is all
    #[arg(
        long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        default_value = "100", default_value_ifs([("duration", IsPresent, None::<&str>), ("trace", IsPresent, None)]),
    )]
    pub requests: Option<u32>,
    /// Send only requests due in this time from the beginning (ms, s, m)
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub duration: Option<Duration>,
    /// Seed times, lengths and texts; the same seed sends the same requests. Use another one if the
    /// server may still cache the last run's prompts
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Give each prompt this many characters of its own. Of several, each request draws one:
    /// 300,6000, or with weights 300:3,6000:1
    #[arg(long, value_name = "LIST", default_value = "1000", value_parser = parse_mix::<4_000_000>)]
    pub prompt_chars: Mix,
    /// Begin each prompt with N characters that other requests share
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=4_000_000))]
    pub shared_prefix_chars: u32,
    /// Draw the shared characters from K different texts
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prefixes: u32,
    /// Generate this many tokens per request. Of several, each request draws one: 16,256, or with
    /// weights 16:3,256:1. Times and prompts do not depend on it
    #[arg(long, value_name = "LIST", default_value = "64", value_parser = parse_mix::<1_000_000>)]
    pub max_tokens: Mix,
    /// Let answers end by themselves, also for servers that do not know ignore_eos
    #[arg(long)]
    pub keep_eos: bool,
    /// Constrain answers to the JSON schema in this file; they end by themselves. For Baton and
    /// vllm serve
    #[arg(long, value_name = "FILE", value_parser = read_schema)]
    pub json_schema: Option<JsonSchema>,
    /// Sample at this temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Use this model. Without it, the first that the server lists
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Goodput: limit the time to first token after the due time (ms, s, m)
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    pub ttft_limit: Duration,
    /// Goodput: limit the mean of a request's longest tenth of gaps (ms, s, m)
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_time)]
    pub tbt_limit: Duration,
    /// Send the limits as each request's objectives, which Baton's admission goes by
    #[arg(long)]
    pub send_limits: bool,
    /// Keep at most N requests under way; those due beyond are counted, not sent
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub most_in_flight: u32,
    /// Fail a request that has no end after this time (ms, s, m)
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_time)]
    pub timeout: Duration,
}

/// A server, and what it speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// OpenAI's HTTP, at this host and port.
    OpenAi(String),
    /// Baton's gRPC.
    Grpc(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OpenAi(host) => write!(f, "http://{host}"),
            Self::Grpc(host) => write!(f, "grpc://{host}"),
        }
    }
}

/// Lengths, each with how often it is drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mix(Vec<(u32, u32)>);

impl Mix {
    /// The length at `at`, from 0 to 1 exclusive, of the weights laid end to end.
    pub(super) fn pick(&self, at: f64) -> u32 {
        let all: u64 = self.0.iter().map(|(_, weight)| u64::from(*weight)).sum();
        let mut left = (at * all as f64) as u64;
        for &(length, weight) in &self.0 {
            match left.checked_sub(u64::from(weight)) {
                Some(rest) => left = rest,
                None => return length,
            }
        }
        self.0.last().map_or(0, |(length, _)| *length)
    }
}

impl ServeArgs {
    /// Whether answers go on after the model ends them. Those that are held to a schema end with
    /// it.
    pub(super) fn ignores_eos(&self) -> bool {
        !self.keep_eos && self.json_schema.is_none()
    }

    /// What a request must keep to count as goodput.
    pub(super) fn limits(&self) -> Limits {
        Limits { ttft: self.ttft_limit, tbt: self.tbt_limit }
    }

    /// What every request asks for, if it does.
    pub(super) fn objectives(&self) -> Option<Limits> {
        self.send_limits.then(|| self.limits())
    }
}

/// What every answer is held to.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonSchema(pub(super) Arc<Value>);

fn read_schema(path: &str) -> Result<JsonSchema, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let schema = serde_json::from_str(&text).map_err(|error| format!("expected JSON: {error}"))?;
    Ok(JsonSchema(Arc::new(schema)))
}

fn parse_target(text: &str) -> Result<Target, String> {
    let wrong = || "expected http://HOST:PORT or grpc://HOST:PORT, without a path".to_owned();
    let (scheme, host) = text.split_once("://").ok_or_else(wrong)?;
    let host = host.trim_end_matches('/');
    let authority: http::uri::Authority = host.parse().map_err(|_| wrong())?;
    if authority.port_u16().is_none() {
        return Err(wrong());
    }
    match scheme {
        "http" => Ok(Target::OpenAi(host.to_owned())),
        "grpc" => Ok(Target::Grpc(host.to_owned())),
        _ => Err(wrong()),
    }
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| (1e-6..=1e6).contains(rate));
    rate.ok_or_else(|| "expected a number from 0.000001 to 1000000".to_owned())
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        _ => return Err("expected a time with ms, s or m".to_owned()),
    };
    let time =
        number.parse::<f64>().map(|number| number * seconds).ok().filter(|time| (1e-3..=86_400.0).contains(time));
    time.map(Duration::from_secs_f64)
        .ok_or_else(|| "expected a time from 1ms to a day, as in 100ms, 5s or 2m".to_owned())
}

fn parse_mix<const LONGEST: u32>(text: &str) -> Result<Mix, String> {
    let wrong =
        || format!("expected lengths from 1 to {LONGEST}, with weights from 1 to 1000 or without, as in 300:3,6000:1");
    let one = |part: &str| {
        let (length, weight) = part.split_once(':').unwrap_or((part, "1"));
        let length = length.trim().parse().ok().filter(|length| (1..=LONGEST).contains(length))?;
        let weight = weight.trim().parse().ok().filter(|weight| (1..=1000).contains(weight))?;
        Some((length, weight))
    };
    let parts: Option<Vec<_>> = text.split(',').map(one).collect();
    parts.filter(|parts| parts.len() <= 100).map(Mix).ok_or_else(wrong)
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: ServeArgs,
    }

    /// Arguments after the URL.
    pub fn parse(line: &str) -> Result<ServeArgs, clap::Error> {
        let words = ["serve", "http://h:1"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.args)
    }

    #[test]
    fn url_scheme_selects_openai_or_grpc() {
        assert_eq!(parse_target("http://h:1/"), Ok(Target::OpenAi("h:1".into())));
        assert_eq!(parse_target("grpc://[::1]:7070").unwrap().to_string(), "grpc://[::1]:7070");
        for wrong in ["h:1", "https://h:1", "http://h", "http://h:1/v1", "grpc://", "http://a b:1"] {
            assert!(parse_target(wrong).unwrap_err().contains("grpc://HOST:PORT"), "{wrong}");
        }
    }

    #[test]
    fn time_arguments_accept_units() {
        for (text, ms) in [("100ms", 100), ("5s", 5000), ("2m", 120_000), ("1.5", 1500)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for wrong in ["", "s", "-1s", "1h", "0", "NaN", "1 s", "90000"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn length_mix_is_drawn_by_weight() {
        let mix = parse_mix::<6000>("300:3,6000").unwrap();
        assert_eq!([0.0, 0.5, 0.7499, 0.75, 0.9999].map(|at| mix.pick(at)), [300, 300, 300, 6000, 6000]);
        assert_eq!(parse_mix::<7>("7").unwrap().pick(0.5), 7);
        for wrong in ["", "0", "300,", "300:0", "a", "1:2:3", "5000000"] {
            assert!(parse_mix::<4_000_000>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_are_sent_as_objectives_only_if_asked() {
        assert_eq!(parse("--rate 1").unwrap().objectives(), None);
        let limits = parse("--rate 1 --ttft-limit 2s --tbt-limit 50ms --send-limits").unwrap().objectives().unwrap();
        assert_eq!((limits.ttft_ms(), limits.tbt_ms()), (2000.0, 50.0));
    }

    #[test]
    fn invalid_serve_bench_argument_names_its_flag() {
        assert!(parse("--rate 2 --duration 5s --prompt-chars 300,6000 --max-tokens 16,64:2,1000000").is_ok());
        assert!(parse("--trace t --speed 2 --requests 7").is_ok());
        for (line, flag) in [
            ("", "--rate"),
            ("--rate 0", "--rate"),
            ("--rate 1 --trace t", "--trace"),
            ("--rate 1 --speed 2", "--speed"),
            ("--rate 1 --jitter 3s", "--jitter"),
            ("--trace t --max-tokens 3", "--max-tokens"),
            ("--rate 1 --max-tokens 0", "--max-tokens"),
            ("--rate 1 --max-tokens 16,1000001", "--max-tokens"),
            ("--rate 1 --requests 0", "--requests"),
            ("--rate 1 --tbt-limit never", "--tbt-limit"),
            ("--rate 1 --most-in-flight 0", "--most-in-flight"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(flag), "{line}: {error}");
        }
    }
}
