//! Core and shell of a prefill node in one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_proto::{PROTOCOL_VERSION, v1};
use baton_scheduler::{
    FetchedBytes, KvEventBatch, LeaseEffect, PrefillConfig, PrefillCore, PrefillEffect, PushId, PushReport, PushSpan,
    RequestKey, StepId, StepPlan,
};
use baton_transfer_engine::{BatchOptions, SpanPair, TransferError, TransportChoice};
use baton_types::{DecodeTarget, ErrorKind, GrantId, GrantReply, GrantRequest, Handoff, Load, NodeInfo, Refused};
use baton_worker::config::Settings;
use baton_worker::{
    Direction, EngineEvent, FetchEvent, Fetching, Input, LeaseDesk, LinkPacer, NodeParts, PacedCancel, Peers,
    RemoteArena, Role, Ssd, StepMetrics, TierEvent, core_refused, paced, refused, start_fetch,
};

use crate::metrics::Metrics;

/// A push makes progress or is given up within this time.
const PUSH_DEADLINE: Duration = Duration::from_secs(30);
/// What the core never asks for without one.
const NO_SSD: &str = "the core wants an SSD, and this node has none";
/// How often a grant that is not needed is given back; one that is forgotten expires by itself.
const RELEASE_ATTEMPTS: u32 = 3;
/// The pause after the first attempt; after the second one it is twice as long.
const RELEASE_RETRY: Duration = Duration::from_millis(200);

/// What only a prefill node takes in: answers to its effects.
#[derive(Debug)]
pub enum PrefillInput {
    /// The decode node's answer to a grant request.
    GrantReply(RequestKey, Result<(GrantReply, RemoteArena), Refused>),
    /// A batch of writes is over.
    PushDone(RequestKey, PushId, Result<PushReport, Refused>),
    /// The decode node's answer to a handoff.
    HandoffReply(RequestKey, Result<(), Refused>),
    /// The holder of a prefix agreed, and has so many of the blocks asked for.
    FetchBegun(RequestKey, usize),
    /// One layer of a prefix is here.
    Fetched(RequestKey, u32),
    /// A prefix is here whole, or the rest will not come.
    FetchDone(RequestKey, Result<FetchedBytes, Refused>),
    /// The SSD has something to say.
    Tier(TierEvent),
}

impl From<TierEvent> for PrefillInput {
    fn from(event: TierEvent) -> Self {
        match event {
            // What comes from the SSD is a fetch like any other.
            TierEvent::Begun(key, blocks) => Self::FetchBegun(key, blocks),
            TierEvent::Layer(key, layer) => Self::Fetched(key, layer),
            TierEvent::Done(key, result) => Self::FetchDone(key, result),
            event => Self::Tier(event),
        }
    }
}

impl From<FetchEvent> for PrefillInput {
    fn from(event: FetchEvent) -> Self {
        match event {
            FetchEvent::Begun(key, blocks) => Self::FetchBegun(key, blocks),
            FetchEvent::Layer(key, layer) => Self::Fetched(key, layer),
            FetchEvent::Done(key, result) => Self::FetchDone(key, result),
        }
    }
}

/// See the module's text.
pub struct PrefillRole {
    core: PrefillCore,
    parts: NodeParts<PrefillInput>,
    peers: Peers,
    /// What may carry pushes.
    transport: TransportChoice,
    /// Arenas that requests push to.
    remotes: HashMap<RequestKey, RemoteArena>,
    /// Batches under way.
    pushes: HashMap<RequestKey, Vec<(PushId, PacedCancel)>>,
    /// Prefixes on their way here.
    fetches: HashMap<RequestKey, Fetching>,
    /// Other nodes that read here.
    leases: LeaseDesk,
    /// The tier below the arena, if there is one.
    ssd: Option<Ssd>,
    /// The step in flight: rows, tokens attended to.
    step: Option<(StepId, u32, u64)>,
    metrics: Metrics,
    steps: StepMetrics,
}

impl PrefillRole {
    /// A role from its parts.
    pub fn new(settings: &Settings, parts: NodeParts<PrefillInput>) -> anyhow::Result<Self> {
        let config = PrefillConfig::new(parts.info.node.clone(), parts.info.generation, parts.model.clone());
        let mut config = config.with_chunk_tokens(settings.chunk_tokens);
        config.max_waiting = settings.max_waiting as usize;
        config.eviction = settings.eviction;
        config.max_sequences_per_chunk = settings.max_running as usize;
        config.max_stores = Ssd::max_stores(settings);
        let mut core = PrefillCore::new(config).map_err(|error| core_refused(&error))?;
        let ssd = Ssd::open(settings, &parts, &mut core)?;
        Ok(Self {
            ssd,
            core,
            parts,
            peers: Peers::default(),
            transport: settings.transport,
            remotes: HashMap::new(),
            pushes: HashMap::new(),
            fetches: HashMap::new(),
            leases: LeaseDesk::default(),
            step: None,
            metrics: Metrics::default(),
            steps: StepMetrics::default(),
        })
    }

