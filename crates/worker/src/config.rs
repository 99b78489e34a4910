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
    /// Name of the node; by default the role and a random number.
    pub name: Option<String>,
    /// The conductors to register with, `http://host:port` by commas.
    pub conductor: String,
    /// Address of the gRPC service.
    pub listen: String,
    /// Address of the HTTP port: health, readiness and metrics.
    pub http: String,
    /// Address where other nodes' KV arrives or leaves from.
    pub transfer_listen: String,
    /// What KV may travel over: the best that both ends have (auto), or rdma, shm or tcp and nothing else.
    #[serde(with = "transport")]
    pub transport: TransportChoice,
    /// Folder of the socket by which nodes of one host share memory, where they do not share a network namespace.
    pub transfer_shm_folder: Option<PathBuf>,
    /// RDMA devices that carry KV, as `mlx5_0,rxe*`; by default all that have an address.
    pub transfer_rdma_devices: Option<String>,
    /// Index into each RDMA device's GID table; by default RoCEv2 over IPv4 where there is one.
    pub transfer_rdma_gid_index: Option<u32>,
    /// Sends checksums of KV along where tcp carries it.
    pub transfer_checksums: bool,
    /// Host that others reach this node at, where it is not the one it listens on.
    pub advertise_host: Option<String>,
    /// Model file or folder.
    pub model: Option<PathBuf>,
    /// Name of the model for clients; by default that of the file.
    pub model_name: Option<String>,
    /// `cpu` with a model file, or `mock` without.
    pub engine: String,
    /// Threads of the engine; 0 takes every core that this process may use.
    pub threads: usize,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Prefill: most tokens of one chunk.
    pub chunk_tokens: u32,
    /// Decode: most tokens of prompts in one step beside the batch.
    pub decode_chunk_tokens: u32,
    /// Decode: blocks of an answer that room is kept for from the start. Where answers grow beyond that and blocks run out, the youngest sequences wait.
    pub growth_blocks: u32,
    /// Blocks of the KV arena; 0 takes what `cache_bytes` holds.
    pub cache_blocks: u32,
    /// Bytes of the KV arena, where `cache_blocks` is 0.
    pub cache_bytes: u64,
    /// Folder on a local SSD where blocks are kept that the arena has no room for; none without.
    pub ssd_folder: Option<PathBuf>,
    /// Most bytes of it.
    pub ssd_bytes: u64,
    /// Which cached blocks go first where room is needed.
    #[serde(with = "eviction")]
    pub eviction: EvictionKind,
    /// Element type of stored K and V.
    pub kv_dtype: KvDtype,
    /// What products with quantized weights are computed in.
    #[serde(with = "compute_dtype")]
    pub compute_dtype: ComputeDtype,
    /// Most requests that wait.
    pub max_waiting: u32,
    /// Most sequences of one step.
    pub max_running: u32,
    /// How long room is kept for a sequence that does not come, seconds.
    pub grant_ttl_s: f64,
    /// Mock engine: microseconds of a step.
    pub mock_base_us: u64,
    /// Mock engine: microseconds of each row of a step.
    pub mock_row_us: u64,
    /// Mock engine: the model that it stands for (llama3-70b-a800, llama2-70b-a800, fitted:FILE). Its times are the profile's, and so are `chunk_tokens`, `max_running`, `cache_blocks`
    /// where that is 0, and the bandwidth of transfers.
    pub mock_profile: Option<String>,
    /// Mock engine: bytes of KV of a token, a multiple of 64.
    pub mock_kv_bytes: u32,
    /// Mock engine: a step that computes this token never ends.
    pub mock_stuck_token: Option<u32>,
    /// The engine is taken to be dead, and the node ends, if it makes no progress in a step for this long, seconds.
    pub step_timeout_s: f64,
    /// How long a drain may take, seconds.
    pub grace_s: f64,
    /// Filter of log lines.
    pub log: String,
    /// text or json.
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

