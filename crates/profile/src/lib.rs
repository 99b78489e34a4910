//! What a model on a machine costs: the numbers that the simulator and mock nodes share. Every
//! number says where it comes from.
//!
//! **Invariant**: a profile that was loaded has finite numbers, positive where something is divided
//! by them.

// Tests read the clock.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod link;

use std::path::Path;
use std::time::Duration;

use baton_types::NodeProfile;
use serde::{Deserialize, Serialize};

pub use link::Link;

/// Groups of layers that mock and simulated engines compute, push and fetch as one: 80 layers would
/// cost 20 times the events and show the same.
pub const LAYER_GROUPS: u32 = 4;
/// Most tokens of prompt and output together on nodes that play a profile.
pub const CONTEXT_TOKENS: u32 = 1 << 20;

/// A model on a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelProfile {
    /// Its name.
    pub name: String,
    /// Fixed cost of a chunk of prefill, seconds.
    pub prefill_base: f64,
    /// Per uncached prompt token, seconds.
    pub prefill_per_token: f64,
    /// Per (uncached token x attended token), seconds.
    pub prefill_per_token_pair: f64,
    /// Fixed cost of a decode step, seconds.
    pub decode_base: f64,
    /// Per sequence of a decode step, seconds.
    pub decode_per_sequence: f64,
    /// Per token of KV attended to in a decode step, seconds.
    pub decode_per_kv_token: f64,
    /// Tokens of one chunk of prefill.
    pub chunk_tokens: u32,
    /// Layers: the last one's push is what compute cannot hide.
    pub layers: u32,
    /// Bytes of KV of a token, all layers.
    pub kv_bytes_per_token: u64,
    /// Tokens of KV that a decode node's device memory holds.
    pub decode_kv_tokens: u64,
    /// Tokens of KV that a prefill node keeps in host memory.
    pub cache_tokens: u64,
    /// Most sequences of a decode step.
    pub max_running: u32,
    /// Bytes per second between two nodes.
    pub network_bytes_per_s: f64,
    /// Of a message or the last byte of a transfer, seconds.
    pub network_latency_s: f64,
    /// Bytes per second from a node's own SSD tier.
    pub ssd_bytes_per_s: f64,
    /// Standard deviation of a step's time, as a part of it.
    pub step_noise: f64,
}

/// A profile could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// No profile has this name.
    #[error("'{0}' is not a model profile (llama2-70b-a800, llama3-70b-a800, fitted:FILE)")]
    Unknown(String),
    /// The file of a fitted one cannot be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// It does not have the form of a profile.
    #[error("{path}: {error}")]
    Parse {
        /// The file.
        path: String,
        /// Why, with line and field.
        error: serde_json::Error,
    },
    /// A number makes no sense.
    #[error("{path}: {field} is {value}, but must be {expected}")]
    Invalid {
        /// The file.
        path: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
        /// What is taken.
        expected: &'static str,
    },
}

/// 8 x A800 SXM 80 GB. Peak: 312 TFLOP/s of dense BF16 each (NVIDIA A800 data sheet).
const PEAK_FLOPS: f64 = 8.0 * 312e12;
/// Part of the peak that prefill reaches: assumed; 40 to 50 % is usual for long prompts with tensor
/// parallelism over 8 devices.
const MFU: f64 = 0.45;
/// Memory: 2.039 TB/s each (same sheet).
const MEMORY_BYTES_PER_S: f64 = 8.0 * 2.039e12;

/// The shape of a 70B LLaMA, and flops(n) = l (a n^2 d + b n d^2) of its prefill (Mooncake,
/// FAST'25, section 3: a = 4, b = 22, grouped-query factor 8).
struct Llama70b {
    layers: f64,
    d: f64,
    parameters: f64,
}

