//! The conductor's settings.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use baton_runtime::LogFormat;
use baton_runtime::settings::{self, BadSetting};
use baton_scheduler::{AdmissionKind, ClusterConfig, PlacementKind, RequestLimits};
use baton_types::KvDtype;
use serde::{Deserialize, Deserializer, Serialize};

/// What `stall_timeout_s` may be, seconds. Nodes that compute a long prompt say so every ten seconds.
pub const STALL_TIMEOUTS: RangeInclusive<f64> = 1.0..=24.0 * 3600.0;
/// Longest that a setting lets a request wait.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// A setting that is a word.
///
/// # Errors
/// It is another one.
pub fn parsed<T: FromStr<Err: Display>>(key: &'static str, value: &str) -> Result<T, BadSetting> {
    value.parse().map_err(|error: T::Err| BadSetting::invalid(key, error.to_string()))
}

/// A setting that is a time, more than none.
///
/// # Errors
/// It is none, or too long.
pub fn positive_seconds(key: &'static str, seconds: f64) -> Result<Duration, BadSetting> {
    settings::seconds(key, seconds, 0.001..=LONGEST_WAIT.as_secs_f64())
}

/// A time in milliseconds, or `off`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MillisOrOff {
    /// A number.
    Millis(f64),
    /// `off`, or a number as text.
    Word(String),
}

impl MillisOrOff {
    fn off() -> Self {
        Self::Word("off".to_owned())
    }

    /// The time of this setting; `None` if it is off.
    ///
    /// # Errors
    /// It is neither.
    pub fn of(&self, key: &'static str) -> Result<Option<Duration>, BadSetting> {
        let wrong = |problem| BadSetting::invalid(key, problem);
        let millis = match self {
            Self::Millis(millis) => *millis,
            Self::Word(word) if word == "off" => return Ok(None),
            Self::Word(word) => {
                word.parse().map_err(|_| wrong(format!("'{word}', but must be milliseconds, or off")))?
            }
        };
        positive_millis(millis).map(Some).map_err(wrong)
    }
}

/// A time that is more than none.
///
/// # Errors
/// It is not.
pub fn positive_millis(millis: f64) -> Result<Duration, String> {
    let time = Duration::try_from_secs_f64(millis / 1e3).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| format!("{millis:?}, but must be milliseconds, more than 0"))
}

/// A list, or a text of its entries with commas between them.
fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a list, or a text with commas")]
    enum List {
        Entries(Vec<String>),
        Text(String),
    }
    Ok(match List::deserialize(deserializer)? {
        List::Entries(entries) => entries,
        List::Text(text) => {
            text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).map(ToOwned::to_owned).collect()
        }
    })
}

