//! Which conductors are connected, and what they are sent.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use baton_proto::v1;
use baton_runtime::telemetry::set_log_filter;
use baton_scheduler::{StaleTerm, TermFence};
use baton_types::{ConductorId, ErrorKind};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Messages that may wait for one conductor. One that reads slower than this loses its session, and
/// with it its requests: it cannot be served, and must not hold up the others.
const QUEUED_EVENTS: usize = 8192;
/// Bytes of messages that may wait for all conductors together. If there are more, the one that has
/// left most unread loses its session.
const QUEUED_BYTES: usize = 256 << 20;
/// Most conductors at once.
const MAX_SESSIONS: usize = 32;

/// What a session's response stream carries.
pub struct EventReceiver {
    events: Events,
    queued: Arc<AtomicUsize>,
    error: Ending,
}

/// What waits for a conductor. A session that ends takes it along: its stream may stay, unread.
type Events = Arc<Mutex<mpsc::Receiver<(usize, v1::NodeEvent)>>>;

/// What a session's stream ends with, if not in order.
type Ending = Arc<Mutex<Option<Status>>>;

fn end_with(error: &Ending, kind: ErrorKind, message: &str) {
    *error.lock().unwrap_or_else(PoisonError::into_inner) = Some(baton_proto::status(kind, message, None));
}

impl Stream for EventReceiver {
    type Item = Result<v1::NodeEvent, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.events.lock().unwrap_or_else(PoisonError::into_inner).poll_recv(cx);
        Poll::Ready(match ready!(polled) {
            Some((bytes, event)) => {
                self.queued.fetch_sub(bytes, Ordering::Relaxed);
                Some(Ok(event))
            }
            None => self.error.lock().unwrap_or_else(PoisonError::into_inner).take().map(Err),
        })
    }
}

struct Session {
    epoch: u64,
    /// Cancelled when the session is over for the node: its reader must not take in another
    /// command.
    ended: CancellationToken,
    events: mpsc::Sender<(usize, v1::NodeEvent)>,
    unread: Events,
    queued: Arc<AtomicUsize>,
    error: Ending,
}

impl Session {
    /// Bytes that wait.
    fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    /// Nothing is kept for a conductor that is gone, or does not read.
    fn drop_unread(&self) {
        let mut unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner);
        unread.close();
        while unread.try_recv().is_ok() {}
    }

    /// `false`: there is no room.
    fn send(&self, event: v1::node_event::Event) -> bool {
        let event = v1::NodeEvent { event: Some(event) };
        let bytes = event.encoded_len();
        self.queued.fetch_add(bytes, Ordering::Relaxed);
        self.events.try_send((bytes, event)).is_ok()
    }
}

#[derive(Default)]
struct Inner {
    next_epoch: u64,
    term_fence: TermFence,
    /// The latest version of settings that the conductors of these sessions know of.
    settings: Option<u64>,
    /// The filter of log lines that is in force; empty: as at the start.
    log: String,
    sessions: HashMap<ConductorId, Session>,
}

impl Inner {
    /// A conductor does not read. Its reader ends, too, and says so to the loop: no node decodes
    /// for a conductor that does not read.
    fn end_unread(&mut self, conductor: ConductorId) {
        let Some(session) = self.sessions.remove(&conductor) else { return };
        tracing::warn!(%conductor, unread = session.queued(), "the conductor does not read its events: closing its session");
        session.ended.cancel();
        session.drop_unread();
    }
}

/// The sessions of one node. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Mutex<Inner>>);

