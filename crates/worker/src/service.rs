//! `baton.v1.Node`: checks and translates; the node's loop decides.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::{PROTOCOL_VERSION, check_protocol_version, generation, required, v1};
use baton_runtime::{Clock, TaskSet, within};
use baton_types::{
    ConductorId, ErrorKind, Generation, GrantId, Handoff, KvLayout, LeaseRelease, LeaseRequest, NodeInfo, NodeRole,
    PrefillEvent, Refused,
};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status, Streaming};

use crate::input::Input;
use crate::sessions::{ChangePace, EventReceiver, Sessions};

/// The loop answers at once or is stuck.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a conductor may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// The service of a node of either role.
pub struct NodeService<E> {
    /// Who this is.
    pub info: Arc<NodeInfo>,
    /// The node's loop: what must reach it.
    pub inputs: mpsc::Sender<Input<E>>,
    /// The same for what may be refused: who calls can come again.
    pub calls: mpsc::Sender<Input<E>>,
    /// The conductors' sessions.
    pub sessions: Sessions,
    /// Where session readers live.
    pub tasks: TaskSet,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
}

fn refused_status(refused: Refused) -> Status {
    baton_proto::status(refused.kind, refused.message, None)
}

fn overloaded(message: &str) -> Status {
    baton_proto::status(ErrorKind::Overloaded, message, None)
}

fn unavailable(message: impl Into<String>) -> Status {
    baton_proto::status(ErrorKind::Unavailable, message, None)
}

impl<E: Send + 'static> NodeService<E> {
    async fn input(&self, input: Input<E>) -> Result<(), Status> {
        self.inputs.send(input).await.map_err(|_| unavailable("this node is going down"))
    }

    /// Sends an input that is answered, and waits for the answer.
    async fn ask<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Input<E>) -> Result<T, Status> {
        let (answer, answered) = oneshot::channel();
        self.calls.try_send(make(answer)).map_err(|error| match error {
            TrySendError::Full(_) => overloaded("as many calls as may be wait at this node"),
            TrySendError::Closed(_) => unavailable("this node is going down"),
        })?;
        self.answer(answered).await
    }

    async fn answer<T>(&self, answered: oneshot::Receiver<T>) -> Result<T, Status> {
        match within(&*self.clock, ANSWER_TIMEOUT, answered).await {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(_)) => {
                Err(unavailable("this node dropped the call: it is going down, or the request was aborted"))
            }
            None => Err(unavailable(format!("this node's loop did not answer within {ANSWER_TIMEOUT:?}"))),
        }
    }

    fn check_decodes(&self) -> Result<(), Status> {
        if self.info.role == NodeRole::Decode {
            return Ok(());
        }
        Err(baton_proto::status(ErrorKind::Invalid, format!("{} is a {} node", self.info.node, self.info.role), None))
    }

    fn check_layout(&self, layout: Option<v1::KvLayout>) -> Result<(), Status> {
        let layout: KvLayout = required("layout", layout)?.try_into()?;
        let mismatch =
            |error: baton_types::LayoutMismatch| baton_proto::status(ErrorKind::Invalid, error.to_string(), None);
        self.info.layout.check_compatible(&layout).map_err(mismatch)
    }

    /// Whether a peer computes bitwise as this node does.
    fn computes_alike(&self, kv_class: &str) -> bool {
        kv_class == self.info.kv_class
    }

    fn check_generation(&self, target: Generation) -> Result<(), Status> {
        if target == self.info.generation {
            return Ok(());
        }
        let ours = self.info.generation;
        Err(unavailable(format!("{} is generation {ours}, and generation {target} was meant", self.info.node)))
    }
}

