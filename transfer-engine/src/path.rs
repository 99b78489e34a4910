//! How an owner is reached, and how well.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::{Generation, NodeId, NodeStart};
use metrics::{Counter, Gauge, counter, gauge};

use crate::metrics::{CHANGES, PEER_BANDWIDTH, PEER_BATCHES, PEER_BUSY, PEER_BYTES, PEER_IN_FLIGHT, RETRIES};
use crate::{TransferError, TransportKind};

/// Bandwidth is taken anew over at least as many bytes.
const WINDOW_BYTES: u64 = 8 << 20;
/// Fallbacks of one path are warned of at most this often.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// Share of the newest window in the average.
const NEWEST: f64 = 0.3;

/// How an owner is reached, and how well.
#[derive(Debug, Clone, PartialEq)]
pub struct PathReport {
    /// The owner.
    pub node: NodeId,
    /// The start of it.
    pub generation: Generation,
    /// What carries bytes there now; `None` before the first.
    pub transport: Option<TransportKind>,
    /// Open connections.
    pub lanes: usize,
    /// Bytes acknowledged.
    pub bytes: u64,
    /// Batches completed.
    pub batches: u64,
    /// Parts sent again after their connection failed.
    pub retries: u64,
    /// Changes to a worse transport.
    pub fallbacks: u64,
    /// Bytes given to a connection and not yet acknowledged.
    pub in_flight_bytes: u64,
    /// While any are on their way, a moving average; `None` before the first.
    pub bytes_per_second: Option<f64>,
}

/// Counts what goes to one owner.
pub(crate) struct PathStats {
    peer: String,
    state: Mutex<State>,
    busy: Counter,
    in_flight: Gauge,
    bandwidth: Gauge,
    retries: Counter,
}

#[derive(Default)]
struct State {
    transport: Option<TransportKind>,
    bytes: u64,
    batches: u64,
    retries: u64,
    fallbacks: u64,
    /// When the last warning of one was given.
    warned: Option<Instant>,
    in_flight: u64,
    /// Since when bytes have been on their way without a break, or since the last account of it.
    since: Option<Instant>,
    /// Of the window that is not yet in the average.
    window_bytes: u64,
    window_time: Duration,
    average: Option<f64>,
    /// What is not yet a whole second of the time in which bytes were on their way.
    busy: Duration,
}

impl State {
    /// Adds the time since the last account to the window, and the window to the average if it is
    /// large enough. Gives the whole seconds that have become full.
    fn account(&mut self, now: Instant) -> u64 {
        let elapsed = self.since.map_or(Duration::ZERO, |since| now - since);
        self.since = (self.in_flight > 0).then_some(now);
        self.window_time += elapsed;
        if self.window_bytes >= WINDOW_BYTES {
            let newest = self.newest();
            self.average = Some(self.average.map_or(newest, |old| old + NEWEST * (newest - old)));
            self.window_bytes = 0;
            self.window_time = Duration::ZERO;
        }
        let busy = self.busy + elapsed;
        self.busy = Duration::from_nanos(u64::from(busy.subsec_nanos()));
        busy.as_secs()
    }

    /// The average; before the first whole window, what there is of it.
    fn bandwidth(&self) -> Option<f64> {
        self.average.or_else(|| (self.window_bytes > 0 && !self.window_time.is_zero()).then(|| self.newest()))
    }

    fn newest(&self) -> f64 {
        self.window_bytes as f64 / self.window_time.as_secs_f64().max(1e-9)
    }
}

