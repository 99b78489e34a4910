//! The requests that this conductor is serving: where events about them go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use baton_types::{Attempt, DecodeEvent, Generation, NodeId, PrefillEvent, RequestId, RequestKey};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Something happened to a request.
#[derive(Debug)]
pub enum LiveEvent {
    /// From its prefill node.
    Prefill(PrefillEvent),
    /// From its decode node.
    Decode(DecodeEvent),
    /// Its decode node would rather have it go on at another one. All of its output so far, so many tokens, was sent before.
    Offered(u32),
    /// A node that it was placed on is gone.
    NodeLost(NodeId),
}

/// What a request is told.
#[derive(Debug)]
pub struct Told {
    /// The attempt that it is about: what was on its way when a new one began is about the old one.
    pub attempt: Attempt,
    /// When it came from the node.
    pub at: Instant,
    /// What.
    pub event: LiveEvent,
}

struct Live {
    attempt: Attempt,
    nodes: Vec<(NodeId, Generation)>,
    /// The attempt that another decode node was asked to go on with, beside this one, and that node.
    moving: Option<(Attempt, NodeId, Generation)>,
    /// Not bounded by a number: a request's events are bounded by its `max_tokens`, but for two offers a second at most from a node that has no room for it, and stale ones are dropped before they get here.
    events: mpsc::UnboundedSender<Told>,
    /// Cancelled by `Abort`: it must reach a request that waits for its client, too.
    aborted: CancellationToken,
    idempotency_key: String,
}

#[derive(Default)]
struct Inner {
    requests: HashMap<RequestId, Live>,
    /// Requests that run under an idempotency key.
    keys: HashMap<String, RequestId>,
}

/// Why a request cannot be entered.
#[derive(Debug, PartialEq, Eq)]
pub enum EnterError {
    /// The conductor serves as many as it may.
    Full,
    /// A request with this idempotency key is running.
    Duplicate(RequestId),
}

/// The registry. Cheap to clone.
#[derive(Clone)]
pub struct LiveRequests {
    inner: Arc<Mutex<Inner>>,
    limit: usize,
}

/// A request's place in the registry, given up when dropped.
pub struct Entry {
    registry: LiveRequests,
    request: RequestId,
    /// What happens to the request.
    pub events: mpsc::UnboundedReceiver<Told>,
    /// Cancelled by `Abort`.
    pub aborted: CancellationToken,
}

