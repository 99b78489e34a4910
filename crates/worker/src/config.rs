//! The settings of a node, of either role.

use std::path::PathBuf;

use baton_engine::ComputeDtype;
use baton_runtime::LogFormat;
use baton_runtime::settings::list;
use baton_scheduler::MAX_WAITING;
use baton_transfer_engine::TransportChoice;
use baton_types::KvDtype;

baton_runtime::settings! {
    /// Settings: plain data. Keys are those of the TOML file, the flags and `BATON_…`.
    pub struct Settings {
        /// Register under this name; if unset, under the role and a random number.
        name: Option<String> = None, "NAME";
        /// Register with these conductors, `http://host:port` with commas. A name stands for all of
        /// its addresses.
        conductor: String = "http://127.0.0.1:7070".into(), "URLS";
        /// Serve gRPC on this address.
        listen: String = "127.0.0.1:0".into(), "ADDR";
        /// Serve /health, /ready and /metrics over HTTP on this address.
        http: String = "127.0.0.1:0".into(), "ADDR";
        /// Exchange KV with other nodes (transfer engine) on this address.
        transfer_listen: String = "127.0.0.1:0".into(), "ADDR";
        /// Carry KV by auto, rdma, shm or tcp; auto takes the best of both ends.
        #[serde(with = "word")]
        transport: TransportChoice = TransportChoice::Auto, "TRANSPORT";
        /// Put the shared-memory socket of one host's nodes into this folder. Set it if the nodes
        /// do not share a network namespace.
        transfer_shm_folder: Option<PathBuf> = None, "DIR";
        /// Carry KV by these RDMA devices, as `mlx5_0,rxe*`. If unset, all that have an address are
        /// used.
        transfer_rdma_devices: Option<String> = None, "NAMES";
        /// Use this index into each RDMA device's GID table. If unset, RoCEv2 over IPv4 is used if
        /// there is one.
        transfer_rdma_gid_index: Option<u32> = None, "N";
        /// Advertise this host to other processes, if it differs from the listening one.
        advertise_host: Option<String> = None, "HOST";
        /// Load this model: GGUF file or safetensors folder.
        model: Option<PathBuf> = None, "FILE";
        /// Serve the model under the first of these names, with commas, as the conductor does; if
        /// unset, that of the file.
        #[serde(deserialize_with = "list")]
        served_model_name: Vec<String> = Vec::new(), "NAMES";
        /// Use `cpu` with a model file, or `mock` without one.
        engine: String = "cpu".into(), "ENGINE";
        /// Compute with this many threads; 0 takes every core that this process may use.
        threads: usize = 0, "N";
        /// Use this many tokens per KV block.
        block_tokens: u32 = 16, "N";
        /// Prefill: compute at most this many tokens per chunk.
        chunk_tokens: u32 = 512, "N";
        /// Decode: add at most this many prompt tokens to a step (mixed batch).
        decode_chunk_tokens: u32 = 64, "N";
        /// Decode: reserve this many blocks for a sequence's output from the start. If outputs
        /// outgrow them and blocks run out, the youngest sequences wait.
        growth_blocks: u32 = 4, "N";
        /// Give the KV arena this many blocks; 0 takes what `cache_bytes` has room for.
        cache_blocks: u32 = 0, "N";
        /// Give the KV arena this many bytes, if `cache_blocks` is 0. If unset, half of the memory
        /// that the weights leave free is used, in equal parts by the nodes of one `baton up`.
        cache_bytes: Option<u64> = None, "BYTES";
        /// Take at most this many tokens of prompt and output together; if unset, the model's
        /// context length.
        max_model_len: Option<u32> = None, "N";
        /// Also write full KV blocks to this local SSD folder, and read them back after their
        /// eviction from memory. If unset, there is no SSD tier.
        ssd_folder: Option<PathBuf> = None, "DIR";
        /// Use at most this many bytes of `ssd_folder`.
        ssd_bytes: u64 = 10 << 30, "BYTES";
        /// Store K and V as f16, bf16, f32 or int8, alike on all nodes. int8 has one scale per
        /// token and head.
        kv_dtype: KvDtype = KvDtype::F16, "TYPE";
        /// Compute in auto or f32. auto goes by the weights; f32 is a slow reference.
        #[serde(with = "word")]
        compute_dtype: ComputeDtype = ComputeDtype::default(), "TYPE";
        /// Queue at most this many requests.
        max_waiting: u32 = MAX_WAITING, "N";
        /// Compute at most this many sequences in one step.
        max_running: u32 = 64, "N";
        /// Void a grant if its sequence does not arrive in this time, in seconds.
        grant_ttl_s: f64 = 60.0, "SECONDS";
        /// Mock engine: take this many microseconds per step.
        mock_base_us: u64 = 500, "N";
        /// Mock engine: add this many microseconds per token in a step's batch.
        mock_token_us: u64 = 20, "N";
        /// Mock engine: stand for this model: llama3-70b-a800, llama2-70b-a800 or fitted:FILE. Its
        /// profile gives times, transfer bandwidth, `chunk_tokens` and `max_running`, and
        /// `cache_blocks` if that is 0.
        mock_profile: Option<String> = None, "PROFILE";
        /// Mock engine: use this many bytes of KV per token, a multiple of 64.
        mock_kv_bytes: u32 = 64, "N";
        /// Mock engine: give the answers of this JSON file, one per turn of the assistant. The
        /// context is 131072 tokens then.
        mock_answers: Option<PathBuf> = None, "FILE";
        /// Mock engine: never end a step that computes this token.
        mock_stuck_token: Option<u32> = None, "ID";
        /// End the node if a step makes no progress for this long, in seconds. The engine counts as
        /// dead then.
        step_timeout_s: f64 = 30.0, "SECONDS";
        /// Limit a drain to this long, in seconds.
        grace_s: f64 = 30.0, "SECONDS";
        /// Filter log lines, as in debug or `baton_worker=debug,info`.
        log: String = "info".into(), "FILTER";
        /// Write log lines as text or json.
        log_format: LogFormat = LogFormat::Text, "FORMAT";
    }
}

