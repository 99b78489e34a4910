//! Core and shell of a decode node in one.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use baton_proto::v1;
use baton_scheduler::{
    DecodeConfig, DecodeCore, DecodeEffect, KvEventBatch, PushId, RequestKey, StepId, StepPlan, StepSlice,
};
use baton_transfer_engine::{Arrival, ArrivalReceiver, GrantSpec};
use baton_types::{
    DecodeEvent, ErrorKind, Generation, GrantId, GrantReply, LeaseRequest, Load, NodeId, PrefillEvent, Refused,
};
use baton_worker::config::Settings;
use baton_worker::{
    EngineEvent, FetchEvent, Fetching, GrantAnswer, Input, LeaseDesk, NodeParts, Peers, Role, Ssd, StepMetrics,
    TierEvent, core_refused, start_fetch,
};
use tokio::sync::{mpsc, oneshot};

use crate::metrics::Metrics;

/// A grant in the transfer engine outlives the core's own time limit: the core decides, and this is
/// the net below it.
const GRANT_LIFETIME: Duration = Duration::from_secs(600);

/// What only a decode node takes in.
#[derive(Debug)]
pub enum DecodeInput {
    /// The transfer engine says that something arrived.
    Arrival(Arrival),
    /// Nothing can land under this grant any more.
    Fenced(GrantId),
    /// The SSD has something to say.
    Tier(TierEvent),
    /// About the blocks of a sequence that comes from another decode node.
    Fetch(FetchEvent),
}

impl From<TierEvent> for DecodeInput {
    fn from(event: TierEvent) -> Self {
        Self::Tier(event)
    }
}

impl From<FetchEvent> for DecodeInput {
    fn from(event: FetchEvent) -> Self {
        Self::Fetch(event)
    }
}

/// The step that the engine works on.
struct StepInFlight {
    id: StepId,
    /// But for its times.
    report: v1::StepReport,
    /// Layers of its slice, as a part of all.
    slice_part: f64,
}

/// See the module's text.
pub struct DecodeRole {
    core: DecodeCore,
    parts: NodeParts<DecodeInput>,
    /// Prefill nodes that wait for a grant.
    grant_answers: HashMap<RequestKey, oneshot::Sender<GrantAnswer>>,
    /// Prefill nodes that wait for the answer to a handoff.
    handoff_answers: HashMap<RequestKey, oneshot::Sender<Result<(), Refused>>>,
    /// Other nodes that read here.
    leases: LeaseDesk,
    /// The tier below the arena, if there is one.
    ssd: Option<Ssd>,
    peers: Peers,
    /// Blocks on their way here.
    fetches: HashMap<RequestKey, Fetching>,
    step: Option<StepInFlight>,
    metrics: Metrics,
    steps: StepMetrics,
}

impl DecodeRole {
    /// A role from its parts.
    pub fn new(settings: &Settings, mut parts: NodeParts<DecodeInput>) -> anyhow::Result<Self> {
        let mut config = DecodeConfig::new(parts.model.clone());
        config.max_running = settings.max_running as usize;
        config.max_waiting = settings.max_waiting as usize;
        config.eviction = settings.eviction;
        config.growth_blocks = settings.growth_blocks as usize;
        config.prompt_budget = settings.decode_chunk_tokens as usize;
        let longest = GRANT_LIFETIME.as_secs_f64();
        config.grant_ttl = baton_runtime::settings::seconds("grant_ttl_s", settings.grant_ttl_s, 1.0..=longest)?;
        config.max_stores = Ssd::max_stores(settings);
        let mut core = DecodeCore::new(config).map_err(|error| core_refused(&error))?;
        let ssd = Ssd::open(settings, &parts, &mut core)?;
        forward_arrivals(&mut parts);
        Ok(Self {
            core,
            parts,
            grant_answers: HashMap::new(),
            handoff_answers: HashMap::new(),
            leases: LeaseDesk::default(),
            ssd,
            peers: Peers::default(),
            fetches: HashMap::new(),
            step: None,
            metrics: Metrics::default(),
            steps: StepMetrics::default(),
        })
    }

    fn on_engine(&mut self, now: Instant, event: EngineEvent) {
        let EngineEvent::StepDone { step, result, elapsed, slice, .. } = event else { return };
        if let Some(StepInFlight { mut report, slice_part, .. }) = self.step.take_if(|in_flight| in_flight.id == step) {
            let tail_rows = report.slice.map_or(0, |slice| slice.rows);
            self.steps.on_step(report.rows + tail_rows, elapsed);
            report.seconds = elapsed.saturating_sub(slice).as_secs_f64();
            if let Some(report) = &mut report.slice {
                report.seconds = slice.as_secs_f64() / slice_part;
            }
            self.parts.sessions.broadcast(&v1::node_event::Event::Step(report));
        }
        self.core.on_step_done(now, step, result);
    }