/// Settings: plain data. Keys are those of the TOML file, the flags and `BATON_…`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Address of clients' gRPC port.
    pub grpc: String,
    /// Address of clients' HTTP port.
    pub http: String,
    /// Address of operators' port, gRPC and HTTP; if it is not set, they share the clients' ports.
    pub operators: Option<String>,
    /// Address of the port where nodes register; if it is not set, they share the clients' gRPC port.
    pub nodes: Option<String>,
    /// Members of etcd, `host:port`: conductors that name the same elect one that places for all. None: this conductor is alone.
    #[serde(deserialize_with = "list")]
    pub etcd: Vec<String>,
    /// All keys of this cluster in etcd begin so.
    pub etcd_prefix: String,
    /// Authorities that etcd's certificate must come from, a PEM file: etcd is asked over TLS.
    pub etcd_ca: Option<PathBuf>,
    /// Certificate of this conductor for etcd, a PEM file.
    pub etcd_cert: Option<PathBuf>,
    /// Key of `etcd_cert`, a PEM file.
    pub etcd_key: Option<PathBuf>,
    /// User of etcd.
    pub etcd_user: Option<String>,
    /// File with the password of `etcd_user`.
    pub etcd_password_file: Option<PathBuf>,
    /// Host or address by which other conductors reach this one; by default the one that it listens on.
    pub advertise_host: Option<String>,
    /// Origins of web pages that may call the HTTP port, or `*`.
    #[serde(deserialize_with = "list")]
    pub cors_origins: Vec<String>,
    /// Model file or folder: its tokenizer and chat template are used.
    pub model: Option<PathBuf>,
    /// `cpu` with a model file, or `mock` without.
    pub engine: String,
    /// Chat template (Jinja) instead of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Name of the model for clients; by default that of the file.
    pub model_name: Option<String>,
    /// Tokens of a KV block of all nodes.
    pub block_tokens: u32,
    /// Element type of K and V of all nodes.
    pub kv_dtype: KvDtype,
    /// Requests served at once.
    pub max_requests: usize,
    /// Connections of clients at once; fewer if this process may not have so many descriptors.
    pub max_connections: usize,
    /// Bytes that the bodies of requests may take together while they are read; answers that are not streamed may take as many, and so may what clients leave unread.
    pub max_body_bytes_total: usize,
    /// Largest prompt taken, bytes of text.
    pub max_prompt_bytes: usize,
    /// A request without any event for this long is ended, seconds.
    pub stall_timeout_s: f64,
    /// How often a request is placed at most.
    pub max_attempts: u32,
    /// How placement chooses: round-robin, load-balance, cache-aware or min-total-delay.
    pub placement: String,
    /// What is taken in where requests have objectives: none, early or selective.
    pub admission: String,
    /// Requests that would wait longer than this for others, by estimate, are refused: milliseconds, or off.
    pub max_wait_ms: MillisOrOff,
    /// Objective of the time to first token of requests that have none of their own: milliseconds, or off.
    pub ttft_slo_ms: MillisOrOff,
    /// Objective of the time between tokens of requests that have none of their own: milliseconds, or off.
    pub tbt_slo_ms: MillisOrOff,
    /// Longest that a request may take, seconds, whatever it asks for.
    pub max_request_s: f64,
    /// How long a prompt waits for room at a prefill node, seconds.
    pub queue_timeout_s: f64,
    /// How long a prompt is put off for others at most in a prefill node's queue, seconds; at most half of `queue_timeout_s`.
    pub max_overtaken_s: f64,
    /// Which prompts decode nodes compute: never any, those for which no prefill node is left (fallback), or also those too short to disturb anybody (short).
    pub prompts_at_decode: String,
    /// Whether decode nodes compute the tails of long prompts while the prefill node computes what comes before, where that brings the first token forward.
    pub partial_prefill: bool,
    /// Whether prefill nodes bring prefixes that other nodes hold, where that takes less time than computing them.
    pub fetch_prefixes: bool,
    /// Most prefill nodes that a hot prefix is copied to before prompts ask for it there; 0 or 1 for none: it is brought where one asks.
    pub replicate_prefixes: usize,
    /// How often is looked for prefixes to copy, seconds.
    pub replicate_interval_s: f64,
    /// How long health checks say no, and requests are still taken, before a drain begins: until load balancers know of it, seconds.
    pub not_ready_s: f64,
    /// How long a drain may take, seconds.
    pub grace_s: f64,
    /// Filter of log lines.
    pub log: String,
    /// text or json.
    pub log_format: LogFormat,
}

