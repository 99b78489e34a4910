//! A node that says what its test has it say.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_proto::v1::node_server::{Node, NodeServer};
use baton_proto::{PROTOCOL_VERSION, v1};
use baton_types::{
    DecodeEvent, ErrorKind, FinishReason, KvTransfer, NodeInfo, NodeRole, PrefillEvent, Refused, RequestKey,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use super::world::until;

type Said = Result<v1::NodeEvent, Status>;

/// A session that a conductor opened.
struct Session {
    commands: mpsc::UnboundedReceiver<Command>,
    events: mpsc::UnboundedSender<Said>,
}

/// See the module's text.
pub struct FakeNode {
    pub info: NodeInfo,
    /// What it reports.
    pub load: v1::Load,
    /// It does not report by itself.
    pub is_silent: bool,
    /// What its check of its blocks finds.
    pub problem: Arc<Mutex<String>>,
    /// It does not say who it is, and answers no check.
    pub is_mute: Arc<AtomicBool>,
    welcome: Arc<Mutex<NodeInfo>>,
    arrivals: mpsc::UnboundedReceiver<Session>,
    session: Option<Session>,
    /// The one before, which is the conductor's to close.
    _earlier: Option<Session>,
    /// Commands that no test has asked for yet.
    heard: VecDeque<Command>,
    server: JoinHandle<()>,
}

/// A job that a node was given.
pub struct Job {
    pub node: String,
    pub key: RequestKey,
    pub wire: v1::PrefillJob,
}

impl Job {
    /// Its decode node.
    pub fn decode(&self) -> String {
        self.wire.decode.as_ref().unwrap().node.clone()
    }
}

impl FakeNode {
    /// Serves `info` at an address of its own, which it gets here.
    pub async fn start(mut info: NodeInfo) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        info.address = format!("http://{}", listener.local_addr().unwrap());
        let (opened, arrivals) = mpsc::unbounded_channel();
        let problem = Arc::<Mutex<String>>::default();
        let is_mute = Arc::<AtomicBool>::default();
        let welcome = Arc::new(Mutex::new(info.clone()));
        let service = Service {
            welcome: Arc::clone(&welcome),
            problem: Arc::clone(&problem),
            is_mute: Arc::clone(&is_mute),
            opened,
        };
        let serving = tonic::transport::Server::builder()
            .add_service(NodeServer::new(service))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move { serving.await.unwrap() });
        let load = v1::Load {
            blocks_total: info.layout.num_blocks,
            accepts_migrations: info.role == NodeRole::Decode,
            ..v1::Load::default()
        };
        Self {
            info,
            load,
            is_silent: false,
            problem,
            is_mute,
            welcome,
            arrivals,
            session: None,
            _earlier: None,
            heard: VecDeque::new(),
            server,
        }
    }

    /// It is started again: the next session is of this generation.
    pub fn restart(&mut self, generation: u64) {
        self.info.generation = baton_types::Generation(generation);
        *self.welcome.lock().unwrap() = self.info.clone();
    }

    /// Takes the session that a conductor opened.
    pub async fn attach(&mut self) {
        let arrivals = &mut self.arrivals;
        let session = until("a session", || arrivals.try_recv().ok()).await;
        self._earlier = self.session.replace(session);
        self.heard.clear();
    }

    pub fn has_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| !session.events.is_closed())
    }

    pub fn say(&self, event: Event) {
        // A conductor that closed the session does not listen.
        let _ = self.session.as_ref().unwrap().events.send(Ok(v1::NodeEvent { event: Some(event) }));
    }

    /// Says what its load is; no two reports are the same.
    pub fn report(&mut self) -> v1::Load {
        self.load.prefix_queries += 1;
        self.say(Event::Load(self.load));
        self.load
    }

    /// Its process ends: the session breaks.
    pub fn die(&mut self) {
        let _ = self.session.take().unwrap().events.send(Err(Status::unavailable("killed")));
    }

    /// Another session takes the place of the conductor's.
    pub fn is_taken_over(&mut self) {
        let status = baton_proto::status(ErrorKind::Conflict, "another session of this conductor took its place", None);
        let _ = self.session.take().unwrap().events.send(Err(status));
    }

    /// It ends its session itself.
    pub fn leave(&mut self) {
        self.session = None;
    }

    pub fn prefill(&self, key: RequestKey, event: &PrefillEvent) {
        self.say(Event::Prefill(v1::PrefillEvent::from_domain(key, event)));
    }

    pub fn decode(&self, key: RequestKey, events: &[DecodeEvent]) {
        let events = events.iter().map(|event| v1::DecodeEvent::from_domain(key, event)).collect();
        self.say(Event::Decode(v1::DecodeEvents { events }));
    }

    pub fn started(&self, key: RequestKey) {
        self.prefill(key, &PrefillEvent::Started { queue: Duration::ZERO, cached_tokens: 0 });
    }

    pub fn first_token(&self, key: RequestKey, token: char, finish: Option<FinishReason>) {
        self.prefill(key, &first_token(token, finish));
    }

    pub fn handed_off(&self, key: RequestKey) {
        let transfer = KvTransfer { bytes: 4096, transport: "tcp".into(), ..KvTransfer::default() };
        self.prefill(key, &PrefillEvent::HandedOff(transfer));
    }

    /// All that a prefill node says of a request that goes well.
    pub fn computes(&self, key: RequestKey, token: char) {
        self.started(key);
        self.first_token(key, token, None);
        self.handed_off(key);
    }

    pub fn failed(&self, key: RequestKey, kind: ErrorKind) {
        self.prefill(key, &PrefillEvent::Failed(Refused { kind, message: "of the test".into() }));
    }

    pub fn token(&self, key: RequestKey, index: u32, token: char) {
        self.decode(key, &[decoded(index, token, None)]);
    }

    pub fn last_token(&self, key: RequestKey, index: u32, token: char) {
        self.decode(key, &[decoded(index, token, Some(FinishReason::Length))]);
    }

    /// It would rather have the request go on elsewhere.
    pub fn offer(&self, key: RequestKey, output_tokens: u32) {
        self.say(Event::MigrationRequest(v1::MigrationRequest { key: Some(key.into()), output_tokens }));
    }

    /// Takes the first command that it got for which `wanted` gives something; `None` if there is
    /// none so far.
    pub fn heard<T>(&mut self, mut wanted: impl FnMut(&Command) -> Option<T>) -> Option<T> {
        if let Some(session) = &mut self.session {
            while let Ok(command) = session.commands.try_recv() {
                self.heard.push_back(command);
            }
        }
        let (at, found) = self.heard.iter().enumerate().find_map(|(at, command)| Some((at, wanted(command)?)))?;
        self.heard.remove(at);
        Some(found)
    }

    /// Waits for such a command.
    pub async fn hears<T>(&mut self, what: &str, mut wanted: impl FnMut(&Command) -> Option<T>) -> T {
        let what = format!("{what} at {}", self.info.node);
        until(&what, || self.heard(&mut wanted)).await
    }

    /// A job, if there is one.
    pub fn job(&mut self) -> Option<Job> {
        let wire = self.heard(|command| match command {
            Command::Prefill(job) => Some(job.clone()),
            _ => None,
        })?;
        let key = baton_proto::key(wire.key.clone()).unwrap();
        Some(Job { node: self.info.node.to_string(), key, wire })
    }

    /// Waits until it is told to forget an attempt.
    pub async fn hears_abort(&mut self, key: RequestKey) {
        let key = v1::RequestKey::from(key);
        self.hears("an abort", |command| (*command == Command::Abort(key.clone())).then_some(())).await;
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.server.abort();
    }
}