    fn on_role(&mut self, now: Instant, input: DecodeInput) {
        match input {
            DecodeInput::Arrival(Arrival::Batch { grant, tag, bytes, .. }) => {
                self.metrics.received.increment(bytes);
                self.core.on_arrival(now, grant, PushId(tag), bytes);
            }
            DecodeInput::Arrival(Arrival::GrantExpired { grant }) => {
                self.metrics.expired.increment(1);
                self.core.on_grant_fenced(now, grant);
            }
            DecodeInput::Fenced(grant) => self.core.on_grant_fenced(now, grant),
            DecodeInput::Tier(event) => self.on_tier(now, event),
            DecodeInput::Fetch(FetchEvent::Begun(key, blocks)) => self.core.on_fetch_begun(key, blocks),
            // Nothing is computed before all of them are here.
            DecodeInput::Fetch(FetchEvent::Layer(..)) => {}
            DecodeInput::Fetch(FetchEvent::Done(key, result)) => {
                self.fetches.remove(&key);
                self.core.on_fetch_done(now, key, result);
            }
        }
    }

    fn on_tier(&mut self, now: Instant, event: TierEvent) {
        let Some(ssd) = &mut self.ssd else { return };
        match event {
            TierEvent::Done(key, result) => {
                let blocks = result.map(|fetched| {
                    ssd.on_fetched(&fetched);
                    ssd.blocks(fetched.bytes)
                });
                self.core.on_load_done(now, key, blocks);
            }
            event => ssd.on_event(&mut self.core, event),
        }
    }

    fn on_effect(&mut self, effect: DecodeEffect) -> anyhow::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        baton_worker::testing::note("decode", effect.name());
        match effect {
            DecodeEffect::OpenGrant { key, prefill, prefill_generation, reply } => {
                self.open_grant(key, prefill, prefill_generation, reply);
            }
            DecodeEffect::RefuseGrant { key, refused } => {
                self.metrics.refused.increment(1);
                self.answer_grant(key, Err(refused));
            }
            DecodeEffect::RevokeGrant { grant } => self.revoke(grant),
            DecodeEffect::HandoffReply { key, result } => {
                if let Some(answer) = self.handoff_answers.remove(&key) {
                    // The prefill node may have given up; its grant then ends by itself.
                    let _ = answer.send(result);
                }
            }
            DecodeEffect::Lease(effect) => {
                if let Some(failed) = self.leases.carry_out(&self.parts, effect) {
                    self.core.on_release_lease(self.parts.clock.now(), failed);
                }
            }
            DecodeEffect::Tier(effect) => {
                let ssd = self.ssd.as_mut().context("the core wants an SSD, and this node has none")?;
                // Nothing waits for its layers: the sequence joins the batch when all have come.
                ssd.carry_out(&self.parts, &mut self.core, effect);
            }
            DecodeEffect::RunStep(plan) => self.run_step(plan)?,
            DecodeEffect::Offer { conductor, key, output_tokens } => {
                self.metrics.offered.increment(1);
                let offer = v1::SequenceOffer { key: Some(key.into()), output_tokens };
                self.parts.sessions.send(conductor, v1::node_event::Event::Offer(offer));
            }
            DecodeEffect::Fetch { key, source, block_hashes, destinations } => {
                let info = &self.parts.info;
                let reader = info.node.clone();
                let reader_generation = info.generation;
                let lease = LeaseRequest { key, reader, reader_generation, block_hashes };
                let parts = &mut self.parts;
                let fetching = start_fetch(parts, &self.peers, source, lease, destinations);
                self.fetches.insert(key, fetching);
            }
            DecodeEffect::CancelFetch { key } => {
                if let Some(fetching) = self.fetches.get(&key) {
                    fetching.cancel.cancel();
                }
            }
            DecodeEffect::AnswerMigration { conductor, key, result } => {
                self.metrics.on_migrate(&result);
                let event = result.map_or_else(PrefillEvent::Failed, PrefillEvent::Fetched);
                let event = v1::PrefillEvent::from_domain(key, &event);
                self.parts.sessions.send(conductor, v1::node_event::Event::Prefill(event));
            }
            DecodeEffect::EmitPrefill { conductor, key, event } => {
                self.metrics.on_prompt_event(&event);
                let event = v1::PrefillEvent::from_domain(key, &event);
                self.parts.sessions.send(conductor, v1::node_event::Event::Prefill(event));
            }
            DecodeEffect::Emit { conductor, events } => {
                let wire = events.iter().map(|(key, event)| self.event(*key, event)).collect();
                let event = v1::node_event::Event::Decode(v1::DecodeEvents { events: wire });
                self.parts.sessions.send(conductor, event);
            }
        }
        Ok(())
    }

    fn event(&self, key: RequestKey, event: &DecodeEvent) -> v1::DecodeEvent {
        self.metrics.on_event(event);
        v1::DecodeEvent::from_domain(key, event)
    }

    fn run_step(&mut self, plan: StepPlan) -> anyhow::Result<()> {
        let num_layers = self.parts.model.layout.num_layers;
        let slice_part = plan.slice.as_ref().map_or(0.0, |slice| slice.layers.len() as f64 / f64::from(num_layers));
        let slice = plan.slice.as_ref().map(|StepSlice { sequence, .. }| v1::SliceReport {
            rows: sequence.range.len() as u32,
            attended_tokens: sequence.attended_tokens(),
            seconds: 0.0,
        });
        if plan.slice.as_ref().is_some_and(|slice| slice.layers.end == num_layers) {
            self.metrics.partial_prefill_tokens.increment(slice.map_or(0, |slice| slice.rows.into()));
        }
        let rows = plan.rows();
        let attended_tokens = plan.attended_tokens();
        let prompt_rows = plan.prompt_rows();
        let report = v1::StepReport { rows, attended_tokens, seconds: 0.0, prompt_rows, slice };
        self.step = Some(StepInFlight { id: plan.id, report, slice_part });
        anyhow::ensure!(self.parts.engine.submit(plan, Vec::new()), "the engine's thread is gone");
        Ok(())
    }

    fn answer_grant(&mut self, key: RequestKey, answer: GrantAnswer) {
        let Some(waiting) = self.grant_answers.remove(&key) else { return };
        // If the prefill node has given up, or died, while it waited for room, the grant will not
        // be used.
        if let Err(Ok(unheard)) = waiting.send(answer) {
            self.core.on_release_grant(self.parts.clock.now(), key, GrantId(unheard.grant));
        }
    }

    fn open_grant(&mut self, key: RequestKey, prefill: NodeId, generation: Generation, reply: GrantReply) {
        let spec = GrantSpec {
            id: reply.grant,
            segment: self.parts.segment,
            ranges: self.parts.model.layout.ranges(&reply.blocks),
            writer: Some((prefill, generation)),
            // The transfer engine keeps the machine's clock.
            expires: baton_runtime::now() + GRANT_LIFETIME,
        };
        let answer = match self.parts.transfer.grant(spec) {
            Ok(()) => Ok(v1::GrantReply {
                grant: reply.grant.0,
                held_blocks: reply.held_blocks,
                blocks: reply.blocks.iter().map(|block| block.0).collect(),
                segment: self.parts.descriptor.encode(),
                num_blocks: self.parts.model.layout.num_blocks,
                partial_prefill_tokens: reply.partial_prefill_tokens,
            }),
            Err(error) => {
                self.core.on_release_grant(self.parts.clock.now(), key, reply.grant);
                Err(Refused { kind: ErrorKind::Internal, message: format!("opening the grant: {error}") })
            }
        };
        if answer.is_ok() {
            self.metrics.granted.increment(1);
        }
        self.answer_grant(key, answer);
    }

    fn revoke(&self, grant: GrantId) {
        let fenced = self.parts.transfer.revoke(grant);
        let inputs = self.parts.inputs.clone();
        self.parts.tasks.spawn_request("fence", async move {
            fenced.await;
            // The loop is gone only when the process ends.
            let _ = inputs.send(Input::Role(DecodeInput::Fenced(grant))).await;
        });
    }
}