impl Llama70b {
    fn on_a800(&self, name: &str) -> ModelProfile {
        let rate = PEAK_FLOPS * MFU;
        let a = 4.0;
        let b = 22.0;
        ModelProfile {
            name: name.to_owned(),
            // Launches and collectives of a chunk: assumed.
            prefill_base: 5e-3,
            prefill_per_token: self.layers * b * self.d * self.d / rate,
            // n^2 is twice the pairs that a causal prompt attends to.
            prefill_per_token_pair: 2.0 * self.layers * a * self.d / rate,
            // Weights in BF16 at 75 % of the memory's rate, and 15 ms of collectives, launches and
            // scheduling: a step of one sequence takes 27 ms, as vLLM was measured on 8 x A100 in
            // 2024.
            decode_base: 2.0 * self.parameters / (MEMORY_BYTES_PER_S * 0.75) + 15e-3,
            // Matrix products of a sequence's one token at 40 % of the peak: assumed.
            decode_per_sequence: 2.0 * self.parameters / (PEAK_FLOPS * 0.4),
            // Paged attention at 60 % of the memory's rate: assumed.
            decode_per_kv_token: 327_680.0 / (MEMORY_BYTES_PER_S * 0.6),
            // "Typically larger than 1000 tokens" (Mooncake, arXiv 2407.00079, section 3).
            chunk_tokens: 1024,
            layers: 80,
            // 2 (K, V) x 80 layers x 8 heads x 128 x 2 bytes (Mooncake, FAST'25: 320 KB for
            // LLaMA3-70B).
            kv_bytes_per_token: 327_680,
            // 90 % of 640 GB, less the weights and 20 GB for activations: assumed.
            decode_kv_tokens: ((576e9 - 2.0 * self.parameters - 20e9) / 327_680.0) as u64,
            // "3M tokens" of local cache in about 1 TB of host memory (Mooncake, FAST'25, section
            // 5).
            cache_tokens: 3_000_000,
            // Assumed: room for KV ends a batch of long prompts before this does.
            max_running: 512,
            // 87 GB/s measured by Mooncake's transfer engine on 4 x 200 Gbit/s (FAST'25, section
            // 5).
            network_bytes_per_s: 87e9,
            // Assumed: a message, and the last part of a transfer.
            network_latency_s: 1e-3,
            // Two NVMe drives on PCIe 4.0, 6 GB/s of reads each: assumed.
            ssd_bytes_per_s: 12e9,
            // Assumed: what a linear model of a step leaves.
            step_noise: 0.05,
        }
    }
}

impl ModelProfile {
    /// A profile by name, or from a JSON file (`fitted:FILE`).
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        match name {
            // 69.0 and 70.6 billion parameters (model cards).
            "llama2-70b-a800" => Ok(Llama70b { layers: 80.0, d: 8192.0, parameters: 69.0e9 }.on_a800(name)),
            "llama3-70b-a800" => Ok(Llama70b { layers: 80.0, d: 8192.0, parameters: 70.6e9 }.on_a800(name)),
            _ => match name.strip_prefix("fitted:") {
                Some(path) => Self::read(Path::new(path)),
                None => Err(ProfileError::Unknown(name.to_owned())),
            },
        }
    }

    fn read(path: &Path) -> Result<Self, ProfileError> {
        let name = || path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ProfileError::Read { path: name(), error })?;
        let profile: Self = serde_json::from_str(&text).map_err(|error| ProfileError::Parse { path: name(), error })?;
        profile.validate(&name())?;
        Ok(profile)
    }

    fn validate(&self, path: &str) -> Result<(), ProfileError> {
        let positive = [
            ("prefill_per_token", self.prefill_per_token),
            ("decode_base", self.decode_base),
            ("chunk_tokens", f64::from(self.chunk_tokens)),
            ("layers", f64::from(self.layers)),
            ("kv_bytes_per_token", self.kv_bytes_per_token as f64),
            ("decode_kv_tokens", self.decode_kv_tokens as f64),
            ("cache_tokens", self.cache_tokens as f64),
            ("max_running", f64::from(self.max_running)),
            ("network_bytes_per_s", self.network_bytes_per_s),
            ("ssd_bytes_per_s", self.ssd_bytes_per_s),
        ];
        let not_negative = [
            ("prefill_base", self.prefill_base),
            ("prefill_per_token_pair", self.prefill_per_token_pair),
            ("decode_per_sequence", self.decode_per_sequence),
            ("decode_per_kv_token", self.decode_per_kv_token),
            ("network_latency_s", self.network_latency_s),
            ("step_noise", self.step_noise),
        ];
        let invalid = |(field, value): &(&'static str, f64), expected| ProfileError::Invalid {
            path: path.to_owned(),
            field,
            value: *value,
            expected,
        };
        if let Some(field) = positive.iter().find(|(_, value)| !value.is_finite() || *value <= 0.0) {
            return Err(invalid(field, "more than 0"));
        }
        match not_negative.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            Some(field) => Err(invalid(field, "0 or more")),
            None => Ok(()),
        }
    }

    /// What a node of the cluster would say of itself.
    pub fn node_profile(&self) -> NodeProfile {
        NodeProfile {
            prefill_base: self.prefill_base,
            prefill_per_token: self.prefill_per_token,
            prefill_per_token_pair: self.prefill_per_token_pair,
            decode_base: self.decode_base,
            decode_per_sequence: self.decode_per_sequence,
            decode_per_kv_token: self.decode_per_kv_token,
            max_waiting: 0,
            max_running: self.max_running,
            chunk_tokens: self.chunk_tokens,
            transfer_bytes_per_s: 0.0,
        }
    }

    /// Seconds of a chunk of `rows` tokens that attend to `attended` in sum.
    pub fn prefill_step(&self, rows: u32, attended: u64) -> f64 {
        self.prefill_base + self.prefill_per_token * f64::from(rows) + self.prefill_per_token_pair * attended as f64
    }

    /// Seconds of a decode step.
    pub fn decode_step(&self, sequences: usize, kv_tokens: u64) -> f64 {
        self.decode_base + self.decode_per_sequence * sequences as f64 + self.decode_per_kv_token * kv_tokens as f64
    }

    /// What [`Self::prefill_step`] takes, for an engine.
    pub const fn prefill_cost(&self) -> StepCost {
        StepCost {
            base: self.prefill_base,
            per_row: self.prefill_per_token,
            per_row_pair: self.prefill_per_token_pair,
            noise: self.step_noise,
        }
    }

    /// What [`Self::decode_step`] takes, for an engine: a row is a sequence.
    pub const fn decode_cost(&self) -> StepCost {
        StepCost {
            base: self.decode_base,
            per_row: self.decode_per_sequence,
            per_row_pair: self.decode_per_kv_token,
            noise: self.step_noise,
        }
    }

    /// Seconds of a whole prompt of which the first `cached` tokens are there.
    pub fn prompt(&self, tokens: u32, cached: u32) -> f64 {
        let rows = tokens - cached;
        let chunks = rows.div_ceil(self.chunk_tokens);
        self.prefill_step(rows, attended(cached, tokens)) + self.prefill_base * f64::from(chunks.saturating_sub(1))
    }

    /// Bytes of KV of so many tokens, all layers.
    pub fn kv_bytes(&self, tokens: u32) -> u64 {
        self.kv_bytes_per_token * u64::from(tokens)
    }

    /// Of a message.
    pub fn latency(&self) -> Duration {
        Duration::from_secs_f64(self.network_latency_s)
    }
}