impl Sessions {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session whose first event is `welcome`; one that the same conductor had before ends.
    /// Returns the session's epoch, what is cancelled when the session is over for the node, and
    /// the stream of its events. `None`: there are as many as may be.
    pub fn open(
        &self,
        conductor: ConductorId,
        welcome: v1::node_event::Event,
    ) -> Option<(u64, CancellationToken, EventReceiver)> {
        let (events, receiver) = mpsc::channel(QUEUED_EVENTS);
        let mut inner = self.lock();
        if inner.sessions.len() >= MAX_SESSIONS && !inner.sessions.contains_key(&conductor) {
            return None;
        }
        if inner.sessions.is_empty() {
            // Versions of conductors that are gone say nothing of this one's: without etcd it
            // counts from 0.
            inner.settings = None;
        }
        inner.next_epoch += 1;
        let epoch = inner.next_epoch;
        let ended = CancellationToken::new();
        let queued = Arc::<AtomicUsize>::default();
        let error = Ending::default();
        let unread = Arc::new(Mutex::new(receiver));
        let session = Session {
            epoch,
            ended: ended.clone(),
            events,
            unread: Arc::clone(&unread),
            queued: Arc::clone(&queued),
            error: Arc::clone(&error),
        };
        // A new channel has room.
        session.send(welcome);
        if inner.term_fence.latest() > 0 {
            session.send(v1::node_event::Event::LeaderTerm(inner.term_fence.latest()));
        }
        if let Some(before) = inner.sessions.insert(conductor, session) {
            // The conductor must not take this node for one that died.
            end_with(&before.error, ErrorKind::Conflict, "another session of this conductor took its place");
            before.ended.cancel();
            before.drop_unread();
        }
        Some((epoch, ended, EventReceiver { events: unread, queued, error }))
    }

    /// A conductor says what is set at run time. Another one may know of a later change.
    pub fn on_settings(&self, told: &v1::NodeSettings) {
        let mut inner = self.lock();
        if inner.settings.is_some_and(|known| told.version <= known) {
            return;
        }
        inner.settings = Some(told.version);
        if inner.log == told.log {
            return;
        }
        // In order: two changes may come from two conductors.
        let filter = Some(&*told.log).filter(|filter| !filter.is_empty());
        match set_log_filter(filter) {
            Ok(()) => {
                tracing::info!(version = told.version, log = filter, "settings changed");
                inner.log.clone_from(&told.log);
            }
            Err(error) => tracing::error!(version = told.version, %error, "what is set is not taken"),
        }
    }

    /// Whether the conductor has a session.
    pub fn is_open(&self, conductor: ConductorId) -> bool {
        self.lock().sessions.contains_key(&conductor)
    }

    /// Closes the session of that epoch. `false` if a later one of the same conductor lives on: its
    /// requests must not be touched.
    pub fn close(&self, conductor: ConductorId, epoch: u64) -> bool {
        let mut inner = self.lock();
        let replaced = inner.sessions.get(&conductor).is_some_and(|session| session.epoch > epoch);
        if !replaced && let Some(session) = inner.sessions.remove(&conductor) {
            session.drop_unread();
        }
        !replaced
    }

    /// Sends an event to one conductor. An event for a conductor that is gone is dropped: its
    /// requests are aborted anyway.
    pub fn send(&self, conductor: ConductorId, event: v1::node_event::Event) {
        let mut inner = self.lock();
        let Some(session) = inner.sessions.get(&conductor) else { return };
        if !session.send(event) {
            return inner.end_unread(conductor);
        }
        while inner.sessions.values().map(Session::queued).sum::<usize>() > QUEUED_BYTES {
            let most = inner.sessions.iter().max_by_key(|(_, session)| session.queued());
            let Some((&conductor, _)) = most else { return };
            inner.end_unread(conductor);
        }
    }

