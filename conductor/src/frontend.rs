//! The way of a request through the conductor: check, tokenize, then a `Relay` takes it to its end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_intake::{Budget, Reservation};
use baton_proto::v1;
use baton_runtime::{Clock, Phase, Shutdown, TaskSet, random_u64, within};
use baton_scheduler::{
    Cluster, HotPrefixes, PrefixIndex, RequestCore, RequestError, RequestJob, RequestLimits, SequenceLimits,
};
use baton_types::{Attempt, BlockHash, ConductorId, ErrorKind, KvDtype, NodeId, RequestId, RequestKey, Slo, TokenId};
use tokio::sync::mpsc;

use crate::checks::Checks;
use crate::decision_log::DecisionLog;
use crate::error::GenerateError;
use crate::grpc::explain;
use crate::keyed::KeyedAnswers;
use crate::leader::{Answer, DecisionReasons, Desk, PendingAnswer};
use crate::live::{Entry, LiveRequests};
use crate::metrics::Metrics;
use crate::nodes::NodeSessions;
use crate::other_answers::{Decodes, OtherAnswers};
use crate::output::OutputText;
use crate::prompt::{CheckedRequest, TextModel, timeout};
use crate::relay::Relay;
use crate::run_time_settings::{Rules, RunTimeSettings};
use crate::transfers::Transfers;
use crate::turns::Client;
use crate::unjoined::UnjoinedNodes;
use crate::window_stats::SharedWindowStats;

/// Responses on their way to a client's connection. What that does not take is kept by its relay,
/// within bounds.
pub(crate) const QUEUED_RESPONSES: usize = 64;

/// Most answers of a request.
const MAX_ANSWERS: u32 = 128;
/// Longest idempotency key, bytes.
pub const MAX_IDEMPOTENCY_KEY_BYTES: usize = 128;
/// Longest id that a client gives its request, bytes.
pub const MAX_CLIENT_ID_BYTES: usize = 128;

/// One message to a client.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// The message, or the error that ends the request.
    pub response: Result<v1::GenerateResponse, GenerateError>,
    /// When what it says came from a node; `None` if it is no token.
    pub heard: Option<Instant>,
}

/// What the frontend sends to one client.
pub type Responses = mpsc::Receiver<Outgoing>;

/// A request that is to be placed.
struct AcceptedRequest {
    entry: Entry,
    /// Of its other answers.
    more: Vec<Entry>,
    text: OutputText,
    /// The request's own, before what the conductor sets for all.
    objectives: Slo,
    job: RequestJob,
}

/// A request that was taken in.
struct Admitted {
    relay: Relay,
    /// If more than one answer is wanted.
    others: Option<OtherAnswers>,
    responses: Responses,
}

/// Bounds of the frontend.
#[derive(Debug, Clone, Copy)]
pub struct FrontendLimits {
    /// Requests served at once.
    pub max_requests: usize,
    /// Objectives of requests that have none of their own.
    pub default_slo: Slo,
    /// Longest that a request may take.
    pub max_time: Duration,
    /// Those of each.
    pub request: RequestLimits,
}

/// How nodes keep KV. Only nodes that do it alike can serve together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvFormat {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Element type of K and V.
    pub dtype: KvDtype,
}

/// Everything that requests share.
pub struct Frontend {
    /// This conductor.
    pub id: ConductorId,
    /// The model's text side.
    pub model: Arc<TextModel>,
    /// How all nodes keep KV.
    pub kv: KvFormat,
    /// Its settings.
    pub settings: RunTimeSettings,
    limits: Mutex<FrontendLimits>,
    /// The requests being served.
    pub live: LiveRequests,
    /// The way to the nodes.
    pub nodes: NodeSessions,
    /// Nodes that asked to join, without a session.
    pub unjoined: UnjoinedNodes,
    /// What the nodes last said of their transfers.
    pub transfers: Transfers,
    /// Metric handles.
    pub metrics: Metrics,
    /// What operators are told of the last requests.
    pub window_stats: SharedWindowStats,
    /// What was decided on the last requests.
    pub decision_log: DecisionLog,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Where request tasks live.
    pub tasks: TaskSet,
    /// How far this conductor is on its way down.
    pub shutdown: Shutdown,
    /// For what clients have not read.
    pub unread: Budget,
    /// Of requests with an idempotency key.
    pub keyed: KeyedAnswers,
    /// Where the questions of requests go.
    pub desk: Desk,
    cluster: Mutex<Cluster>,
    hot_prefixes: Mutex<HotPrefixes>,
    /// The cluster's: nodes' events go there without holding the cluster.
    pub index: Arc<PrefixIndex>,
    checks: Checks,
}

