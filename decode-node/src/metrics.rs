//! The decode node's metrics.

use baton_runtime::{LATENCY_BUCKETS, MetricDoc, MetricKind, count_from_zero};
use baton_scheduler::DecodeCore;
use baton_types::{DecodeEvent, FetchReport, PrefillEvent, Refused};
use metrics::{Counter, Histogram, counter, histogram};

const TOKENS: &str = "baton_decode_tokens_total";
const QUEUE: &str = "baton_decode_queue_seconds";
const ENDED: &str = "baton_decode_requests_total";
const GRANTS: &str = "baton_decode_grants_total";
const PREEMPTIONS: &str = "baton_decode_preemptions_total";
const PROMPTS: &str = "baton_decode_prompts_total";
const TAIL_TOKENS: &str = "baton_decode_partial_prefill_tokens_total";
const OFFERS: &str = "baton_decode_migration_requests_total";
const TAKEN: &str = "baton_decode_sequences_migrated_total";
const TAKEN_BYTES: &str = "baton_decode_migrated_bytes_total";
const RECEIVED: &str = "baton_decode_received_bytes_total";

const ABORTS: &str = "baton_decode_aborts_total";

/// What the decode node registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc {
        name: ABORTS,
        kind: MetricKind::Counter,
        labels: &["stage"],
        help: "Requests aborted here, by stage: granted, waiting, preempted, migrating, running.",
    },
    MetricDoc { name: TOKENS, kind: MetricKind::Counter, labels: &[], help: "Tokens generated." },
    MetricDoc {
        name: QUEUE,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "Seconds from the handoff to the sequence's first step.",
    },
    MetricDoc {
        name: ENDED,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Requests that ended here: stop, length, failed.",
    },
    MetricDoc {
        name: GRANTS,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Grants asked for by prefill nodes: granted, refused, expired.",
    },
    MetricDoc {
        name: PREEMPTIONS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Running sequences that were preempted. They migrate, or are computed again.",
    },
    MetricDoc {
        name: PROMPTS,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Prompts to be computed here and not by a prefill node: computed, failed.",
    },
    MetricDoc {
        name: TAIL_TOKENS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Prompt tokens computed here by partial prefill.",
    },
    MetricDoc {
        name: OFFERS,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Migrations requested of a conductor: a sequence waits for room, or the node drains.",
    },
    MetricDoc {
        name: TAKEN,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Sequences to migrate here from other decode nodes: fetched, computed (no KV fetched, or none needed), refused.",
    },
    MetricDoc {
        name: TAKEN_BYTES,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Bytes of KV fetched from other decode nodes.",
    },
    MetricDoc { name: RECEIVED, kind: MetricKind::Counter, labels: &[], help: "Bytes of KV received." },
];

/// Handles, made once.
pub struct Metrics {
    tokens: Counter,
    queue: Histogram,
    stop: Counter,
    length: Counter,
    failed: Counter,
    /// Tails of prompts went through their last layer.
    pub partial_prefill_tokens: Counter,
    /// Room was given.
    pub granted: Counter,
    /// Room was refused.
    pub refused: Counter,
    /// A grant's time ran out.
    pub expired: Counter,
    /// Bytes that arrived.
    pub received: Counter,
    /// Sequences that gave up their blocks.
    pub preemptions: Counter,
    /// Sequences that others may take.
    pub offered: Counter,
    migrated_fetched: Counter,
    taken_computed: Counter,
    taken_refused: Counter,
    taken_bytes: Counter,
    prompts_computed: Counter,
    prompts_failed: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        count_from_zero(ABORTS, "stage", DecodeCore::STAGES);
        Self {
            tokens: counter!(TOKENS),
            queue: histogram!(QUEUE),
            stop: counter!(ENDED, "outcome" => "stop"),
            length: counter!(ENDED, "outcome" => "length"),
            failed: counter!(ENDED, "outcome" => "failed"),
            partial_prefill_tokens: counter!(TAIL_TOKENS),
            granted: counter!(GRANTS, "outcome" => "granted"),
            refused: counter!(GRANTS, "outcome" => "refused"),
            expired: counter!(GRANTS, "outcome" => "expired"),
            received: counter!(RECEIVED),
            preemptions: counter!(PREEMPTIONS),
            offered: counter!(OFFERS),
            migrated_fetched: counter!(TAKEN, "outcome" => "fetched"),
            taken_computed: counter!(TAKEN, "outcome" => "computed"),
            taken_refused: counter!(TAKEN, "outcome" => "refused"),
            taken_bytes: counter!(TAKEN_BYTES),
            prompts_computed: counter!(PROMPTS, "outcome" => "computed"),
            prompts_failed: counter!(PROMPTS, "outcome" => "failed"),
        }
    }
}

impl Metrics {
    /// A request is given up; `None`: it is not here.
    pub fn on_abort(&self, stage: Option<&'static str>) {
        if let Some(stage) = stage {
            counter!(ABORTS, "stage" => stage).increment(1);
        }
    }

    /// What a conductor is told of a prompt that is computed here, counted.
    pub fn on_prompt_event(&self, event: &PrefillEvent) {
        match event {
            PrefillEvent::FirstToken { .. } => {
                self.tokens.increment(1);
                self.prompts_computed.increment(1);
            }
            PrefillEvent::Failed(_) | PrefillEvent::DecodeFailed(_) => self.prompts_failed.increment(1),
            PrefillEvent::Started { .. } | PrefillEvent::Fetched(_) | PrefillEvent::HandedOff(_) => {}
            PrefillEvent::GrantRefused(_) | PrefillEvent::Progress { .. } => {}
        }
    }

    /// A sequence of another decode node was to go on here.
    pub fn on_migrate(&self, result: &Result<FetchReport, Refused>) {
        match result {
            Ok(report) if report.bytes == 0 => self.taken_computed.increment(1),
            Ok(report) => {
                self.migrated_fetched.increment(1);
                self.taken_bytes.increment(report.bytes);
            }
            Err(_) => self.taken_refused.increment(1),
        }
    }

    /// What a conductor is told, counted.
    pub fn on_event(&self, event: &DecodeEvent) {
        match event {
            DecodeEvent::Token { finish, queue, .. } => {
                self.tokens.increment(1);
                if let Some(queue) = queue {
                    self.queue.record(*queue);
                }
                match finish {
                    Some(baton_types::FinishReason::Stop) => self.stop.increment(1),
                    Some(baton_types::FinishReason::Length) => self.length.increment(1),
                    None => {}
                }
            }
            DecodeEvent::Failed(_) => self.failed.increment(1),
        }
    }
}
