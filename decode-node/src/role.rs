//! Core and shell of a decode node in one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::v1;
use baton_runtime::MetricDoc;
use baton_scheduler::{DecodeConfig, DecodeCore, DecodeEffect, PushId, RequestKey, StepPlan};
use baton_transfer_engine::{Arrival, ArrivalReceiver, GrantSpec};
use baton_types::{
    DecodeEvent, ErrorKind, GrantId, GrantReply, Handoff, LeaseRequest, Load, NodeRole, NodeStart, PrefillEvent,
    Refused,
};
use baton_worker::config::Settings;
use baton_worker::{FetchEvent, GrantAnswer, Input, NodeParts, NodeShell, Role, Ssd, core_refused};
use tokio::sync::{mpsc, oneshot};

use crate::metrics::{METRICS, Metrics};

/// A grant in the transfer engine outlives the core's own time limit, and any request: the core
/// decides, and this is the net below it.
const GRANT_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// What only a decode node takes in.
#[derive(Debug)]
pub enum DecodeInput {
    /// The transfer engine says that something arrived.
    Arrival(Arrival),
    /// Nothing can land under this grant any more.
    Fenced(GrantId),
}

/// See the module's text.
pub struct DecodeRole {
    core: DecodeCore,
    shell: NodeShell<DecodeInput>,
    /// Prefill nodes that wait for a grant.
    grant_answers: HashMap<RequestKey, oneshot::Sender<GrantAnswer>>,
    /// Prefill nodes that wait for the answer to a handoff.
    handoff_answers: HashMap<RequestKey, oneshot::Sender<Result<(), Refused>>>,
    metrics: Metrics,
}

