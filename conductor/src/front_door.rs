//! The way of a request through the conductor: check, tokenize, place, relay.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_runtime::{Clock, Phase, Shutdown, TaskSet, random_u64};
use baton_scheduler::{Cluster, Explanation, Placement, PlacementRequest, PrefixFetch, PrefixIndex};
use baton_text::StopStrings;
use baton_types::{
    Attempt, BlockHash, ConductorId, DecodeTarget, ErrorKind, FetchReport, FetchSource, NodeId, NodeInfo, NodeRole,
    PrefillJob, QueueTerms, RequestId, RequestKey, Slo, Tbt, Timeline, TokenId, Ttft, Usage,
};
use tokio::sync::{Semaphore, mpsc};

use crate::error::GenerateError;
use crate::hot_prefixes::HotPrefixes;
use crate::live::{EnterError, Entry, LiveRequests};
use crate::metrics::Metrics;
use crate::nodes::NodeSessions;
use crate::output::Output;
use crate::prompt::{CheckedRequest, Limits, TextModel};
use crate::records::{OpenRecord, Records, RequestEnd};
use crate::relay::Relay;
use crate::tally::SharedTally;
use crate::transfers::Transfers;

/// Prompts up to this many bytes are tokenized on the spot: handing them to another thread would take longer.
const TOKENIZE_INLINE_BYTES: usize = 2048;
/// Responses that may wait for a client to read; further events of the request wait in front of it, and they are bounded by its `max_tokens`.
const QUEUED_RESPONSES: usize = 64;

/// One of so many of the requests served at once may wait to be placed.
const HELD_SHARE: usize = 8;

/// One message to a client.
pub struct Outgoing {
    /// The message, or the error that ends the request.
    pub response: Result<v1::GenerateResponse, GenerateError>,
    /// When what it says came from a node; `None` where it is no token.
    pub heard: Option<Instant>,
}

/// What the front door sends to one client.
pub type Responses = mpsc::Receiver<Outgoing>;

/// Bounds of the front door.
#[derive(Debug, Clone, Copy)]
pub struct FrontDoorLimits {
    /// Requests served at once.
    pub max_requests: usize,
    /// A request without any event for this long, offers by its decode node not counted, is ended.
    pub stall_timeout: Duration,
    /// How often a request may be placed again after a node failed.
    pub max_attempts: u32,
}

/// Everything that requests share.
pub struct FrontDoor {
    /// This conductor.
    pub id: ConductorId,
    /// The model's text side.
    pub model: Arc<TextModel>,
    /// Bounds.
    pub limits: FrontDoorLimits,
    /// The requests being served.
    pub live: LiveRequests,
    /// The way to the nodes.
    pub nodes: NodeSessions,
    /// What the nodes last said of their transfers.
    pub transfers: Transfers,
    /// Metric handles.
    pub metrics: Metrics,
    /// What operators are told of the last requests.
    pub tally: SharedTally,
    /// What was decided on the last requests.
    pub records: Records,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Where request tasks live.
    pub tasks: TaskSet,
    /// How far this conductor is on its way down.
    pub shutdown: Shutdown,
    cluster: Mutex<Cluster>,
    hot_prefixes: Mutex<HotPrefixes>,
    /// The cluster's: nodes' events go there without holding the cluster.
    pub index: Arc<PrefixIndex>,
    tokenizing: Arc<Semaphore>,
    /// Places for requests that wait to be placed.
    holding: Semaphore,
}

