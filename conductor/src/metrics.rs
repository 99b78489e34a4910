//! The conductor's metrics.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, LATENCY_BUCKETS, MetricDoc, MetricKind};
use baton_types::{FinishReason, NodeRole, Timeline, Usage};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::error::GenerateError;
use crate::front_door::FrontDoor;

const REQUESTS: &str = "baton_conductor_requests_total";
const REJECTIONS: &str = "baton_conductor_rejections_total";
const HELD: &str = "baton_conductor_requests_held_total";
const RETRIES: &str = "baton_conductor_retries_total";
const RUNNING: &str = "baton_conductor_requests_running";
const TTFT: &str = "baton_conductor_time_to_first_token_seconds";
const GAP: &str = "baton_conductor_inter_token_latency_seconds";
const E2E: &str = "baton_conductor_e2e_request_latency_seconds";
const EXPOSED: &str = "baton_conductor_kv_transfer_exposed_seconds";
const PROMPT_TOKENS: &str = "baton_conductor_prompt_tokens_total";
const GENERATION_TOKENS: &str = "baton_conductor_generation_tokens_total";
const CACHED_TOKENS: &str = "baton_conductor_cached_prompt_tokens_total";
const NODES: &str = "baton_conductor_nodes_ready";
const NODES_LOST: &str = "baton_conductor_nodes_lost_total";

/// What the conductor registers.
pub const METRICS: &[MetricDoc] = &[
    doc(
        REQUESTS,
        MetricKind::Counter,
        &["outcome"],
        "Accepted requests that ended, by outcome: stop, length, or the kind of error.",
    ),
    doc(REJECTIONS, MetricKind::Counter, &["kind"], "Requests refused before any work, by kind of error."),
    doc(
        HELD,
        MetricKind::Counter,
        &[],
        "Requests that waited at the door for the cluster to get room, within their objective.",
    ),
    doc(RETRIES, MetricKind::Counter, &[], "Requests placed again after a node failed or refused."),
    doc(RUNNING, MetricKind::Gauge, &[], "Requests being served."),
    doc(
        TTFT,
        MetricKind::Histogram(LATENCY_BUCKETS),
        &[],
        "From a request's arrival to its first token at the front door.",
    ),
    doc(GAP, MetricKind::Histogram(GAP_BUCKETS), &[], "Between two pieces of a request's output at the front door."),
    doc(E2E, MetricKind::Histogram(LATENCY_BUCKETS), &[], "From a request's arrival to its end."),
    doc(EXPOSED, MetricKind::Histogram(GAP_BUCKETS), &[], "The part of a KV transfer after the last layer's compute."),
    doc(PROMPT_TOKENS, MetricKind::Counter, &[], "Tokens of the prompts of ended requests."),
    doc(GENERATION_TOKENS, MetricKind::Counter, &[], "Tokens generated for ended requests."),
    doc(CACHED_TOKENS, MetricKind::Counter, &[], "Prompt tokens that the prefill node did not have to compute."),
    doc(NODES, MetricKind::Gauge, &["role"], "Nodes that take requests."),
    doc(NODES_LOST, MetricKind::Counter, &["role"], "Sessions with nodes that ended."),
];

const fn doc(name: &'static str, kind: MetricKind, labels: &'static [&'static str], help: &'static str) -> MetricDoc {
    MetricDoc { name, kind, labels, help }
}

/// Handles, made once.
pub struct Metrics {
    held: Counter,
    retries: Counter,
    running: Gauge,
    ttft: Histogram,
    gap: Histogram,
    e2e: Histogram,
    exposed: Histogram,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    cached_tokens: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            held: counter!(HELD),
            retries: counter!(RETRIES),
            running: gauge!(RUNNING),
            ttft: histogram!(TTFT),
            gap: histogram!(GAP),
            e2e: histogram!(E2E),
            exposed: histogram!(EXPOSED),
            prompt_tokens: counter!(PROMPT_TOKENS),
            generation_tokens: counter!(GENERATION_TOKENS),
            cached_tokens: counter!(CACHED_TOKENS),
        }
    }
}

impl Metrics {
    /// A request was taken in or refused.
    pub fn on_admission<T>(&self, outcome: &Result<T, GenerateError>) {
        if let Err(error) = outcome {
            counter!(REJECTIONS, "kind" => error.kind().as_str()).increment(1);
        }
    }

    /// A request waits at the door.
    pub fn on_held(&self) {
        self.held.increment(1);
    }

    /// A request was placed again.
    pub fn on_retry(&self) {
        self.retries.increment(1);
    }

    /// Two pieces of an output came this far apart.
    pub fn on_token_gap(&self, gap: Duration) {
        self.gap.record(gap);
    }

    /// A request ended.
    pub fn on_end(&self, outcome: &Result<FinishReason, GenerateError>, timeline: &Timeline, usage: &Usage) {
        let outcome = outcome.as_ref().map_or_else(|error| error.kind().as_str(), |finish| finish.as_str());
        counter!(REQUESTS, "outcome" => outcome).increment(1);
        if usage.completion_tokens > 0 {
            self.ttft.record(timeline.ttft);
        }
        if timeline.kv_transfer.bytes > 0 {
            self.exposed.record(timeline.kv_transfer.exposed);
        }
        self.e2e.record(timeline.total);
        self.prompt_tokens.increment(u64::from(usage.prompt_tokens));
        self.generation_tokens.increment(u64::from(usage.completion_tokens));
        self.cached_tokens.increment(u64::from(usage.cached_tokens));
    }

    /// A node's session ended.
    pub fn on_node_lost(&self, role: NodeRole) {
        counter!(NODES_LOST, "role" => role.as_str()).increment(1);
    }

    /// Brings the gauges up to date before a scrape.
    pub fn refresh(&self, door: &FrontDoor) {
        self.running.set(door.live.len() as f64);
        let card = door.model_card();
        gauge!(NODES, "role" => "prefill").set(f64::from(card.prefill_nodes));
        gauge!(NODES, "role" => "decode").set(f64::from(card.decode_nodes));
    }
}