/// Takes commands in until the conductor ends the session or it breaks.
async fn read_commands<E>(
    mut commands: Streaming<v1::NodeCommand>,
    conductor: ConductorId,
    inputs: &mpsc::Sender<Input<E>>,
    sessions: &Sessions,
    clock: &dyn Clock,
) -> Result<(), Status> {
    use v1::node_command::Command;
    let mut pace = ChangePace::new(clock.now());
    while let Some(command) = commands.message().await? {
        let Some(command) = command.command else {
            tracing::warn!(%conductor, "a command that this version does not know: it is ignored");
            continue;
        };
        if matches!(command, Command::Hello(_)) {
            return Err(baton_proto::status(ErrorKind::Invalid, "a second hello", None));
        }
        if let Command::Settings(settings) = command {
            if sessions.on_settings(conductor, settings) {
                clock.sleep_until(pace.on_changed(clock.now())).await;
            }
            continue;
        }
        if let Command::Leader(leader) = &command {
            if sessions.on_leader(conductor, leader) {
                clock.sleep_until(pace.on_changed(clock.now())).await;
            }
            continue;
        }
        let fail = |key: Option<v1::RequestKey>, refused: Refused| {
            if let Ok(key) = baton_proto::key(key) {
                let failed = v1::PrefillEvent::from_domain(key, &PrefillEvent::Failed(refused));
                sessions.send(conductor, v1::node_event::Event::Prefill(failed));
            }
        };
        let ordered = match &command {
            Command::Prefill(job) => Some((job.key.clone(), job.term)),
            _ => None,
        };
        if let Some((key, term)) = &ordered
            && let Err(stale) = sessions.admit(conductor, *term)
        {
            let refused = Refused { kind: ErrorKind::Unavailable, message: stale.to_string() };
            fail(key.clone(), refused);
            continue;
        }
        match input(command, conductor) {
            Ok(Some(input)) => {
                if inputs.send(input).await.is_err() {
                    return Ok(());
                }
            }
            Ok(None) => {}
            // One command that cannot be read is no reason to end the requests of the others.
            Err(error) => {
                tracing::error!(%conductor, %error, "a command cannot be read: it is ignored");
                if let Some((key, _)) = ordered {
                    let refused = Refused { kind: ErrorKind::Internal, message: format!("the job: {error}") };
                    fail(key, refused);
                }
            }
        }
    }
    Ok(())
}

fn input<E>(
    command: v1::node_command::Command,
    conductor: ConductorId,
) -> Result<Option<Input<E>>, baton_proto::InvalidMessage> {
    use v1::node_command::Command;
    Ok(Some(match command {
        Command::Hello(_) | Command::Settings(_) | Command::Leader(_) => return Ok(None),
        Command::Prefill(job) => Input::Prefill(job.into_domain(conductor)?),
        Command::Abort(key) => Input::Abort(key.try_into()?),
        Command::KvSnapshot(_) => Input::KvSnapshot(conductor),
        Command::ClearCache(_) => Input::ClearCache,
        Command::ForgetPrefix(forget) => {
            Input::ForgetPrefix(baton_proto::hashes_from_bytes("block_hashes", &forget.block_hashes)?)
        }
        Command::NodeLost(lost) => Input::NodeLost(lost.into_domain()?),
        Command::Reselect(reselect) => Input::Reselect(reselect.try_into()?),
        Command::Drain(v1::DrainCommand { draining: true }) => Input::Drain,
        Command::Drain(v1::DrainCommand { draining: false }) => Input::Undrain,
    }))
}

async fn hello(commands: &mut Streaming<v1::NodeCommand>, clock: &dyn Clock) -> Result<ConductorId, Status> {
    let first = within(clock, HELLO_TIMEOUT, commands.message()).await;
    let first = first.ok_or_else(|| unavailable(format!("no hello within {HELLO_TIMEOUT:?}")))??;
    let Some(v1::node_command::Command::Hello(hello)) = first.and_then(|first| first.command) else {
        return Err(baton_proto::status(ErrorKind::Invalid, "the first command of a session must be hello", None));
    };
    check_protocol_version(hello.protocol_version)?;
    let invalid = |error: baton_types::ParseIdError| {
        baton_proto::status(ErrorKind::Invalid, format!("conductor_id: {error}"), None)
    };
    hello.conductor_id.parse().map_err(invalid)
}

