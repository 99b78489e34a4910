//! Sessions with the nodes: dial, greet, take in what they report.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::Uri;
use baton_intake::CountedChannel;
use baton_proto::{MAX_MESSAGE_BYTES, PROTOCOL_VERSION, check_protocol_version, v1};
use baton_runtime::{Clock, error_chain, within};
use baton_types::{ConductorId, ErrorKind, Generation, NodeId, NodeInfo, NodeStart, Refused};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

/// Commands that may wait for one node. A node that is so far behind is as good as gone.
const QUEUED_COMMANDS: usize = 4096;
/// How long a node may take to accept the connection and to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How often is looked whether a node said something. Silence is counted in these: if this process
/// is stopped for a while, it is not the nodes that were silent.
const LISTEN: Duration = Duration::from_millis(250);
/// A node reports its load several times a second. If it is silent so often, it is suspected, and
/// what it has goes on elsewhere: two seconds.
const SUSPECT_AFTER: u32 = 8;
/// If it is silent so often, its session is closed: ten seconds.
const LOST_AFTER: u32 = 40;

/// How long a node whose connection broke may take to answer on another one. Its requests wait for
/// that.
const STILL_THERE: Duration = Duration::from_millis(300);

/// Nodes that may be dialled at once: who only says that it is a node is not one yet.
const MAX_DIALS: usize = 256;

/// Names of nodes' hosts that are looked up at once. The system's look-up holds a thread as long as
/// it likes, also if nothing waits for it any more.
pub(crate) const MAX_LOOKUPS: usize = 32;

static LOOKUPS: Lookups = Lookups(Semaphore::const_new(MAX_LOOKUPS));

struct Lookups(Semaphore);

impl Lookups {
    /// Looks up, in its turn, where a host listens.
    async fn find(
        &'static self,
        look_up: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Vec<SocketAddr>> {
        // Closed only with the process.
        let turn = self.0.acquire().await.map_err(io::Error::other)?;
        let found = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            look_up()
        });
        found.await.map_err(io::Error::other)?
    }
}

/// Where the host of an address listens.
async fn looked_up(address: &Uri) -> io::Result<Vec<SocketAddr>> {
    let host = format!("{}:{}", address.host().unwrap_or_default(), address.port_u16().unwrap_or(80));
    match host.parse() {
        Ok(numeric) => Ok(vec![numeric]),
        Err(_) => LOOKUPS.find(move || Ok(host.to_socket_addrs()?.collect())).await,
    }
}

struct Session {
    generation: Generation,
    address: String,
    commands: mpsc::Sender<v1::NodeCommand>,
    closed: CancellationToken,
}

#[derive(Default)]
struct Inner {
    sessions: HashMap<NodeId, Session>,
    /// Starts that registered and have not been greeted. A start that only says that it is a later
    /// one keeps no other from being dialled.
    dialled: HashSet<NodeStart>,
}

/// The sessions of this conductor. Cheap to clone.
#[derive(Clone, Default)]
pub struct NodeSessions(Arc<Mutex<Inner>>);

/// A session that is to be dialled.
pub struct Dial {
    /// The node, as it registered.
    pub info: NodeInfo,
    sessions: NodeSessions,
}

impl Drop for Dial {
    /// It was greeted, or will not be.
    fn drop(&mut self) {
        self.sessions.lock().dialled.remove(&self.info.start());
    }
}

/// Why a session ended or did not begin.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// It cannot be reached.
    #[error("cannot reach {address}: {reason}")]
    Unreachable {
        /// Its address.
        address: String,
        /// What the connection says.
        reason: String,
    },
    /// Something else answers there.
    #[error("{0}")]
    WrongNode(String),
    /// The node ended it.
    #[error("the node ended it")]
    Ended,
    /// Another session of this conductor took its place at the node.
    #[error("replaced: {0}")]
    Replaced(String),
    /// The connection broke, and the node still answers.
    #[error("cut off from the node, which still answers: {0}")]
    CutOff(String),
    /// It broke off.
    #[error("the session broke: {0}")]
    Broken(String),
    /// No event for too long.
    #[error("silent for {0:?}")]
    Silent(Duration),
    /// A later start of the node, or the end of this conductor, replaced it.
    #[error("closed")]
    Closed,
}