impl FrontDoor {
    /// Puts the parts together.
    #[allow(clippy::too_many_arguments)] // one call, in `run`
    pub fn new(
        id: ConductorId,
        model: TextModel,
        limits: FrontDoorLimits,
        nodes: NodeSessions,
        metrics: Metrics,
        clock: Arc<dyn Clock>,
        tasks: TaskSet,
        shutdown: Shutdown,
        cluster: Cluster,
    ) -> Self {
        let live = LiveRequests::new(limits.max_requests);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let index = cluster.index();
        let hot_prefixes = Mutex::new(HotPrefixes::new(clock.now()));
        let (cluster, tokenizing) = (Mutex::new(cluster), Arc::new(Semaphore::new(threads)));
        Self {
            id,
            model: Arc::new(model),
            limits,
            live,
            nodes,
            transfers: Transfers::default(),
            metrics,
            tally: SharedTally::new(clock.now()),
            records: Records::default(),
            clock,
            tasks,
            shutdown,
            cluster,
            hot_prefixes,
            index,
            tokenizing,
            holding: Semaphore::new(places_to_wait(&limits)),
        }
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

    /// Takes a request in: checks it, tokenizes, places it, and sends it on its way. Whatever refuses it does so here, before the stream begins.
    pub async fn generate(self: &Arc<Self>, request: v1::GenerateRequest) -> Result<Responses, GenerateError> {
        let arrived = self.clock.now();
        let outcome = self.admit(request, arrived).await;
        self.metrics.on_admission(&outcome);
        self.tally.lock().admission.on_admission(self.clock.now(), &outcome);
        let (mut relay, responses) = outcome?;
        let door = Arc::clone(self);
        self.tasks.spawn_request("relay", async move {
            relay.run(&door).await;
        });
        Ok(responses)
    }

    async fn admit(
        self: &Arc<Self>,
        request: v1::GenerateRequest,
        arrived: Instant,
    ) -> Result<(Relay, Responses), GenerateError> {
        if self.shutdown.phase() >= Phase::Draining {
            return Err(GenerateError::going_down());
        }
        if self.live.len() >= self.limits.max_requests {
            return Err(self.full());
        }
        // Whatever waits to be tokenized counts, too, and what is obviously too large does not wait.
        self.model.check_size(&request)?;
        let id = RequestId(u128::from(random_u64()) << 64 | u128::from(random_u64()));
        let entry = self.live.enter(id, &request.idempotency_key).map_err(|error| self.cannot_enter(error))?;
        let checked = self.check(request).await?;
        let job = Job::new(id, checked, &self.cluster())?;
        let job = Job { record: Some(self.records.open(id, job.tokens.len() as u32, job.sampling.max_tokens)), ..job };
        let placement =
            self.place_first(&job, &entry, arrived).await.inspect_err(|error| self.not_taken(&job, error, arrived))?;
        if !job.bypasses_cache() {
            self.hot_prefixes().observe(self.clock.now(), &job.block_hashes);
        }
        let (out, responses) = mpsc::channel(QUEUED_RESPONSES);
        let relay = Relay::new(self, job, placement, entry, out, arrived)?;
        Ok((relay, responses))
    }

    /// Places a request for the first time. While its objective leaves time for the cluster to get room, it waits here; its client's leaving ends that.
    async fn place_first(&self, job: &Job, entry: &Entry, arrived: Instant) -> Result<Placement, GenerateError> {
        let (mut exclude, mut place_to_wait) = (Vec::new(), None);
        loop {
            let refused = match self.place(job, Attempt(0), &exclude, entry, arrived) {
                // Its session ended in this moment: the choice among the others is as good as new.
                Err(GenerateError::Node { node, .. }) if exclude.is_empty() => {
                    exclude.push(node);
                    continue;
                }
                Err(refused @ GenerateError::Refused { hold: Some(_), .. }) => refused,
                placed => return placed,
            };
            let GenerateError::Refused { hold: Some(hold), .. } = refused else { return Err(refused) };
            let waited = self.clock.now().saturating_duration_since(arrived);
            if self.shutdown.phase() >= Phase::Draining || waited > self.limits.stall_timeout {
                return Err(refused);
            }
            if place_to_wait.is_none() {
                // Who waits is bounded: beyond it, requests are refused at once.
                let Ok(permit) = self.holding.try_acquire() else { return Err(refused) };
                place_to_wait = Some(permit);
                self.metrics.on_held();
                self.tally.lock().admission.held += 1;
            }
            tokio::select! {
                () = baton_runtime::sleep(hold) => exclude.clear(),
                () = entry.aborted.cancelled() => return Err(GenerateError::Aborted),
            }
        }
    }

    /// The request was not taken in.
    fn not_taken(&self, job: &Job, error: &GenerateError, arrived: Instant) {
        let waited = self.clock.now().saturating_duration_since(arrived);
        let timeline = Timeline { placement: waited, total: waited, ..Timeline::default() };
        let usage = Usage { prompt_tokens: job.tokens.len() as u32, ..Usage::default() };
        if let Some(record) = &job.record {
            record.end(RequestEnd {
                outcome: Err(error.clone()),
                timeline,
                usage,
                tbt: None,
                decode: None,
                first_token: None,
            });
        }
    }

    /// Requests that wait at the door now.
    pub fn holding(&self) -> usize {
        places_to_wait(&self.limits).saturating_sub(self.holding.available_permits())
    }

    fn full(&self) -> GenerateError {
        let message = format!("this conductor serves {} requests, as many as it may", self.limits.max_requests);
        GenerateError::FrontDoor { kind: ErrorKind::Overloaded, message, retry_after: Some(Duration::from_secs(1)) }
    }

    fn cannot_enter(&self, error: EnterError) -> GenerateError {
        match error {
            EnterError::Full => self.full(),
            EnterError::Duplicate(running) => {
                GenerateError::invalid("idempotency_key", format!("request {running} with the same key is running"))
            }
        }
    }

    /// Whether a request could be served now: what every health check tells.
    pub fn is_ready(&self) -> bool {
        self.shutdown.phase() == Phase::Serving && self.cluster().is_ready()
    }

    /// What the nodes that are ready can take.
    pub fn node_limits(&self) -> Option<Limits> {
        let cluster = self.cluster();
        let nodes = || cluster.nodes().filter(|node| node.is_ready()).map(|node| node.info());
        Some(Limits {
            context_length: nodes().map(|info| info.context_length).min()?,
            vocab_size: nodes().map(|info| info.vocab_size).min()?,
        })
    }

    /// What placement would decide for a request now, and why; with the tokens of its prompt.
    pub async fn explain(&self, request: v1::GenerateRequest) -> Result<(u32, Explanation), GenerateError> {
        self.model.check_size(&request)?;
        let checked = self.check(request).await?;
        let id = RequestId(u128::from(random_u64()) << 64 | u128::from(random_u64()));
        let job = Job::new(id, checked, &self.cluster())?;
        let key = RequestKey { request: id, attempt: Attempt(0) };
        let wanted = job.placement_request(key, &[], Duration::ZERO);
        let explanation = self.cluster().explain(self.clock.now(), &wanted, &mut random_u64);
        Ok((wanted.prompt_tokens, explanation))
    }

    /// A prompt's length and the chained hashes of its full blocks.
    pub async fn prompt_hashes(&self, request: v1::GenerateRequest) -> Result<(u32, Arc<[BlockHash]>), GenerateError> {
        self.model.check_size(&request)?;
        let job = Job::new(RequestId::default(), self.check(request).await?, &self.cluster())?;
        Ok((job.tokens.len() as u32, job.block_hashes))
    }

    async fn check(&self, request: v1::GenerateRequest) -> Result<CheckedRequest, GenerateError> {
        let limits = self.node_limits().ok_or_else(|| GenerateError::FrontDoor {
            kind: ErrorKind::Unavailable,
            message: "no node is ready".to_owned(),
            retry_after: Some(Duration::from_secs(1)),
        })?;
        let (model, seed) = (Arc::clone(&self.model), random_u64());
        if prost_len(&request) <= TOKENIZE_INLINE_BYTES {
            return model.check(request, limits, seed);
        }
        // Closed only with the process.
        let permit = Arc::clone(&self.tokenizing).acquire_owned().await.map_err(|_| GenerateError::Aborted)?;
        let checking = tokio::task::spawn_blocking(move || {
            // Held until the work is over, even where the client has gone away.
            let _permit = permit;
            model.check(request, limits, seed)
        });
        checking.await.unwrap_or_else(|panic| {
            let message = format!("checking the request failed: {panic}");
            Err(GenerateError::FrontDoor { kind: ErrorKind::Internal, message, retry_after: None })
        })
    }

    /// Places an attempt, charges the nodes, and sends the prompt to the prefill node.
    pub fn place(
        &self,
        job: &Job,
        attempt: Attempt,
        exclude: &[NodeId],
        entry: &Entry,
        arrived: Instant,
    ) -> Result<Placement, GenerateError> {
        let key = RequestKey { request: job.request, attempt };
        let (placement, target, fetch, starts) = {
            let mut cluster = self.cluster();
            let now = self.clock.now();
            let waited = now.saturating_duration_since(arrived);
            let wanted = job.placement_request(key, exclude, waited);
            let explanation = Arc::new(cluster.place_explained(now, &wanted, &mut random_u64));
            if let Some(record) = &job.record {
                record.decided(attempt, waited, Arc::clone(&explanation));
            }
            let placement = explanation.decision.clone().map_err(|refusal| GenerateError::Refused {
                kind: refusal.kind,
                message: refusal.message,
                retry_after: refusal.retry_after,
                hold: refusal.hold,
            })?;
            let at_decode = cluster.node(&placement.prefill).is_some_and(|node| node.info().role == NodeRole::Decode);
            if at_decode {
                self.metrics.on_prompt_at_decode();
            }
            // A decode node that computes the prompt has nobody to hand it to.
            let decode = placement.decode.as_ref().filter(|_| !at_decode);
            let target = decode.and_then(|node| cluster.node(node));
            let target = target.map(|node| decode_target(node.info(), wanted.slo.tbt.map(|Tbt(tbt)| tbt)));
            let fetch = placement.fetch.as_ref().and_then(|fetch| fetch_source(&cluster, fetch));
            let start = |node: NodeId| cluster.node(&node).map(|known| (node.clone(), known.info().generation));
            let starts = placement.nodes().into_iter().filter_map(start).collect();
            (placement, target, fetch, starts)
        };
        // Before the job goes out: its first event must find the attempt entered.
        entry.placed(attempt, starts);
        let tail_tokens = if target.is_some() { placement.tail_tokens } else { 0 };
        if tail_tokens > 0 {
            self.metrics.on_split();
        }
        let whole = job.prefill_job(self.id, key, target, fetch, placement.terms);
        let prefill = PrefillJob { tail_tokens, ..whole };
        let command = v1::node_command::Command::Prefill((&prefill).into());
        if !self.nodes.send(&placement.prefill, command) {
            self.cluster().on_ended(self.clock.now(), key);
            // It may be held before it is placed again: the loss of this node is none of its own then.
            entry.placed(attempt, Vec::new());
            let message = "its session ended in this moment".to_owned();
            let refused = baton_types::Refused { kind: ErrorKind::Unavailable, message };
            let error = GenerateError::Node { node: placement.prefill, refused };
            if let Some(record) = &job.record {
                record.failed(&error);
            }
            return Err(error);
        }
        Ok(placement)
    }

    /// The output is complete, with so many tokens: what the ledger learns from.
    pub fn finished(&self, key: RequestKey, output_tokens: u32) {
        self.cluster().on_finished(self.clock.now(), key, output_tokens);
    }

    /// A prefix came to the attempt's prefill node from another one, or did not.
    pub fn fetched(&self, key: RequestKey, placement: &Placement, report: &FetchReport) {
        let mut cluster = self.cluster();
        cluster.on_fetch_done(key);
        // What a node found on its own SSD says nothing of the way between nodes.
        let Some(fetch) = placement.fetch.as_ref().filter(|_| report.transport != FetchReport::SSD) else { return };
        cluster.on_fetched(self.clock.now(), &fetch.from, &placement.prefill, report);
    }

    /// Ends an attempt on its nodes and in the ledger. Nodes that are done with it, or gone, do not mind.
    pub fn end(&self, key: RequestKey, placement: &Placement, abort: bool) {
        self.cluster().on_ended(self.clock.now(), key);
        if abort {
            for node in placement.nodes() {
                self.nodes.send(&node, v1::node_command::Command::Abort(key.into()));
            }
        }
    }
}

pub(crate) fn decode_target(info: &NodeInfo, tbt: Option<Duration>) -> DecodeTarget {
    DecodeTarget { node: info.node.clone(), generation: info.generation, address: info.address.clone(), tbt }
}

pub(crate) fn fetch_source(cluster: &Cluster, fetch: &PrefixFetch) -> Option<FetchSource> {
    let info = cluster.node(&fetch.from)?.info();
    Some(FetchSource {
        node: info.node.clone(),
        generation: info.generation,
        address: info.address.clone(),
        tokens: fetch.tokens,
    })
}

fn places_to_wait(limits: &FrontDoorLimits) -> usize {
    (limits.max_requests / HELD_SHARE).max(1)
}

fn prost_len(request: &v1::GenerateRequest) -> usize {
    use prost::Message;
    request.encoded_len()
}

/// A request that was checked: what is the same in every attempt.
pub struct Job {
    /// The request.
    pub request: RequestId,
    /// The prompt.
    pub tokens: Arc<[TokenId]>,
    /// How to draw.
    pub sampling: Arc<baton_types::SamplingParams>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Chained hashes of the prompt's full blocks.
    pub block_hashes: Arc<[BlockHash]>,
    /// Where its decisions are kept; none where it is only asked what would be decided.
    pub record: Option<OpenRecord>,
    slo: Slo,
    priority: i32,
}

impl Job {
    fn new(request: RequestId, checked: CheckedRequest, cluster: &Cluster) -> Result<Self, GenerateError> {
        let block_hashes = cluster.block_hashes(&checked.tokens, &[]).ok_or_else(|| GenerateError::FrontDoor {
            kind: ErrorKind::Unavailable,
            message: "no node is ready".to_owned(),
            retry_after: Some(Duration::from_secs(1)),
        })?;
        Ok(Self {
            request,
            tokens: checked.tokens.into(),
            sampling: Arc::new(checked.sampling),
            stop: checked.stop,
            block_hashes: block_hashes.into(),
            record: None,
            slo: checked.slo,
            priority: checked.priority,
        })
    }

