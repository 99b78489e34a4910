//! What is simulated.

use std::time::Duration;

use baton_kv_cache::EvictionKind;
use baton_scheduler::ClusterConfig;

use crate::policy::{SimAdmission, SimPlacement};
use crate::trace::BLOCK_TOKENS;

/// The part of a trace's time whose requests are counted. All of it is played.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// From this part of the trace's time on, 0 to 1.
    pub from: f64,
    /// Up to this part of it.
    pub to: f64,
}

impl Window {
    /// All of it.
    pub const ALL: Self = Self { from: 0.0, to: 1.0 };
    /// Where parameters are chosen.
    pub const FIRST_HALF: Self = Self { from: 0.0, to: 0.5 };
    /// Where they are judged.
    pub const SECOND_HALF: Self = Self { from: 0.5, to: 1.0 };
}

impl Window {
    /// Whether a request that comes at `at` is counted, where the last one comes at `last`.
    pub(crate) fn contains(&self, at: Duration, last: Duration) -> bool {
        at >= last.mul_f64(self.from) && (at < last.mul_f64(self.to) || self.to >= 1.0)
    }
}

/// What is simulated. Settings of the cluster are production's, and so are their defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimOptions {
    /// Prefill nodes.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// How requests are placed.
    pub placement: SimPlacement,
    /// What is taken in.
    pub admission: SimAdmission,
    /// Which blocks the caches drop.
    pub eviction: EvictionKind,
    /// How many times as fast as recorded the trace is played.
    pub speed: f64,
    /// Objective of the time to first token; none without.
    pub ttft_slo: Option<Duration>,
    /// Objective of the time between tokens; none without.
    pub tbt_slo: Option<Duration>,
    /// Requests that would wait longer than this for others, by estimate, are refused; none without.
    pub max_wait: Option<Duration>,
    /// Longest time a request may be overtaken in a prefill queue.
    pub max_overtaken: Duration,
    /// Longest wait for room at a prefill node.
    pub queue_timeout: Duration,
    /// Of everything that is drawn.
    pub seed: u64,
    /// Whose requests are counted.
    pub window: Window,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Blocks of a prefill node's cache in place of the profile's.
    pub cache_blocks: Option<u32>,
    /// Blocks of a prefill node's SSD tier; no tier if 0.
    pub ssd_blocks: u32,
    /// Whether decode nodes compute the last tokens of long prompts.
    pub split_prompts: bool,
    /// Prefill nodes that a hot prefix is replicated to.
    pub replicas: usize,
    /// A node is killed every so often.
    pub kill_every: Option<Duration>,
}

impl Default for SimOptions {
    fn default() -> Self {
        let cluster = ClusterConfig::default();
        Self {
            prefill: 8,
            decode: 8,
            placement: SimPlacement::default(),
            admission: SimAdmission::default(),
            eviction: EvictionKind::default(),
            speed: 1.0,
            ttft_slo: None,
            tbt_slo: None,
            max_wait: cluster.max_wait,
            max_overtaken: cluster.max_overtaken,
            queue_timeout: cluster.queue_timeout,
            seed: 1,
            window: Window::ALL,
            block_tokens: BLOCK_TOKENS,
            cache_blocks: None,
            ssd_blocks: 0,
            split_prompts: cluster.splits_prompts,
            replicas: cluster.replicas,
            kill_every: None,
        }
    }
}