/// Carries arrivals into the loop.
fn forward_arrivals(parts: &mut NodeParts<DecodeInput>) {
    let inputs = parts.inputs.clone();
    let end = parts.tasks.clone();
    let arrivals = std::mem::replace(&mut parts.arrivals, ArrivalReceiver::empty());
    parts.tasks.spawn("arrivals", async move {
        tokio::select! {
            () = forward(arrivals, inputs) => Ok::<(), anyhow::Error>(()),
            () = end.cancelled() => Ok(()),
        }
    });
}

async fn forward(mut arrivals: ArrivalReceiver, inputs: mpsc::Sender<Input<DecodeInput>>) {
    while let Some(arrival) = arrivals.recv().await {
        if inputs.send(Input::Role(DecodeInput::Arrival(arrival))).await.is_err() {
            return;
        }
    }
}

impl Role for DecodeRole {
    type Event = DecodeInput;

    fn on_input(&mut self, now: Instant, input: Input<DecodeInput>) {
        match input {
            Input::Grant(request, answer) => {
                // A second request for the same key drops the first one's sender: its caller hears
                // that.
                self.grant_answers.insert(request.key, answer);
                self.core.on_grant_request(now, request);
            }
            Input::Lease(request, answer) => {
                self.leases.ask(request.key, answer);
                self.core.on_lease_request(now, request);
            }
            Input::ReleaseLease(lease) => self.core.on_release_lease(now, lease),
            Input::ReleaseGrant(key, grant) => self.core.on_release_grant(now, key, grant),
            // Its tokens would go nowhere: the conductor, or its session, is gone.
            Input::Handoff(handoff, answer) if !self.parts.sessions.is_open(handoff.conductor) => {
                let message = format!("conductor {} has no session with {}", handoff.conductor, self.parts.info.node);
                let _ = answer.send(Err(Refused { kind: ErrorKind::Unavailable, message }));
            }
            Input::Handoff(handoff, answer) => {
                self.handoff_answers.insert(handoff.key, answer);
                self.core.on_handoff(now, handoff);
            }
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
            Input::Role(input) => self.on_role(now, input),
            Input::Prefill(job) => self.core.on_submit(now, job),
            // It is sent only to nodes that were refused.
            Input::Reselect(_) => {}
            // The loop answers these.
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

    fn load(&self, _: Instant) -> Load {
        let load = self.core.load();
        self.metrics.preemptions.absolute(load.preemptions);
        load
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
