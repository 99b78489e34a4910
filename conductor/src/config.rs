//! The conductor's settings.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use baton_runtime::settings::{self, BadSetting, list};
use baton_runtime::{LogFormat, available_memory};
use baton_scheduler::{AdmissionKind, ClusterConfig, PlacementKind, RequestLimits};
use baton_types::KvDtype;
use serde::{Deserialize, Serialize};

/// What `stall_timeout_s` may be, seconds. Nodes that compute a long prompt say so every ten
/// seconds.
pub const STALL_TIMEOUTS: RangeInclusive<f64> = 1.0..=24.0 * 3600.0;
/// Longest that a setting lets a request wait.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Where sampling that a request leaves open comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GenerationConfig {
    /// From the model's files, and from the APIs what those do not say.
    Auto,
    /// From the APIs alone.
    None,
}

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

impl From<Option<Duration>> for MillisOrOff {
    fn from(time: Option<Duration>) -> Self {
        time.map_or(Self::off(), |time| Self::Millis(time.as_secs_f64() * 1e3))
    }
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

/// What `max_body_bytes_total` is if it is not set: a share of the free memory, within bounds.
/// There are four budgets of it, and tokenizing takes about as much again.
const BODY_SHARE: u64 = 10;
const MAX_BODY_BUDGET: u64 = 256 << 20;
const MIN_BODY_BUDGET: u64 = 16 << 20;

/// Bytes of a budget if no setting says them.
fn default_budget(available_bytes: Option<u64>) -> usize {
    let share = available_bytes.map_or(MAX_BODY_BUDGET, |bytes| bytes / BODY_SHARE);
    share.clamp(MIN_BODY_BUDGET, MAX_BODY_BUDGET) as usize
}

impl Settings {
    /// Bytes that bodies, unstreamed answers and unread output may take, each.
    pub fn body_budget(&self) -> usize {
        self.max_body_bytes_total.unwrap_or_else(|| default_budget(available_memory()))
    }
}

baton_runtime::settings! {
    /// Settings: plain data. Keys are those of the TOML file, the flags and `BATON_…`.
    pub struct Settings {
        /// Serve clients' gRPC on this address.
        grpc: String = "127.0.0.1:7070".into(), "ADDR";
        /// Serve clients' HTTP on this address.
        http: String = "127.0.0.1:8080".into(), "ADDR";
        /// Serve operators (Cluster, reflection, metrics) on this address; if unset, on the
        /// clients' ports.
        operators: Option<String> = None, "ADDR";
        /// Let nodes register on this address; if unset, on the clients' gRPC port.
        nodes: Option<String> = None, "ADDR";
        /// Elect one leader among the conductors of these etcd members, `host:port` with commas. If
        /// unset, this conductor is alone.
        #[serde(deserialize_with = "list")]
        etcd: Vec<String> = Vec::new(), "ENDPOINTS";
        /// Begin every key of this cluster in etcd with this.
        etcd_prefix: String = "/baton".into(), "PREFIX";
        /// Use TLS to etcd, and trust the certificate authorities in this PEM file; if unset, no
        /// TLS.
        etcd_ca: Option<PathBuf> = None, "FILE";
        /// Present this certificate (PEM file) to etcd; needs `etcd_key`.
        etcd_cert: Option<PathBuf> = None, "FILE";
        /// Use this private key (PEM file) for `etcd_cert`.
        etcd_key: Option<PathBuf> = None, "FILE";
        /// Log in to etcd as this user; needs `etcd_password_file`.
        etcd_user: Option<String> = None, "NAME";
        /// Read the password of `etcd_user` from this file.
        etcd_password_file: Option<PathBuf> = None, "FILE";
        /// Advertise this host or address to other conductors; if unset, the listening one.
        advertise_host: Option<String> = None, "HOST";
        /// Allow HTTP calls from web pages of these origins, with commas, or of all with `*`.
        #[serde(deserialize_with = "list")]
        cors_origins: Vec<String> = Vec::new(), "ORIGINS";
        /// Use the tokenizer and chat template of this model: GGUF file or safetensors folder.
        model: Option<PathBuf> = None, "FILE";
        /// Use `cpu` with a model file, or `mock` without one.
        engine: String = "cpu".into(), "ENGINE";
        /// Use this chat template (Jinja) instead of the model's own.
        chat_template: Option<PathBuf> = None, "FILE";
        /// Serve the model under these names, with commas; answers and nodes have the first. If
        /// unset, that of the file.
        #[serde(deserialize_with = "list")]
        served_model_name: Vec<String> = Vec::new(), "NAMES";
        /// Take sampling that a request leaves open from the model's generation_config.json or GGUF
        /// (auto), or not (none).
        generation_config: GenerationConfig = GenerationConfig::Auto, "WHERE";
        /// Use this many tokens per KV block, as on all nodes.
        block_tokens: u32 = 16, "N";
        /// Expect K and V stored as f16, bf16, f32 or int8 on all nodes.
        kv_dtype: KvDtype = KvDtype::F16, "TYPE";
        /// Serve at most this many completions at once. A request with `n` counts `n` times.
        max_requests: usize = 16_384, "N";
        /// Accept at most this many client connections at once, fewer if descriptors run short.
        max_connections: usize = 16_384, "N";
        /// Limit request bodies, with what is made of them, together to this many bytes of memory
        /// until they are tokens. Unstreamed answers may take as many, and so may output that
        /// clients leave unread. If unset, a tenth of the memory that is free, at most 256 MiB.
        max_body_bytes_total: Option<usize> = None, "BYTES";
        /// Reject prompts longer than this, in bytes of text.
        max_prompt_bytes: usize = 8 << 20, "BYTES";
        /// End a request that has no event for this long, in seconds.
        stall_timeout_s: f64 = RequestLimits::default().stall_timeout.as_secs_f64(), "SECONDS";
        /// End a request after this many failed attempts.
        max_attempts: u32 = RequestLimits::default().max_attempts, "N";
        /// Choose nodes by this policy: round-robin, load-balance, cache-aware or min-total-delay.
        placement: String = PlacementKind::default().as_str().into(), "POLICY";
        /// Admit requests by this policy: none (all of them), early or value-density.
        admission: String = AdmissionKind::default().as_str().into(), "POLICY";
        /// Reject requests whose predicted queueing delay exceeds this, in milliseconds, or off.
        max_wait_ms: MillisOrOff = ClusterConfig::default().max_wait.into(), "MS";
        /// Apply this TTFT objective to requests that have none, in milliseconds, or off.
        ttft_slo_ms: MillisOrOff = MillisOrOff::off(), "MS";
        /// Apply this TBT objective to requests that have none, in milliseconds, or off. TBT is the
        /// mean of a request's longest tenth of gaps between tokens.
        tbt_slo_ms: MillisOrOff = MillisOrOff::off(), "MS";
        /// End a request after this long, in seconds, whatever it asks for.
        max_request_s: f64 = 3600.0, "SECONDS";
        /// Limit a prompt's wait for room at a prefill node, in seconds.
        queue_timeout_s: f64 = ClusterConfig::default().queue_timeout.as_secs_f64(), "SECONDS";
        /// Limit how long a request may be overtaken in a prefill queue, in seconds. It is at most
        /// half of `queue_timeout_s`.
        max_overtaken_s: f64 = ClusterConfig::default().max_overtaken.as_secs_f64(), "SECONDS";
        /// Let decode nodes compute prompts: never, fallback (if no prefill node is left) or short.
        /// `short` adds prompts too short to delay others.
        prompts_at_decode: String = ClusterConfig::default().prompts_at_decode.as_str().into(), "WHEN";
        /// Use partial prefill: decode nodes compute long prompts' last part, prefill nodes the
        /// first. It is used only if the first token comes sooner.
        partial_prefill: bool = ClusterConfig::default().takes_partial_prefills, "BOOL";
        /// Let prefill nodes fetch prefixes of other nodes, if that is faster than computing them.
        fetch_prefixes: bool = ClusterConfig::default().fetches, "BOOL";
        /// Report not ready (/ready, gRPC health) but accept requests for this long before a drain
        /// begins, in seconds. Load balancers learn of the drain in this time.
        not_ready_s: f64 = 0.0, "SECONDS";
        /// Limit a drain to this long, in seconds.
        grace_s: f64 = 30.0, "SECONDS";
        /// Filter log lines, as in debug or `baton_conductor=debug,info`.
        log: String = "info".into(), "FILTER";
        /// Write log lines as text or json.
        log_format: LogFormat = LogFormat::Text, "FORMAT";
    }
}

#[cfg(test)]
mod tests {
    use baton_runtime::settings::load;

    use super::*;

    #[test]
    fn budgets_follow_the_free_memory() {
        const MIB: u64 = 1 << 20;
        let budget = |mib: u64| default_budget(Some(mib * MIB)) >> 20;
        assert_eq!([budget(100), budget(1000), budget(16_000)], [16, 100, 256]);
        assert_eq!(default_budget(None), 256 << 20);
        let set = Settings { max_body_bytes_total: Some(7), ..Settings::default() };
        assert_eq!(set.body_budget(), 7);
    }

    #[test]
    fn cors_origins_setting_accepts_list_or_text() {
        let loaded = |variable: &str| {
            let variable = [("BATON_CORS_ORIGINS".to_owned(), variable.to_owned())];
            load::<Settings>(None, variable.into_iter(), []).unwrap().settings.cors_origins
        };
        assert_eq!(loaded("https://a, https://b"), ["https://a", "https://b"]);
        assert_eq!(loaded(r#"["https://a"]"#), ["https://a"]);
        assert_eq!(loaded("*"), ["*"]);
    }
}