impl NodeSessions {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the maps whole, so a panic elsewhere does not spoil them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node registered. Returns what to dial if it is new or a later start; `None` if its session
    /// stands or is on its way. An older start is refused: two processes with one name would take
    /// each other's place for ever. A session that stands is left alone until a later start has
    /// been greeted.
    pub fn register(&self, info: NodeInfo) -> Result<Option<Dial>, Refused> {
        let mut inner = self.lock();
        if let Some(session) = inner.sessions.get(&info.node) {
            if session.generation > info.generation {
                let node = &info.node;
                let address = &info.address;
                let later = &session.address;
                let message =
                    format!("name: a later start of {node} is at {later}; this one, at {address}, needs another name");
                return Err(Refused { kind: ErrorKind::Invalid, message });
            }
            if session.generation == info.generation {
                return Ok(None);
            }
        }
        if inner.dialled.contains(&info.start()) {
            return Ok(None);
        }
        if inner.dialled.len() >= MAX_DIALS {
            let message = format!("{MAX_DIALS} nodes are being dialled, as many as may: ask again");
            return Err(Refused { kind: ErrorKind::Overloaded, message });
        }
        inner.dialled.insert(info.start());
        Ok(Some(Dial { info, sessions: self.clone() }))
    }

    /// Opens the session of a node that was greeted, in place of an earlier start's. `None` if a
    /// later start has one.
    fn open(&self, info: &NodeInfo, commands: mpsc::Sender<v1::NodeCommand>) -> Option<CancellationToken> {
        let mut inner = self.lock();
        if inner.sessions.get(&info.node).is_some_and(|session| session.generation >= info.generation) {
            return None;
        }
        let closed = CancellationToken::new();
        let address = info.address.clone();
        let session = Session { generation: info.generation, address, commands, closed: closed.clone() };
        if let Some(earlier) = inner.sessions.insert(info.node.clone(), session) {
            earlier.closed.cancel();
        }
        Some(closed)
    }

    /// Sends a command; `false` if the node has no session, or cannot keep up.
    pub fn send(&self, node: &NodeId, command: v1::node_command::Command) -> bool {
        let inner = self.lock();
        let Some(session) = inner.sessions.get(node) else { return false };
        #[cfg(test)]
        crate::tests::seen::command(&command);
        let sent = session.commands.try_send(v1::NodeCommand { command: Some(command) }).is_ok();
        if !sent {
            // An abort or a job that is lost would leak: the node must notice, and it does when its
            // session ends.
            session.closed.cancel();
        }
        sent
    }

    /// Sends a command to every node.
    pub fn send_all(&self, command: &v1::node_command::Command) {
        let nodes: Vec<_> = self.lock().sessions.keys().cloned().collect();
        for node in nodes {
            self.send(&node, command.clone());
        }
    }

    /// Forgets a session that ended, if no later one has taken its place.
    fn remove(&self, node: &NodeId, generation: Generation) {
        let mut inner = self.lock();
        if inner.sessions.get(node).is_some_and(|session| session.generation == generation) {
            inner.sessions.remove(node);
        }
    }

    /// A connection of its own: sessions and rare operator requests only. Its timeouts find a peer
    /// that is not there. They are the machine's time: the network's, and no node's.
    pub async fn client(address: &str) -> Result<v1::node_client::NodeClient<CountedChannel>, SessionError> {
        let unreachable = |reason: String| SessionError::Unreachable { address: address.to_owned(), reason };
        let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|error| unreachable(error.to_string()))?;
        let found = looked_up(endpoint.uri()).await.map_err(|error| unreachable(error_chain(&error)))?;
        let mut reason = "its name has no address".to_owned();
        for listens in &found {
            let endpoint = Endpoint::from_shared(format!("http://{listens}"));
            let endpoint = endpoint.map_err(|error| unreachable(error.to_string()))?;
            // One address that drops everything leaves time for the next.
            let endpoint = endpoint.connect_timeout(GREETING_TIMEOUT / found.len() as u32).tcp_nodelay(true);
            let endpoint = endpoint.http2_keep_alive_interval(Duration::from_secs(5)).keep_alive_while_idle(true);
            match endpoint.connect().await {
                Ok(channel) => {
                    let client = v1::node_client::NodeClient::new(CountedChannel::from(channel));
                    let client = client.max_decoding_message_size(MAX_MESSAGE_BYTES);
                    return Ok(client.max_encoding_message_size(MAX_MESSAGE_BYTES));
                }
                Err(error) => reason = error_chain(&error),
            }
        }
        Err(unreachable(reason))
    }
}

