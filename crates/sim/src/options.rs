//! What is simulated.

use std::time::Duration;

use baton_scheduler::{ClusterConfig, MinTotalDelayConfig};

use crate::faults::FaultKind;
use crate::named::named;
use crate::policy::{SimAdmission, SimPlacement};
use crate::trace::BLOCK_TOKENS;

named! {
    /// The part of a trace's time whose requests are counted. All of it is played.
    Window {
        /// All of it.
        All = "all",
        /// Where parameters are chosen.
        FirstHalf = "first-half",
        /// Where they are judged.
        SecondHalf = "second-half",
    }
}

impl Window {
    /// Whether a request that comes at `at` is counted, if the last one comes at `last`.
    pub(crate) fn contains(self, at: Duration, last: Duration) -> bool {
        match self {
            Self::All => true,
            Self::FirstHalf => at < last / 2,
            Self::SecondHalf => at >= last / 2,
        }
    }
}

named! {
    /// What a cluster can be simulated without, to see what it is worth.
    Feature {
        /// Shorter prompts may pass longer ones in a prefill node's queue.
        ShortestFirst = "shortest-first",
        /// Eviction by least hit density; without it, the least recently used block goes.
        Lhd = "lhd",
        /// Decode nodes compute the last part of long prompts (partial prefill).
        PartialPrefill = "partial-prefill",
        /// Decode nodes compute short prompts.
        PromptsAtDecode = "prompts-at-decode",
        /// Sequences that wait for room go on at another decode node.
        Migration = "migration",
        /// The first token is kept back for as long as the second is expected to be late.
        Smoothing = "smoothing",
        /// Requests wait in the admission queue for room that is expected soon.
        AdmissionQueue = "admission-queue",
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
    /// What the cluster does without.
    pub without: Option<Feature>,
    /// How many times as fast as recorded the trace is played.
    pub speed: f64,
    /// Objective of the time to first token; none without.
    pub ttft_slo: Option<Duration>,
    /// Objective of the time between tokens; none without.
    pub tbt_slo: Option<Duration>,
    /// Requests that would wait longer than this for others, by estimate, are refused; none
    /// without.
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
    /// Blocks of a decode node's memory in place of the profile's.
    pub decode_blocks: Option<u32>,
    /// Blocks of a prefill node's SSD tier; no tier if 0.
    pub ssd_blocks: u32,
    /// Whether nodes have small bounds, drawn, and messages take up to 3 ms: for tests that look
    /// for rare orders of events.
    pub is_cramped: bool,
    /// The mean time from one fault to the next; none without.
    pub fault_every: Option<Duration>,
    /// The only kind of fault that happens; every kind without.
    pub fault: Option<FaultKind>,
}

impl Default for SimOptions {
    fn default() -> Self {
        let cluster = ClusterConfig::default();
        Self {
            prefill: 8,
            decode: 8,
            placement: SimPlacement::default(),
            admission: SimAdmission::default(),
            without: None,
            speed: 1.0,
            ttft_slo: None,
            tbt_slo: None,
            max_wait: cluster.max_wait,
            max_overtaken: cluster.max_overtaken,
            queue_timeout: cluster.queue_timeout,
            seed: 1,
            window: Window::All,
            block_tokens: BLOCK_TOKENS,
            cache_blocks: None,
            decode_blocks: None,
            ssd_blocks: 0,
            is_cramped: false,
            fault_every: None,
            fault: None,
        }
    }
}

impl SimOptions {
    /// The same cluster without a feature.
    pub fn without(self, feature: Feature) -> Self {
        let options = Self { without: Some(feature), ..self };
        match feature {
            Feature::ShortestFirst => {
                let config = MinTotalDelayConfig { reorders: false, ..MinTotalDelayConfig::default() };
                Self { placement: SimPlacement::MinTotalDelayWith(config), ..options }
            }
            _ => options,
        }
    }

    pub(crate) fn has(&self, feature: Feature) -> bool {
        self.without != Some(feature)
    }
}