    fn on_engine(&mut self, now: Instant, event: EngineEvent) {
        match event {
            EngineEvent::KvReady { step, layer } => self.core.on_kv_ready(now, step, layer),
            EngineEvent::PrefixLate { step, key } => {
                self.metrics.late.increment(1);
                self.core.on_prefix_late(now, step, key);
            }
            EngineEvent::StepDone { step, result, elapsed, layers_ended, slice: _ } => {
                self.core.on_layers_done(step, layers_ended);
                if let Some((_, rows, attended)) = self.step.take_if(|in_flight| in_flight.0 == step) {
                    self.steps.on_step(rows, elapsed);
                    let attended_tokens = attended;
                    let seconds = elapsed.as_secs_f64();
                    let report = v1::StepReport { rows, attended_tokens, seconds, prompt_rows: rows, slice: None };
                    self.parts.sessions.broadcast(&v1::node_event::Event::Step(report));
                }
                self.core.on_step_done(now, step, result);
            }
        }
    }

    fn on_role(&mut self, now: Instant, input: PrefillInput) {
        match input {
            PrefillInput::GrantReply(key, reply) => {
                let reply = reply.map(|(reply, remote)| {
                    self.remotes.insert(key, remote);
                    reply
                });
                self.core.on_grant_reply(now, key, reply);
            }
            PrefillInput::PushDone(key, push, result) => {
                if let Some(pushes) = self.pushes.get_mut(&key) {
                    pushes.retain(|(id, _)| *id != push);
                    if pushes.is_empty() {
                        self.pushes.remove(&key);
                    }
                }
                self.core.on_push_done(now, key, push, result);
            }
            PrefillInput::HandoffReply(key, result) => self.core.on_handoff_reply(now, key, result),
            PrefillInput::FetchBegun(key, blocks) => self.core.on_fetch_begun(now, key, blocks),
            PrefillInput::Fetched(key, layer) => self.core.on_fetched(now, key, layer),
            PrefillInput::Tier(event) => {
                if let Some(ssd) = &mut self.ssd {
                    ssd.on_event(&mut self.core, event);
                }
            }
            PrefillInput::FetchDone(key, result) => {
                let fetching = self.fetches.remove(&key);
                if let (Some(ssd), Ok(fetched)) = (&self.ssd, &result) {
                    ssd.on_fetched(fetched);
                }
                self.core.on_fetch_done(now, key, result);
                if let Some(fetching) = fetching {
                    fetching.barrier.finish();
                }
            }
        }
        // What the core has forgotten needs no arena any more.
        self.remotes.retain(|key, _| self.core.knows(*key));
    }

