//! The settings of a node, of either role.

use std::path::PathBuf;

use baton_engine::ComputeDtype;
use baton_runtime::LogFormat;
use baton_scheduler::{EvictionKind, MAX_WAITING};
use baton_transfer_engine::TransportChoice;
use baton_types::KvDtype;
use serde::{Deserialize, Serialize};

/// Settings: plain data. Keys are those of the TOML file, the flags and `BATON_…`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Register under this name; if unset, under the role and a random number.
    pub name: Option<String>,
    /// Register with these conductors, `http://host:port` with commas.
    pub conductor: String,
    /// Serve gRPC on this address.
    pub listen: String,
    /// Serve health, readiness and metrics over HTTP on this address.
    pub http: String,
    /// Exchange KV with other nodes on this address.
    pub transfer_listen: String,
    /// Carry KV by auto (the best of both ends), or only rdma, shm or tcp.
    #[serde(with = "transport")]
    pub transport: TransportChoice,
    /// Put the shared-memory socket of one host's nodes into this folder. Set it if the nodes do
    /// not share a network namespace.
    pub transfer_shm_folder: Option<PathBuf>,
    /// Carry KV by these RDMA devices, as `mlx5_0,rxe*`. If unset, all that have an address are
    /// used.
    pub transfer_rdma_devices: Option<String>,
    /// Use this index into each RDMA device's GID table. If unset, RoCEv2 over IPv4 is used if
    /// there is one.
    pub transfer_rdma_gid_index: Option<u32>,
    /// Send checksums with KV that tcp carries.
    pub transfer_checksums: bool,
    /// Advertise this host to other processes, if it differs from the listening one.
    pub advertise_host: Option<String>,
    /// Load this model file or folder.
    pub model: Option<PathBuf>,
    /// Show clients this model name; if unset, that of the file.
    pub model_name: Option<String>,
    /// Use `cpu` with a model file, or `mock` without one.
    pub engine: String,
    /// Compute with this many threads; 0 takes every core that this process may use.
    pub threads: usize,
    /// Use this many tokens per KV block.
    pub block_tokens: u32,
    /// Prefill: compute at most this many tokens per chunk.
    pub chunk_tokens: u32,
    /// Decode: add at most this many prompt tokens to a step (mixed batch).
    pub decode_chunk_tokens: u32,
    /// Decode: reserve this many blocks for a sequence's output from the start. If outputs outgrow
    /// them and blocks run out, the youngest sequences wait.
    pub growth_blocks: u32,
    /// Give the KV arena this many blocks; 0 takes what `cache_bytes` has room for.
    pub cache_blocks: u32,
    /// Give the KV arena this many bytes, if `cache_blocks` is 0.
    pub cache_bytes: u64,
    /// Cache blocks that the arena has no room for in this local SSD folder. If unset, there is no
    /// SSD tier.
    pub ssd_folder: Option<PathBuf>,
    /// Use at most this many bytes of `ssd_folder`.
    pub ssd_bytes: u64,
    /// Evict cached blocks by this policy.
    #[serde(with = "eviction")]
    pub eviction: EvictionKind,
    /// Store K and V as this element type.
    pub kv_dtype: KvDtype,
    /// Compute products with quantized weights in this type.
    #[serde(with = "compute_dtype")]
    pub compute_dtype: ComputeDtype,
    /// Queue at most this many requests.
    pub max_waiting: u32,
    /// Compute at most this many sequences in one step.
    pub max_running: u32,
    /// Void a grant if its sequence does not arrive in this time, in seconds.
    pub grant_ttl_s: f64,
    /// Mock engine: take this many microseconds per step.
    pub mock_base_us: u64,
    /// Mock engine: add this many microseconds per row of a step.
    pub mock_row_us: u64,
    /// Mock engine: stand for this model: llama3-70b-a800, llama2-70b-a800 or fitted:FILE. Its
    /// profile gives times, transfer bandwidth, `chunk_tokens` and `max_running`, and
    /// `cache_blocks` if that is 0.
    pub mock_profile: Option<String>,
    /// Mock engine: use this many bytes of KV per token, a multiple of 64.
    pub mock_kv_bytes: u32,
    /// Mock engine: never end a step that computes this token.
    pub mock_stuck_token: Option<u32>,
    /// End the node if a step makes no progress for this long, in seconds. The engine counts as
    /// dead then.
    pub step_timeout_s: f64,
    /// Limit a drain to this long, in seconds.
    pub grace_s: f64,
    /// Filter log lines by this.
    pub log: String,
    /// Write log lines as text or json.
    pub log_format: LogFormat,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: None,
            conductor: "http://127.0.0.1:7070".into(),
            listen: "127.0.0.1:0".into(),
            http: "127.0.0.1:0".into(),
            transfer_listen: "127.0.0.1:0".into(),
            transport: TransportChoice::Auto,
            transfer_shm_folder: None,
            transfer_rdma_devices: None,
            transfer_rdma_gid_index: None,
            transfer_checksums: false,
            advertise_host: None,
            model: None,
            model_name: None,
            engine: "cpu".into(),
            threads: 0,
            block_tokens: 16,
            chunk_tokens: 512,
            decode_chunk_tokens: 64,
            growth_blocks: 4,
            cache_blocks: 0,
            cache_bytes: 1 << 30,
            ssd_folder: None,
            ssd_bytes: 10 << 30,
            eviction: EvictionKind::default(),
            kv_dtype: KvDtype::F16,
            compute_dtype: ComputeDtype::default(),
            max_waiting: MAX_WAITING,
            max_running: 64,
            grant_ttl_s: 60.0,
            mock_base_us: 500,
            mock_row_us: 20,
            mock_profile: None,
            mock_kv_bytes: 64,
            mock_stuck_token: None,
            step_timeout_s: 30.0,
            grace_s: 30.0,
            log: "info".into(),
            log_format: LogFormat::Text,
        }
    }
}