    /// Whether a request that finished was within its objectives; those that it does not have count as met.
    pub fn is_met_by(&self, ttft: Duration, tbt: Option<Tbt>) -> bool {
        self.slo.ttft.is_none_or(|limit| Ttft(ttft) <= limit)
            && self.slo.tbt.zip(tbt).is_none_or(|(limit, tbt)| tbt <= limit)
    }

    fn wants_decode(&self) -> bool {
        self.sampling.max_tokens > 1
    }

    fn bypasses_cache(&self) -> bool {
        self.sampling.prompt_logprobs.is_some()
    }

    /// What is asked of the cluster, `waited` after the request's arrival: its objective counts from there.
    fn placement_request<'a>(
        &'a self,
        key: RequestKey,
        exclude: &'a [NodeId],
        waited: Duration,
    ) -> PlacementRequest<'a> {
        // What was accepted is not refused by prediction any more.
        let slo = if key.attempt == Attempt(0) { self.slo } else { Slo::default() };
        PlacementRequest {
            key,
            prompt_tokens: self.tokens.len() as u32,
            block_hashes: &self.block_hashes,
            max_tokens: self.sampling.max_tokens,
            wants_decode: self.wants_decode(),
            slo,
            waited,
            priority: self.priority,
            bypass_cache: self.bypasses_cache(),
            exclude,
        }
    }

    /// The job as its node gets it, none of it left to the decode node.
    pub(crate) fn prefill_job(
        &self,
        conductor: ConductorId,
        key: RequestKey,
        decode: Option<DecodeTarget>,
        fetch: Option<FetchSource>,
        terms: QueueTerms,
    ) -> PrefillJob {
        let (tokens, sampling) = (Arc::clone(&self.tokens), Arc::clone(&self.sampling));
        let (output_tokens, tail_tokens, salt) = (0, 0, Arc::from([]));
        PrefillJob { key, conductor, tokens, output_tokens, sampling, decode, tail_tokens, fetch, salt, terms }
    }

    /// The output's state before its first token.
    pub fn output(&self, model: &TextModel) -> Result<Output, GenerateError> {
        let stops = StopStrings::new(&self.stop).map_err(|error| GenerateError::invalid("stop", error.to_string()))?;
        Ok(Output::new(self.sampling.max_tokens, model.tokenizer.detokenizer(), stops))
    }
}