impl Default for Settings {
    fn default() -> Self {
        let (cluster, request) = (ClusterConfig::default(), RequestLimits::default());
        Self {
            grpc: "127.0.0.1:7070".into(),
            http: "127.0.0.1:8080".into(),
            operators: None,
            nodes: None,
            etcd: Vec::new(),
            etcd_prefix: "/baton".into(),
            etcd_ca: None,
            etcd_cert: None,
            etcd_key: None,
            etcd_user: None,
            etcd_password_file: None,
            advertise_host: None,
            cors_origins: Vec::new(),
            model: None,
            chat_template: None,
            engine: "cpu".into(),
            model_name: None,
            block_tokens: 16,
            kv_dtype: KvDtype::F16,
            max_requests: 16_384,
            max_connections: 16_384,
            max_body_bytes_total: 256 << 20,
            max_prompt_bytes: 8 << 20,
            stall_timeout_s: request.stall_timeout.as_secs_f64(),
            max_attempts: request.max_attempts,
            placement: PlacementKind::default().as_str().into(),
            admission: AdmissionKind::default().as_str().into(),
            max_wait_ms: cluster
                .max_wait
                .map_or(MillisOrOff::off(), |wait| MillisOrOff::Millis(wait.as_secs_f64() * 1e3)),
            ttft_slo_ms: MillisOrOff::off(),
            tbt_slo_ms: MillisOrOff::off(),
            max_request_s: 3600.0,
            queue_timeout_s: cluster.queue_timeout.as_secs_f64(),
            max_overtaken_s: cluster.max_overtaken.as_secs_f64(),
            prompts_at_decode: cluster.prompts_at_decode.as_str().into(),
            partial_prefill: cluster.takes_partial_prefills,
            fetch_prefixes: cluster.fetches,
            replicate_prefixes: cluster.replicas,
            replicate_interval_s: 5.0,
            not_ready_s: 0.0,
            grace_s: 30.0,
            log: "info".into(),
            log_format: LogFormat::Text,
        }
    }
}

