//! Which conductors are connected, and what they are sent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use baton_proto::v1;
use baton_types::ConductorId;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Messages that may wait for one conductor. One that reads slower than this loses its session, and with it its requests: it cannot be served, and must not
/// hold up the others.
const QUEUED_EVENTS: usize = 8192;

/// What a session's response stream carries.
pub type EventReceiver = mpsc::Receiver<Result<v1::NodeEvent, Status>>;

struct Session {
    epoch: u64,
    /// Cancelled when a later session takes its place: its reader must not take in another command.
    replaced: CancellationToken,
    events: mpsc::Sender<Result<v1::NodeEvent, Status>>,
}

#[derive(Default)]
struct Inner {
    next_epoch: u64,
    sessions: HashMap<ConductorId, Session>,
}

/// The sessions of one node. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Mutex<Inner>>);

impl Sessions {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session whose first event is `welcome`; one that the same conductor had before ends. Returns the session's epoch, what is cancelled when a later
    /// one takes its place, and the stream of its events.
    pub fn open(
        &self,
        conductor: ConductorId,
        welcome: v1::node_event::Event,
    ) -> (u64, CancellationToken, EventReceiver) {
        let (events, receiver) = mpsc::channel(QUEUED_EVENTS);
        // Before anybody else can send: a new channel has room.
        let _ = events.try_send(Ok(v1::NodeEvent { event: Some(welcome) }));
        let mut inner = self.lock();
        inner.next_epoch += 1;
        let (epoch, replaced) = (inner.next_epoch, CancellationToken::new());
        if let Some(before) = inner.sessions.insert(conductor, Session { epoch, replaced: replaced.clone(), events }) {
            before.replaced.cancel();
        }
        (epoch, replaced, receiver)
    }

    /// Whether the conductor has a session.
    pub fn is_open(&self, conductor: ConductorId) -> bool {
        self.lock().sessions.contains_key(&conductor)
    }

    /// Closes the session of that epoch. `false` where a later one of the same conductor lives on: its requests must not be touched.
    pub fn close(&self, conductor: ConductorId, epoch: u64) -> bool {
        let mut inner = self.lock();
        let replaced = inner.sessions.get(&conductor).is_some_and(|session| session.epoch > epoch);
        if !replaced {
            inner.sessions.remove(&conductor);
        }
        !replaced
    }

    /// Sends an event to one conductor. An event for a conductor that is gone is dropped: its requests are aborted anyway.
    pub fn send(&self, conductor: ConductorId, event: v1::node_event::Event) {
        let mut inner = self.lock();
        let Some(session) = inner.sessions.get(&conductor) else { return };
        if session.events.try_send(Ok(v1::NodeEvent { event: Some(event) })).is_err() {
            tracing::warn!(%conductor, queued = QUEUED_EVENTS, "the conductor does not read its events: closing its session");
            inner.sessions.remove(&conductor);
        }
    }

    /// Sends an event to every conductor.
    pub fn broadcast(&self, event: &v1::node_event::Event) {
        let conductors: Vec<_> = self.lock().sessions.keys().copied().collect();
        for conductor in conductors {
            self.send(conductor, event.clone());
        }
    }

    /// Ends every session, after what was sent to it.
    pub fn close_all(&self) {
        self.lock().sessions.clear();
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.lock().sessions.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> v1::node_event::Event {
        v1::node_event::Event::Load(v1::Load::default())
    }

    #[test]
    fn a_later_session_replaces_the_earlier_and_survives_its_close() {
        let sessions = Sessions::default();
        let (first, replaced, mut old) = sessions.open(ConductorId(1), event());
        let (second, _, mut new) = sessions.open(ConductorId(1), event());
        assert!(replaced.is_cancelled() && old.try_recv().is_ok() && new.try_recv().is_ok(), "both were welcomed");
        assert!(matches!(old.try_recv(), Err(mpsc::error::TryRecvError::Disconnected)));
        assert!(!sessions.close(ConductorId(1), first));
        sessions.send(ConductorId(1), event());
        assert!(new.try_recv().is_ok());
        assert!(sessions.close(ConductorId(1), second));
        assert!(sessions.is_empty());
    }

    #[test]
    fn a_conductor_that_does_not_read_is_cut_off_and_its_requests_end() {
        let sessions = Sessions::default();
        let (epoch, _, _stuck) = sessions.open(ConductorId(1), event());
        let (_, _, mut healthy) = sessions.open(ConductorId(2), event());
        for _ in 0..=QUEUED_EVENTS {
            sessions.send(ConductorId(1), event());
        }
        sessions.broadcast(&event());
        assert!(healthy.try_recv().is_ok());
        assert_eq!(sessions.lock().sessions.len(), 1);
        assert!(sessions.close(ConductorId(1), epoch), "its reader still reports the end");
    }
}
