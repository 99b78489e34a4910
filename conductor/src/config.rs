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

/// What `stall_timeout_s` may be, seconds. Nodes that compute a long prompt say so every ten
/// seconds.
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
    /// Serve clients' gRPC on this address.
    pub grpc: String,
    /// Serve clients' HTTP on this address.
    pub http: String,
    /// Serve operators' gRPC and HTTP on this address; if unset, on the clients' ports.
    pub operators: Option<String>,
    /// Let nodes register on this address; if unset, on the clients' gRPC port.
    pub nodes: Option<String>,
    /// Elect one leader among the conductors that name these etcd members, each `host:port`. If
    /// empty, this conductor is alone.
    #[serde(deserialize_with = "list")]
    pub etcd: Vec<String>,
    /// Begin every key of this cluster in etcd with this.
    pub etcd_prefix: String,
    /// Use TLS to etcd, and trust certificates of the authorities in this PEM file.
    pub etcd_ca: Option<PathBuf>,
    /// Present this certificate (PEM file) to etcd.
    pub etcd_cert: Option<PathBuf>,
    /// Use this private key (PEM file) for `etcd_cert`.
    pub etcd_key: Option<PathBuf>,
    /// Log in to etcd as this user.
    pub etcd_user: Option<String>,
    /// Read the password of `etcd_user` from this file.
    pub etcd_password_file: Option<PathBuf>,
    /// Advertise this host or address to other conductors; if unset, the listening one.
    pub advertise_host: Option<String>,
    /// Allow HTTP calls from web pages of these origins, or of all with `*`.
    #[serde(deserialize_with = "list")]
    pub cors_origins: Vec<String>,
    /// Use the tokenizer and chat template of this model file or folder.
    pub model: Option<PathBuf>,
    /// Use `cpu` with a model file, or `mock` without one.
    pub engine: String,
    /// Use this chat template (Jinja) instead of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Show clients this model name; if unset, that of the file.
    pub model_name: Option<String>,
    /// Use this many tokens per KV block, as on all nodes.
    pub block_tokens: u32,
    /// Expect this element type of stored K and V on all nodes.
    pub kv_dtype: KvDtype,
    /// Serve at most this many requests at once.
    pub max_requests: usize,
    /// Accept at most this many client connections at once, fewer if descriptors run short.
    pub max_connections: usize,
    /// Limit request bodies together to this many bytes while they are read. Unstreamed answers may
    /// take as many, and so may output that clients leave unread.
    pub max_body_bytes_total: usize,
    /// Refuse prompts longer than this, in bytes of text.
    pub max_prompt_bytes: usize,
    /// End a request that has no event for this long, in seconds.
    pub stall_timeout_s: f64,
    /// Place a request at most this many times.
    pub max_attempts: u32,
    /// Choose nodes by this policy: round-robin, load-balance, cache-aware or min-total-delay.
    pub placement: String,
    /// Admit requests with objectives by this policy: none, early or value-density.
    pub admission: String,
    /// Refuse requests predicted to wait longer than this for others, in milliseconds, or off.
    pub max_wait_ms: MillisOrOff,
    /// Apply this TTFT objective to requests that have none, in milliseconds, or off.
    pub ttft_slo_ms: MillisOrOff,
    /// Apply this TBT objective to requests that have none, in milliseconds, or off.
    pub tbt_slo_ms: MillisOrOff,
    /// End a request after this long, in seconds, whatever it asks for.
    pub max_request_s: f64,
    /// Limit a prompt's wait for room at a prefill node, in seconds.
    pub queue_timeout_s: f64,
    /// Limit how long a request may be overtaken in a prefill queue, in seconds. It is at most half
    /// of `queue_timeout_s`.
    pub max_overtaken_s: f64,
    /// Let decode nodes compute prompts: never, fallback (if no prefill node is left) or short.
    /// `short` adds prompts too short to delay others.
    pub prompts_at_decode: String,
    /// Use partial prefill: decode nodes compute long prompts' last part, prefill nodes the first.
    /// It is used only if the first token comes sooner.
    pub partial_prefill: bool,
    /// Let prefill nodes fetch prefixes of other nodes, if that is faster than computing them.
    pub fetch_prefixes: bool,
    /// Replicate a hot prefix ahead of prompts to at most this many prefill nodes. With 0 or 1,
    /// nodes fetch it only if a prompt needs it.
    pub replicate_prefixes: usize,
    /// Look for prefixes to replicate at this interval, in seconds.
    pub replicate_interval_s: f64,
    /// Fail health checks but accept requests this long before a drain begins, in seconds. Load
    /// balancers learn of the drain in this time.
    pub not_ready_s: f64,
    /// Limit a drain to this long, in seconds.
    pub grace_s: f64,
    /// Filter log lines by this.
    pub log: String,
    /// Write log lines as text or json.
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
    /// Serve clients' gRPC on this address [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<String>,
    /// Serve clients' HTTP on this address [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    pub http: Option<String>,
    /// Serve operators (Cluster, reflection, metrics) on this address
    /// [default: on the clients' ports]
    #[arg(long, value_name = "ADDR")]
    pub operators: Option<String>,
    /// Let nodes register on this address [default: on the clients' gRPC port]
    #[arg(long, value_name = "ADDR")]
    pub nodes: Option<String>,
    /// Elect one leader among the conductors of these etcd members, host:port with commas
    /// [default: none, this one is alone]
    #[arg(long, value_name = "ENDPOINTS")]
    pub etcd: Option<String>,
    /// Begin every key of this cluster in etcd with this [default: /baton]
    #[arg(long, value_name = "PREFIX")]
    pub etcd_prefix: Option<String>,
    /// Use TLS to etcd, and trust certificates of the authorities in this PEM file
    /// [default: none, no TLS]
    #[arg(long, value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// Present this certificate (PEM) to etcd; needs --etcd-key [default: none]
    #[arg(long, value_name = "FILE")]
    pub etcd_cert: Option<PathBuf>,
    /// Use this private key (PEM) for --etcd-cert [default: none]
    #[arg(long, value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,
    /// Log in to etcd as this user; needs --etcd-password-file [default: none]
    #[arg(long, value_name = "NAME")]
    pub etcd_user: Option<String>,
    /// Read the password of --etcd-user from this file [default: none]
    #[arg(long, value_name = "FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// Advertise this host to other conductors [default: the one that it listens on]
    #[arg(long, value_name = "HOST")]
    pub advertise_host: Option<String>,
    /// Allow HTTP calls from web pages of these origins, with commas, or * for all [default: none]
    #[arg(long, value_name = "ORIGINS")]
    pub cors_origins: Option<String>,
    /// Use the tokenizer and chat template of this model: GGUF file or safetensors folder
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Use this chat template (Jinja) instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Use cpu with a model file, or mock without one [default: cpu]
    #[arg(long)]
    pub engine: Option<String>,
    /// Show clients this model name [default: that of the file]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Use N tokens per KV block, as on all nodes [default: 16]
    #[arg(long, value_name = "N")]
    pub block_tokens: Option<u32>,
    /// Expect K and V stored as f16, bf16, f32 or int8 on all nodes [default: f16]
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// Choose nodes by this policy: round-robin, load-balance, cache-aware or min-total-delay
    /// [default: min-total-delay]
    #[arg(long, value_name = "POLICY")]
    pub placement: Option<String>,
    /// Admit requests with objectives by this policy: none, early or value-density
    /// [default: value-density]
    #[arg(long, value_name = "POLICY")]
    pub admission: Option<String>,
    /// Refuse requests predicted to wait longer than this for others, in milliseconds, or off
    /// [default: 30000]
    #[arg(long, value_name = "MS")]
    pub max_wait_ms: Option<String>,
    /// Apply this TTFT objective to requests that have none, in milliseconds, or off [default: off]
    #[arg(long, value_name = "MS")]
    pub ttft_slo_ms: Option<String>,
    /// Apply this TBT objective to requests that have none, in milliseconds, or off [default: off]
    #[arg(long, value_name = "MS")]
    pub tbt_slo_ms: Option<String>,
    /// End a request after this long, in seconds [default: 3600]
    #[arg(long, value_name = "SECONDS")]
    pub max_request_s: Option<f64>,
    /// Limit a prompt's wait for room at a prefill node, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub queue_timeout_s: Option<f64>,
    /// Limit how long a request may be overtaken in a prefill queue, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub max_overtaken_s: Option<f64>,
    /// Let decode nodes compute prompts: never, fallback (if no prefill node is left) or short.
    /// short adds prompts too short to delay others [default: short]
    #[arg(long, value_name = "WHEN")]
    pub prompts_at_decode: Option<String>,
    /// Use partial prefill: decode nodes compute long prompts' last part, prefill nodes the first
    /// [default: true]
    #[arg(long, value_name = "BOOL")]
    pub partial_prefill: Option<bool>,
    /// Let prefill nodes fetch prefixes that other nodes have [default: true]
    #[arg(long, value_name = "BOOL")]
    pub fetch_prefixes: Option<bool>,
    /// Replicate hot prefixes ahead of prompts to at most N prefill nodes; 0 for none [default: 0]
    #[arg(long, value_name = "N")]
    pub replicate_prefixes: Option<usize>,
    /// Look for prefixes to replicate at this interval, in seconds [default: 5]
    #[arg(long, value_name = "SECONDS")]
    pub replicate_interval_s: Option<f64>,
    /// Serve at most N requests at once [default: 16384]
    #[arg(long, value_name = "N")]
    pub max_requests: Option<usize>,
    /// Accept at most N client connections at once [default: 16384, or what descriptors allow]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// Limit request bodies together to this many bytes while they are read. Unstreamed answers may
    /// take as many, and so may output that clients leave unread [default: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    pub max_body_bytes_total: Option<usize>,
    /// Fail health checks this long before a drain begins, in seconds [default: 0]
    #[arg(long, value_name = "SECONDS")]
    pub not_ready_s: Option<f64>,
    /// Limit a drain to this long, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub grace_s: Option<f64>,
    /// Filter log lines, as in debug or baton_conductor=debug,info [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Write log lines as text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(name = "baton-conductor", version, about = "Serve clients and place requests in a Baton cluster")]
pub struct Cli {
    /// Read settings from this TOML file; the environment (BATON_...) and flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print each setting and its source, and exit
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