/// What can be given on the command line; everything else through `--config` or the environment.
#[derive(Debug, Default, clap::Args, Serialize)]
pub struct Flags {
    /// Address of clients' gRPC port [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<String>,
    /// Address of clients' HTTP port [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    pub http: Option<String>,
    /// Address of operators' port: Cluster, reflection, metrics [default: on the clients' ports]
    #[arg(long, value_name = "ADDR")]
    pub operators: Option<String>,
    /// Address of the port where nodes register [default: on the clients' gRPC port]
    #[arg(long, value_name = "ADDR")]
    pub nodes: Option<String>,
    /// Members of etcd, host:port by commas: conductors with the same etcd elect one that places for all [default: none, this one is alone]
    #[arg(long, value_name = "ENDPOINTS")]
    pub etcd: Option<String>,
    /// All keys of this cluster in etcd begin so [default: /baton]
    #[arg(long, value_name = "PREFIX")]
    pub etcd_prefix: Option<String>,
    /// Authorities that etcd's certificate must come from, PEM: etcd is asked over TLS [default: none, no TLS]
    #[arg(long, value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// Certificate of this conductor for etcd, PEM, with --etcd-key [default: none]
    #[arg(long, value_name = "FILE")]
    pub etcd_cert: Option<PathBuf>,
    /// Key of --etcd-cert, PEM [default: none]
    #[arg(long, value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,
    /// User of etcd, with --etcd-password-file [default: none]
    #[arg(long, value_name = "NAME")]
    pub etcd_user: Option<String>,
    /// File with the password of --etcd-user [default: none]
    #[arg(long, value_name = "FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// Host by which other conductors reach this one [default: the one that it listens on]
    #[arg(long, value_name = "HOST")]
    pub advertise_host: Option<String>,
    /// Origins of web pages that may call the HTTP port, by commas, or * for all [default: none]
    #[arg(long, value_name = "ORIGINS")]
    pub cors_origins: Option<String>,
    /// Model file (GGUF) or folder (safetensors): its tokenizer and chat template are used
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Chat template (Jinja) instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// cpu with a model file, or mock without [default: cpu]
    #[arg(long)]
    pub engine: Option<String>,
    /// Name of the model for clients [default: that of the file]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Tokens of a KV block of all nodes [default: 16]
    #[arg(long, value_name = "N")]
    pub block_tokens: Option<u32>,
    /// Element type of K and V of all nodes: f16, bf16, f32 or int8 [default: f16]
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// How placement chooses: round-robin, load-balance, cache-aware or min-total-delay [default: min-total-delay]
    #[arg(long, value_name = "POLICY")]
    pub placement: Option<String>,
    /// What is taken in where requests have objectives: none, early or value-density [default: value-density]
    #[arg(long, value_name = "POLICY")]
    pub admission: Option<String>,
    /// Refuse what would wait longer than this for others, milliseconds, or off [default: 30000]
    #[arg(long, value_name = "MS")]
    pub max_wait_ms: Option<String>,
    /// Objective of the time to first token if a request has none, milliseconds, or off [default: off]
    #[arg(long, value_name = "MS")]
    pub ttft_slo_ms: Option<String>,
    /// Objective of the time between tokens if a request has none, milliseconds, or off [default: off]
    #[arg(long, value_name = "MS")]
    pub tbt_slo_ms: Option<String>,
    /// Longest that a request may take, seconds [default: 3600]
    #[arg(long, value_name = "SECONDS")]
    pub max_request_s: Option<f64>,
    /// Longest wait for room at a prefill node, seconds [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub queue_timeout_s: Option<f64>,
    /// Longest that a prompt is put off for others, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub max_overtaken_s: Option<f64>,
    /// Which prompts decode nodes compute: never, fallback (if no prefill node is left) or short (those too that disturb nobody) [default: short]
    #[arg(long, value_name = "WHEN")]
    pub prompts_at_decode: Option<String>,
    /// Whether decode nodes compute the tails of long prompts while prefill nodes compute what comes before [default: true]
    #[arg(long, value_name = "BOOL")]
    pub partial_prefill: Option<bool>,
    /// Whether prefill nodes bring prefixes that other nodes hold [default: true]
    #[arg(long, value_name = "BOOL")]
    pub fetch_prefixes: Option<bool>,
    /// Most prefill nodes that a hot prefix is copied to before prompts ask for it there; 0 for none [default: 0]
    #[arg(long, value_name = "N")]
    pub replicate_prefixes: Option<usize>,
    /// How often is looked for prefixes to copy, seconds [default: 5]
    #[arg(long, value_name = "SECONDS")]
    pub replicate_interval_s: Option<f64>,
    /// Answers at once, of all requests [default: 16384]
    #[arg(long, value_name = "N")]
    pub max_requests: Option<usize>,
    /// Connections of clients at once [default: 16384, or what descriptors allow]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// Bytes that request bodies may take together; answers that are not streamed, and what clients leave unread, as many each [default: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    pub max_body_bytes_total: Option<usize>,
    /// How long health checks say no before a drain begins, seconds [default: 0]
    #[arg(long, value_name = "SECONDS")]
    pub not_ready_s: Option<f64>,
    /// How long a drain may take, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub grace_s: Option<f64>,
    /// Filter of log lines, as in debug or baton_conductor=debug,info [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(name = "baton-conductor", version, about = "The frontend of a Baton cluster")]
pub struct Cli {
    /// Settings file (TOML); the environment (BATON_...) and flags go before it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the settings and where each came from, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Settings.
    #[command(flatten)]
    pub flags: Flags,
}

#[cfg(test)]
mod tests {
    use baton_runtime::settings::load;

    use super::*;

    #[test]
    fn origins_are_a_list_or_a_text() {
        let loaded = |variable: &str| {
            let variable = [("BATON_CORS_ORIGINS".to_owned(), variable.to_owned())];
            load::<Settings>(None, variable.into_iter(), &Flags::default()).unwrap().settings.cors_origins
        };
        assert_eq!(loaded("https://a, https://b"), ["https://a", "https://b"]);
        assert_eq!(loaded(r#"["https://a"]"#), ["https://a"]);
        assert_eq!(loaded("*"), ["*"]);
    }
}
