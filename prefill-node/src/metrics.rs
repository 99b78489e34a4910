//! The prefill node's metrics.

use std::time::Duration;

use baton_runtime::{GAP_BUCKETS, LATENCY_BUCKETS, MetricDoc, MetricKind, count_from_zero};
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
const ENDED: &str = "baton_prefill_requests_total";

const ABORTS: &str = "baton_prefill_aborts_total";

/// What the prefill node registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc {
        name: ABORTS,
        kind: MetricKind::Counter,
        labels: &["stage"],
        help: "Requests aborted here, by stage: queued, computing, granted, pushing, handing_off.",
    },
    MetricDoc {
        name: QUEUE,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "Seconds in the node's queue.",
    },
    MetricDoc {
        name: COMPUTE,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "Seconds from the first chunk's start to the first token.",
    },
    MetricDoc {
        name: PUSHED,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Bytes of KV pushed for requests that were handed off.",
    },
    MetricDoc {
        name: EXPOSED,
        kind: MetricKind::Histogram(GAP_BUCKETS),
        labels: &[],
        help: "Seconds of a KV push that compute does not hide: after the last layer's compute.",
    },
    MetricDoc {
        name: FETCHES,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Prefixes of other nodes: fetched, computed (because the fetch failed).",
    },
    MetricDoc {
        name: LATE,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Prefixes of other nodes or the SSD that came too late for a step and were computed.",
    },
    MetricDoc {
        name: FETCHED,
        kind: MetricKind::Counter,
        labels: &[],
        help: "Bytes of KV fetched from other nodes for requests.",
    },
    MetricDoc {
        name: FETCH,
        kind: MetricKind::Histogram(LATENCY_BUCKETS),
        labels: &[],
        help: "Seconds from asking a prefix's holder to the last byte.",
    },
    MetricDoc {
        name: ENDED,
        kind: MetricKind::Counter,
        labels: &["outcome"],
        help: "Requests that left the node: handed_off, finished (no decode needed), failed.",
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
    handed_off: Counter,
    finished: Counter,
    failed: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        count_from_zero(ABORTS, "stage", PrefillCore::STAGES);
        Self {
            queue: histogram!(QUEUE),
            compute: histogram!(COMPUTE),
            pushed: counter!(PUSHED),
            exposed: histogram!(EXPOSED),
            brought: counter!(FETCHES, "outcome" => "fetched"),
            computed: counter!(FETCHES, "outcome" => "computed"),
            late: counter!(LATE),
            fetched: counter!(FETCHED),
            fetch: histogram!(FETCH),
            handed_off: counter!(ENDED, "outcome" => "handed_off"),
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
            PrefillEvent::FirstToken { finish, compute, .. } => {
                self.compute.record(*compute);
                if finish.is_some() {
                    self.finished.increment(1);
                }
            }
            PrefillEvent::HandedOff(transfer) => self.on_handed_off(transfer),
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

    fn on_handed_off(&self, transfer: &KvTransfer) {
        self.handed_off.increment(1);
        self.pushed.increment(transfer.bytes);
        if transfer.exposed > Duration::ZERO {
            self.exposed.record(transfer.exposed);
        }
    }
}