/// An arithmetic as text.
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
    /// Name of the node [default: the role and a random number]
    #[arg(long)]
    pub name: Option<String>,
    /// The conductors to register with, by commas; each address that a name has is one [default: http://127.0.0.1:7070]
    #[arg(long, value_name = "URLS")]
    pub conductor: Option<String>,
    /// Address of the gRPC service [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// Address of the HTTP port: /health, /ready and /metrics [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub http: Option<String>,
    /// Address of the transfer engine [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDR")]
    pub transfer_listen: Option<String>,
    /// What KV may travel over: auto (the best that both ends have), or rdma, shm or tcp and nothing else [default: auto]
    #[arg(long, value_name = "TRANSPORT")]
    pub transport: Option<String>,
    /// Folder of the socket by which nodes of one host share memory, where they do not share a network namespace
    #[arg(long, value_name = "DIR")]
    pub transfer_shm_folder: Option<PathBuf>,
    /// Host that others reach this node at, where it is not the one it listens on
    #[arg(long, value_name = "HOST")]
    pub advertise_host: Option<String>,
    /// Model file (GGUF) or folder (safetensors)
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Name of the model for clients [default: that of the file]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// cpu with a model file, or mock without [default: cpu]
    #[arg(long)]
    pub engine: Option<String>,
    /// Threads of the engine [default: every core that this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Tokens of a KV block [default: 16]
    #[arg(long, value_name = "N")]
    pub block_tokens: Option<u32>,
    /// Prefill: most tokens of one chunk [default: 512]
    #[arg(long, value_name = "N")]
    pub chunk_tokens: Option<u32>,
    /// Decode: most tokens of prompts in one step beside the batch [default: 64]
    #[arg(long, value_name = "N")]
    pub decode_chunk_tokens: Option<u32>,
    /// Decode: blocks of an answer that room is kept for from the start [default: 4]
    #[arg(long, value_name = "N")]
    pub growth_blocks: Option<u32>,
    /// Blocks of the KV arena [default: what cache_bytes, 1 GiB, holds]
    #[arg(long, value_name = "N")]
    pub cache_blocks: Option<u32>,
    /// Bytes of the KV arena, where --cache-blocks is not given
    #[arg(long, value_name = "BYTES")]
    pub cache_bytes: Option<u64>,
    /// Folder on a local SSD where blocks are kept that the arena has no room for
    #[arg(long, value_name = "DIR")]
    pub ssd_folder: Option<PathBuf>,
    /// Most bytes of it [default: 10 GiB]
    #[arg(long, value_name = "BYTES")]
    pub ssd_bytes: Option<u64>,
    /// Which cached blocks go first: lru, lfu, length-aware or lhd [default: lhd]
    #[arg(long, value_name = "POLICY")]
    pub eviction: Option<String>,
    /// Element type of stored K and V: f16, bf16, f32, or int8 with a scale per row of a head; alike on all nodes [default: f16]
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// What products with quantized weights are computed in: stored (the weights as they are, 8-bit activations), bf16 (twice as fast for prompts where the CPU has AMX, slow for tokens: for prefill nodes) or f32 (slow and large, the reference). Nodes of one arithmetic share cached prefixes [default: stored]
    #[arg(long, value_name = "TYPE")]
    pub compute_dtype: Option<String>,
    /// Most requests that wait [default: 256]
    #[arg(long, value_name = "N")]
    pub max_waiting: Option<u32>,
    /// Most sequences of one step [default: 64]
    #[arg(long, value_name = "N")]
    pub max_running: Option<u32>,
    /// Mock engine: microseconds of a step [default: 500]
    #[arg(long, value_name = "N")]
    pub mock_base_us: Option<u64>,
    /// Mock engine: microseconds of each row of a step [default: 20]
    #[arg(long, value_name = "N")]
    pub mock_row_us: Option<u64>,
    /// Mock engine: takes times, sizes and bandwidth of a model: llama3-70b-a800, llama2-70b-a800 or fitted:FILE [default: none]
    #[arg(long, value_name = "PROFILE")]
    pub mock_profile: Option<String>,
    /// Mock engine: bytes of KV of a token, a multiple of 64 [default: 64]
    #[arg(long, value_name = "N")]
    pub mock_kv_bytes: Option<u32>,
    /// Mock engine: a step that computes this token never ends [default: none]
    #[arg(long, value_name = "ID")]
    pub mock_stuck_token: Option<u32>,
    /// The node ends if its engine makes no progress in a step for this long, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub step_timeout_s: Option<f64>,
    /// How long a drain may take, seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub grace_s: Option<f64>,
    /// Filter of log lines, as in debug or baton_worker=debug,info [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

/// The command line.
#[derive(Debug, clap::Parser)]
#[command(
    version,
    about = "A node of a Baton cluster: computes prompts (baton-prefill) or streams tokens (baton-decode)"
)]
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
