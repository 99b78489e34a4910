//! Metrics of both kinds of node.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, MetricDoc, MetricKind};
use metrics::{Counter, Histogram, counter, histogram};

const STEPS: &str = "baton_node_steps_total";
const STEP_SECONDS: &str = "baton_node_step_seconds";
const STEP_ROWS: &str = "baton_node_step_rows_total";

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