pub fn first_token(token: char, finish: Option<FinishReason>) -> PrefillEvent {
    PrefillEvent::FirstToken {
        token: token.into(),
        logprobs: None,
        prompt_logprobs: Vec::new(),
        finish,
        compute: Duration::ZERO,
    }
}

pub fn decoded(index: u32, token: char, finish: Option<FinishReason>) -> DecodeEvent {
    DecodeEvent::Token { index, token: token.into(), logprobs: None, finish, queue: None }
}

struct Service {
    welcome: Arc<Mutex<NodeInfo>>,
    problem: Arc<Mutex<String>>,
    is_mute: Arc<AtomicBool>,
    opened: mpsc::UnboundedSender<Session>,
}

fn not_asked<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("conductors do not ask that"))
}

#[tonic::async_trait]
impl Node for Service {
    type SessionStream = Pin<Box<dyn Stream<Item = Said> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::NodeCommand>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut stream = request.into_inner();
        let (heard, commands) = mpsc::unbounded_channel();
        let (events, said) = mpsc::unbounded_channel();
        let node = Some((&*self.welcome.lock().unwrap()).into());
        let welcome = Event::Welcome(v1::Welcome { protocol_version: PROTOCOL_VERSION, node });
        if !self.is_mute.load(Relaxed) {
            events.send(Ok(v1::NodeEvent { event: Some(welcome) })).unwrap();
        }
        tokio::spawn(async move {
            while let Ok(Some(v1::NodeCommand { command: Some(command) })) = stream.message().await {
                if heard.send(command).is_err() {
                    return;
                }
            }
        });
        self.opened.send(Session { commands, events }).map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(said))))
    }

    async fn check_integrity(
        &self,
        _: Request<v1::CheckIntegrityRequest>,
    ) -> Result<Response<v1::CheckIntegrityResponse>, Status> {
        if self.is_mute.load(Relaxed) {
            std::future::pending::<()>().await;
        }
        let problem = self.problem.lock().unwrap().clone();
        Ok(Response::new(v1::CheckIntegrityResponse { problem, load: None }))
    }

    async fn grant(&self, _: Request<v1::GrantRequest>) -> Result<Response<v1::GrantReply>, Status> {
        not_asked()
    }

    async fn release_grant(
        &self,
        _: Request<v1::ReleaseGrantRequest>,
    ) -> Result<Response<v1::ReleaseGrantReply>, Status> {
        not_asked()
    }

    async fn handoff(&self, _: Request<v1::HandoffRequest>) -> Result<Response<v1::HandoffReply>, Status> {
        not_asked()
    }

    async fn lease(&self, _: Request<v1::LeaseRequest>) -> Result<Response<v1::LeaseReply>, Status> {
        not_asked()
    }

    async fn release_lease(
        &self,
        _: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseReply>, Status> {
        not_asked()
    }
}
