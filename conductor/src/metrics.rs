//! The conductor's metrics.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, LATENCY_BUCKETS, MetricDoc, MetricKind, count_from_zero};
use baton_types::{ErrorKind, FetchReport, FinishReason, NodeRole, Timeline, Usage};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::error::GenerateError;
use crate::frontend::Frontend;
use crate::prediction_errors::{Estimate, Pair};
use crate::prompt::{CappedBy, CheckedRequest};
use crate::unjoined::NotJoined;

const SUCCESSES: &str = "baton_conductor_request_success_total";
const FAILURES: &str = "baton_conductor_request_failures_total";
const REJECTIONS: &str = "baton_conductor_rejections_total";
const ATTACHED: &str = "baton_conductor_requests_attached_total";
const CAPPED: &str = "baton_conductor_requests_capped_total";
const QUEUED: &str = "baton_conductor_requests_queued_total";
const RETRIES: &str = "baton_conductor_retries_total";
const GRANTS_REFUSED: &str = "baton_conductor_grants_refused_total";
const RELAY: &str = "baton_conductor_relay_seconds";
const PLACEMENT: &str = "baton_conductor_placement_seconds";
const MIGRATIONS: &str = "baton_conductor_migrations_total";
const MIGRATED_TOKENS: &str = "baton_conductor_migrated_tokens_total";
const AT_DECODE: &str = "baton_conductor_prompts_at_decode_total";
const PARTIAL_PREFILLS: &str = "baton_conductor_partial_prefills_total";
const LEADS: &str = "baton_conductor_leads";
const SETTINGS: &str = "baton_conductor_settings_version";
const RUNNING: &str = "baton_conductor_requests_running";
const WAITING: &str = "baton_conductor_requests_waiting";
const TTFT: &str = "baton_conductor_time_to_first_token_seconds";
const GAP: &str = "baton_conductor_inter_token_latency_seconds";
const E2E: &str = "baton_conductor_e2e_request_latency_seconds";
const EXPOSED: &str = "baton_conductor_kv_push_exposed_seconds";
const PROMPT_TOKENS: &str = "baton_conductor_prompt_tokens_total";
const GENERATION_TOKENS: &str = "baton_conductor_generation_tokens_total";
const CACHED_TOKENS: &str = "baton_conductor_cached_prompt_tokens_total";
const ESTIMATE_ERROR: &str = "baton_conductor_prediction_error_ratio";
const PREDICTED_SECONDS: &str = "baton_conductor_predicted_seconds";
const MEASURED_SECONDS: &str = "baton_conductor_measured_seconds";
const PREDICTED_TOKENS: &str = "baton_conductor_predicted_tokens";
const MEASURED_TOKENS: &str = "baton_conductor_measured_tokens";
const NODES: &str = "baton_conductor_nodes_ready";
const NODES_UNJOINED: &str = "baton_conductor_nodes_unjoined";
const NODES_LOST: &str = "baton_conductor_nodes_lost_total";

/// Parts of what was measured.
const ERROR_BUCKETS: &[f64] =
    &[0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0];
/// From what is left of a push over shared memory to the longest wait.
const ESTIMATE_BUCKETS: &[f64] = &[
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
    20.0, 50.0, 100.0, 200.0,
];
/// From a token that finds everything idle to a client that does not read.
const RELAY_BUCKETS: &[f64] = &[
    2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7.5e-4, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2,
    0.5, 1.0, 5.0,
];
const TOKEN_BUCKETS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0,
];

