//! Sessions with the nodes: dial, greet, take in what they report.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_proto::{MAX_MESSAGE_BYTES, PROTOCOL_VERSION, check_protocol_version, v1};
use baton_runtime::error_chain;
use baton_types::{ConductorId, ErrorKind, Generation, NodeId, NodeInfo, Refused};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

/// Commands that may wait for one node. A node that is so far behind is as good as gone.
const QUEUED_COMMANDS: usize = 4096;
/// How long a node may take to accept the connection and to say who it is.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How often is looked whether a node said something. Silence is counted in these: if this process is stopped for a while, it is not the nodes that were
/// silent.
const LISTEN: Duration = Duration::from_millis(250);
/// A node reports its load several times a second. If it is silent so often, it is suspected, and what it has goes on elsewhere: two seconds.
const SUSPECT_AFTER: u32 = 8;
/// If it is silent so often, its session is closed: ten seconds.
const LOST_AFTER: u32 = 40;

struct Session {
    generation: Generation,
    address: String,
    commands: mpsc::Sender<v1::NodeCommand>,
    closed: CancellationToken,
}

/// The sessions of this conductor. Cheap to clone.
#[derive(Clone, Default)]
pub struct NodeSessions(Arc<Mutex<HashMap<NodeId, Session>>>);

/// A session that is to be dialled.
pub struct Dial {
    /// The node, as it registered.
    pub info: NodeInfo,
    commands: mpsc::Receiver<v1::NodeCommand>,
    closed: CancellationToken,
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
    fn lock(&self) -> MutexGuard<'_, HashMap<NodeId, Session>> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node registered: gives back what to dial where it is new or a later start, `None` where its session stands. An older start is refused: two processes
    /// with one name would take each other's place for ever.
    pub fn register(&self, info: NodeInfo) -> Result<Option<Dial>, Refused> {
        let mut sessions = self.lock();
        if let Some(session) = sessions.get(&info.node) {
            if session.generation > info.generation {
                let (node, address, later) = (&info.node, &info.address, &session.address);
                let message =
                    format!("name: a later start of {node} is at {later}; this one, at {address}, needs another name");
                return Err(Refused { kind: ErrorKind::Invalid, message });
            }
            if session.generation == info.generation {
                return Ok(None);
            }
            session.closed.cancel();
        }
        let (commands, receiver) = mpsc::channel(QUEUED_COMMANDS);
        let closed = CancellationToken::new();
        let address = info.address.clone();
        let session = Session { generation: info.generation, address, commands, closed: closed.clone() };
        sessions.insert(info.node.clone(), session);
        Ok(Some(Dial { info, commands: receiver, closed }))
    }

    /// Sends a command; `false` where the node has no session, or cannot keep up.
    pub fn send(&self, node: &NodeId, command: v1::node_command::Command) -> bool {
        let sessions = self.lock();
        let Some(session) = sessions.get(node) else { return false };
        let sent = session.commands.try_send(v1::NodeCommand { command: Some(command) }).is_ok();
        if !sent {
            // An abort or a job that is lost would leak: the node must notice, and it does when its session ends.
            session.closed.cancel();
        }
        sent
    }

    /// Sends a command to every node.
    pub fn send_all(&self, command: &v1::node_command::Command) {
        let nodes: Vec<_> = self.lock().keys().cloned().collect();
        for node in nodes {
            self.send(&node, command.clone());
        }
    }

    /// Forgets a session that ended. `false` where a later one has taken its place.
    fn remove(&self, node: &NodeId, generation: Generation) -> bool {
        let mut sessions = self.lock();
        let ours = sessions.get(node).is_some_and(|session| session.generation == generation);
        if ours {
            sessions.remove(node);
        }
        ours
    }

    /// A connection of its own: sessions and rare operator requests only.
    pub async fn client(address: &str) -> Result<v1::node_client::NodeClient<Channel>, SessionError> {
        let unreachable = |reason: String| SessionError::Unreachable { address: address.to_owned(), reason };
        let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|error| unreachable(error.to_string()))?;
        let endpoint = endpoint.connect_timeout(GREETING_TIMEOUT).tcp_nodelay(true);
        let endpoint = endpoint.http2_keep_alive_interval(Duration::from_secs(5)).keep_alive_while_idle(true);
        let channel = endpoint.connect().await.map_err(|error| unreachable(error_chain(&error)))?;
        let client = v1::node_client::NodeClient::new(channel);
        Ok(client.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES))
    }
}