/// An eviction policy as text.
mod eviction {
    use baton_scheduler::EvictionKind;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(kind: &EvictionKind, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(kind.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EvictionKind, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// A compute dtype as text.
mod compute_dtype {
    use baton_engine::ComputeDtype;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(compute_dtype: &ComputeDtype, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(compute_dtype.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ComputeDtype, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A transport as text.
mod transport {
    use baton_transfer_engine::TransportChoice;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(choice: &TransportChoice, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(choice)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TransportChoice, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| de::Error::custom("expected auto, rdma, shm or tcp"))
    }
}

/// What can be given on the command line; everything else through `--config` or the environment.
#[derive(Debug, Default, clap::Args, Serialize)]
pub struct Flags {
    /// Register under this name [default: the role and a random number]
    #[arg(long)]
    pub name: Option<String>,
    /// Register with these conductors, with commas; every address of a name is one
    /// [default: http://127.0.0.1:7070]
    #[arg(long, value_name = "URLS")]
    pub conductor: Option<String>,
    /// Serve gRPC on this address [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// Serve /health, /ready and /metrics over HTTP on this address [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub http: Option<String>,
    /// Exchange KV with other nodes (transfer engine) on this address [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub transfer_listen: Option<String>,
    /// Carry KV by auto (the best of both ends), or only rdma, shm or tcp [default: auto]
    #[arg(long, value_name = "TRANSPORT")]
    pub transport: Option<String>,
    /// Put the shared-memory socket of one host's nodes into this folder. Set it if the nodes do
    /// not share a network namespace
    #[arg(long, value_name = "DIR")]
    pub transfer_shm_folder: Option<PathBuf>,
    /// Advertise this host to other processes, if it differs from the listening one
    #[arg(long, value_name = "HOST")]
    pub advertise_host: Option<String>,
    /// Load this model: GGUF file or safetensors folder
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Show clients this model name [default: that of the file]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Use cpu with a model file, or mock without one [default: cpu]
    #[arg(long)]
    pub engine: Option<String>,
    /// Compute with N threads [default: every core that this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Use N tokens per KV block [default: 16]
    #[arg(long, value_name = "N")]
    pub block_tokens: Option<u32>,
    /// Prefill: compute at most N tokens per chunk [default: 512]
    #[arg(long, value_name = "N")]
    pub chunk_tokens: Option<u32>,
    /// Decode: add at most N prompt tokens to a step (mixed batch) [default: 64]
    #[arg(long, value_name = "N")]
    pub decode_chunk_tokens: Option<u32>,
    /// Decode: reserve N blocks for a sequence's output from the start [default: 4]
    #[arg(long, value_name = "N")]
    pub growth_blocks: Option<u32>,
    /// Give the KV arena N blocks [default: what cache_bytes, 1 GiB, holds]
    #[arg(long, value_name = "N")]
    pub cache_blocks: Option<u32>,
    /// Give the KV arena this many bytes, if --cache-blocks is not given
    #[arg(long, value_name = "BYTES")]
    pub cache_bytes: Option<u64>,
    /// Cache blocks that the arena has no room for in this local SSD folder
    #[arg(long, value_name = "DIR")]
    pub ssd_folder: Option<PathBuf>,
    /// Use at most this many bytes of --ssd-folder [default: 10 GiB]
    #[arg(long, value_name = "BYTES")]
    pub ssd_bytes: Option<u64>,
    /// Evict cached blocks by this policy: lru, lfu, length-aware or lhd [default: lhd]
    #[arg(long, value_name = "POLICY")]
    pub eviction: Option<String>,
    /// Store K and V as f16, bf16, f32 or int8, alike on all nodes. int8 has a scale per row of a
    /// head [default: f16]
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// Compute products with quantized weights in auto, bf16 or f32. auto keeps the weights as they
    /// are, with 8-bit activations. bf16 is twice as fast for prompts if the CPU has AMX. It is
    /// slow for tokens: use it on prefill nodes. f32 is the reference, slow and large. Nodes share
    /// cached prefixes within one type [default: auto]
    #[arg(long, value_name = "TYPE")]
    pub compute_dtype: Option<String>,
    /// Queue at most N requests [default: 256]
    #[arg(long, value_name = "N")]
    pub max_waiting: Option<u32>,
    /// Compute at most N sequences in one step [default: 64]
    #[arg(long, value_name = "N")]
    pub max_running: Option<u32>,
    /// Mock engine: take N microseconds per step [default: 500]
    #[arg(long, value_name = "N")]
    pub mock_base_us: Option<u64>,
    /// Mock engine: add N microseconds per row of a step [default: 20]
    #[arg(long, value_name = "N")]
    pub mock_row_us: Option<u64>,
    /// Mock engine: use times, sizes and bandwidth of llama3-70b-a800, llama2-70b-a800 or
    /// fitted:FILE [default: none]
    #[arg(long, value_name = "PROFILE")]
    pub mock_profile: Option<String>,
    /// Mock engine: use N bytes of KV per token, a multiple of 64 [default: 64]
    #[arg(long, value_name = "N")]
    pub mock_kv_bytes: Option<u32>,
    /// Mock engine: never end a step that computes this token [default: none]
    #[arg(long, value_name = "ID")]
    pub mock_stuck_token: Option<u32>,
    /// End the node if a step makes no progress for this long, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub step_timeout_s: Option<f64>,
    /// Limit a drain to this long, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub grace_s: Option<f64>,
    /// Filter log lines, as in debug or baton_worker=debug,info [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Write log lines as text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(
    version,
    about = "Run a node of a Baton cluster: baton-prefill computes prompts, baton-decode generates tokens"
)]
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
    use baton_transfer_engine::TransportKind;

    use super::*;

    fn loaded(variable: Option<&str>, flag: Option<&str>) -> Result<Settings, String> {
        let environment = variable.map(|value| ("BATON_TRANSPORT".to_owned(), value.to_owned()));
        let flags = Flags { transport: flag.map(Into::into), ..Flags::default() };
        let loaded = load::<Settings>(None, environment.into_iter(), &flags);
        loaded.map(|loaded| loaded.settings).map_err(|error| error.to_string())
    }

    #[test]
    fn a_transport_is_chosen_by_name() {
        assert_eq!(loaded(None, None).unwrap().transport, TransportChoice::Auto);
        assert_eq!(loaded(Some("shm"), None).unwrap().transport, TransportChoice::Only(TransportKind::Shm));
        assert_eq!(loaded(Some("shm"), Some("auto")).unwrap().transport, TransportChoice::Auto);
        let error = loaded(None, Some("infiniband")).unwrap_err();
        assert_eq!(error, "--transport: 'infiniband': expected auto, rdma, shm or tcp");
        assert!(loaded(Some("7"), None).unwrap_err().contains("BATON_TRANSPORT"));
    }
}
