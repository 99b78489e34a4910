//! The requests that this conductor is serving: where events about them go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use baton_scheduler::{Departure, RequestEvent};
use baton_types::{Attempt, NodeId, NodeStart, RequestId, RequestKey};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Something happened that a request may want to know.
#[derive(Debug)]
pub enum LiveEvent {
    /// A node said something about one of its attempts.
    Node(NodeId, Attempt, RequestEvent),
    /// A start of a node went away, with all requests on it.
    NodeDeparture(NodeStart, Departure),
}

/// What a request is told.
#[derive(Debug)]
pub struct TimedEvent {
    /// When it came from the node, or was noticed.
    pub at: Instant,
    /// What.
    pub event: LiveEvent,
}

struct Live {
    /// Not bounded by a number: `max_tokens` and the attempts bound what nodes say of a request.
    /// Beyond that come at most two offers a second, from a node that has no room for it.
    events: mpsc::UnboundedSender<TimedEvent>,
    /// In the order in which they came.
    number: u64,
    /// Nodes that its attempts are at.
    at: Vec<NodeId>,
    /// Cancelled by `Abort`: it must reach a request that waits for its client, too.
    aborted: CancellationToken,
}

#[derive(Default)]
struct Inner {
    requests: HashMap<RequestId, Live>,
    entered: u64,
    limit: usize,
}

/// The conductor serves as many requests as it may.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// The registry. Cheap to clone.
#[derive(Clone)]
pub struct LiveRequests {
    inner: Arc<Mutex<Inner>>,
}

/// A request's place in the registry, given up when dropped.
pub struct Entry {
    registry: LiveRequests,
    request: RequestId,
    /// The client's own id of it; empty if there is none.
    pub client_id: Arc<str>,
    /// What happens to the request.
    pub events: mpsc::UnboundedReceiver<TimedEvent>,
    /// Cancelled by `Abort`.
    pub aborted: CancellationToken,
}

impl Entry {
    /// Whose it is.
    pub fn request(&self) -> RequestId {
        self.request
    }
}

impl LiveRequests {
    /// A registry of at most `limit` requests.
    pub fn new(limit: usize) -> Self {
        Self { inner: Arc::new(Mutex::new(Inner { limit, ..Inner::default() })) }
    }

    /// As many from now on. Those that are here stay.
    pub fn set_limit(&self, limit: usize) {
        self.lock().limit = limit;
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the maps whole, so a panic elsewhere does not spoil them.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request.
    pub fn enter(&self, request: RequestId, client_id: Arc<str>) -> Result<Entry, Full> {
        let mut inner = self.lock();
        if inner.requests.len() >= inner.limit {
            return Err(Full);
        }
        let (events, receiver) = mpsc::unbounded_channel();
        let aborted = CancellationToken::new();
        let number = inner.entered;
        inner.entered += 1;
        let live = Live { events, number, at: Vec::new(), aborted: aborted.clone() };
        inner.requests.insert(request, live);
        Ok(Entry { registry: self.clone(), request, client_id, events: receiver, aborted })
    }

    /// Delivers what a node said at that time. `false`: the request is over.
    pub fn deliver(&self, from: &NodeId, key: RequestKey, at: Instant, event: RequestEvent) -> bool {
        let inner = self.lock();
        let Some(live) = inner.requests.get(&key.request) else { return false };
        live.events.send(TimedEvent { at, event: LiveEvent::Node(from.clone(), key.attempt, event) }).is_ok()
    }

    /// How many requests no node has.
    pub fn waiting(&self) -> usize {
        self.lock().requests.values().filter(|live| live.at.is_empty()).count()
    }

    /// Requests that have attempts at a node, the oldest first.
    pub fn at(&self, node: &NodeId) -> Vec<RequestId> {
        let inner = self.lock();
        let at = inner.requests.iter().filter(|(_, live)| live.at.contains(node));
        let mut found: Vec<_> = at.map(|(request, live)| (live.number, *request)).collect();
        drop(inner);
        found.sort_unstable();
        found.into_iter().map(|(_, request)| request).collect()
    }

    /// Tells requests that a start of a node went away: each knows whether it was on it.
    pub fn node_away(&self, requests: &[RequestId], at: Instant, start: &NodeStart, away: Departure) {
        let inner = self.lock();
        for live in requests.iter().filter_map(|request| inner.requests.get(request)) {
            // A request that ended in this moment does not need to know.
            let _ = live.events.send(TimedEvent { at, event: LiveEvent::NodeDeparture(start.clone(), away) });
        }
    }

    /// Aborts a request. `false` if it is not running here.
    pub fn abort(&self, request: RequestId) -> bool {
        let inner = self.lock();
        inner.requests.get(&request).map(|live| live.aborted.cancel()).is_some()
    }

    /// Requests being served.
    pub fn len(&self) -> usize {
        self.lock().requests.len()
    }

    /// Whether none is being served.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Entry {
    /// An attempt of it goes to these nodes. To be told before any of them can be lost to it.
    pub fn goes_to(&self, nodes: impl IntoIterator<Item = NodeId>) {
        if let Some(live) = self.registry.lock().requests.get_mut(&self.request) {
            for node in nodes {
                if !live.at.contains(&node) {
                    live.at.push(node);
                }
            }
        }
    }

    /// Gives the place up.
    pub fn leave(&self) {
        self.registry.lock().requests.remove(&self.request);
    }
}

#[cfg(test)]
mod tests {
    use baton_types::Generation;

    use super::*;

    fn now() -> Instant {
        Instant::now()
    }

    #[test]
    fn live_request_receives_events_until_it_is_dropped() {
        let live = LiveRequests::new(4);
        let mut entry = live.enter(RequestId(1), "".into()).unwrap();
        let key = RequestKey { request: RequestId(1), attempt: Attempt(2) };
        assert!(live.deliver(&NodeId::new("p").unwrap(), key, now(), RequestEvent::MigrationRequested(3)));
        let node = NodeId::new("p").unwrap();
        assert_eq!(live.at(&node), []);
        entry.goes_to([node.clone(), node.clone()]);
        let start = NodeStart { node, generation: Generation(4) };
        live.node_away(&live.at(&start.node), now(), &start, Departure::Died);
        let first = entry.events.try_recv().unwrap().event;
        assert!(matches!(first, LiveEvent::Node(_, Attempt(2), RequestEvent::MigrationRequested(3))));
        let second = entry.events.try_recv().unwrap().event;
        assert!(matches!(second, LiveEvent::NodeDeparture(away, Departure::Died) if away == start));
        assert!(live.abort(RequestId(1)) && entry.aborted.is_cancelled());
        drop(entry);
        assert!(live.is_empty() && !live.abort(RequestId(1)));
        assert!(!live.deliver(&NodeId::new("p").unwrap(), key, now(), RequestEvent::MigrationRequested(3)));
    }

    #[test]
    fn live_requests_over_limit_are_refused() {
        let live = LiveRequests::new(2);
        let first = live.enter(RequestId(1), "".into()).unwrap();
        let _second = live.enter(RequestId(2), "".into()).unwrap();
        assert_eq!(live.enter(RequestId(3), "".into()).err(), Some(Full));
        drop(first);
        assert!(live.enter(RequestId(4), "".into()).is_ok());
    }
}
