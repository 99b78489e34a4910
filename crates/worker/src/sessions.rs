//! Which conductors are connected, and what they are sent.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_runtime::settings::BadSetting;
use baton_runtime::telemetry::{LogFilter, set_log_filter};
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
/// Memory of messages that may wait for all conductors together. If there is more, the one that has
/// left most unread loses its session.
const QUEUED_BYTES: usize = 256 << 20;
/// Memory of a message, at most so many times what it takes on the wire: a block's hash has 20
/// bytes there, and 88 here.
const MEMORY_FACTOR: usize = 5;
/// Most conductors at once.
const MAX_SESSIONS: usize = 32;
/// How often a conductor may name another leader or filter, on average, and how often in a row.
const CHANGE_EVERY: Duration = Duration::from_millis(500);
const CHANGES_AT_ONCE: u32 = 4;

/// How fast a session may name other leaders, for which the other conductors ask etcd each time, or
/// other filters of log lines, for which all lines are looked at anew.
pub struct ChangePace {
    /// When all that was changed so far has had its time.
    paid: Instant,
}

impl ChangePace {
    /// Of a session that begins.
    pub fn new(now: Instant) -> Self {
        Self { paid: now }
    }

    /// Something was changed. Until the time that this gives the session is not read.
    pub fn on_changed(&mut self, now: Instant) -> Instant {
        self.paid = self.paid.max(now) + CHANGE_EVERY;
        now.max(self.paid.checked_sub(CHANGES_AT_ONCE * CHANGE_EVERY).unwrap_or(now))
    }
}

/// What a session's response stream carries.
pub struct EventReceiver {
    events: Events,
    queued: Arc<AtomicUsize>,
    error: Ending,
}

/// What waits for a conductor. A session that ends takes it along: its stream may stay, unread.
type Events = Arc<Mutex<mpsc::Receiver<(usize, v1::NodeEvent)>>>;

/// Memory of a message that waits.
fn memory(event: &v1::NodeEvent) -> usize {
    size_of::<(usize, v1::NodeEvent)>() + event.encoded_len() * MEMORY_FACTOR
}

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
    /// The later term that its conductor was told of; 0: none.
    told_term: u64,
    /// What its conductor says is set at run time.
    settings: Option<Arc<Settings>>,
}

/// What a conductor says is set at run time.
struct Settings {
    version: u64,
    log: String,
    /// `None`: as at the start.
    filter: Option<LogFilter>,
    /// Counts what was changed at this node, while their sessions were open; 0: the conductor said
    /// so first of all.
    change: u64,
}

impl TryFrom<v1::NodeSettings> for Settings {
    type Error = BadSetting;

    fn try_from(told: v1::NodeSettings) -> Result<Self, BadSetting> {
        let filter = if told.log.is_empty() { None } else { Some(told.log.parse()?) };
        Ok(Self { version: told.version, log: told.log, filter, change: 0 })
    }
}

impl Session {
    /// Memory of what waits.
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
        let bytes = memory(&event);
        self.queued.fetch_add(bytes, Ordering::Relaxed);
        self.events.try_send((bytes, event)).is_ok()
    }
}

#[derive(Default)]
struct Inner {
    next_epoch: u64,
    term_fence: TermFence,
    /// Changes of settings so far.
    changes: u64,
    sessions: HashMap<ConductorId, Session>,
    /// Memory of what sessions left unread at their ends, since it was last asked for.
    freed: usize,
}

impl Inner {
    /// Nothing that a conductor said outlasts its session, and nothing waits for it.
    fn remove(&mut self, conductor: ConductorId) -> Option<Session> {
        let session = self.sessions.remove(&conductor)?;
        self.freed += session.queued();
        session.drop_unread();
        self.term_fence.on_gone(conductor);
        self.tell_terms();
        Some(session)
    }

    /// A conductor does not read. Its reader ends, too, and says so to the loop: no node decodes
    /// for a conductor that does not read.
    fn end_unread(&mut self, conductor: ConductorId) {
        let Some(session) = self.remove(conductor) else { return };
        tracing::warn!(%conductor, "the conductor does not read its events: closing its session");
        session.ended.cancel();
    }

    /// Sends an event to one conductor. Says whether a session ended for want of room.
    fn send(&mut self, conductor: ConductorId, event: v1::node_event::Event) -> bool {
        let Some(session) = self.sessions.get(&conductor) else { return false };
        if !session.send(event) {
            self.end_unread(conductor);
            return true;
        }
        let mut has_ended = false;
        while self.sessions.values().map(Session::queued).sum::<usize>() > QUEUED_BYTES {
            let most = self.sessions.iter().max_by_key(|(_, session)| session.queued());
            let Some((&conductor, _)) = most else { break };
            self.end_unread(conductor);
            has_ended = true;
        }
        has_ended
    }