    fn on_effect(&mut self, effect: PrefillEffect) -> anyhow::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        baton_worker::testing::note("prefill", effect.name());
        match effect {
            PrefillEffect::RequestGrant { target, request, delay } => self.request_grant(target, request, delay),
            PrefillEffect::RunStep(plan) => self.run_step(plan)?,
            PrefillEffect::Push { key, push, target: _, grant, spans } => self.push(key, push, grant, &spans),
            PrefillEffect::CancelPushes { key } => {
                for (_, cancel) in self.pushes.get(&key).into_iter().flatten() {
                    cancel.cancel();
                }
            }
            PrefillEffect::Fetch { source, lease, destinations } => {
                let key = lease.key;
                let fetching = start_fetch(&mut self.parts, &self.peers, source, lease, destinations);
                self.fetches.insert(key, fetching);
            }
            PrefillEffect::CancelFetch { key } => {
                if let Some(fetching) = self.fetches.get(&key) {
                    fetching.cancel.cancel();
                }
            }
            PrefillEffect::Tier(effect) => {
                let ssd = self.ssd.as_mut().context(NO_SSD)?;
                self.fetches.extend(ssd.carry_out(&self.parts, &mut self.core, effect));
            }
            PrefillEffect::Lease(effect) => self.lease(effect),
            PrefillEffect::Handoff { target, handoff } => self.hand_off(target, handoff),
            PrefillEffect::ReleaseGrant { key, target, grant } => self.release_grant(key, target, grant),
            PrefillEffect::Emit { conductor, key, event } => {
                self.metrics.on_event(&event);
                let event = v1::PrefillEvent::from_domain(key, &event);
                self.parts.sessions.send(conductor, v1::node_event::Event::Prefill(event));
            }
        }
        Ok(())
    }

    fn run_step(&mut self, plan: StepPlan) -> anyhow::Result<()> {
        self.step = Some((plan.id, plan.rows(), plan.attended_tokens()));
        let waiting = plan.sequences.iter().filter(|sequence| sequence.awaits_prefix);
        let barriers =
            waiting.filter_map(|sequence| Some((sequence.key, self.fetches.get(&sequence.key)?.barrier.clone())));
        let barriers = barriers.collect();
        anyhow::ensure!(self.parts.engine.submit(plan, barriers), "the engine's thread is gone");
        Ok(())
    }

    fn lease(&mut self, effect: LeaseEffect) {
        if let Some(failed) = self.leases.carry_out(&self.parts, effect) {
            self.core.on_release_lease(self.parts.clock.now(), failed);
        }
    }

    /// Runs a call and sends its answer back into the loop.
    fn answer(&self, name: &'static str, call: impl Future<Output = PrefillInput> + Send + 'static) {
        let inputs = self.parts.inputs.clone();
        self.parts.tasks.spawn_request(name, async move {
            let answer = call.await;
            // The loop is gone only when the process ends.
            let _ = inputs.send(Input::Role(answer)).await;
        });
    }

    fn request_grant(&self, target: DecodeTarget, request: GrantRequest, delay: Duration) {
        let peers = self.peers.clone();
        let info = Arc::clone(&self.parts.info);
        let key = request.key;
        let waited = self.parts.clock.sleep(delay);
        self.answer("grant request", async move {
            waited.await;
            PrefillInput::GrantReply(key, ask_for_grant(&peers, &target, request, &info).await)
        });
    }

    fn push(&mut self, key: RequestKey, push: PushId, grant: GrantId, spans: &[PushSpan]) {
        let Some(remote) = self.remotes.get(&key) else {
            let refused = Refused { kind: ErrorKind::Internal, message: format!("no arena is known for {key:?}") };
            return self.answer("push", async move { PrefillInput::PushDone(key, push, Err(refused)) });
        };
        let layout = &self.parts.model.layout;
        let bytes = self.parts.model.layout.block_bytes() as u64;
        let pair = |span: &PushSpan| SpanPair {
            local_offset: layout.offset(span.layer, span.source) as u64,
            remote_offset: remote.layout.offset(span.layer, span.destination) as u64,
            len: bytes,
        };
        let pairs: Vec<_> = spans.iter().map(pair).collect();
        let now = self.parts.clock.now();
        let reserve = |link: &mut LinkPacer| link.reserve(now, Direction::Send, bytes * spans.len() as u64);
        let due = self.parts.pacer.as_mut().map(reserve);
        let transfer = self.parts.transfer.clone();
        let source = self.parts.segment;
        let remote = remote.segment.clone();
        let write = move || {
            // The transfer engine keeps the machine's clock.
            let options = BatchOptions::new(baton_runtime::now() + PUSH_DEADLINE).tag(push.0);
            transfer.write(source, &remote, grant, pairs, options)
        };
        let (batch, cancel) = paced(&self.parts.clock, due, write);
        self.pushes.entry(key).or_default().push((push, cancel));
        let transport = self.transport;
        self.answer("push", async move {
            let result = batch.await.map(|report| PushReport {
                bytes: report.bytes,
                transport: report.transport.as_str().to_owned(),
                started: report.started,
                completed: report.completed,
            });
            PrefillInput::PushDone(key, push, result.map_err(|error| transfer_failed(transport, error)))
        });
    }

    fn hand_off(&self, target: DecodeTarget, handoff: Handoff) {
        let peers = self.peers.clone();
        self.answer("handoff", async move {
            let key = handoff.key;
            let result = match peers.client(&target.address) {
                Ok(mut client) => client
                    .hand_over(v1::Handoff::from(&handoff))
                    .await
                    .map(|_| ())
                    .map_err(|s| refused(&target.address, &s)),
                Err(error) => Err(error),
            };
            PrefillInput::HandoffReply(key, result)
        });
    }

    fn release_grant(&self, key: RequestKey, target: DecodeTarget, grant: GrantId) {
        let peers = self.peers.clone();
        let clock = Arc::clone(&self.parts.clock);
        let tasks = self.parts.tasks.clone();
        self.parts.tasks.spawn_request("grant release", async move {
            for attempt in 1..=RELEASE_ATTEMPTS {
                let Ok(mut client) = peers.client(&target.address) else { return };
                let request = v1::ReleaseGrantRequest { key: Some(key.into()), grant: grant.0 };
                let Err(status) = client.release_grant(request).await else { return };
                tracing::warn!(node = %target.node, attempt, reason = status.message(), "cannot release a grant; it will expire");
                if attempt == RELEASE_ATTEMPTS {
                    return;
                }
                tokio::select! {
                    () = clock.sleep(RELEASE_RETRY * attempt) => {}
                    // A node on its way out does not wait for another that may be gone.
                    () = tasks.cancelled() => return,
                }
            }
        });
    }
}

