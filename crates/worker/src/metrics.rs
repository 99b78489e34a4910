//! Metrics of both kinds of node.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, MetricDoc, MetricKind};
use baton_types::{KvLayout, Load};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

const STEPS: &str = "baton_node_steps_total";
const STEP_SECONDS: &str = "baton_node_step_seconds";
const STEP_ROWS: &str = "baton_node_step_tokens_total";
const RUNNING: &str = "baton_node_requests_running";
const WAITING: &str = "baton_node_requests_waiting";
const KV_USAGE: &str = "baton_node_kv_cache_usage_ratio";
const PREFIX_QUERIES: &str = "baton_node_prefix_cache_queries_total";
const PREFIX_HITS: &str = "baton_node_prefix_cache_hits_total";
const CACHE_CONFIG: &str = "baton_node_cache_config_info";
const ENGINE_STALLS: &str = "baton_node_engine_stalls_total";
const LATE_MASKS: &str = "baton_node_late_masks_total";
const LEASES: &str = "baton_node_leases_total";
const SSD_BLOCKS: &str = "baton_node_ssd_blocks_total";
const SSD_BYTES: &str = "baton_node_ssd_bytes";

/// What every node registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc { name: STEPS, kind: MetricKind::Counter, labels: &[], help: "Steps of the engine." },
    MetricDoc {
        name: STEP_SECONDS,
        kind: MetricKind::Histogram(GAP_BUCKETS),
        labels: &[],
        help: "Seconds of an engine step.",
    },
    MetricDoc {
        name: STEP_ROWS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Tokens in the batches of steps: prompt tokens, and one per sequence.",
    },
    MetricDoc {
        name: RUNNING,
        kind: MetricKind::Gauge,
        labels: &[],
        help: "Requests being computed, or sequences in the running batch.",
    },
    MetricDoc {
        name: WAITING,
        kind: MetricKind::Gauge,
        labels: &[],
        help: "Requests in the queue, or waiting for bytes or room.",
    },
    MetricDoc {
        name: KV_USAGE,
        kind: MetricKind::Gauge,
        labels: &[],
        help: "Share of KV cache blocks in use by requests, 0 to 1. Blocks cached only for later prompts are not counted.",
    },
    MetricDoc {
        name: PREFIX_QUERIES,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Prompt tokens looked up in the prefix cache.",
    },
    MetricDoc {
        name: PREFIX_HITS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Looked-up prompt tokens found in the prefix cache, in the SSD tier or at another node.",
    },
    MetricDoc {
        name: CACHE_CONFIG,
        kind: MetricKind::Gauge,
        labels: &["block_size", "num_blocks"],
        help: "Always 1; the labels are the tokens of a KV block and the number of blocks.",
    },
    MetricDoc {
        name: ENGINE_STALLS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Times that the engine made no progress in a step for longer than usual.",
    },
    MetricDoc {
        name: LATE_MASKS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Masks of structured output that were not made in time for a step: their sequences sat it out.",
    },
    MetricDoc {
        name: LEASES,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Leases that other nodes asked for to read a prefix: granted, refused.",
    },
    MetricDoc {
        name: SSD_BLOCKS,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Blocks of the SSD tier: written, write_error, read, read_error, evicted.",
    },
    MetricDoc { name: SSD_BYTES, kind: MetricKind::Gauge, labels: &[], help: "Bytes of the blocks in the SSD tier." },
];

/// The engine makes no progress in its step.
pub fn on_engine_stalled() {
    counter!(ENGINE_STALLS).increment(1);
}

/// A sequence sits a step out: its mask was late.
pub fn on_mask_late() {
    counter!(LATE_MASKS).increment(1);
}

/// Of a node's load and cache. Handles, made once.
pub struct LoadMetrics {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge,
    prefix_queries: Counter,
    prefix_hits: Counter,
}

impl LoadMetrics {
    /// Of a node whose cache is so large.
    pub fn new(layout: &KvLayout) -> Self {
        let block_size = layout.block_tokens.to_string();
        let num_blocks = layout.num_blocks.to_string();
        gauge!(CACHE_CONFIG, "block_size" => block_size, "num_blocks" => num_blocks).set(1.0);
        Self {
            running: gauge!(RUNNING),
            waiting: gauge!(WAITING),
            kv_usage: gauge!(KV_USAGE),
            prefix_queries: counter!(PREFIX_QUERIES),
            prefix_hits: counter!(PREFIX_HITS),
        }
    }

    /// What the node does now.
    pub fn on_load(&self, load: &Load) {
        self.running.set(load.running);
        self.waiting.set(load.waiting);
        self.kv_usage.set(f64::from(load.blocks_used) / f64::from(load.blocks_total.max(1)));
        self.prefix_queries.absolute(load.prefix_queries);
        self.prefix_hits.absolute(load.prefix_hits);
    }
}

/// Handles, made once.
pub struct StepMetrics {
    steps: Counter,
    seconds: Histogram,
    rows: Counter,
}

impl Default for StepMetrics {
    fn default() -> Self {
        Self { steps: counter!(STEPS), seconds: histogram!(STEP_SECONDS), rows: counter!(STEP_ROWS) }
    }
}

impl StepMetrics {
    /// A step is over.
    pub fn on_step(&self, rows: u32, elapsed: Duration) {
        self.steps.increment(1);
        self.seconds.record(elapsed);
        self.rows.increment(u64::from(rows));
    }
}

/// Handles, made once.
pub struct LeaseMetrics {
    granted: Counter,
    refused: Counter,
}

impl Default for LeaseMetrics {
    fn default() -> Self {
        Self { granted: counter!(LEASES, "outcome" => "granted"), refused: counter!(LEASES, "outcome" => "refused") }
    }
}

impl LeaseMetrics {
    /// A reader was answered.
    pub fn on_answer(&self, granted: bool) {
        if granted { self.granted.increment(1) } else { self.refused.increment(1) }
    }
}

/// Handles of the SSD tier, made once.
pub struct SsdMetrics {
    /// Blocks written.
    pub written: Counter,
    /// Blocks that could not be written.
    pub write_errors: Counter,
    /// Blocks read back.
    pub read: Counter,
    /// Blocks whose read failed, or that were damaged.
    pub read_errors: Counter,
    /// Blocks that made room for others.
    pub evicted: Counter,
    /// What the tier holds.
    pub bytes: Gauge,
}

impl Default for SsdMetrics {
    fn default() -> Self {
        Self {
            written: counter!(SSD_BLOCKS, "outcome" => "written"),
            write_errors: counter!(SSD_BLOCKS, "outcome" => "write_error"),
            read: counter!(SSD_BLOCKS, "outcome" => "read"),
            read_errors: counter!(SSD_BLOCKS, "outcome" => "read_error"),
            evicted: counter!(SSD_BLOCKS, "outcome" => "evicted"),
            bytes: gauge!(SSD_BYTES),
        }
    }
}