impl PathStats {
    pub(crate) fn new(node: &NodeId) -> Self {
        let peer = node.to_string();
        // Every fallback that may come, so that the first one raises its counter from 0.
        for from in TransportKind::between_processes() {
            for to in TransportKind::between_processes().filter(|to| to.rank() > from.rank()) {
                let from = from.as_str();
                let to = to.as_str();
                counter!(CHANGES, "peer" => peer.clone(), "from" => from, "to" => to).absolute(0);
            }
        }
        Self {
            state: Mutex::default(),
            busy: counter!(PEER_BUSY, "peer" => peer.clone()),
            in_flight: gauge!(PEER_IN_FLIGHT, "peer" => peer.clone()),
            bandwidth: gauge!(PEER_BANDWIDTH, "peer" => peer.clone()),
            retries: counter!(RETRIES, "peer" => peer.clone()),
            peer,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane was chosen. `failed`: the best kind that there is a way of and that could not be had,
    /// and why. A detour is a lane for parts that a better kind cannot carry, whether or not it
    /// works.
    pub(crate) fn on_choice(
        &self,
        kind: TransportKind,
        failed: Option<(TransportKind, TransferError)>,
        is_detour: bool,
    ) {
        let mut state = self.state();
        if is_detour && state.transport.is_some() {
            return;
        }
        let before = state.transport.replace(kind);
        if before == Some(kind) {
            return;
        }
        // The first lane of all is a fallback, too, if a better way was there to be tried.
        let Some(from) = before.or(failed.as_ref().map(|(better, _)| *better)) else {
            drop(state);
            return tracing::info!(peer = self.peer, transport = %kind, "first transfer to a node");
        };
        let falls_back = kind.rank() > from.rank();
        state.fallbacks += u64::from(falls_back);
        let fallbacks = state.fallbacks;
        // A path that comes and goes is counted, and said now and then.
        let is_news = falls_back && state.warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL);
        if is_news {
            state.warned = Some(baton_runtime::now());
        }
        drop(state);
        counter!(CHANGES, "peer" => self.peer.clone(), "from" => from.as_str(), "to" => kind.as_str()).increment(1);
        let reason = failed.map_or_else(String::new, |(_, error)| error.to_string());
        match (falls_back, is_news) {
            (true, true) => {
                tracing::warn!(peer = self.peer, %from, to = %kind, reason, fallbacks, "transfers fall back");
            }
            (true, false) => tracing::debug!(peer = self.peer, %from, to = %kind, reason, "transfers fall back"),
            (false, _) => tracing::info!(peer = self.peer, %from, to = %kind, "transfers are back on the better path"),
        }
    }

    pub(crate) fn on_batch(&self, kind: TransportKind) {
        self.state().batches += 1;
        counter!(PEER_BATCHES, "peer" => self.peer.clone(), "transport" => kind.as_str()).increment(1);
    }

    pub(crate) fn on_acknowledged(&self, kind: TransportKind, bytes: u64) {
        let mut state = self.state();
        state.bytes += bytes;
        state.window_bytes += bytes;
        drop(state);
        counter!(PEER_BYTES, "peer" => self.peer.clone(), "transport" => kind.as_str()).increment(bytes);
    }

    pub(crate) fn on_retry(&self, parts: u64) {
        self.state().retries += parts;
        self.retries.increment(parts);
    }

    pub(crate) fn report(&self, owner: &NodeStart, lanes: usize) -> PathReport {
        let state = self.state();
        PathReport {
            node: owner.node.clone(),
            generation: owner.generation,
            transport: state.transport,
            lanes,
            bytes: state.bytes,
            batches: state.batches,
            retries: state.retries,
            fallbacks: state.fallbacks,
            in_flight_bytes: state.in_flight,
            bytes_per_second: state.bandwidth(),
        }
    }
}

/// Bytes on their way, until it is dropped.
pub(crate) struct InFlight {
    stats: Arc<PathStats>,
    bytes: u64,
}

impl InFlight {
    pub(crate) fn new(stats: &Arc<PathStats>, bytes: u64) -> Self {
        let mut state = stats.state();
        let busy_seconds = state.account(baton_runtime::now());
        state.in_flight += bytes;
        state.since.get_or_insert_with(baton_runtime::now);
        drop(state);
        stats.busy.increment(busy_seconds);
        stats.in_flight.increment(bytes as f64);
        Self { stats: Arc::clone(stats), bytes }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.stats.state();
        state.in_flight -= self.bytes;
        let busy_seconds = state.account(baton_runtime::now());
        let bandwidth = state.bandwidth();
        drop(state);
        self.stats.busy.increment(busy_seconds);
        self.stats.in_flight.decrement(self.bytes as f64);
        if let Some(bandwidth) = bandwidth {
            self.stats.bandwidth.set(bandwidth);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_bandwidth_counts_only_time_with_bytes_in_flight() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut state = State { in_flight: 1, since: Some(at(0)), ..State::default() };
        state.window_bytes = WINDOW_BYTES;
        state.in_flight = 0;
        assert_eq!((state.account(at(100)), state.busy), (0, Duration::from_millis(100)));
        let first = state.average.unwrap();
        assert!((first - WINDOW_BYTES as f64 * 10.0).abs() < 1.0, "{first}");
        assert_eq!((state.account(at(900)), state.busy), (0, Duration::from_millis(100)), "nothing was on its way");
        state.since = Some(at(900));
        state.window_bytes = WINDOW_BYTES;
        state.account(at(950));
        let second = state.average.unwrap();
        assert!((second - first * 1.3).abs() < first * 0.01, "{first} {second}");
        state.since = Some(at(950));
        assert_eq!((state.account(at(2800)), state.busy), (2, Duration::ZERO), "whole seconds are counted");
    }
}
