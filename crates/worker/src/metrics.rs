//! Metrics of both kinds of node.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, MetricDoc, MetricKind};
use metrics::{Counter, Histogram, counter, histogram};

const STEPS: &str = "baton_node_steps_total";
const STEP_SECONDS: &str = "baton_node_step_seconds";
const STEP_ROWS: &str = "baton_node_step_rows_total";
const LEASES: &str = "baton_node_leases_total";

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
        name: LEASES,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Answers to nodes that wanted to read a prefix here: granted, refused.",
    },
];

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
