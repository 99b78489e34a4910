//! The prefill node's metrics.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, LATENCY_BUCKETS, MetricDoc, MetricKind};
use baton_scheduler::PrefillCore;
use baton_types::{FetchReport, KvTransfer, PrefillEvent};
use metrics::{Counter, Histogram, counter, histogram};

const QUEUE: &str = "baton_prefill_queue_seconds";
const COMPUTE: &str = "baton_prefill_compute_seconds";
const PUSHED: &str = "baton_prefill_pushed_bytes_total";
const EXPOSED: &str = "baton_prefill_push_exposed_seconds";
const FETCHES: &str = "baton_prefill_prefix_fetches_total";
const LATE: &str = "baton_prefill_prefixes_late_total";
const FETCHED: &str = "baton_prefill_prefix_fetched_bytes_total";
const FETCH: &str = "baton_prefill_prefix_fetch_seconds";
const COPIES: &str = "baton_prefill_prefix_copies_total";
const COPIED: &str = "baton_prefill_prefix_copied_bytes_total";
const ENDED: &str = "baton_prefill_requests_total";

const ABORTS: &str = "baton_prefill_aborts_total";

/// What the prefill node registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc {
        name: ABORTS,
        kind: MetricKind::Counter,
        labels: &["stage"],
        help: "Requests that were given up here, by how far they were: queued, computing, granted, pushing, handing_over.",
    },
    MetricDoc {
        name: QUEUE,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "Wait in the node's queue.",
    },
    MetricDoc {
        name: COMPUTE,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "From the first chunk's start to the first token.",
    },
    MetricDoc {
        name: PUSHED,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Bytes of KV pushed for requests that were handed over.",
    },
    MetricDoc {
        name: EXPOSED,
        kind: MetricKind::Histogram(GAP_BUCKETS),
        labels: &[],
        help: "The part of a push after the last layer's compute.",
    },
    MetricDoc {
        name: FETCHES,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Prefixes that another node held: brought, or computed after all because that failed.",
    },
    MetricDoc {
        name: LATE,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Prefixes, of other nodes or the SSD, that a step waited for and gave up: they were computed.",
    },
    MetricDoc { name: FETCHED, kind: MetricKind::Counter, labels: &[], help: "Bytes of KV brought from other nodes." },
    MetricDoc {
        name: FETCH,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "From the question to the holder of a prefix to its last byte.",
    },
    MetricDoc {
        name: COPIES,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Prefixes that a conductor wanted here before a prompt began with one: brought, or failed, which includes those given up for requests.",
    },
    MetricDoc {
        name: COPIED,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Bytes of KV brought from other nodes for no request.",
    },
    MetricDoc {
        name: ENDED,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Requests that left the node: handed_over, finished (no decode needed), failed.",
    },
];

/// Handles, made once.
pub struct Metrics {
    queue: Histogram,
    compute: Histogram,
    pushed: Counter,
    exposed: Histogram,
    brought: Counter,
    computed: Counter,
    /// Prefixes that a step gave up.
    pub late: Counter,
    fetched: Counter,
    fetch: Histogram,
    copied: Counter,
    not_copied: Counter,
    copied_bytes: Counter,
    handed_over: Counter,
    finished: Counter,
    failed: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        // `increase()` does not see a counter's first event if the counter begins with it.
        for stage in PrefillCore::STAGES {
            counter!(ABORTS, "stage" => stage).absolute(0);
        }
        Self {
            queue: histogram!(QUEUE),
            compute: histogram!(COMPUTE),
            pushed: counter!(PUSHED),
            exposed: histogram!(EXPOSED),
            brought: counter!(FETCHES, "outcome" => "brought"),
            computed: counter!(FETCHES, "outcome" => "computed"),
            late: counter!(LATE),
            fetched: counter!(FETCHED),
            fetch: histogram!(FETCH),
            copied: counter!(COPIES, "outcome" => "brought"),
            not_copied: counter!(COPIES, "outcome" => "failed"),
            copied_bytes: counter!(COPIED),
            handed_over: counter!(ENDED, "outcome" => "handed_over"),
            finished: counter!(ENDED, "outcome" => "finished"),
            failed: counter!(ENDED, "outcome" => "failed"),
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

    /// What the conductor is told, counted.
    pub fn on_event(&self, event: &PrefillEvent) {
        match event {
            PrefillEvent::Started { queue, .. } => self.queue.record(*queue),
            PrefillEvent::Fetched(report) => self.on_fetched(report),
            PrefillEvent::Copied(report) if report.failure.is_some() => self.not_copied.increment(1),
            PrefillEvent::Copied(report) => {
                self.copied.increment(1);
                self.copied_bytes.increment(report.bytes);
            }
            PrefillEvent::FirstToken { finish, compute, .. } => {
                self.compute.record(*compute);
                if finish.is_some() {
                    self.finished.increment(1);
                }
            }
            PrefillEvent::HandedOver(transfer) => self.on_handed_over(transfer),
            PrefillEvent::Failed(_) | PrefillEvent::DecodeFailed(_) => self.failed.increment(1),
            // Counted by the decode node, which refused it.
            PrefillEvent::GrantRefused(_) | PrefillEvent::Progress { .. } => {}
        }
    }

    fn on_fetched(&self, report: &FetchReport) {
        if report.transport == FetchReport::SSD {
            return;
        }
        if report.failure.is_some() {
            return self.computed.increment(1);
        }
        self.brought.increment(1);
        self.fetched.increment(report.bytes);
        self.fetch.record(report.elapsed);
    }

    fn on_handed_over(&self, transfer: &KvTransfer) {
        self.handed_over.increment(1);
        self.pushed.increment(transfer.bytes);
        if transfer.exposed > Duration::ZERO {
            self.exposed.record(transfer.exposed);
        }
    }
}
