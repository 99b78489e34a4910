//! The connections of a port: how many there are, and which of them has waited longest for a
//! request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Descriptors that are never given to connections from outside: files, sessions with nodes,
/// listeners.
const RESERVED_DESCRIPTORS: usize = 64;

/// The connections of one or more ports, which share a bound. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Connections(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    max: usize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    open: usize,
    /// Number of the next entry of `idle`.
    next: u64,
    /// Connections without a request, the one that waits longest first.
    idle: BTreeMap<u64, CancellationToken>,
}

/// One connection's place.
#[derive(Debug)]
pub struct Slot {
    shared: Arc<Shared>,
    state: Mutex<State>,
    closed: CancellationToken,
}

#[derive(Debug)]
struct State {
    requests: usize,
    /// Its entry among the idle ones.
    entry: Option<u64>,
    idle_since: Instant,
    had_request: bool,
}

/// A request is being served: its connection is not idle.
#[derive(Debug)]
pub struct Busy(Arc<Slot>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its value whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn insert(&mut self, closed: CancellationToken) -> u64 {
        let entry = self.next;
        self.next += 1;
        self.idle.insert(entry, closed);
        entry
    }
}

impl Connections {
    /// At most `max` at once.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Shared { max, table: Mutex::default() }))
    }

    /// How many there are.
    pub fn open(&self) -> usize {
        lock(&self.0.table).open
    }

    /// A place for a new connection. If all are taken, the connection that has waited longest for a
    /// request is closed; `None` if all have requests.
    pub(super) fn enter(&self, now: Instant) -> Option<Arc<Slot>> {
        let mut table = lock(&self.0.table);
        if table.open >= self.0.max {
            let (_, longest) = table.idle.pop_first()?;
            table.open -= 1;
            longest.cancel();
        }
        table.open += 1;
        let closed = CancellationToken::new();
        let entry = Some(table.insert(closed.clone()));
        let state = Mutex::new(State { requests: 0, entry, idle_since: now, had_request: false });
        Some(Arc::new(Slot { shared: Arc::clone(&self.0), state, closed }))
    }

    /// Closes the connection that has waited longest for a request, for its descriptor. `false` if
    /// all have requests.
    pub(super) fn close_longest_idle(&self) -> bool {
        let mut table = lock(&self.0.table);
        let Some((_, longest)) = table.idle.pop_first() else { return false };
        table.open -= 1;
        longest.cancel();
        true
    }
}

impl Slot {
    /// A request begins.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        let mut state = lock(&self.state);
        state.requests += 1;
        state.had_request = true;
        if let Some(entry) = state.entry.take() {
            // Not there: it is being closed.
            lock(&self.shared.table).idle.remove(&entry);
        }
        Busy(Arc::clone(self))
    }

    /// Whether a request is being served.
    pub(super) fn is_busy(&self) -> bool {
        lock(&self.state).requests > 0
    }

    /// Since when it has had no request, and whether it ever had one; `None` while it has one.
    pub(super) fn idle(&self) -> Option<(Instant, bool)> {
        let state = lock(&self.state);
        (state.requests == 0).then_some((state.idle_since, state.had_request))
    }

    /// Resolves when its place is needed by another one.
    pub(super) async fn closed(&self) {
        self.closed.cancelled().await;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.requests -= 1;
        if state.requests == 0 {
            state.idle_since = crate::now();
            if !self.0.closed.is_cancelled() {
                state.entry = Some(lock(&self.0.shared.table).insert(self.0.closed.clone()));
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let entry = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).entry;
        let mut table = lock(&self.shared.table);
        if let Some(entry) = entry {
            table.idle.remove(&entry);
        }
        // The connection that took its place has counted it out.
        if !self.closed.is_cancelled() {
            table.open -= 1;
        }
    }
}

/// How many connections from outside this process can have, by its descriptors; `wanted` if they
/// suffice. Raises the soft limit as far as it goes.
pub fn connections_within_descriptors(wanted: usize) -> usize {
    wanted.min(within(raise_descriptors()))
}

/// A quarter is for what the connections cause, and for other ports.
fn within(descriptors: usize) -> usize {
    descriptors.saturating_sub(RESERVED_DESCRIPTORS.max(descriptors / 4)).max(1)
}

fn raise_descriptors() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // It may be forbidden; then it stays as it is.
    let current = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    current.map_or(usize::MAX, |descriptors| descriptors as usize)
}

/// How long a listener waits after it could not accept: twice as long each time, so that it does
/// not spin while descriptors are missing.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    warned: Option<Instant>,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(5);
    const LONGEST: Duration = Duration::from_secs(1);
    const WARN_INTERVAL: Duration = Duration::from_secs(10);

    pub(super) fn on_success(&mut self) {
        self.failures = 0;
    }

    /// How long to wait now, and whether to say so.
    pub(super) fn on_failure(&mut self, now: Instant) -> (Duration, bool) {
        let wait = Self::FIRST.saturating_mul(1 << self.failures.min(16)).min(Self::LONGEST);
        self.failures += 1;
        let warn = self.warned.is_none_or(|warned| now.saturating_duration_since(warned) >= Self::WARN_INTERVAL);
        if warn {
            self.warned = Some(now);
        }
        (wait, warn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_connection_table_closes_the_longest_idle_connection() {
        let connections = Connections::new(2);
        let now = crate::now();
        let first = connections.enter(now).unwrap();
        let second = connections.enter(now).unwrap();
        let request = first.busy();
        let third = connections.enter(now).unwrap();
        assert!(second.closed.is_cancelled() && !first.closed.is_cancelled(), "the first has a request");
        let other = third.busy();
        assert!(connections.enter(now).is_none(), "all have requests");
        assert_eq!(connections.open(), 2);
        drop(request);
        assert!(connections.enter(now).is_some() && first.closed.is_cancelled(), "it has waited since its request");
        drop((first, second, third, other));
        assert_eq!(connections.open(), 0);
        assert!(lock(&connections.0.table).idle.is_empty());
    }

    #[test]
    fn connection_closed_as_its_request_begins_is_counted_once() {
        let connections = Connections::new(1);
        let slot = connections.enter(crate::now()).unwrap();
        assert!(connections.close_longest_idle());
        drop(slot.busy());
        assert!(!connections.close_longest_idle());
        drop(slot);
        assert_eq!(connections.open(), 0);
    }

    #[test]
    fn connection_limit_leaves_file_descriptors_free() {
        assert_eq!([100, 256, 20_000].map(within), [36, 192, 15_000]);
        assert_eq!(within(3), 1);
    }

    #[test]
    fn accept_backoff_grows_to_a_bound_and_warns_now_and_then() {
        let mut backoff = Backoff::default();
        let now = crate::now();
        let waits: Vec<_> = (0..12).map(|_| backoff.on_failure(now)).collect();
        assert_eq!(waits[0], (Duration::from_millis(5), true));
        assert_eq!(waits[1], (Duration::from_millis(10), false));
        assert_eq!(waits[11], (Duration::from_secs(1), false));
        backoff.on_success();
        assert_eq!(backoff.on_failure(now + Duration::from_secs(11)), (Duration::from_millis(5), true));
    }
}