/// What a session does with what its node says.
pub trait SessionEvents {
    /// The node said who it is: from now on it can take requests. An error refuses it.
    fn on_welcome(&self, info: &NodeInfo) -> Result<(), SessionError>;
    /// The node is silent, and may be on its way back.
    fn on_silent(&self, info: &NodeInfo);
    /// The node said something.
    fn on_event(&self, info: &NodeInfo, event: v1::node_event::Event);
    /// The session is over; `error` says why. Called once after a successful `on_welcome`.
    fn on_left(&self, info: &NodeInfo, error: &SessionError);
}

/// Runs a session to its end. Says why it did not begin; where it did, `events` are told why it ended.
pub async fn run_session(
    sessions: &NodeSessions,
    dial: Dial,
    conductor: ConductorId,
    events: &impl SessionEvents,
) -> Result<(), SessionError> {
    let (node, generation, closed) = (dial.info.node.clone(), dial.info.generation, dial.closed.clone());
    let mut welcomed = None;
    let error = tokio::select! {
        error = talk(dial, conductor, events, &mut welcomed) => error,
        () = closed.cancelled() => SessionError::Closed,
    };
    // Before its place is free: what a next session of the same start begins, the end of this one would undo.
    if let Some(info) = &welcomed {
        events.on_left(info, &error);
    }
    sessions.remove(&node, generation);
    welcomed.map(drop).ok_or(error)
}

async fn talk(
    dial: Dial,
    conductor: ConductorId,
    events: &impl SessionEvents,
    welcomed: &mut Option<NodeInfo>,
) -> SessionError {
    let mut stream = match tokio::time::timeout(GREETING_TIMEOUT, greet(dial, conductor)).await {
        Ok(Ok((info, stream))) => {
            if let Err(error) = events.on_welcome(&info) {
                return error;
            }
            *welcomed = Some(info);
            stream
        }
        Ok(Err(error)) => return error,
        Err(_) => return SessionError::Silent(GREETING_TIMEOUT),
    };
    let Some(info) = welcomed.as_ref() else { return SessionError::Closed };
    let mut silent = 0;
    loop {
        match tokio::time::timeout(LISTEN, stream.message()).await {
            Ok(Ok(Some(event))) => {
                silent = 0;
                if let Some(event) = event.event {
                    events.on_event(info, event);
                }
            }
            Ok(Ok(None)) => return SessionError::Ended,
            Ok(Err(status)) => return SessionError::Broken(status.message().to_owned()),
            Err(_) => {
                silent += 1;
                match silent {
                    SUSPECT_AFTER => events.on_silent(info),
                    LOST_AFTER.. => return SessionError::Silent(LISTEN * LOST_AFTER),
                    _ => {}
                }
            }
        }
    }
}

/// Dials, says hello, and hears who answers.
async fn greet(
    dial: Dial,
    conductor: ConductorId,
) -> Result<(NodeInfo, tonic::Streaming<v1::NodeEvent>), SessionError> {
    let mut client = NodeSessions::client(&dial.info.address).await?;
    let hello = v1::Hello { protocol_version: PROTOCOL_VERSION, conductor_id: conductor.to_string() };
    let hello = v1::NodeCommand { command: Some(v1::node_command::Command::Hello(hello)) };
    let commands = tokio_stream::StreamExt::chain(tokio_stream::once(hello), ReceiverStream::new(dial.commands));
    let broken = |status: tonic::Status| SessionError::Broken(status.message().to_owned());
    let mut stream = client.session(commands).await.map_err(broken)?.into_inner();
    let first = stream.message().await.map_err(broken)?;
    let Some(v1::node_event::Event::Welcome(welcome)) = first.and_then(|event| event.event) else {
        return Err(SessionError::WrongNode("its first event is not Welcome".to_owned()));
    };
    let info = check_welcome(welcome, &dial.info).map_err(SessionError::WrongNode)?;
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
