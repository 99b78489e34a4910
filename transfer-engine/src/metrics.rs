//! The engine's metrics.

use std::time::Duration;

use baton_runtime::{MetricDoc, MetricKind};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::{TransferError, TransportKind};

const BYTES: &str = "baton_transfer_bytes_total";
const BATCHES: &str = "baton_transfer_batches_total";
const BATCH_SECONDS: &str = "baton_transfer_batch_seconds";
pub(crate) const PEER_BYTES: &str = "baton_transfer_peer_bytes_total";
pub(crate) const PEER_BATCHES: &str = "baton_transfer_peer_batches_total";
pub(crate) const PEER_BUSY: &str = "baton_transfer_peer_busy_seconds_total";
pub(crate) const PEER_IN_FLIGHT: &str = "baton_transfer_peer_in_flight_bytes";
pub(crate) const PEER_BANDWIDTH: &str = "baton_transfer_peer_bandwidth_bytes_per_second";
pub(crate) const RETRIES: &str = "baton_transfer_retries_total";
pub(crate) const CHANGES: &str = "baton_transfer_transport_changes_total";
const REFUSALS: &str = "baton_transfer_refusals_total";
const CONNECTS: &str = "baton_transfer_connects_total";
const CONNECTIONS: &str = "baton_transfer_connections";
const GRANTS: &str = "baton_transfer_grants";

/// Seconds: a small batch on a good network takes tens of microseconds, a large one on a bad
/// network seconds.
const BATCH_BUCKETS: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// What the transfer engine registers.
pub const METRICS: &[MetricDoc] = &[
    MetricDoc {
        name: BYTES,
        kind: MetricKind::Counter,
        labels: &["transport", "direction"],
        help: "Payload bytes: out (sent from registered memory, retries counted again), in (received into it).",
    },
    MetricDoc {
        name: BATCHES,
        kind: MetricKind::Counter,
        labels: &["transport", "outcome"],
        help: "Batches, by transport and outcome: complete, or the name of the error (transport none).",
    },
    MetricDoc {
        name: BATCH_SECONDS,
        kind: MetricKind::Histogram(BATCH_BUCKETS),
        labels: &["transport"],
        help: "Seconds from the call to the acknowledgement of the last byte, for complete batches.",
    },
    MetricDoc {
        name: REFUSALS,
        kind: MetricKind::Counter,
        labels: &["transport"],
        help: "Parts of batches that this node refused.",
    },
    MetricDoc {
        name: CONNECTS,
        kind: MetricKind::Counter,
        labels: &["transport", "outcome"],
        help: "Attempts to connect to a peer: ok, failed.",
    },
    MetricDoc {
        name: CONNECTIONS,
        kind: MetricKind::Gauge,
        labels: &["transport", "direction"],
        help: "Open connections: out (to write), in (accepted).",
    },
    MetricDoc { name: GRANTS, kind: MetricKind::Gauge, labels: &[], help: "Live grants given by this node." },
    MetricDoc {
        name: PEER_BYTES,
        kind: MetricKind::Counter,
        labels: &["peer", "transport"],
        help: "Payload bytes acknowledged by a peer.",
    },
    MetricDoc {
        name: PEER_BATCHES,
        kind: MetricKind::Counter,
        labels: &["peer", "transport"],
        help: "Batches completed with a peer, by transport.",
    },
    MetricDoc {
        name: PEER_BUSY,
        kind: MetricKind::Counter,
        labels: &["peer"],
        help: "Whole seconds during which bytes were in flight to a peer.",
    },
    MetricDoc {
        name: PEER_IN_FLIGHT,
        kind: MetricKind::Gauge,
        labels: &["peer"],
        help: "Bytes given to a connection to a peer and not yet acknowledged.",
    },
    MetricDoc {
        name: PEER_BANDWIDTH,
        kind: MetricKind::Gauge,
        labels: &["peer"],
        help: "Bytes per second to a peer while any are in flight, as a moving average.",
    },
    MetricDoc {
        name: RETRIES,
        kind: MetricKind::Counter,
        labels: &["peer"],
        help: "Parts of batches sent again after their connection failed.",
    },
    MetricDoc {
        name: CHANGES,
        kind: MetricKind::Counter,
        labels: &["peer", "from", "to"],
        help: "Changes of the transport to a peer, to a worse one (fallback) or back.",
    },
];

/// Handles, made once per engine.
pub(crate) struct Metrics {
    kinds: [KindMetrics; TransportKind::ALL.len()],
    pub(crate) grants: Gauge,
}

/// Those of one kind of transport.
pub(crate) struct KindMetrics {
    pub(crate) bytes_out: Counter,
    pub(crate) bytes_in: Counter,
    complete: Counter,
    batch_seconds: Histogram,
    pub(crate) refusals: Counter,
    pub(crate) connects_ok: Counter,
    pub(crate) connects_failed: Counter,
    pub(crate) connections_out: Gauge,
    pub(crate) connections_in: Gauge,
}

impl KindMetrics {
    fn new(transport: TransportKind) -> Self {
        let transport = transport.as_str();
        Self {
            bytes_out: counter!(BYTES, "transport" => transport, "direction" => "out"),
            bytes_in: counter!(BYTES, "transport" => transport, "direction" => "in"),
            complete: counter!(BATCHES, "transport" => transport, "outcome" => "complete"),
            batch_seconds: histogram!(BATCH_SECONDS, "transport" => transport),
            refusals: counter!(REFUSALS, "transport" => transport),
            connects_ok: counter!(CONNECTS, "transport" => transport, "outcome" => "ok"),
            connects_failed: counter!(CONNECTS, "transport" => transport, "outcome" => "failed"),
            connections_out: gauge!(CONNECTIONS, "transport" => transport, "direction" => "out"),
            connections_in: gauge!(CONNECTIONS, "transport" => transport, "direction" => "in"),
        }
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self { kinds: TransportKind::ALL.map(KindMetrics::new), grants: gauge!(GRANTS) }
    }

    /// Those of one kind of transport.
    pub(crate) fn of(&self, kind: TransportKind) -> &KindMetrics {
        &self.kinds[kind.rank()]
    }

    pub(crate) fn on_batch(&self, elapsed: Duration, result: Result<TransportKind, &TransferError>) {
        match result {
            Ok(kind) => {
                self.of(kind).complete.increment(1);
                self.of(kind).batch_seconds.record(elapsed);
            }
            // Failures are rare: their handle is looked up.
            Err(error) => counter!(BATCHES, "transport" => "none", "outcome" => error.name()).increment(1),
        }
    }
}

/// Adds to a gauge, and takes it back when dropped.
pub(crate) struct GaugeGuard {
    gauge: Gauge,
    amount: f64,
}

impl GaugeGuard {
    pub(crate) fn new(gauge: &Gauge, amount: f64) -> Self {
        gauge.increment(amount);
        Self { gauge: gauge.clone(), amount }
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.gauge.decrement(self.amount);
    }
}