/// Seconds of an engine's step: linear in its rows and in the tokens that they attend to in sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Of each step.
    pub base: f64,
    /// Of each row: a prompt's token, or a sequence.
    pub per_row: f64,
    /// Of each token that a row attends to.
    pub per_row_pair: f64,
    /// Standard deviation of its time, as a part of it.
    pub noise: f64,
}

impl StepCost {
    /// Seconds of a step without its noise.
    pub fn seconds(&self, rows: u64, attended: u64) -> f64 {
        self.base + self.per_row * rows as f64 + self.per_row_pair * attended as f64
    }
}

/// A factor around 1 of this standard deviation, from draws from [0, 1): a sum of uniform numbers
/// is normal enough, and bounded.
pub fn step_noise(deviation: f64, unit: &mut impl FnMut() -> f64) -> f64 {
    let normal: f64 = (0..12).map(|_| unit()).sum::<f64>() - 6.0;
    (1.0 + deviation * normal).max(0.1)
}

/// Sum over the positions `from..to` of the tokens that each attends to, itself included.
pub fn attended(from: u32, to: u32) -> u64 {
    let up_to = |n: u32| u64::from(n) * (u64::from(n) + 1) / 2;
    up_to(to) - up_to(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_costs_equal_step_times_of_model_profile() {
        let profile = ModelProfile::load("llama3-70b-a800").unwrap();
        let rows = 1024;
        let pairs = attended(4096, 5120);
        assert_eq!(profile.prefill_cost().seconds(u64::from(rows), pairs), profile.prefill_step(rows, pairs));
        assert_eq!(profile.decode_cost().seconds(7, 90_000), profile.decode_step(7, 90_000));
    }

    #[test]
    fn step_noise_is_around_1_and_exactly_1_if_off() {
        let mut draws = [0.25, 0.75].into_iter().cycle();
        assert_eq!(step_noise(0.0, &mut || draws.next().unwrap()), 1.0);
        assert_eq!(step_noise(0.05, &mut || 0.5), 1.0);
        assert!((step_noise(0.05, &mut || 0.75) - 1.15).abs() < 1e-12);
        assert_eq!(step_noise(1.0, &mut || 0.0), 0.1, "a step never takes no time");
    }
}