/// What the conductor registers.
pub const METRICS: &[MetricDoc] = &[
    doc(
        SUCCESSES,
        MetricKind::Counter,
        &["finished_reason"],
        "Accepted requests that completed, by reason of the end: stop, length.",
    ),
    doc(FAILURES, MetricKind::Counter, &["kind"], "Accepted requests that failed, by kind of error."),
    doc(
        REJECTIONS,
        MetricKind::Counter,
        &["kind", "stage"],
        "Requests rejected before any work, by kind of error and stage: validation (invalid request), conductor (its own limits, or its drain), admission (policy, or no room in the cluster), placement (no node or no leader, or a prompt longer than the nodes hold).",
    ),
    doc(ATTACHED, MetricKind::Counter, &[], "Requests answered from an earlier request with the same idempotency key."),
    doc(
        CAPPED,
        MetricKind::Counter,
        &["reason"],
        "Requests whose output limit was lowered, by reason: context (above the model's), nodes (KV of the largest ready node).",
    ),
    doc(
        QUEUED,
        MetricKind::Counter,
        &[],
        "Requests that waited in the admission queue for room in the cluster, within their objective.",
    ),
    doc(RETRIES, MetricKind::Counter, &[], "Requests placed again after a node failed or refused."),
    doc(
        GRANTS_REFUSED,
        MetricKind::Counter,
        &["outcome"],
        "Grants refused by a decode node (no room, or steps longer than the objective): reselected (another node), retried (same node, no other had room).",
    ),
    doc(
        MIGRATIONS,
        MetricKind::Counter,
        &["outcome"],
        "Migrations asked of another decode node, for lack of room or because of a drain: done, failed (stayed in place).",
    ),
    doc(
        MIGRATED_TOKENS,
        MetricKind::Counter,
        &[],
        "Tokens of migrated requests whose KV the new node fetched and did not compute.",
    ),
    doc(
        AT_DECODE,
        MetricKind::Counter,
        &[],
        "Prompts sent to a decode node: short ones, or all if no prefill node is left.",
    ),
    doc(
        PARTIAL_PREFILLS,
        MetricKind::Counter,
        &[],
        "Prompts computed by partial prefill: the last part at the decode node, the first at the prefill node.",
    ),
    doc(RUNNING, MetricKind::Gauge, &[], "Requests that nodes are serving."),
    doc(WAITING, MetricKind::Gauge, &[], "Requests not yet at a node: being tokenized, or in the admission queue."),
    doc(LEADS, MetricKind::Gauge, &[], "1 if this conductor is the leader, 0 if it asks the leader for placement."),
    doc(
        SETTINGS,
        MetricKind::Gauge,
        &[],
        "Version of the run-time settings in force at this conductor; 0 before the first change.",
    ),
    doc(
        TTFT,
        MetricKind::Histogram(LATENCY_BUCKETS),
        &[],
        "Seconds from a request's arrival to its first token at the conductor.",
    ),
    doc(
        GAP,
        MetricKind::Histogram(GAP_BUCKETS),
        &[],
        "Seconds between two pieces of a request's output at the conductor.",
    ),
    doc(
        RELAY,
        MetricKind::Histogram(RELAY_BUCKETS),
        &[],
        "Seconds from node event to gRPC client write. Only tokens after the first, which smoothing may keep back, are counted.",
    ),
    doc(
        PLACEMENT,
        MetricKind::Histogram(RELAY_BUCKETS),
        &[],
        "Seconds from asking for an attempt's placement to the answer. With several conductors, this includes a hop to the leader or the wait for one.",
    ),
    doc(E2E, MetricKind::Histogram(LATENCY_BUCKETS), &[], "Seconds from a request's arrival to its end."),
    doc(
        EXPOSED,
        MetricKind::Histogram(GAP_BUCKETS),
        &[],
        "Seconds of a KV push that compute does not hide: after the last layer's compute.",
    ),
    doc(PROMPT_TOKENS, MetricKind::Counter, &[], "Prompt tokens of ended requests."),
    doc(GENERATION_TOKENS, MetricKind::Counter, &[], "Tokens generated for ended requests."),
    doc(CACHED_TOKENS, MetricKind::Counter, &[], "Prompt tokens that the prefill node did not have to compute."),
    doc(
        ESTIMATE_ERROR,
        MetricKind::Histogram(ERROR_BUCKETS),
        &["quantity"],
        "Prediction error of finished requests, as a ratio of the measured value: ttft (from placement), tbt, transfer (KV push that compute does not hide), output (tokens).",
    ),
    doc(
        PREDICTED_SECONDS,
        MetricKind::Histogram(ESTIMATE_BUCKETS),
        &["quantity"],
        "Predicted seconds of ttft, tbt and transfer of finished requests. Its sum over the measured sum is the bias.",
    ),
    doc(
        MEASURED_SECONDS,
        MetricKind::Histogram(ESTIMATE_BUCKETS),
        &["quantity"],
        "Measured seconds of ttft, tbt and transfer of finished requests.",
    ),
    doc(
        PREDICTED_TOKENS,
        MetricKind::Histogram(TOKEN_BUCKETS),
        &["quantity"],
        "Predicted output tokens of finished requests.",
    ),
    doc(
        MEASURED_TOKENS,
        MetricKind::Histogram(TOKEN_BUCKETS),
        &["quantity"],
        "Measured output tokens of finished requests.",
    ),
    doc(NODES, MetricKind::Gauge, &["role"], "Nodes that accept requests."),
    doc(
        NODES_UNJOINED,
        MetricKind::Gauge,
        &["state"],
        "Nodes that asked to join within 30 s and have no session: refused (another model, layout or version, or a name that is taken), unreachable.",
    ),
    doc(NODES_LOST, MetricKind::Counter, &["role"], "Node sessions that ended, without those of drained nodes."),
];