impl LiveRequests {
    /// A registry of at most `limit` requests.
    pub fn new(limit: usize) -> Self {
        Self { inner: Arc::default(), limit }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the maps whole, so a panic elsewhere does not spoil them.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request; an empty idempotency key is none.
    pub fn enter(&self, request: RequestId, idempotency_key: &str) -> Result<Entry, EnterError> {
        let mut inner = self.lock();
        if inner.requests.len() >= self.limit {
            return Err(EnterError::Full);
        }
        if !idempotency_key.is_empty() {
            if let Some(running) = inner.keys.get(idempotency_key) {
                return Err(EnterError::Duplicate(*running));
            }
            inner.keys.insert(idempotency_key.to_owned(), request);
        }
        let (events, receiver) = mpsc::unbounded_channel();
        let (idempotency_key, aborted) = (idempotency_key.to_owned(), CancellationToken::new());
        let live = Live {
            attempt: Attempt(0),
            nodes: Vec::new(),
            moving: None,
            events,
            aborted: aborted.clone(),
            idempotency_key,
        };
        inner.requests.insert(request, live);
        Ok(Entry { registry: self.clone(), request, events: receiver, aborted })
    }

    /// Delivers an event, which came from a node at that time, of the current attempt, or of the one that it moves to. `false`: the request is over, or the event is of an older attempt.
    pub fn deliver(&self, key: RequestKey, at: Instant, event: LiveEvent) -> bool {
        let inner = self.lock();
        let live = inner.requests.get(&key.request).filter(|live| live.expects(key.attempt));
        live.is_some_and(|live| live.events.send(Told { attempt: key.attempt, at, event }).is_ok())
    }

    /// Tells every request placed on that start of a node that it is gone.
    pub fn node_lost(&self, at: Instant, node: &NodeId, generation: Generation) {
        let placed = |live: &&Live| live.is_on(node, generation);
        for live in self.lock().requests.values().filter(placed) {
            // A request that ended in this moment does not need to know.
            let event = LiveEvent::NodeLost(node.clone());
            let _ = live.events.send(Told { attempt: live.attempt_on(node, generation), at, event });
        }
    }

    /// Aborts a request. `false` where it is not running here.
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

impl Live {
    fn expects(&self, attempt: Attempt) -> bool {
        self.attempt == attempt || self.moving.as_ref().is_some_and(|(moving, ..)| *moving == attempt)
    }

    /// The attempt that the node's loss is about: what it was asked to go on with is lost with it, also where the request has gone on there by the time that it is heard.
    fn attempt_on(&self, node: &NodeId, generation: Generation) -> Attempt {
        let moving = self.moving.as_ref().filter(|(_, to, start)| (to, *start) == (node, generation));
        moving.map_or(self.attempt, |(attempt, ..)| *attempt)
    }

    fn is_on(&self, node: &NodeId, generation: Generation) -> bool {
        let moving = self.moving.iter().map(|(_, id, start)| (id, start));
        self.nodes.iter().map(|(id, start)| (id, start)).chain(moving).any(|start| start == (node, &generation))
    }
}

impl Entry {
    /// Says that another decode node is asked to go on with the request as `attempt`. Events of both attempts come from here on.
    pub fn moving(&self, attempt: Attempt, node: NodeId, generation: Generation) {
        if let Some(live) = self.registry.lock().requests.get_mut(&self.request) {
            live.moving = Some((attempt, node, generation));
        }
    }

    /// Says that it does not.
    pub fn stays(&self) {
        if let Some(live) = self.registry.lock().requests.get_mut(&self.request) {
            live.moving = None;
        }
    }

    /// Says that another node takes the place of one that the attempt was placed on.
    pub fn goes_to(&self, from: &NodeId, to: (NodeId, Generation)) {
        if let Some(live) = self.registry.lock().requests.get_mut(&self.request) {
            live.nodes.retain(|(node, _)| node != from);
            live.nodes.push(to);
        }
    }

    /// Says where the request runs now; events of earlier attempts are dropped from here on.
    pub fn placed(&self, attempt: Attempt, nodes: Vec<(NodeId, Generation)>) {
        if let Some(live) = self.registry.lock().requests.get_mut(&self.request) {
            live.attempt = attempt;
            live.nodes = nodes;
            live.moving = None;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Entry {
    /// Gives the place up.
    pub fn leave(&self) {
        let mut inner = self.registry.lock();
        if let Some(live) = inner.requests.remove(&self.request) {
            inner.keys.remove(&live.idempotency_key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Instant {
        Instant::now()
    }

    fn key(attempt: u32) -> RequestKey {
        RequestKey { request: RequestId(1), attempt: Attempt(attempt) }
    }

    #[test]
    fn events_of_an_older_attempt_are_dropped() {
        let live = LiveRequests::new(4);
        let mut entry = live.enter(RequestId(1), "").unwrap();
        let p = NodeId::new("p").unwrap();
        entry.placed(Attempt(1), vec![(p.clone(), Generation(4))]);
        let event = || LiveEvent::Prefill(PrefillEvent::Started { queue: std::time::Duration::ZERO, cached_tokens: 0 });
        assert!(!live.deliver(key(0), now(), event()));
        assert!(live.deliver(key(1), now(), event()));
        assert!(matches!(entry.events.try_recv(), Ok(Told { attempt: Attempt(1), event: LiveEvent::Prefill(_), .. })));
        live.node_lost(now(), &NodeId::new("other").unwrap(), Generation(4));
        live.node_lost(now(), &p, Generation(3));
        assert!(entry.events.try_recv().is_err());
        live.node_lost(now(), &p, Generation(4));
        assert!(matches!(entry.events.try_recv(), Ok(Told { attempt: Attempt(1), event: LiveEvent::NodeLost(_), .. })));
        assert!(live.abort(RequestId(1)) && entry.aborted.is_cancelled());
        drop(entry);
        assert!(live.is_empty() && !live.abort(RequestId(1)));
    }

    #[test]
    fn of_a_request_that_moves_both_attempts_are_heard() {
        let live = LiveRequests::new(4);
        let mut entry = live.enter(RequestId(1), "").unwrap();
        let (d0, d1) = (NodeId::new("d0").unwrap(), NodeId::new("d1").unwrap());
        entry.placed(Attempt(0), vec![(d0.clone(), Generation(1))]);
        entry.moving(Attempt(1), d1.clone(), Generation(2));
        assert!(
            live.deliver(key(0), now(), LiveEvent::Offered(3)) && live.deliver(key(1), now(), LiveEvent::Offered(3))
        );
        live.node_lost(now(), &d1, Generation(2));
        let attempts: Vec<_> = std::iter::from_fn(|| entry.events.try_recv().ok()).map(|told| told.attempt.0).collect();
        assert_eq!(attempts, [0, 1, 1], "the loss is about the attempt that it was to go on with");
        entry.stays();
        assert!(!live.deliver(key(1), now(), LiveEvent::Offered(3)));
        entry.moving(Attempt(2), d1.clone(), Generation(2));
        entry.placed(Attempt(2), vec![(d1, Generation(2))]);
        assert!(
            !live.deliver(key(0), now(), LiveEvent::Offered(3)) && live.deliver(key(2), now(), LiveEvent::Offered(3))
        );
        live.node_lost(now(), &d0, Generation(1));
        assert!(
            matches!(entry.events.try_recv(), Ok(Told { attempt: Attempt(2), event: LiveEvent::Offered(3), .. }))
                && entry.events.try_recv().is_err()
        );
    }

    #[test]
    fn the_number_of_requests_and_the_keys_are_bounded() {
        let live = LiveRequests::new(2);
        let first = live.enter(RequestId(1), "k").unwrap();
        assert_eq!(live.enter(RequestId(2), "k").err(), Some(EnterError::Duplicate(RequestId(1))));
        let _second = live.enter(RequestId(3), "").unwrap();
        assert_eq!(live.enter(RequestId(4), "").err(), Some(EnterError::Full));
        drop(first);
        assert!(live.enter(RequestId(5), "k").is_ok());
        assert_eq!(live.lock().keys.len(), 0);
    }
}