impl Frontend {
    /// Puts the parts together.
    pub fn new(
        id: ConductorId,
        model: TextModel,
        settings: RunTimeSettings,
        rules: &Rules,
        metrics: Metrics,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let own = &settings.in_force().borrow().settings.settings.clone();
        let limits = rules.limits;
        let cluster = rules.cluster();
        let live = LiveRequests::new(limits.max_requests);
        let index = cluster.index();
        let hot_prefixes = Mutex::new(HotPrefixes::new(clock.now()));
        Self {
            id,
            model: Arc::new(model),
            kv: KvFormat { block_tokens: own.block_tokens, dtype: own.kv_dtype },
            limits: Mutex::new(limits),
            live,
            nodes: NodeSessions::default(),
            unjoined: UnjoinedNodes::default(),
            transfers: Transfers::default(),
            metrics,
            window_stats: SharedWindowStats::new(clock.now()),
            decision_log: DecisionLog::default(),
            clock,
            tasks: TaskSet::new(),
            shutdown: Shutdown::new(),
            unread: Budget::new(own.body_budget()),
            keyed: KeyedAnswers::new(own.body_budget()),
            settings,
            desk: Desk::new(id),
            cluster: Mutex::new(cluster),
            hot_prefixes,
            index,
            checks: Checks::default(),
        }
    }