const fn doc(name: &'static str, kind: MetricKind, labels: &'static [&'static str], help: &'static str) -> MetricDoc {
    MetricDoc { name, kind, labels, help }
}

/// Handles, made once.
pub struct Metrics {
    attached: Counter,
    capped: [Counter; CappedBy::ALL.len()],
    queued: Counter,
    retries: Counter,
    grants_reselected: Counter,
    grants_retried: Counter,
    migrations_done: Counter,
    migrations_failed: Counter,
    migrated_tokens: Counter,
    at_decode: Counter,
    split: Counter,
    running: Gauge,
    waiting: Gauge,
    leads: Gauge,
    settings: Gauge,
    ttft: Histogram,
    gap: Histogram,
    /// Of tokens: from their node to their client's connection.
    pub relayed: Histogram,
    /// Of answers to where an attempt goes.
    pub placement: Histogram,
    e2e: Histogram,
    exposed: Histogram,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    cached_tokens: Counter,
    prefill_nodes: Gauge,
    decode_nodes: Gauge,
    unjoined: [Gauge; NotJoined::ALL.len()],
    estimates: [PredictionMetrics; Estimate::ALL.len()],
}

/// Of one estimate.
struct PredictionMetrics {
    error: Histogram,
    predicted: Histogram,
    measured: Histogram,
}

impl PredictionMetrics {
    fn new(estimate: Estimate) -> Self {
        let (predicted, measured) = match estimate {
            Estimate::Output => (PREDICTED_TOKENS, MEASURED_TOKENS),
            Estimate::Ttft | Estimate::Tbt | Estimate::Transfer => (PREDICTED_SECONDS, MEASURED_SECONDS),
        };
        let of = |name: &'static str| histogram!(name, "quantity" => estimate.as_str());
        Self { error: of(ESTIMATE_ERROR), predicted: of(predicted), measured: of(measured) }
    }
}

/// Makes the counters that are looked up by their labels.
fn make_labelled() {
    count_from_zero(FAILURES, "kind", ErrorKind::ALL.map(ErrorKind::as_str));
    count_from_zero(SUCCESSES, "finished_reason", FinishReason::ALL.map(FinishReason::as_str));
    count_from_zero(NODES_LOST, "role", NodeRole::ALL.map(NodeRole::as_str));
    for kind in ErrorKind::ALL {
        for stage in GenerateError::STAGES {
            counter!(REJECTIONS, "kind" => kind.as_str(), "stage" => stage).absolute(0);
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        make_labelled();
        Self {
            attached: counter!(ATTACHED),
            capped: CappedBy::ALL.map(|reason| counter!(CAPPED, "reason" => reason.as_str())),
            queued: counter!(QUEUED),
            retries: counter!(RETRIES),
            grants_reselected: counter!(GRANTS_REFUSED, "outcome" => "reselected"),
            grants_retried: counter!(GRANTS_REFUSED, "outcome" => "retried"),
            migrations_done: counter!(MIGRATIONS, "outcome" => "done"),
            migrations_failed: counter!(MIGRATIONS, "outcome" => "failed"),
            migrated_tokens: counter!(MIGRATED_TOKENS),
            at_decode: counter!(AT_DECODE),
            split: counter!(PARTIAL_PREFILLS),
            running: gauge!(RUNNING),
            waiting: gauge!(WAITING),
            leads: gauge!(LEADS),
            settings: gauge!(SETTINGS),
            ttft: histogram!(TTFT),
            gap: histogram!(GAP),
            relayed: histogram!(RELAY),
            placement: histogram!(PLACEMENT),
            e2e: histogram!(E2E),
            exposed: histogram!(EXPOSED),
            prompt_tokens: counter!(PROMPT_TOKENS),
            generation_tokens: counter!(GENERATION_TOKENS),
            cached_tokens: counter!(CACHED_TOKENS),
            prefill_nodes: gauge!(NODES, "role" => "prefill"),
            decode_nodes: gauge!(NODES, "role" => "decode"),
            unjoined: NotJoined::ALL.map(|why| gauge!(NODES_UNJOINED, "state" => why.as_str())),
            estimates: Estimate::ALL.map(PredictionMetrics::new),
        }
    }
}

impl Metrics {
    /// A request was taken in or refused.
    pub fn on_admission<T>(&self, outcome: &Result<T, GenerateError>) {
        if let Err(error) = outcome {
            counter!(REJECTIONS, "kind" => error.kind().as_str(), "stage" => error.stage()).increment(1);
        }
    }

    /// A request was checked.
    pub fn on_checked(&self, request: &CheckedRequest) {
        if let Some(reason) = request.capped {
            self.capped[reason as usize].increment(1);
        }
    }

    /// A request is answered as another one with its key is.
    pub fn on_attached(&self) {
        self.attached.increment(1);
    }

    /// A request waits in the admission queue.
    pub fn on_queued(&self) {
        self.queued.increment(1);
    }

    /// A decode node is to compute a prompt.
    pub fn on_prompt_at_decode(&self) {
        self.at_decode.increment(1);
    }

    /// A prompt was sent out of which the decode node is to compute the tail.
    pub fn on_partial_prefill(&self) {
        self.split.increment(1);
    }

    /// A decode node refused a grant; another one is asked, or the same one again.
    pub fn on_grant_refused(&self, reselected: bool) {
        if reselected { &self.grants_reselected } else { &self.grants_retried }.increment(1);
    }

    /// A request goes on at another decode node.
    pub fn on_migrated(&self, report: &FetchReport) {
        self.migrations_done.increment(1);
        self.migrated_tokens.increment(u64::from(report.tokens));
    }

    /// It does not, after all.
    pub fn on_migration_failed(&self) {
        self.migrations_failed.increment(1);
    }

    /// A request was placed again.
    pub fn on_retry(&self) {
        self.retries.increment(1);
    }

    /// Two pieces of an output came this far apart.
    pub fn on_token_gap(&self, gap: Duration) {
        self.gap.record(gap);
    }

    /// Something came of a prediction.
    pub fn on_estimate(&self, estimate: Estimate, pair: Pair) {
        let metrics = &self.estimates[estimate as usize];
        metrics.error.record(pair.error());
        metrics.predicted.record(pair.predicted);
        metrics.measured.record(pair.measured);
    }

    /// A request ended.
    pub fn on_end(&self, outcome: &Result<FinishReason, GenerateError>, timeline: &Timeline, usage: &Usage) {
        match outcome {
            Ok(finish) => counter!(SUCCESSES, "finished_reason" => finish.as_str()),
            Err(error) => counter!(FAILURES, "kind" => error.kind().as_str()),
        }
        .increment(1);
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

    /// Other settings are in force.
    pub fn on_settings(&self, version: u64) {
        self.settings.set(version as f64);
    }

    /// A node's session ended.
    pub fn on_node_lost(&self, role: NodeRole) {
        counter!(NODES_LOST, "role" => role.as_str()).increment(1);
    }

    /// Brings the gauges up to date before a scrape.
    pub fn refresh(&self, frontend: &Frontend) {
        let all = frontend.live.len();
        let waiting = frontend.live.waiting();
        self.running.set(all.saturating_sub(waiting) as f64);
        self.waiting.set(waiting as f64);
        self.leads.set(f64::from(u8::from(frontend.desk.leads())));
        let card = frontend.model_card();
        self.prefill_nodes.set(f64::from(card.prefill_nodes));
        self.decode_nodes.set(f64::from(card.decode_nodes));
        let unjoined = frontend.unjoined.lately(frontend.clock.now());
        for (why, gauge) in NotJoined::ALL.iter().zip(&self.unjoined) {
            gauge.set(unjoined.iter().filter(|(_, node)| node.why == *why).count() as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_failures_begin_at_zero() {
        let (telemetry, _metrics) = baton_runtime::Telemetry::local(&[METRICS], Metrics::default).unwrap();
        let text = telemetry.render();
        for series in [
            r#"baton_conductor_rejections_total{kind="overloaded",stage="admission"}"#,
            r#"baton_conductor_request_failures_total{kind="internal"}"#,
            r#"baton_conductor_request_success_total{finished_reason="stop"}"#,
            r#"baton_conductor_nodes_lost_total{role="decode"}"#,
        ] {
            assert!(text.contains(&format!("{series} 0\n")), "{series} is missing");
        }
    }
}