/// What a session does with what its node says.
pub trait SessionEvents {
    /// The node said who it is. An error refuses it.
    fn check(&self, info: &NodeInfo) -> Result<(), SessionError>;
    /// From now on it can take requests.
    fn on_welcome(&self, info: &NodeInfo);
    /// The node is silent, and may be on its way back.
    fn on_silent(&self, info: &NodeInfo);
    /// It still is. Told again and again.
    fn on_still_silent(&self, info: &NodeInfo);
    /// The node said something.
    fn on_event(&self, info: &NodeInfo, event: v1::node_event::Event);
    /// The session is over; `error` says why. Called once after `on_welcome`.
    fn on_left(&self, info: &NodeInfo, error: &SessionError);
}

/// Runs a session to its end. Says why it did not begin; if it did, `events` are told why it ended.
pub async fn run_session(
    sessions: &NodeSessions,
    dial: Dial,
    conductor: ConductorId,
    clock: &dyn Clock,
    events: &impl SessionEvents,
) -> Result<(), SessionError> {
    let (commands, queued) = mpsc::channel(QUEUED_COMMANDS);
    let greeted = within(clock, GREETING_TIMEOUT, greet(&dial.info, queued, conductor)).await;
    let (info, stream) = greeted.unwrap_or(Err(SessionError::Silent(GREETING_TIMEOUT)))?;
    events.check(&info)?;
    let closed = sessions.open(&info, commands).ok_or(SessionError::Closed)?;
    drop(dial);
    let mut open = Open { sessions, info: &info, events, ended: None };
    events.on_welcome(&info);
    open.ended = Some(tokio::select! {
        error = listen(stream, &info, clock, events) => error,
        () = closed.cancelled() => SessionError::Closed,
    });
    Ok(())
}

/// A session that has begun. If it ends, also by a panic, its node has left, and may come again.
struct Open<'a, E: SessionEvents> {
    sessions: &'a NodeSessions,
    info: &'a NodeInfo,
    events: &'a E,
    ended: Option<SessionError>,
}

impl<E: SessionEvents> Drop for Open<'_, E> {
    fn drop(&mut self) {
        let panicked = std::thread::panicking();
        let bug = || panicked.then(|| SessionError::Broken("a bug in this conductor".to_owned()));
        // Otherwise it is this process that ends.
        if let Some(error) = self.ended.take().or_else(bug) {
            // Before its place is free: what a next session of the same start begins, the end of
            // this one would undo.
            self.events.on_left(self.info, &error);
        }
        self.sessions.remove(&self.info.node, self.info.generation);
    }
}

/// Takes in what a node says until its session is over.
async fn listen(
    mut stream: tonic::Streaming<v1::NodeEvent>,
    info: &NodeInfo,
    clock: &dyn Clock,
    events: &impl SessionEvents,
) -> SessionError {
    let mut silent = 0;
    loop {
        match within(clock, LISTEN, stream.message()).await {
            Some(Ok(Some(event))) => {
                silent = 0;
                if let Some(event) = event.event {
                    events.on_event(info, event);
                }
            }
            Some(Ok(None)) => return SessionError::Ended,
            Some(Err(status)) => {
                let reason = baton_proto::reason_of_status(&status);
                if baton_proto::kind_of_status(&status) == ErrorKind::Conflict {
                    return SessionError::Replaced(reason);
                }
                // What the node says itself has no cause: then it has failed.
                let is_cut = std::error::Error::source(&status).is_some() && still_answers(info, clock).await;
                return if is_cut { SessionError::CutOff(reason) } else { SessionError::Broken(reason) };
            }
            None => {
                silent += 1;
                match silent {
                    0..SUSPECT_AFTER => {}
                    SUSPECT_AFTER => events.on_silent(info),
                    LOST_AFTER.. => return SessionError::Silent(LISTEN * LOST_AFTER),
                    _ => events.on_still_silent(info),
                }
            }
        }
    }
}