    /// Tells each conductor which term stands in its way, if that is another one than before.
    fn tell_terms(&mut self) {
        let now = baton_runtime::now();
        for (conductor, session) in &mut self.sessions {
            let term = self.term_fence.later_than_named_by(now, *conductor).unwrap_or(0);
            if std::mem::replace(&mut session.told_term, term) != term {
                session.send(v1::node_event::Event::LeaderTerm(term));
            }
        }
    }

    /// Settings of open sessions that count: the last that was changed while its session was open.
    /// A version is a claim, and counts only between conductors that have changed nothing since
    /// they came: one may be behind another.
    fn settings(&self) -> Option<&Arc<Settings>> {
        let told = self.sessions.values().filter_map(|session| session.settings.as_ref());
        told.max_by(|a, b| (a.change, a.version, &a.log).cmp(&(b.change, b.version, &b.log)))
    }
}

#[derive(Default)]
struct Shared {
    inner: Mutex<Inner>,
    /// The filter of log lines that is in force; empty: as at the start. Its lock is taken before
    /// that of the sessions, which every token's way takes: to change the filter takes a while.
    log: Mutex<String>,
}

/// The sessions of one node. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sessions(Arc<Shared>);

impl Sessions {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts in force what is set, now that a session has changed it or ended.
    fn follow_settings(&self) {
        // In order: each that has this lock sees the last change.
        let mut in_force = self.0.log.lock().unwrap_or_else(PoisonError::into_inner);
        let latest = self.lock().settings().map(Arc::clone);
        let Some(latest) = latest else { return };
        let Settings { version, log, filter, .. } = &*latest;
        if *in_force == *log {
            return;
        }
        set_log_filter(filter.as_ref());
        tracing::info!(version, log, "settings changed");
        in_force.clone_from(log);
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
            told_term: 0,
            settings: None,
        };
        // A new channel has room.
        session.send(welcome);
        if let Some(before) = inner.remove(conductor) {
            // The conductor must not take this node for one that died.
            end_with(&before.error, ErrorKind::Conflict, "another session of this conductor took its place");
            before.ended.cancel();
            before.drop_unread();
        }
        inner.sessions.insert(conductor, session);
        inner.tell_terms();
        drop(inner);
        self.follow_settings();
        Some((epoch, ended, EventReceiver { events: unread, queued, error }))
    }

    /// A conductor says what is set at run time. Another one may know of a later change. Says
    /// whether it is to be paced: it has changed the filter, or says what cannot be taken.
    pub fn on_settings(&self, conductor: ConductorId, told: v1::NodeSettings) -> bool {
        // Before the lock, which every token's way takes.
        let mut settings = match Settings::try_from(told) {
            Ok(settings) => settings,
            Err(error) => {
                tracing::error!(%conductor, %error, "what is set is not taken");
                return true;
            }
        };
        let mut inner = self.lock();
        let change = inner.changes + 1;
        let Some(session) = inner.sessions.get_mut(&conductor) else { return false };
        let before = session.settings.take();
        let is_new = before.as_ref().map_or("", |before| &before.log) != settings.log;
        match before {
            Some(before) if before.version == settings.version && !is_new => settings.change = before.change,
            Some(_) => settings.change = change,
            None => {}
        }
        session.settings = Some(Arc::new(settings));
        inner.changes = change;
        drop(inner);
        self.follow_settings();
        is_new
    }

    /// A conductor says who leads, and what it denies. Says whether it named another leader before.
    pub fn on_leader(&self, conductor: ConductorId, told: &v1::KnownLeader) -> bool {
        let mut inner = self.lock();
        if !inner.sessions.contains_key(&conductor) {
            return false;
        }
        let is_new = inner.term_fence.on_named(conductor, told.term);
        if told.denied != 0 {
            inner.term_fence.on_denied(baton_runtime::now(), conductor, told.denied);
        }
        if is_new {
            tracing::info!(%conductor, term = told.term, "a conductor names the leader");
        }
        inner.tell_terms();
        is_new
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
        if !replaced {
            inner.remove(conductor);
            drop(inner);
            self.follow_settings();
        }
        !replaced
    }

    /// Sends an event to one conductor. An event for a conductor that is gone is dropped: its
    /// requests are aborted anyway.
    pub fn send(&self, conductor: ConductorId, event: v1::node_event::Event) {
        if self.lock().send(conductor, event) {
            self.follow_settings();
        }
    }

    /// Whether a job of a conductor is to be carried out, by its term.
    pub fn admit(&self, conductor: ConductorId, term: u64) -> Result<(), StaleTerm> {
        let mut inner = self.lock();
        let admitted = inner.term_fence.admit(baton_runtime::now(), conductor, term);
        if let Err(StaleTerm { named, .. }) = admitted {
            // Its conductor may have been sure until now, and was told of none.
            inner.tell_terms();
            tracing::warn!(%conductor, term, named, "rejecting a job of an old term");
        }
        admitted
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
        let mut inner = self.lock();
        inner.sessions.clear();
        inner.term_fence = TermFence::default();
    }

    /// Memory that was freed since it was last asked: what sessions left unread at their ends.
    pub fn freed(&self) -> usize {
        std::mem::take(&mut self.lock().freed)
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

    /// The filter of log lines that is in force.
    fn log_of(sessions: &Sessions) -> String {
        sessions.0.log.lock().unwrap().clone()
    }

    fn named(term: u64) -> v1::KnownLeader {
        v1::KnownLeader { term, denied: 0 }
    }

    /// The terms that a conductor was told of.
    fn terms(events: &mut EventReceiver) -> Vec<u64> {
        let mut events = events.events.lock().unwrap();
        std::iter::from_fn(|| events.try_recv().ok())
            .filter_map(|(_, told)| match told.event {
                Some(v1::node_event::Event::LeaderTerm(term)) => Some(term),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn conductor_is_told_of_a_later_term_until_it_takes_or_denies_it() {
        let [old, new, late] = [1, 2, 3].map(ConductorId);
        let sessions = Sessions::default();
        let (_, _, mut first) = sessions.open(old, event()).unwrap();
        sessions.on_leader(old, &named(4));
        assert_eq!(sessions.admit(old, 4), Ok(()));
        let (_, _, mut second) = sessions.open(new, event()).unwrap();
        assert!(sessions.on_leader(new, &named(7)) && !sessions.on_leader(new, &named(7)));
        assert_eq!((terms(&mut first), terms(&mut second)), (vec![7], vec![4, 0]));
        assert_eq!(sessions.admit(old, 4), Err(StaleTerm { term: 4, named: 7 }));
        let (_, _, mut third) = sessions.open(late, event()).unwrap();
        sessions.on_leader(old, &v1::KnownLeader { term: 4, denied: 7 });
        assert_eq!((terms(&mut first), terms(&mut third)), (vec![0], vec![7]));
        assert_eq!((sessions.admit(old, 4), sessions.admit(new, 7)), (Ok(()), Ok(())));
        sessions.on_leader(late, &named(7));
        assert_eq!((terms(&mut first), terms(&mut third)), (vec![7], vec![0]), "it has not denied this one's word");
    }

    #[test]
    fn extreme_terms_of_a_session_or_a_job_end_with_it() {
        let [honest, liar] = [1, 2].map(ConductorId);
        let sessions = Sessions::default();
        let (_, _, mut told) = sessions.open(honest, event()).unwrap();
        sessions.on_leader(honest, &named(4));
        for term in [u64::MAX, u64::MAX - 1, 1 << 63] {
            let (epoch, _, _events) = sessions.open(liar, event()).unwrap();
            assert!(sessions.admit(liar, term).is_err());
            assert_eq!((sessions.admit(honest, 4), terms(&mut told)), (Ok(()), vec![]), "one job");
            sessions.on_leader(liar, &named(term));
            assert!(sessions.admit(honest, 4).is_err());
            sessions.close(liar, epoch);
            assert_eq!((sessions.admit(honest, 4), terms(&mut told)), (Ok(()), vec![term, 0]));
            assert!(!sessions.on_leader(liar, &named(term)), "its reader was late");
            assert_eq!(sessions.admit(honest, 4), Ok(()));
        }
        // In place of its own, and closed for want of reading.
        let (_, _, _events) = sessions.open(liar, event()).unwrap();
        sessions.on_leader(liar, &named(u64::MAX));
        let (_, _, _events) = sessions.open(liar, event()).unwrap();
        assert_eq!(sessions.admit(honest, 4), Ok(()));
        sessions.on_leader(liar, &named(u64::MAX));
        (0..=QUEUED_EVENTS).for_each(|_| sessions.send(liar, event()));
        assert_eq!(sessions.admit(honest, 4), Ok(()));
    }

    #[test]
    fn session_that_names_leaders_fast_is_read_slowly() {
        let now = Instant::now();
        let mut pace = ChangePace::new(now);
        let mut named = |at: Duration| pace.on_changed(now + at).duration_since(now + at);
        assert!((0..CHANGES_AT_ONCE).all(|_| named(Duration::ZERO).is_zero()), "as in elections");
        assert_eq!(named(Duration::ZERO), CHANGE_EVERY);
        assert_eq!(named(CHANGE_EVERY), CHANGE_EVERY);
        let later = Duration::from_secs(60);
        assert!((0..CHANGES_AT_ONCE).all(|_| named(later).is_zero()) && named(later) == CHANGE_EVERY);
    }

    #[test]
    fn settings_of_node_follow_latest_version_of_connected_conductors() {
        let sessions = Sessions::default();
        let hears = |conductor, version, log: &str| {
            sessions.on_settings(ConductorId(conductor), v1::NodeSettings { version, log: log.into() });
            log_of(&sessions)
        };
        let (first, ..) = sessions.open(ConductorId(1), event()).unwrap();
        assert_eq!(hears(1, 2, "debug"), "debug");
        let (second, ..) = sessions.open(ConductorId(2), event()).unwrap();
        assert_eq!(hears(2, 1, "warn"), "debug", "another conductor is behind");
        sessions.close(ConductorId(1), first);
        assert_eq!(log_of(&sessions), "warn", "what those say that are there");
        sessions.close(ConductorId(2), second);
        assert_eq!(log_of(&sessions), "warn", "no conductor says otherwise");
        let _restarted = sessions.open(ConductorId(3), event()).unwrap();
        assert_eq!(hears(3, 0, ""), "", "one that was restarted counts anew, and has forgotten what was set");
        assert_eq!(hears(3, 1, "warn"), "warn");
        assert_eq!(hears(3, 2, "[{x=\"(a|b)*a.{60}\"}]=trace"), "warn", "a pattern is no filter");
        assert_eq!(hears(3, 3, &"a".repeat(1 << 24)), "warn");
        assert_eq!(hears(3, 4, "info"), "info");
    }

    #[test]
    fn what_is_set_last_counts_whatever_versions_a_liar_says() {
        let sessions = Sessions::default();
        let says = |conductor, version, log: &str| {
            let told = v1::NodeSettings { version, log: log.into() };
            sessions.on_settings(ConductorId(conductor), told)
        };
        let (first, ..) = sessions.open(ConductorId(1), event()).unwrap();
        assert!(says(1, 2, "warn") && !says(1, 3, "warn"), "another version with the same filter costs nothing");
        for version in [u64::MAX, u64::MAX - 1, 9, 0] {
            let (epoch, ..) = sessions.open(ConductorId(2), event()).unwrap();
            says(2, version, "off");
            assert_eq!(log_of(&sessions), "warn", "it has changed nothing since it came");
            assert!(says(2, version, "debug"), "it does");
            assert_eq!(log_of(&sessions), "debug");
            // What is set is set, while it stays.
            says(1, 4, "info");
            assert_eq!(log_of(&sessions), "info", "{version}");
            says(2, version, "debug");
            assert_eq!(log_of(&sessions), "info", "it says so again");
            says(1, 5, "warn");
            sessions.close(ConductorId(2), epoch);
            assert_eq!(log_of(&sessions), "warn");
        }
        assert!(says(1, 6, "[{x=1}]=off"), "what cannot be read is paced, too");
        sessions.close(ConductorId(1), first);
        // One that came before the honest one.
        let _before = sessions.open(ConductorId(3), event()).unwrap();
        says(3, u64::MAX, "off");
        let _second = sessions.open(ConductorId(4), event()).unwrap();
        says(4, 5, "warn");
        says(4, 6, "debug");
        assert_eq!(log_of(&sessions), "debug");
        // An honest one that is behind, and catches up.
        let _third = sessions.open(ConductorId(5), event()).unwrap();
        for version in [5, 6] {
            says(5, version, if version == 5 { "warn" } else { "debug" });
            assert_eq!(log_of(&sessions), "debug");
        }
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
            let bytes = vec![7; QUEUED_BYTES / 4 / MEMORY_FACTOR];
            let removed = v1::KvEvent { event: Some(v1::kv_event::Event::Removed(bytes)) };
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
        assert!(sessions.freed() > QUEUED_BYTES / 2 && sessions.freed() == 0, "told once");
    }

    /// What an allocation of a few bytes takes.
    const SMALLEST: usize = 32;

    #[test]
    fn queued_events_count_at_least_the_memory_that_they_take() {
        let kv = |event: v1::kv_event::Event| {
            let events = vec![v1::KvEvent { event: Some(event) }; 4096];
            v1::NodeEvent { event: Some(v1::node_event::Event::Kv(v1::KvEvents { events, ..Default::default() })) }
        };
        let stored = v1::KvStored { hash: vec![7; 16], parent: vec![7; 16] };
        for (event, allocations) in
            [(kv(v1::kv_event::Event::Removed(vec![7; 16])), 1), (kv(v1::kv_event::Event::Stored(stored)), 2)]
        {
            let taken = 4096 * (size_of::<v1::KvEvent>() + allocations * SMALLEST);
            assert!((taken..taken * 2).contains(&memory(&event)), "{} for {taken}", memory(&event));
        }
        let step = v1::NodeEvent { event: Some(v1::node_event::Event::Step(v1::StepReport::default())) };
        assert!(memory(&step) >= size_of::<v1::NodeEvent>());
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