impl DecodeRole {
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
        }
    }

    fn on_handoff(&mut self, now: Instant, handoff: Handoff, answer: oneshot::Sender<Result<(), Refused>>) {
        if !self.shell.parts.sessions.is_open(handoff.conductor) {
            // Its tokens would go nowhere: the conductor, or its session, is gone.
            let node = &self.shell.parts.info.node;
            let message = format!("conductor {} has no session with {node}", handoff.conductor);
            let _ = answer.send(Err(Refused { kind: ErrorKind::Unavailable, message }));
            return;
        }
        self.handoff_answers.insert(handoff.key, answer);
        let key = handoff.key;
        let conductor = handoff.conductor;
        let sampling = Arc::clone(&handoff.sampling);
        self.core.on_handoff(now, handoff);
        self.shell.prepare(&mut self.core, now, key, conductor, &sampling);
    }

    /// The blocks of a sequence that comes from another decode node.
    fn on_fetch(&mut self, now: Instant, event: FetchEvent) {
        match event {
            FetchEvent::Begun(key, blocks) => self.core.on_fetch_begun(key, blocks),
            // Nothing is computed before all of them are here.
            FetchEvent::Layer(..) => {}
            FetchEvent::Done(key, result) => {
                self.shell.end_fetch(key, &result);
                self.core.on_fetch_done(now, key, result);
            }
        }
    }

    fn on_ssd_read(&mut self, now: Instant, event: FetchEvent) {
        // Nothing waits for its layers: the sequence joins the batch when all have come.
        let FetchEvent::Done(key, result) = event else { return };
        self.shell.end_fetch(key, &result);
        let block_bytes = self.shell.parts.model.layout.block_bytes_all_layers() as u64;
        let blocks = result.map(|read| (read.bytes / block_bytes) as usize);
        self.core.on_load_done(now, key, blocks);
    }

    fn on_effect(&mut self, effect: DecodeEffect) -> anyhow::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        baton_worker::testing::note("decode", effect.name());
        match effect {
            DecodeEffect::OpenGrant { key, prefill, reply } => self.open_grant(key, prefill, reply),
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
            DecodeEffect::Lease(effect) => self.shell.carry_out_lease(&mut self.core, effect),
            DecodeEffect::Tier(effect) => self.shell.carry_out_tier(&mut self.core, effect)?,
            DecodeEffect::RunStep(plan) => self.run_step(plan)?,
            DecodeEffect::RequestMigration { conductor, key, output_tokens } => {
                self.metrics.offered.increment(1);
                let offer = v1::MigrationRequest { key: Some(key.into()), output_tokens };
                self.shell.parts.sessions.send(conductor, v1::node_event::Event::MigrationRequest(offer));
            }
            DecodeEffect::Fetch { key, source, block_hashes, destinations } => {
                let reader = self.shell.parts.info.node.clone();
                let reader_generation = self.shell.parts.info.generation;
                let lease = LeaseRequest { key, reader, reader_generation, block_hashes };
                self.shell.fetch(source, lease, destinations);
            }
            DecodeEffect::CancelFetch { key } => self.shell.cancel_fetch(key),
            DecodeEffect::AnswerMigration { conductor, key, result } => {
                self.metrics.on_migrate(&result);
                let event = result.map_or_else(PrefillEvent::Failed, PrefillEvent::Fetched);
                let event = v1::PrefillEvent::from_domain(key, &event);
                self.shell.parts.sessions.send(conductor, v1::node_event::Event::Prefill(event));
            }
            DecodeEffect::EmitPrefill { conductor, key, event } => {
                self.metrics.on_prompt_event(&event);
                let event = v1::PrefillEvent::from_domain(key, &event);
                self.shell.parts.sessions.send(conductor, v1::node_event::Event::Prefill(event));
            }
            DecodeEffect::Emit { conductor, events } => {
                let wire = events.iter().map(|(key, event)| self.event(*key, event)).collect();
                let event = v1::node_event::Event::Decode(v1::DecodeEvents { events: wire });
                self.shell.parts.sessions.send(conductor, event);
            }
        }
        Ok(())
    }

    fn event(&self, key: RequestKey, event: &DecodeEvent) -> v1::DecodeEvent {
        self.metrics.on_event(event);
        v1::DecodeEvent::from_domain(key, event)
    }

    fn run_step(&mut self, plan: StepPlan) -> anyhow::Result<()> {
        let num_layers = self.shell.parts.model.layout.num_layers;
        if let Some(slice) = plan.slice.as_ref().filter(|slice| slice.layers.end == num_layers) {
            self.metrics.partial_prefill_tokens.increment(slice.sequence.range.len() as u64);
        }
        self.shell.run_step(plan)
    }

    fn answer_grant(&mut self, key: RequestKey, answer: GrantAnswer) {
        let Some(waiting) = self.grant_answers.remove(&key) else { return };
        // If the prefill node has given up, or died, while it waited for room, the grant will not
        // be used.
        if let Err(Ok(unheard)) = waiting.send(answer) {
            self.core.on_release_grant(self.shell.parts.clock.now(), key, GrantId(unheard.grant));
        }
    }

    fn open_grant(&mut self, key: RequestKey, prefill: NodeStart, reply: GrantReply) {
        let spec = GrantSpec {
            id: reply.grant,
            segment: self.shell.parts.segment,
            ranges: self.shell.parts.model.layout.ranges(&reply.blocks),
            writer: Some(prefill),
            // The transfer engine keeps the machine's clock.
            expires: baton_runtime::now() + GRANT_LIFETIME,
        };
        let answer = match self.shell.parts.transfer.grant(spec) {
            Ok(()) => Ok(v1::GrantReply {
                grant: reply.grant.0,
                cached_blocks: reply.cached_blocks,
                blocks: reply.blocks.iter().map(|block| block.0).collect(),
                segment: self.shell.parts.descriptor.encode(),
                num_blocks: self.shell.parts.model.layout.num_blocks,
                partial_prefill_tokens: reply.partial_prefill_tokens,
            }),
            Err(error) => {
                self.core.on_release_grant(self.shell.parts.clock.now(), key, reply.grant);
                Err(Refused { kind: ErrorKind::Internal, message: format!("opening the grant: {error}") })
            }
        };
        if answer.is_ok() {
            self.metrics.granted.increment(1);
        }
        self.answer_grant(key, answer);
    }

    fn revoke(&self, grant: GrantId) {
        let fenced = self.shell.parts.transfer.revoke(grant);
        self.shell.answer("fence", async move {
            fenced.await;
            DecodeInput::Fenced(grant)
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
    const ROLE: NodeRole = NodeRole::Decode;
    const METRICS: &'static [MetricDoc] = METRICS;
    type Core = DecodeCore;
    type Event = DecodeInput;

    fn new(settings: &Settings, parts: NodeParts<DecodeInput>) -> anyhow::Result<Self> {
        let mut config = DecodeConfig::new(parts.model.clone());
        config.max_running = settings.max_running as usize;
        config.max_waiting = settings.max_waiting as usize;
        config.growth_blocks = settings.growth_blocks as usize;
        config.prompt_budget = settings.decode_chunk_tokens as usize;
        let longest = GRANT_LIFETIME.as_secs_f64();
        config.grant_ttl = baton_runtime::settings::seconds("grant_ttl_s", settings.grant_ttl_s, 1.0..=longest)?;
        config.max_stores = Ssd::max_stores(settings);
        let mut core = DecodeCore::new(config).map_err(|error| core_refused(&error))?;
        let mut shell = NodeShell::new(settings, parts, &mut core)?;
        forward_arrivals(&mut shell.parts);
        Ok(Self {
            core,
            shell,
            grant_answers: HashMap::new(),
            handoff_answers: HashMap::new(),
            metrics: Metrics::default(),
        })
    }

    fn core(&mut self) -> &mut DecodeCore {
        &mut self.core
    }

    fn on_input(&mut self, now: Instant, input: Input<DecodeInput>) {
        match input {
            Input::Abort(key) => {
                self.metrics.on_abort(self.core.stage(key));
                self.core.on_abort(now, key);
            }
            Input::Fetch(event) => self.on_fetch(now, event),
            Input::SsdRead(event) => self.on_ssd_read(now, event),
            Input::Grant(request, answer) => {
                // A second request for the same key drops the first one's sender: its caller hears
                // that.
                self.grant_answers.insert(request.key, answer);
                self.core.on_grant_request(now, request);
            }
            Input::ReleaseGrant(key, grant) => self.core.on_release_grant(now, key, grant),
            Input::Handoff(handoff, answer) => self.on_handoff(now, handoff, answer),
            Input::Role(input) => self.on_role(now, input),
            input => self.shell.on_input(&mut self.core, now, input),
        }
    }

    fn carry_out(&mut self) -> anyhow::Result<()> {
        while let Some(effect) = self.core.poll_effect() {
            self.on_effect(effect)?;
        }
        Ok(())
    }

    fn load(&self, _: Instant) -> Load {
        let load = Load { ssd_write_failures: self.shell.ssd_write_failures(), ..self.core.load() };
        self.metrics.preemptions.absolute(load.preemptions);
        load
    }
}