#[tonic::async_trait]
impl<E: Send + 'static> v1::node_server::Node for NodeService<E> {
    type SessionStream = EventReceiver;

    async fn session(
        &self,
        request: Request<Streaming<v1::NodeCommand>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut commands = request.into_inner();
        let conductor = hello(&mut commands, &*self.clock).await?;
        let welcome = v1::Welcome { protocol_version: PROTOCOL_VERSION, node: Some((&*self.info).into()) };
        let opened = self.sessions.open(conductor, v1::node_event::Event::Welcome(welcome));
        let (epoch, ended, events) =
            opened.ok_or_else(|| overloaded("as many conductors as may be have sessions with this node"))?;
        // An earlier session of this conductor ended here, and its requests with it.
        self.input(Input::SessionClosed(conductor)).await?;
        self.input(Input::SessionOpened(conductor)).await?;
        let inputs = self.inputs.clone();
        let sessions = self.sessions.clone();
        let clock = Arc::clone(&self.clock);
        let end = self.tasks.clone();
        self.tasks.spawn_request("session reader", async move {
            let read = tokio::select! {
                read = read_commands(commands, conductor, &inputs, &sessions, &*clock) => read,
                () = end.cancelled() => Ok(()),
                () = ended.cancelled() => Ok(()),
            };
            if let Err(status) = read {
                // A conductor that goes down leaves so. What is lost by it the conductor says.
                tracing::info!(%conductor, reason = status.message(), "session broke");
            }
            if sessions.close(conductor, epoch) {
                // The loop is gone only when the process ends.
                let _ = inputs.send(Input::SessionClosed(conductor)).await;
            }
        });
        Ok(Response::new(events))
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> Result<Response<v1::GrantReply>, Status> {
        self.check_decodes()?;
        let request = request.into_inner();
        check_protocol_version(request.protocol_version)?;
        self.check_generation(generation("target_generation", &request.target_generation)?)?;
        self.check_layout(request.layout.clone())?;
        let is_other_class = !self.computes_alike(&request.kv_class);
        let request = baton_types::GrantRequest { is_other_class, ..request.try_into()? };
        let answer = self.ask(|answer| Input::Grant(request, answer)).await?;
        answer.map(Response::new).map_err(refused_status)
    }

    async fn release_grant(
        &self,
        request: Request<v1::ReleaseGrantRequest>,
    ) -> Result<Response<v1::ReleaseGrantReply>, Status> {
        self.check_decodes()?;
        let request = request.into_inner();
        self.input(Input::ReleaseGrant(baton_proto::key(request.key)?, GrantId(request.grant))).await?;
        Ok(Response::new(v1::ReleaseGrantReply {}))
    }

    async fn lease(&self, request: Request<v1::LeaseRequest>) -> Result<Response<v1::LeaseReply>, Status> {
        let request = request.into_inner();
        check_protocol_version(request.protocol_version)?;
        self.check_generation(generation("target_generation", &request.target_generation)?)?;
        self.check_layout(request.layout.clone())?;
        if !self.computes_alike(&request.kv_class) {
            let node = &self.info.node;
            let ours = &self.info.kv_class;
            let theirs = &request.kv_class;
            let message = format!("kv_class: {node} holds what '{ours}' computed, and '{theirs}' would read it");
            return Err(baton_proto::status(ErrorKind::Invalid, message, None));
        }
        let request = LeaseRequest::try_from(request)?;
        let asked = request.block_hashes.len();
        let most = self.info.layout.num_blocks as usize;
        if asked > most {
            let message = format!("block_hashes: {asked}, but this node has {most} blocks");
            return Err(baton_proto::status(ErrorKind::Invalid, message, None));
        }
        let answer = self.ask(|answer| Input::Lease(request, answer)).await?;
        answer.map(Response::new).map_err(refused_status)
    }

    async fn release_lease(
        &self,
        request: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseReply>, Status> {
        let request = request.into_inner();
        // A late word to an earlier start of this node must not end a lease of the same number.
        self.check_generation(generation("target_generation", &request.target_generation)?)?;
        self.input(Input::ReleaseLease(LeaseRelease::try_from(request)?)).await?;
        Ok(Response::new(v1::ReleaseLeaseReply {}))
    }

    async fn handoff(&self, request: Request<v1::HandoffRequest>) -> Result<Response<v1::HandoffReply>, Status> {
        self.check_decodes()?;
        let handoff = Handoff::try_from(request.into_inner())?;
        // It must not be refused for a flood of other calls: all of the prompt would be computed
        // again.
        let (answer, answered) = oneshot::channel();
        self.input(Input::Handoff(handoff, answer)).await?;
        let answer = self.answer(answered).await?;
        answer.map(|()| Response::new(v1::HandoffReply {})).map_err(refused_status)
    }

    async fn check_integrity(
        &self,
        _: Request<v1::CheckIntegrityRequest>,
    ) -> Result<Response<v1::CheckIntegrityResponse>, Status> {
        let report = self.ask(Input::CheckIntegrity).await?.map_err(refused_status)?;
        let load = Some((&report.load).into());
        Ok(Response::new(v1::CheckIntegrityResponse { problem: report.problem.unwrap_or_default(), load }))
    }
}
