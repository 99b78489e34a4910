//! How an owner is reached, and how well.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::{Generation, NodeId};
use metrics::{Counter, Gauge, counter, gauge};

use crate::grant::Writer;
use crate::metrics::{FAILOVERS, PEER_BANDWIDTH, PEER_BATCHES, PEER_BUSY, PEER_BYTES, PEER_IN_FLIGHT, RETRIES};
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
    /// The window that is not yet in the average.
    window: (u64, Duration),
    average: Option<f64>,
}

impl State {
    /// Adds the time since the last account to the window, and the window to the average where it is large enough.
    fn account(&mut self, now: Instant) -> Duration {
        let elapsed = self.since.map_or(Duration::ZERO, |since| now - since);
        self.since = (self.in_flight > 0).then_some(now);
        self.window.1 += elapsed;
        if self.window.0 >= WINDOW_BYTES {
            let newest = self.newest();
            self.average = Some(self.average.map_or(newest, |old| old + NEWEST * (newest - old)));
            self.window = (0, Duration::ZERO);
        }
        elapsed
    }

    fn newest(&self) -> f64 {
        self.window.0 as f64 / self.window.1.as_secs_f64().max(1e-9)
    }
}

impl PathStats {
    pub(crate) fn new(node: &NodeId) -> Self {
        let peer = node.to_string();
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

    /// A lane was chosen; `error` is why none of a better kind. A detour is one for parts that a better kind cannot carry, whether or not it works.
    pub(crate) fn on_choice(&self, kind: TransportKind, error: &TransferError, is_detour: bool) {
        let mut state = self.state();
        if is_detour && state.transport.is_some() {
            return;
        }
        let before = state.transport.replace(kind);
        drop(state);
        let Some(before) = before.filter(|before| *before != kind) else {
            if before.is_none() {
                tracing::info!(peer = self.peer, transport = %kind, "first transfer to a node");
            }
            return;
        };
        counter!(FAILOVERS, "peer" => self.peer.clone(), "from" => before.as_str(), "to" => kind.as_str()).increment(1);
        if kind.rank() > before.rank() {
            let mut state = self.state();
            state.fallbacks += 1;
            let fallbacks = state.fallbacks;
            // A path that comes and goes is counted, and said now and then.
            let quiet = state.warned.is_some_and(|at| at.elapsed() < WARNING_INTERVAL);
            if quiet {
                drop(state);
                tracing::debug!(peer = self.peer, from = %before, to = %kind, reason = %error, "transfers fall back");
            } else {
                state.warned = Some(Instant::now());
                drop(state);
                tracing::warn!(peer = self.peer, from = %before, to = %kind, reason = %error, fallbacks, "transfers fall back");
            }
        } else {
            tracing::info!(peer = self.peer, from = %before, to = %kind, "transfers are back on the better path");
        }
    }

    pub(crate) fn on_batch(&self, kind: TransportKind) {
        self.state().batches += 1;
        counter!(PEER_BATCHES, "peer" => self.peer.clone(), "transport" => kind.as_str()).increment(1);
    }

    pub(crate) fn on_acknowledged(&self, kind: TransportKind, bytes: u64) {
        let mut state = self.state();
        state.bytes += bytes;
        state.window.0 += bytes;
        drop(state);
        counter!(PEER_BYTES, "peer" => self.peer.clone(), "transport" => kind.as_str()).increment(bytes);
    }

    pub(crate) fn on_retry(&self, parts: u64) {
        self.state().retries += parts;
        self.retries.increment(parts);
    }

    pub(crate) fn report(&self, target: &Writer, lanes: usize) -> PathReport {
        let state = self.state();
        let newest = || (state.window.0 > 0 && !state.window.1.is_zero()).then(|| state.newest());
        PathReport {
            node: target.node.clone(),
            generation: target.generation,
            transport: state.transport,
            lanes,
            bytes: state.bytes,
            batches: state.batches,
            retries: state.retries,
            fallbacks: state.fallbacks,
            in_flight_bytes: state.in_flight,
            bytes_per_second: state.average.or_else(newest),
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
        let elapsed = state.account(Instant::now());
        state.in_flight += bytes;
        state.since.get_or_insert_with(Instant::now);
        drop(state);
        stats.busy.increment(elapsed.as_micros() as u64);
        stats.in_flight.increment(bytes as f64);
        Self { stats: Arc::clone(stats), bytes }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.stats.state();
        state.in_flight -= self.bytes;
        let elapsed = state.account(Instant::now());
        let average = state.average;
        drop(state);
        self.stats.busy.increment(elapsed.as_micros() as u64);
        self.stats.in_flight.decrement(self.bytes as f64);
        if let Some(average) = average {
            self.stats.bandwidth.set(average);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_counts_the_time_in_which_bytes_are_on_their_way() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut state = State { in_flight: 1, since: Some(at(0)), ..State::default() };
        state.window.0 = WINDOW_BYTES;
        state.in_flight = 0;
        assert_eq!(state.account(at(100)), Duration::from_millis(100));
        let first = state.average.unwrap();
        assert!((first - WINDOW_BYTES as f64 * 10.0).abs() < 1.0, "{first}");
        assert_eq!(state.account(at(900)), Duration::ZERO, "nothing was on its way");
        state.since = Some(at(900));
        state.window.0 = WINDOW_BYTES;
        state.account(at(950));
        let second = state.average.unwrap();
        assert!((second - first * 1.3).abs() < first * 0.01, "{first} {second}");
    }
}
