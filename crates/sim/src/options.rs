//! What is simulated.

use std::time::Duration;

use baton_kv_cache::EvictionKind;
use baton_scheduler::{AdmissionKind, PlacementKind};
use baton_types::QueueTerms;

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

/// What is simulated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimOptions {
    /// Prefill nodes.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// How requests are placed.
    pub placement: PlacementKind,
    /// What is taken in.
    pub admission: AdmissionKind,
    /// Which blocks the caches drop.
    pub eviction: EvictionKind,
    /// How many times as fast as recorded the trace is played.
    pub speed: f64,
    /// Objective of the time to first token.
    pub ttft_slo: Duration,
    /// Objective of the time between tokens.
    pub tbt_slo: Duration,
    /// Of everything that is drawn.
    pub seed: u64,
    /// Whose requests are counted.
    pub window: Window,
    /// Blocks of a prefill node's cache in place of the profile's.
    pub cache_blocks: Option<u32>,
    /// Blocks of a prefill node's SSD tier; none where 0.
    pub ssd_blocks: u32,
    /// Whether prefixes that decode nodes hold are fetched, too.
    pub decode_sources: bool,
    /// Only what live nodes do so far: no prefix is fetched; a decode node's room is reserved when a request is placed, for the answer that it asks for; nobody looks at the decode
    /// node a second time; nobody is put off for longer than half of a node's queue timeout.
    pub as_live: bool,
    /// Longest that a prompt is put off for others in a queue.
    pub max_overtaken: Duration,
    /// A prompt that takes longer is computed by several nodes, so that its parts do not; never where `None`.
    pub split_above: Option<Duration>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            prefill: 8,
            decode: 8,
            placement: PlacementKind::default(),
            admission: AdmissionKind::None,
            eviction: EvictionKind::default(),
            speed: 1.0,
            ttft_slo: Duration::from_secs(30),
            tbt_slo: Duration::from_millis(100),
            seed: 1,
            window: Window::ALL,
            cache_blocks: None,
            ssd_blocks: 0,
            decode_sources: true,
            as_live: false,
            max_overtaken: Self::max_overtaken(false),
            split_above: None,
        }
    }
}

impl SimOptions {
    /// The usual bound on being put off.
    pub const fn max_overtaken(as_live: bool) -> Duration {
        if as_live { QueueTerms::MAX_OVERTAKEN } else { Duration::from_secs(600) }
    }
}