async fn ask_for_grant(
    peers: &Peers,
    target: &DecodeTarget,
    request: GrantRequest,
    info: &NodeInfo,
) -> Result<(GrantReply, RemoteArena), Refused> {
    let wire = v1::GrantRequest {
        protocol_version: PROTOCOL_VERSION,
        key: Some(request.key.into()),
        prefill_node: request.prefill.to_string(),
        prefill_generation: request.prefill_generation.to_string(),
        target_generation: target.generation.to_string(),
        layout: Some((&info.layout).into()),
        prompt_tokens: request.prompt_tokens,
        output_tokens: request.output_tokens,
        block_hashes: baton_proto::hashes_to_bytes(&request.block_hashes),
        max_tokens: request.max_tokens,
        kv_class: info.kv_class.clone(),
        tbt_s: request.tbt.map(|tbt| tbt.as_secs_f64()),
        partial_prefill_tokens: request.partial_prefill_tokens,
    };
    let reply = peers.client(&target.address)?.grant(wire).await;
    let reply = reply.map_err(|status| refused(&target.address, &status))?.into_inner();
    let (remote, blocks) =
        RemoteArena::new(&target.node, &info.layout, &reply.segment, reply.num_blocks, reply.blocks)?;
    let grant = GrantId(reply.grant);
    let held_blocks = reply.held_blocks;
    let partial_prefill_tokens = reply.partial_prefill_tokens;
    let grant = GrantReply { grant, held_blocks, blocks, partial_prefill_tokens };
    Ok((grant, remote))
}

/// A push that failed is the decode node's or the network's fault: another placement may work. A
/// transport that was forced is named: without the choice another one might have carried the push.
fn transfer_failed(transport: TransportChoice, error: TransferError) -> Refused {
    let kind = match error.kind() {
        // Nothing of a push comes from the client: what is invalid about it, the client cannot
        // mend.
        ErrorKind::DeadlineExceeded | ErrorKind::DataLoss | ErrorKind::Invalid => ErrorKind::Unavailable,
        kind => kind,
    };
    let forced = match transport {
        TransportChoice::Auto => String::new(),
        TransportChoice::Only(only) => format!(" over {only}, the only transport allowed"),
    };
    Refused { kind, message: format!("KV transfer{forced}: {error}") }
}

impl Role for PrefillRole {
    type Event = PrefillInput;

    fn on_input(&mut self, now: Instant, input: Input<PrefillInput>) {
        match input {
            Input::Prefill(job) => self.core.on_submit(now, job),
            Input::Abort(key) => {
                self.metrics.on_abort(self.core.stage(key));
                self.core.on_abort(now, key);
            }
            Input::SessionClosed(conductor) => self.core.on_conductor_lost(now, conductor),
            Input::Engine(event) => self.on_engine(now, event),
            Input::Drain => self.core.on_drain(now),
            Input::Undrain => self.core.on_undrain(now),
            Input::ClearCache => self.core.clear_cache(),
            Input::NodeLost(lost) => self.core.on_node_lost(now, &lost),
            Input::Reselect(reselect) => self.core.on_reselect(reselect),
            Input::Role(input) => self.on_role(now, input),
            Input::Lease(request, answer) => {
                self.leases.ask(request.key, answer);
                self.core.on_lease_request(now, request);
            }
            Input::ReleaseLease(lease) => self.core.on_release_lease(now, lease),
            // The service of a prefill node refuses what only decode nodes do, and the loop answers
            // the rest.
            Input::Grant(..) | Input::ReleaseGrant(..) | Input::Handoff(..) => {}
            Input::SessionOpened(_) | Input::KvSnapshot(_) | Input::CheckIntegrity(_) => {}
        }
    }

    fn on_wakeup(&mut self, now: Instant) {
        self.core.on_wakeup(now);
    }

    fn next_wakeup(&self) -> Option<Instant> {
        self.core.next_wakeup()
    }

    fn carry_out(&mut self) -> anyhow::Result<()> {
        while let Some(effect) = self.core.poll_effect() {
            self.on_effect(effect)?;
        }
        Ok(())
    }

    fn load(&self, now: Instant) -> Load {
        self.core.load(now)
    }

    fn drain_kv_events(&mut self, max: usize) -> Option<KvEventBatch> {
        self.core.drain_kv_events(max)
    }

    fn kv_snapshot(&self) -> KvEventBatch {
        self.core.kv_snapshot()
    }

    fn check_integrity(&self) -> Result<(), String> {
        self.core.check_integrity().map_err(|error| error.to_string())
    }

    fn is_idle(&self) -> bool {
        self.core.is_idle()
    }
}