    /// Bounds, as they are now.
    pub fn limits(&self) -> FrontendLimits {
        // It is plain data: a panic leaves it whole.
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Other bounds from now on.
    pub fn set_limits(&self, limits: FrontendLimits) {
        self.live.set_limit(limits.max_requests);
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    /// The conductor's picture of the cluster. Never held across an await.
    pub fn cluster(&self) -> MutexGuard<'_, Cluster> {
        // The cluster checks its own accounts; a panic in another request must not end all of them.
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which prefixes requests begin with. Never held across an await.
    pub fn hot_prefixes(&self) -> MutexGuard<'_, HotPrefixes> {
        // What a panic left behind is a wrong count at worst.
        self.hot_prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request in: checks it, tokenizes, places it, and sends it on its way. Whatever
    /// refuses it does so here, before the stream begins. Its answers have the id and those that
    /// follow it. `taken_in` is what the request has of the budget of bodies, given back once it is
    /// tokens.
    pub async fn generate(
        self: &Arc<Self>,
        id: RequestId,
        request: v1::GenerateRequest,
        taken_in: Option<Arc<Reservation>>,
    ) -> Result<Responses, GenerateError> {
        if request.idempotency_key.is_empty() {
            return self.begin(id, request, taken_in).await;
        }
        self.check_keyed(id, &request)?;
        self.generate_keyed(id, request, taken_in).await
    }

    fn check_keyed(&self, id: RequestId, request: &v1::GenerateRequest) -> Result<(), GenerateError> {
        let checked = check_idempotency_key(&request.idempotency_key);
        let checked = checked.and_then(|()| check_client_id(&request.client_request_id).map(|_| ()));
        checked.inspect_err(|error| self.on_refused(id, error))
    }

    /// A request was refused before it was begun.
    pub(crate) fn on_refused(&self, id: RequestId, error: &GenerateError) {
        let told = error.to_string();
        tracing::info!(request = %id, error = told, "request rejected");
        let outcome: Result<(), _> = Err(error.clone());
        self.metrics.on_admission(&outcome);
        self.window_stats.lock().admission.on_admission(self.clock.now(), &outcome);
    }

    /// The same of a request that no other one has begun.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        id: RequestId,
        request: v1::GenerateRequest,
        taken_in: Option<Arc<Reservation>>,
    ) -> Result<Responses, GenerateError> {
        let arrived = self.clock.now();
        let outcome = self.admit(id, request, arrived, taken_in).await;
        self.metrics.on_admission(&outcome);
        self.window_stats.lock().admission.on_admission(self.clock.now(), &outcome);
        let Admitted { mut relay, others, responses } = outcome?;
        self.tasks.spawn_request("relay", async move { relay.run().await });
        if let Some(others) = others {
            let frontend = Arc::clone(self);
            self.tasks.spawn_request("other answers", async move { others.run(&frontend).await });
        }
        Ok(responses)
    }

    async fn admit(
        self: &Arc<Self>,
        id: RequestId,
        request: v1::GenerateRequest,
        arrived: Instant,
        taken_in: Option<Arc<Reservation>>,
    ) -> Result<Admitted, GenerateError> {
        let client_id: Arc<str> = check_client_id(&request.client_request_id)?.into();
        // From its record on, its end is logged.
        let taken = self.take_in(id, &client_id, request).await.inspect_err(|error| {
            let client_request = Some(&*client_id).filter(|id| !id.is_empty());
            // What it repeats of a request is quoted.
            let error = error.to_string();
            tracing::info!(request = %id, client_request, error, "request rejected");
        });
        let AcceptedRequest { entry, more, text, objectives, job } = taken?;
        // It may wait long from here on, and what it was read into is gone.
        drop(taken_in);
        let hashes = Arc::clone(&job.block_hashes);
        let observed = !job.bypasses_cache();
        let (out, responses) = mpsc::channel(QUEUED_RESPONSES);
        let (others, decodes) = OtherAnswers::new(more, &job, arrived, objectives, &text, &out).unzip();
        let mut relay = self.relay(0, decodes, arrived, job, text, entry, out);
        relay.admitted(objectives).await?;
        if observed {
            self.hot_prefixes().observe(self.clock.now(), &hashes);
        }
        Ok(Admitted { relay, others, responses })
    }

    /// All that may refuse a request before it is to be placed.
    async fn take_in(
        &self,
        id: RequestId,
        client_id: &Arc<str>,
        request: v1::GenerateRequest,
    ) -> Result<AcceptedRequest, GenerateError> {
        if self.shutdown.phase() >= Phase::Draining {
            return Err(RequestError::GoingDown.into());
        }
        if self.live.len() >= self.limits().max_requests {
            return Err(self.full());
        }
        // Whatever waits to be tokenized counts, too, and what is obviously too large does not
        // wait.
        self.model.check_size(&request)?;
        let enter = |id| self.live.enter(id, Arc::clone(client_id)).map_err(|_| self.full());
        let entry = enter(id)?;
        let more = (1..self.check_n(request.n)?)
            .map(|completion| enter(id.plus(completion)))
            .collect::<Result<Vec<_>, _>>()?;
        let time = self.time(timeout(request.timeout_ms)?);
        let checking = within(&*self.clock, time, self.check(request)).await;
        let checked = checking.ok_or(RequestError::TimedOut(time))??;
        self.metrics.on_checked(&checked);
        let text = OutputText::new(&self.model.tokenizer, &checked)?;
        let objectives = checked.slo;
        let job = self.job(entry.request(), checked)?;
        Ok(AcceptedRequest { entry, more, text, objectives, job })
    }

    /// The relay of an answer that has not been placed.
    pub(crate) fn relay(
        self: &Arc<Self>,
        completion: u32,
        decodes: Option<Decodes>,
        arrived: Instant,
        job: RequestJob,
        text: OutputText,
        entry: Entry,
        out: mpsc::Sender<Outgoing>,
    ) -> Relay {
        let client_id = Arc::clone(&entry.client_id);
        let record = self.decision_log.open(job.request, client_id, job.tokens.len() as u32, job.sampling.max_tokens);
        let core = RequestCore::new(self.clock.now(), arrived, job, self.limits().request);
        Relay::new(Arc::clone(self), completion, decodes, core, text, record, entry, out)
    }

    fn job(&self, request: RequestId, checked: CheckedRequest) -> Result<RequestJob, GenerateError> {
        let (hasher, block_tokens) = self.cluster().block_hasher(&[]).ok_or_else(no_node)?;
        let block_hashes = hasher.chain(&checked.tokens, block_tokens);
        Ok(RequestJob {
            request,
            conductor: self.id,
            tokens: checked.tokens.into(),
            sampling: Arc::new(checked.sampling),
            block_hashes: block_hashes.into(),
            slo: checked.slo.or(self.limits().default_slo),
            timeout: self.time(checked.timeout),
            priority: checked.priority,
            first_completion_nodes: Vec::new(),
        })
    }

    /// How long a request may take that asks for so much.
    pub(crate) fn time(&self, wanted: Option<Duration>) -> Duration {
        let most = self.limits().max_time;
        wanted.map_or(most, |wanted| wanted.min(most))
    }

    /// How many answers are wanted.
    fn check_n(&self, n: u32) -> Result<u32, GenerateError> {
        let most = usize::try_from(MAX_ANSWERS).unwrap_or(usize::MAX).min(self.limits().max_requests);
        match n {
            0 => Ok(1),
            _ if n as usize <= most => Ok(n),
            _ => Err(GenerateError::invalid("n", format!("{n}, but at most {most} answers are given"))),
        }
    }

    pub(crate) fn full(&self) -> GenerateError {
        let message = format!("max_requests: this conductor serves as many as it may, {}", self.limits().max_requests);
        GenerateError::Frontend { kind: ErrorKind::Overloaded, message, retry_after: Some(Duration::from_secs(1)) }
    }

    /// Sends a command that an operator waits for.
    pub fn tell(&self, node: &NodeId, command: v1::node_command::Command) -> Result<(), GenerateError> {
        if self.nodes.send(node, command) {
            return Ok(());
        }
        let message = format!("node: {node} has no session with this conductor");
        Err(GenerateError::Frontend { kind: ErrorKind::Unavailable, message, retry_after: None })
    }

    /// Whether a request could be served now: what every health check tells.
    pub fn is_ready(&self) -> bool {
        let serves = self.shutdown.phase() == Phase::Serving;
        // One after the other: the desk takes the cluster's lock under its own.
        serves && self.desk.is_led(self.clock.now()) && self.cluster().is_ready()
    }

    /// What the nodes that are ready can take.
    pub fn node_limits(&self) -> Option<SequenceLimits> {
        self.cluster().sequence_limits(self.clock.now())
    }

    /// What would be decided for a request now, and why: by the one that places.
    pub async fn explain(&self, request: v1::GenerateRequest) -> Result<v1::ExplainResponse, GenerateError> {
        self.model.check_size(&request)?;
        let checked = self.check(request).await?;
        let id = new_request_id();
        let job = self.job(id, checked)?;
        let key = RequestKey { request: id, attempt: Attempt(0) };
        let wanted = job.placement_request(key, 0, &[], Duration::ZERO);
        let answer = match self.ask_why(&wanted) {
            PendingAnswer::Ready(answer) => Some(answer),
            PendingAnswer::Later(later) => later.await.ok(),
        };
        match answer {
            Some(Answer::Explained(DecisionReasons::Own(why))) => Ok(explain::response(wanted.prompt_tokens, &why)),
            Some(Answer::Explained(DecisionReasons::FromLeader(why))) => Ok(*why),
            _ => Err(no_leader()),
        }
    }

    /// The tokens of a prompt, and how many of prompt and output a request may have.
    pub async fn tokenize(&self, request: v1::GenerateRequest) -> Result<(Vec<TokenId>, u32), GenerateError> {
        self.model.check_size(&request)?;
        let most = self.node_limits().ok_or_else(no_node)?.sequence;
        Ok((self.check(request).await?.tokens, most))
    }

    /// A prompt's length and the chained hashes of its full blocks.
    pub async fn prompt_hashes(&self, request: v1::GenerateRequest) -> Result<(u32, Arc<[BlockHash]>), GenerateError> {
        self.model.check_size(&request)?;
        let job = self.job(RequestId::default(), self.check(request).await?)?;
        Ok((job.tokens.len() as u32, job.block_hashes))
    }

    async fn check(&self, request: v1::GenerateRequest) -> Result<CheckedRequest, GenerateError> {
        let limits = self.node_limits().ok_or_else(no_node)?;
        self.checks.check(&self.model, Client, request, limits, &self.shutdown).await
    }
}

/// The id of a request that comes now.
pub fn new_request_id() -> RequestId {
    RequestId(u128::from(random_u64()) << 64 | u128::from(random_u64()))
}

fn check_client_id(id: &str) -> Result<&str, GenerateError> {
    if id.len() <= MAX_CLIENT_ID_BYTES {
        return Ok(id);
    }
    let problem = format!("{} bytes, but at most {MAX_CLIENT_ID_BYTES} are taken", id.len());
    Err(GenerateError::invalid("client_request_id", problem))
}

fn check_idempotency_key(key: &str) -> Result<(), GenerateError> {
    if key.len() <= MAX_IDEMPOTENCY_KEY_BYTES {
        return Ok(());
    }
    let problem = format!("{} bytes, but at most {MAX_IDEMPOTENCY_KEY_BYTES} are taken", key.len());
    Err(GenerateError::invalid("idempotency_key", problem))
}

fn no_leader() -> GenerateError {
    let message = "no conductor leads: nothing is placed".to_owned();
    GenerateError::Frontend { kind: ErrorKind::Unavailable, message, retry_after: Some(Duration::from_secs(1)) }
}

fn no_node() -> GenerateError {
    let message = "no node is ready".to_owned();
    GenerateError::Frontend { kind: ErrorKind::Unavailable, message, retry_after: Some(Duration::from_secs(1)) }
}
