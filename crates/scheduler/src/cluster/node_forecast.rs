//! What a node has before it: what operators are shown.

use std::time::{Duration, Instant};

use super::{Cluster, ClusterNode};
use crate::cost::duration;

/// A node's work, as predicted and as measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeForecast {
    /// Prompts placed there whose first token has not come.
    pub pending: usize,
    /// To compute what is left of them.
    pub queue: Duration,
    /// Sequences placed there, those whose prompt is being computed included.
    pub sequences: usize,
    /// Time between tokens of those that decode, as a high quantile of the steps; none if none
    /// does.
    pub tbt: Option<Duration>,
    /// Rows per second of the last steps: prompt tokens of a prefill node, tokens of a decode node.
    /// None before the first step.
    pub rows_per_second: Option<f64>,
    /// Mean of the last steps.
    pub step: Option<Duration>,
}

impl Cluster {
    /// What this node has before it.
    pub fn node_forecast(&self, now: Instant, node: &ClusterNode) -> NodeForecast {
        let charges = &node.charges;
        let batch = charges.decoding_now();
        let tbt =
            (batch.sequences > 0.0).then(|| self.predictor.high_step_seconds(node, batch.sequences, batch.kv_tokens));
        NodeForecast {
            pending: charges.pending(),
            queue: duration(charges.backlog.total(now)),
            sequences: charges.sequences(),
            tbt: tbt.map(duration),
            rows_per_second: node.last_steps.rows_per_second(),
            step: node.last_steps.mean(),
        }
    }
}

/// A node's last steps, each of which counts a twentieth less with every one after it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LastSteps {
    steps: f64,
    rows: f64,
    seconds: f64,
}

/// Part of its weight that a step keeps when the next one comes.
const KEPT: f64 = 0.95;

impl LastSteps {
    /// A step of so many rows took so many seconds. What is no time is left out.
    pub(super) fn observe(&mut self, rows: u32, seconds: f64) {
        if !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        self.steps = self.steps * KEPT + 1.0;
        self.rows = self.rows * KEPT + f64::from(rows);
        self.seconds = self.seconds * KEPT + seconds;
    }

    fn rows_per_second(&self) -> Option<f64> {
        (self.steps > 0.0).then(|| self.rows / self.seconds)
    }

    fn mean(&self) -> Option<Duration> {
        (self.steps > 0.0).then(|| duration(self.seconds / self.steps))
    }
}
