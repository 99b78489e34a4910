//! The engine's metrics.

use std::time::Duration;

use baton_runtime::{MetricDoc, MetricKind};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::{TransferError, TransportKind};

const BYTES: &str = "baton_transfer_bytes_total";
const BATCHES: &str = "baton_transfer_batches_total";
const BATCH_SECONDS: &str = "baton_transfer_batch_seconds";
const IN_FLIGHT: &str = "baton_transfer_in_flight_bytes";
const RETRIES: &str = "baton_transfer_retries_total";
const REFUSALS: &str = "baton_transfer_refusals_total";
const CONNECTS: &str = "baton_transfer_connects_total";
const CONNECTIONS: &str = "baton_transfer_connections";
const GRANTS: &str = "baton_transfer_grants";

/// Seconds: a small batch on a good network takes tens of microseconds, a large one on a bad network seconds.
const BATCH_BUCKETS: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// What the transfer engine registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc {
        name: BYTES,
        kind: MetricKind::Counter,
        labels: &["transport", "direction"],
        help: "Payload bytes: out, sent from registered memory (retries count again); in, landed in it.",
    },
    MetricDoc {
        name: BATCHES,
        kind: MetricKind::Counter,
        labels: &["transport", "outcome"],
        help: "Batches written, by how they ended: complete, or the name of the error.",
    },
    MetricDoc {
        name: BATCH_SECONDS,
        kind: MetricKind::Histogram(BATCH_BUCKETS),
        labels: &["transport"],
        help: "Time from the call to the acknowledgement of the last byte, of complete batches.",
    },
    MetricDoc {
        name: IN_FLIGHT,
        kind: MetricKind::Gauge,
        labels: &["transport"],
        help: "Bytes given to a connection and not yet acknowledged.",
    },
    MetricDoc {
        name: RETRIES,
        kind: MetricKind::Counter,
        labels: &["transport"],
        help: "Parts of batches sent again after their connection failed.",
    },
    MetricDoc {
        name: REFUSALS,
        kind: MetricKind::Counter,
        labels: &["transport"],
        help: "Parts of batches that this node refused to take.",
    },
    MetricDoc {
        name: CONNECTS,
        kind: MetricKind::Counter,
        labels: &["transport", "outcome"],
        help: "Attempts to connect to a peer: ok or failed.",
    },
    MetricDoc {
        name: CONNECTIONS,
        kind: MetricKind::Gauge,
        labels: &["transport", "direction"],
        help: "Open connections: out, to write; in, accepted.",
    },
    MetricDoc { name: GRANTS, kind: MetricKind::Gauge, labels: &[], help: "Live grants given by this node." },
];

/// Handles, made once per engine.
pub(crate) struct Metrics {
    transport: &'static str,
    pub(crate) bytes_out: Counter,
    pub(crate) bytes_in: Counter,
    complete: Counter,
    batch_seconds: Histogram,
    pub(crate) in_flight: Gauge,
    pub(crate) retries: Counter,
    pub(crate) refusals: Counter,
    pub(crate) connects_ok: Counter,
    pub(crate) connects_failed: Counter,
    pub(crate) connections_out: Gauge,
    pub(crate) connections_in: Gauge,
    pub(crate) grants: Gauge,
}

impl Metrics {
    pub(crate) fn new(transport: TransportKind) -> Self {
        let transport = transport.as_str();
        Self {
            transport,
            bytes_out: counter!(BYTES, "transport" => transport, "direction" => "out"),
            bytes_in: counter!(BYTES, "transport" => transport, "direction" => "in"),
            complete: counter!(BATCHES, "transport" => transport, "outcome" => "complete"),
            batch_seconds: histogram!(BATCH_SECONDS, "transport" => transport),
            in_flight: gauge!(IN_FLIGHT, "transport" => transport),
            retries: counter!(RETRIES, "transport" => transport),
            refusals: counter!(REFUSALS, "transport" => transport),
            connects_ok: counter!(CONNECTS, "transport" => transport, "outcome" => "ok"),
            connects_failed: counter!(CONNECTS, "transport" => transport, "outcome" => "failed"),
            connections_out: gauge!(CONNECTIONS, "transport" => transport, "direction" => "out"),
            connections_in: gauge!(CONNECTIONS, "transport" => transport, "direction" => "in"),
            grants: gauge!(GRANTS),
        }
    }

    pub(crate) fn on_batch(&self, elapsed: Duration, error: Option<&TransferError>) {
        match error {
            None => {
                self.complete.increment(1);
                self.batch_seconds.record(elapsed);
            }
            // Failures are rare: their handle is looked up.
            Some(error) => counter!(BATCHES, "transport" => self.transport, "outcome" => error.name()).increment(1),
        }
    }
}

/// Adds to a gauge, and takes it back when dropped.
pub(crate) struct Held {
    gauge: Gauge,
    amount: f64,
}

impl Held {
    pub(crate) fn new(gauge: &Gauge, amount: f64) -> Self {
        gauge.increment(amount);
        Self { gauge: gauge.clone(), amount }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.decrement(self.amount);
    }
}