/// A setting that is a word, as its type writes and reads it.
mod word {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<T: Display, S: Serializer>(word: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(word)
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use baton_runtime::settings::{Declared, load};
    use baton_transfer_engine::TransportKind;

    use super::*;

    fn loaded(variable: Option<&str>, flag: Option<&str>) -> Result<Settings, String> {
        let environment = variable.map(|value| ("BATON_TRANSPORT".to_owned(), value.to_owned()));
        let flags = flag.map(|value| ("transport", value.to_owned()));
        let loaded = load::<Settings>(None, environment.into_iter(), flags);
        loaded.map(|loaded| loaded.settings).map_err(|error| error.to_string())
    }

    #[test]
    fn transport_is_chosen_by_name() {
        assert_eq!(loaded(None, None).unwrap().transport, TransportChoice::Auto);
        assert_eq!(loaded(Some("shm"), None).unwrap().transport, TransportChoice::Only(TransportKind::Shm));
        assert_eq!(loaded(Some("shm"), Some("auto")).unwrap().transport, TransportChoice::Auto);
        let error = loaded(None, Some("infiniband")).unwrap_err();
        assert_eq!(error, "--transport: 'infiniband': expected auto, rdma, shm or tcp");
        assert!(loaded(Some("7"), None).unwrap_err().contains("BATON_TRANSPORT"));
    }

    #[test]
    fn help_and_chart_name_every_transport() {
        let help = Settings::SETTINGS.iter().find(|setting| setting.key == "transport").unwrap().doc;
        assert!(help.contains(&TransportChoice::names()), "{help}");
        let names: Vec<_> = TransportChoice::all().map(|choice| format!("{:?}", choice.as_str())).collect();
        let schema = include_str!("../../../helm/baton/values.schema.json");
        assert!(schema.contains(&format!(r#""transport": {{"enum": [{}]}}"#, names.join(", "))));
    }

    #[test]
    fn compute_dtype_is_chosen_by_name() {
        let loaded = |word: &str| load::<Settings>(None, [].into_iter(), [("compute_dtype", word.to_owned())]);
        assert_eq!(loaded("f32").unwrap().settings.compute_dtype, ComputeDtype::F32);
        assert!(loaded("f32").unwrap().print().contains("compute_dtype = \"f32\""));
        let error = loaded("bf16").unwrap_err().to_string();
        assert_eq!(error, "--compute-dtype: 'bf16': expected auto or f32");
    }
}