/// Whether the very start of a node answers on another connection: then it has not died. It is
/// asked to release a lease that does not exist, which a later start of it refuses.
async fn still_answers(info: &NodeInfo, clock: &dyn Clock) -> bool {
    let generation = info.generation.to_string();
    let release = v1::ReleaseLeaseRequest {
        lease: u64::MAX,
        reader_node: info.node.to_string(),
        reader_generation: generation.clone(),
        target_generation: generation,
    };
    let answer = async { NodeSessions::client(&info.address).await.ok()?.release_lease(release).await.ok() };
    within(clock, STILL_THERE, answer).await.flatten().is_some()
}

/// Dials, says hello, and hears who answers.
async fn greet(
    registered: &NodeInfo,
    queued: mpsc::Receiver<v1::NodeCommand>,
    conductor: ConductorId,
) -> Result<(NodeInfo, tonic::Streaming<v1::NodeEvent>), SessionError> {
    let mut client = NodeSessions::client(&registered.address).await?;
    let hello = v1::Hello { protocol_version: PROTOCOL_VERSION, conductor_id: conductor.to_string() };
    let hello = v1::node_command::Command::Hello(hello);
    #[cfg(test)]
    crate::tests::seen::command(&hello);
    let hello = v1::NodeCommand { command: Some(hello) };
    let commands = tokio_stream::StreamExt::chain(tokio_stream::once(hello), ReceiverStream::new(queued));
    let broken = |status: tonic::Status| SessionError::Broken(baton_proto::reason_of_status(&status));
    let mut stream = client.session(commands).await.map_err(broken)?.into_inner();
    let first = stream.message().await.map_err(broken)?;
    let Some(v1::node_event::Event::Welcome(welcome)) = first.and_then(|event| event.event) else {
        return Err(SessionError::WrongNode("its first event is not Welcome".to_owned()));
    };
    let info = check_welcome(welcome, registered).map_err(SessionError::WrongNode)?;
    Ok((info, stream))
}

fn check_welcome(welcome: v1::Welcome, registered: &NodeInfo) -> Result<NodeInfo, String> {
    check_protocol_version(welcome.protocol_version).map_err(|error| error.to_string())?;
    let node = baton_proto::required("node", welcome.node).map_err(|error| error.to_string())?;
    let info = NodeInfo::try_from(node).map_err(|error| error.to_string())?;
    if (&info.node, info.generation) != (&registered.node, registered.generation) {
        return Err(format!(
            "{} generation {} answers where {} generation {} registered",
            info.node, info.generation, registered.node, registered.generation
        ));
    }
    Ok(info)
}

#[cfg(test)]
pub(crate) mod tests {
    use baton_types::{KvDtype, KvLayout, NodeProfile, NodeRole};

    use super::*;

    pub(crate) fn info(name: &str, generation: u64) -> NodeInfo {
        NodeInfo {
            node: NodeId::new(name).unwrap(),
            role: NodeRole::Prefill,
            generation: Generation(generation),
            address: "http://127.0.0.1:1".to_owned(),
            model: "m".to_owned(),
            vocab_size: 512,
            context_length: 2048,
            kv_class: "test".to_owned(),
            layout: KvLayout {
                model: 7,
                num_layers: 4,
                num_kv_heads: 1,
                head_dim: 8,
                block_tokens: 16,
                dtype: KvDtype::F16,
                num_blocks: 100,
            },
            profile: NodeProfile::default(),
            vocabulary: String::new(),
        }
    }

