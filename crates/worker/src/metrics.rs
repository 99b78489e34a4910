//! Metrics of both kinds of node.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, MetricDoc, MetricKind};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

const STEPS: &str = "baton_node_steps_total";
const STEP_SECONDS: &str = "baton_node_step_seconds";
const STEP_ROWS: &str = "baton_node_step_rows_total";
const ENGINE_STALLS: &str = "baton_node_engine_stalls_total";
const LEASES: &str = "baton_node_leases_total";
const SSD_BLOCKS: &str = "baton_node_ssd_blocks_total";
const SSD_BYTES: &str = "baton_node_ssd_bytes";

/// What every node registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc { name: STEPS, kind: MetricKind::Counter, labels: &[], help: "Steps of the engine." },
    MetricDoc { name: STEP_SECONDS, kind: MetricKind::Histogram(GAP_BUCKETS), labels: &[], help: "Time of a step." },
    MetricDoc {
        name: STEP_ROWS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Rows computed: prompt tokens, or sequences.",
    },
    MetricDoc {
        name: ENGINE_STALLS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Times that the engine made no progress in a step for longer than usual.",
    },
    MetricDoc {
        name: LEASES,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Answers to nodes that wanted to read a prefix here: granted, refused.",
    },
    MetricDoc {
        name: SSD_BLOCKS,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Blocks of the SSD tier: written, write_error, read, read_error, evicted for others.",
    },
    MetricDoc { name: SSD_BYTES, kind: MetricKind::Gauge, labels: &[], help: "Bytes of the SSD tier's blocks." },
];

/// The engine makes no progress in its step.
pub fn on_engine_stalled() {
    counter!(ENGINE_STALLS).increment(1);
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