    /// Whether an order of that term is to be carried out. If a later leader has been heard of it
    /// is not, and the conductor is told its term; a later one is told to all.
    pub fn admit(&self, conductor: ConductorId, term: u64) -> Result<(), StaleTerm> {
        let admitted = self.lock().term_fence.admit(term);
        match &admitted {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(told_by = %conductor, term, "a newer leader was elected");
                self.broadcast(&v1::node_event::Event::LeaderTerm(term));
            }
            Err(StaleTerm { latest, .. }) => {
                tracing::warn!(%conductor, term, latest, "rejecting a job of an old term");
                self.send(conductor, v1::node_event::Event::LeaderTerm(*latest));
            }
        }
        admitted.map(drop)
    }

    /// Sends an event to every conductor.
    pub fn broadcast(&self, event: &v1::node_event::Event) {
        let conductors: Vec<_> = self.lock().sessions.keys().copied().collect();
        for conductor in conductors {
            self.send(conductor, event.clone());
        }
    }

    /// Breaks every session off: this node fails, and its conductors must not take it for one that
    /// has drained.
    pub fn break_all(&self) {
        for session in self.lock().sessions.values() {
            end_with(&session.error, ErrorKind::Unavailable, "this node has failed");
        }
        self.close_all();
    }

    /// Ends every session, after what was sent to it.
    pub fn close_all(&self) {
        self.lock().sessions.clear();
    }

    /// Whether no conductor is connected.
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

    /// How many events wait.
    fn recv(stream: &mut EventReceiver) -> usize {
        let mut events = stream.events.lock().unwrap();
        std::iter::from_fn(|| events.try_recv().ok()).count()
    }

    #[tokio::test]
    async fn order_of_earlier_term_is_refused_and_latest_term_is_reported() {
        use tokio_stream::StreamExt;
        let sessions = Sessions::default();
        let (_, _, mut first) = sessions.open(ConductorId(1), event()).unwrap();
        assert_eq!(sessions.admit(ConductorId(1), 0), Ok(()));
        assert_eq!(sessions.admit(ConductorId(1), 4), Ok(()));
        assert_eq!(sessions.admit(ConductorId(2), 4), Ok(()), "others place in the same term");
        let stale = sessions.admit(ConductorId(1), 3).unwrap_err();
        assert_eq!(stale, StaleTerm { term: 3, latest: 4 });
        let (_, _, mut second) = sessions.open(ConductorId(2), event()).unwrap();
        sessions.close_all();
        let terms = async |events: &mut EventReceiver| {
            let mut terms = Vec::new();
            while let Some(Ok(told)) = events.next().await {
                if let Some(v1::node_event::Event::LeaderTerm(term)) = told.event {
                    terms.push(term);
                }
            }
            terms
        };
        assert_eq!((terms(&mut first).await, terms(&mut second).await), (vec![4, 4], vec![4]));
    }

    #[test]
    fn settings_of_node_follow_latest_version_of_connected_conductors() {
        let sessions = Sessions::default();
        let hears = |version, log: &str| {
            sessions.on_settings(&v1::NodeSettings { version, log: log.into() });
            sessions.lock().log.clone()
        };
        let (first, ..) = sessions.open(ConductorId(1), event()).unwrap();
        assert_eq!(hears(2, "debug"), "debug");
        let _second = sessions.open(ConductorId(2), event()).unwrap();
        assert_eq!(hears(1, "warn"), "debug", "another conductor is behind");
        sessions.close(ConductorId(1), first);
        assert_eq!(hears(0, ""), "debug");
        sessions.close_all();
        let _restarted = sessions.open(ConductorId(3), event()).unwrap();
        assert_eq!(hears(0, ""), "", "one that was restarted counts anew, and has forgotten what was set");
        assert_eq!(hears(1, "warn"), "warn");
    }

    #[test]
    fn later_session_replaces_the_earlier_and_survives_its_close() {
        let sessions = Sessions::default();
        let (first, ended, mut old) = sessions.open(ConductorId(1), event()).unwrap();
        let (second, _, mut new) = sessions.open(ConductorId(1), event()).unwrap();
        assert!(ended.is_cancelled() && recv(&mut old) == 0 && recv(&mut new) == 1, "one is welcomed");
        let mut context = Context::from_waker(std::task::Waker::noop());
        let Poll::Ready(Some(Err(end))) = Pin::new(&mut old).poll_next(&mut context) else { panic!("it goes on") };
        assert_eq!(baton_proto::kind_of_status(&end), ErrorKind::Conflict, "{end}");
        assert!(!sessions.close(ConductorId(1), first));
        sessions.send(ConductorId(1), event());
        assert_eq!(recv(&mut new), 1);
        assert!(sessions.close(ConductorId(1), second));
        assert!(sessions.is_empty());
    }

    #[test]
    fn session_of_conductor_that_does_not_read_is_ended() {
        let sessions = Sessions::default();
        let (epoch, ended, _stuck) = sessions.open(ConductorId(1), event()).unwrap();
        let (_, _, mut healthy) = sessions.open(ConductorId(2), event()).unwrap();
        for _ in 0..=QUEUED_EVENTS {
            sessions.send(ConductorId(1), event());
        }
        sessions.broadcast(&event());
        assert!(recv(&mut healthy) > 0);
        assert!(sessions.lock().sessions.len() == 1 && ended.is_cancelled());
        assert!(sessions.close(ConductorId(1), epoch), "its reader still reports the end");
    }

    #[tokio::test]
    async fn queued_events_of_a_session_are_bounded_in_bytes() {
        use tokio_stream::StreamExt;
        let large = || {
            let removed = v1::KvEvent { event: Some(v1::kv_event::Event::Removed(vec![7; QUEUED_BYTES / 4])) };
            v1::node_event::Event::Kv(v1::KvEvents { events: vec![removed], ..v1::KvEvents::default() })
        };
        let sessions = Sessions::default();
        let (_, ended, mut read) = sessions.open(ConductorId(1), event()).unwrap();
        for _ in 0..12 {
            sessions.send(ConductorId(1), large());
            while read.queued.load(Ordering::Relaxed) > QUEUED_BYTES / 2 {
                read.next().await.unwrap().unwrap();
            }
        }
        assert!(!ended.is_cancelled(), "it reads");
        (0..6).for_each(|_| sessions.send(ConductorId(1), large()));
        assert!(ended.is_cancelled() && sessions.is_empty());
    }

    #[tokio::test]
    async fn unread_events_of_all_sessions_are_bounded_together() {
        use tokio_stream::StreamExt;
        let of = |bytes| {
            let removed = v1::KvEvent { event: Some(v1::kv_event::Event::Removed(vec![7; bytes])) };
            v1::node_event::Event::Kv(v1::KvEvents { events: vec![removed], ..v1::KvEvents::default() })
        };
        let sessions = Sessions::default();
        let (_, honest_ended, mut honest) = sessions.open(ConductorId(0), event()).unwrap();
        let mut strangers = Vec::new();
        let held = |strangers: &Vec<(u64, CancellationToken, EventReceiver)>| {
            let waiting = |stream: &EventReceiver| stream.events.lock().unwrap().len();
            strangers.iter().map(|(.., stream)| waiting(stream)).sum::<usize>()
        };
        // Sessions that stay, that come again in the place of their own, and that end unread.
        for round in 0..90 {
            let id = ConductorId(1 + if round < 60 { round % 30 } else { round });
            if let Some(opened) = sessions.open(id, event()) {
                strangers.push(opened);
            }
            (0..3).for_each(|_| sessions.send(id, of(8 << 20)));
            sessions.send(ConductorId(0), of(1 << 20));
            while honest.queued.load(Ordering::Relaxed) > 0 {
                honest.next().await.unwrap().unwrap();
            }
            if round % 3 == 2 {
                let (epoch, ..) = strangers[strangers.len() - 1];
                sessions.close(id, epoch);
            }
            assert!(held(&strangers) <= QUEUED_BYTES / (8 << 20) + 90, "{round}: {}", held(&strangers));
        }
        assert!(!honest_ended.is_cancelled(), "it reads");
    }

    #[test]
    fn sessions_over_limit_are_refused() {
        let sessions = Sessions::default();
        let open: Vec<_> = (0..MAX_SESSIONS as u64).map(|n| sessions.open(ConductorId(n), event()).unwrap()).collect();
        assert!(sessions.open(ConductorId(99), event()).is_none());
        assert!(sessions.open(ConductorId(3), event()).is_some(), "in place of its own");
        assert!(sessions.close(ConductorId(0), open[0].0) && sessions.open(ConductorId(99), event()).is_some());
    }
}