    #[test]
    fn node_that_only_registers_replaces_no_session() {
        let sessions = NodeSessions::default();
        let first = sessions.register(info("p0", 1)).unwrap().unwrap();
        assert!(sessions.register(info("p0", 1)).unwrap().is_none(), "it is being dialled");
        let (commands, mut queued) = mpsc::channel(4);
        let closed = sessions.open(&first.info, commands).unwrap();
        drop(first);
        assert!(sessions.register(info("p0", 1)).unwrap().is_none(), "it has a session");

        let command = || v1::node_command::Command::KvSnapshot(v1::KvSnapshotRequest {});
        let stranger = sessions.register(info("p0", 2)).unwrap().unwrap();
        assert!(!closed.is_cancelled() && sessions.send(&stranger.info.node, command()) && queued.try_recv().is_ok());
        drop(stranger);
        assert!(sessions.register(info("p0", 1)).unwrap().is_none(), "no node answered at the other one's address");

        let later = sessions.register(info("p0", 2)).unwrap().unwrap();
        let (commands, _queued) = mpsc::channel(4);
        assert!(sessions.open(&later.info, commands).is_some() && closed.is_cancelled());
        assert_eq!(sessions.register(info("p0", 1)).err().unwrap().kind, ErrorKind::Invalid);
        sessions.remove(&later.info.node, Generation(1));
        assert!(sessions.send(&later.info.node, command()), "the end of the earlier one is none of its business");
    }

    #[test]
    fn claim_of_a_later_start_keeps_no_other_from_being_dialled() {
        let sessions = NodeSessions::default();
        for generation in [u64::MAX, u64::MAX - 1] {
            // No node answers there.
            let _false_start = sessions.register(info("p0", generation)).unwrap().unwrap();
            let true_start = sessions.register(info("p0", 1)).unwrap().expect("it is dialled, too");
            let (commands, _queued) = mpsc::channel(4);
            assert!(sessions.open(&true_start.info, commands).is_some());
            drop(true_start);
            assert!(sessions.register(info("p0", 1)).unwrap().is_none(), "it has a session");
            sessions.remove(&NodeId::new("p0").unwrap(), Generation(1));
        }
        // One that had its place was greeted, and is gone.
        let false_start = sessions.register(info("p0", u64::MAX)).unwrap().unwrap();
        let (commands, _queued) = mpsc::channel(4);
        sessions.open(&false_start.info, commands).unwrap();
        drop(false_start);
        assert!(sessions.register(info("p0", 1)).is_err());
        sessions.remove(&NodeId::new("p0").unwrap(), Generation(u64::MAX));
        assert!(sessions.register(info("p0", 1)).unwrap().is_some());
    }

    #[test]
    fn concurrent_dials_of_nodes_are_bounded() {
        let sessions = NodeSessions::default();
        let dials: Vec<_> =
            (0..MAX_DIALS).map(|n| sessions.register(info(&format!("n{n}"), 1)).unwrap().unwrap()).collect();
        assert_eq!(sessions.register(info("p0", 1)).err().unwrap().kind, ErrorKind::Overloaded);
        drop(dials);
        assert!(sessions.register(info("p0", 1)).unwrap().is_some());
    }

    #[tokio::test]
    async fn slow_look_up_keeps_its_place_after_its_caller_has_left() {
        static LOOKUPS: Lookups = Lookups(Semaphore::const_new(1));
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let slow = LOOKUPS.find(move || {
            let _ = ended.recv();
            Ok(Vec::new())
        });
        let soon = Duration::from_millis(50);
        assert!(tokio::time::timeout(soon, slow).await.is_err());
        let mut next = Box::pin(LOOKUPS.find(|| Ok(vec![([127, 0, 0, 1], 7).into()])));
        assert!(tokio::time::timeout(soon, &mut next).await.is_err(), "the first one still holds a thread");
        // An address that is no name needs none.
        let numeric = looked_up(&"http://[::1]:7".parse().unwrap()).await.unwrap();
        assert_eq!(numeric, ["[::1]:7".parse().unwrap()]);
        drop(end);
        assert_eq!(next.await.unwrap(), [([127, 0, 0, 1], 7).into()]);
    }
}
