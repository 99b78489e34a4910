//! Core and shell of a prefill node in one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::{PROTOCOL_VERSION, v1};
use baton_runtime::MetricDoc;
use baton_scheduler::{PrefillConfig, PrefillCore, PrefillEffect, PushId, PushReport, PushSpan, RequestKey};
use baton_transfer_engine::{BatchOptions, SpanPair, TransferError, TransportChoice};
use baton_types::{
    DecodeTarget, ErrorKind, GrantId, GrantReply, GrantRequest, Handoff, Load, NodeInfo, NodeRole, Refused,
};
use baton_worker::config::Settings;
use baton_worker::{
    Direction, EngineEvent, FetchEvent, Input, LinkPacer, NodeParts, NodeShell, PacedCancel, Peers, RemoteArena, Role,
    Ssd, core_refused, paced, refused,
};

use crate::metrics::{METRICS, Metrics};

/// A push makes progress or is given up within this time.
const PUSH_DEADLINE: Duration = Duration::from_secs(30);
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
}

/// See the module's text.
pub struct PrefillRole {
    core: PrefillCore,
    shell: NodeShell<PrefillInput>,
    /// What may carry pushes.
    transport: TransportChoice,
    /// Arenas that requests push to.
    remotes: HashMap<RequestKey, RemoteArena>,
    /// Batches under way.
    pushes: HashMap<RequestKey, Vec<(PushId, PacedCancel)>>,
    metrics: Metrics,
}

impl PrefillRole {
    fn on_engine(&mut self, now: Instant, event: EngineEvent) {
        match event {
            EngineEvent::KvReady { step, layer } => self.core.on_kv_ready(now, step, layer),
            EngineEvent::PrefixLate { step, key } => {
                self.metrics.late.increment(1);
                self.core.on_prefix_late(now, step, key);
            }
            EngineEvent::StepDone(done) => {
                self.core.on_layers_done(done.step, done.layers_ended);
                self.shell.on_step_done(&mut self.core, now, done);
            }
            EngineEvent::MaskReady(key) => self.core.on_mask_ready(now, key),
        }
    }

    /// A prefix comes from another node, or from the SSD.
    fn on_fetch(&mut self, now: Instant, event: FetchEvent) {
        match event {
            FetchEvent::Begun(key, blocks) => self.core.on_fetch_begun(now, key, blocks),
            FetchEvent::Layer(key, layer) => self.core.on_fetched(now, key, layer),
            FetchEvent::Done(key, result) => {
                let barrier = self.shell.end_fetch(key, &result);
                self.core.on_fetch_done(now, key, result);
                if let Some(barrier) = barrier {
                    barrier.finish();
                }
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
        }
    }

    fn on_effect(&mut self, effect: PrefillEffect) -> anyhow::Result<()> {
        #[cfg(any(test, feature = "testing"))]
        baton_worker::testing::note("prefill", effect.name());
        match effect {
            PrefillEffect::RequestGrant { target, request, delay } => self.request_grant(target, request, delay),
            PrefillEffect::RunStep(plan) => self.shell.run_step(plan)?,
            PrefillEffect::Push { key, push, target: _, grant, spans } => self.push(key, push, grant, &spans),
            PrefillEffect::CancelPushes { key } => {
                for (_, cancel) in self.pushes.get(&key).into_iter().flatten() {
                    cancel.cancel();
                }
            }
            PrefillEffect::Fetch { source, lease, destinations } => self.shell.fetch(source, lease, destinations),
            PrefillEffect::CancelFetch { key } => self.shell.cancel_fetch(key),
            PrefillEffect::Tier(effect) => self.shell.carry_out_tier(&mut self.core, effect)?,
            PrefillEffect::Lease(effect) => self.shell.carry_out_lease(&mut self.core, effect),
            PrefillEffect::Handoff { target, handoff } => self.hand_off(target, handoff),
            PrefillEffect::ReleaseGrant { key, target, grant } => self.release_grant(key, target, grant),
            PrefillEffect::Emit { conductor, key, event } => {
                self.metrics.on_event(&event);
                let event = v1::PrefillEvent::from_domain(key, &event);
                self.shell.parts.sessions.send(conductor, v1::node_event::Event::Prefill(event));
            }
        }
        Ok(())
    }

    fn request_grant(&self, target: DecodeTarget, request: GrantRequest, delay: Duration) {
        let peers = self.shell.peers.clone();
        let info = Arc::clone(&self.shell.parts.info);
        let key = request.key;
        let waited = self.shell.parts.clock.sleep(delay);
        self.shell.answer("grant request", async move {
            waited.await;
            PrefillInput::GrantReply(key, ask_for_grant(&peers, &target, request, &info).await)
        });
    }

    fn push(&mut self, key: RequestKey, push: PushId, grant: GrantId, spans: &[PushSpan]) {
        let Some(remote) = self.remotes.get(&key) else {
            let refused = Refused { kind: ErrorKind::Internal, message: format!("no arena is known for {key:?}") };
            return self.shell.answer("push", async move { PrefillInput::PushDone(key, push, Err(refused)) });
        };
        let layout = &self.shell.parts.model.layout;
        let bytes = self.shell.parts.model.layout.block_bytes() as u64;
        let pair = |span: &PushSpan| SpanPair {
            local_offset: layout.offset(span.layer, span.source) as u64,
            remote_offset: remote.layout.offset(span.layer, span.destination) as u64,
            len: bytes,
        };
        let pairs: Vec<_> = spans.iter().map(pair).collect();
        let now = self.shell.parts.clock.now();
        let reserve = |link: &mut LinkPacer| link.reserve(now, Direction::Send, bytes * spans.len() as u64);
        let due = self.shell.parts.pacer.as_mut().map(reserve);
        let transfer = self.shell.parts.transfer.clone();
        let source = self.shell.parts.segment;
        let remote = remote.segment.clone();
        let write = move || {
            // The transfer engine keeps the machine's clock.
            let options = BatchOptions::new(baton_runtime::now() + PUSH_DEADLINE).tag(push.0);
            transfer.write(source, &remote, grant, pairs, options)
        };
        let (batch, cancel) = paced(&self.shell.parts.clock, due, write);
        self.pushes.entry(key).or_default().push((push, cancel));
        let transport = self.transport;
        self.shell.answer("push", async move {
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
        let peers = self.shell.peers.clone();
        self.shell.answer("handoff", async move {
            let key = handoff.key;
            let result = match peers.client(&target.address) {
                Ok(mut client) => client
                    .handoff(v1::HandoffRequest::from(&handoff))
                    .await
                    .map(|_| ())
                    .map_err(|s| refused(&target.address, &s)),
                Err(error) => Err(error),
            };
            PrefillInput::HandoffReply(key, result)
        });
    }

    fn release_grant(&self, key: RequestKey, target: DecodeTarget, grant: GrantId) {
        let peers = self.shell.peers.clone();
        let clock = Arc::clone(&self.shell.parts.clock);
        let tasks = self.shell.parts.tasks.clone();
        self.shell.parts.tasks.spawn_request("grant release", async move {
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
    let cached_blocks = reply.cached_blocks;
    let partial_prefill_tokens = reply.partial_prefill_tokens;
    let grant = GrantReply { grant, cached_blocks, blocks, partial_prefill_tokens };
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
    const ROLE: NodeRole = NodeRole::Prefill;
    const METRICS: &'static [MetricDoc] = METRICS;
    type Core = PrefillCore;
    type Event = PrefillInput;

    fn new(settings: &Settings, parts: NodeParts<PrefillInput>) -> anyhow::Result<Self> {
        let config = PrefillConfig::new(parts.info.node.clone(), parts.info.generation, parts.model.clone());
        let mut config = config.with_chunk_tokens(settings.chunk_tokens);
        config.max_waiting = settings.max_waiting as usize;
        config.max_sequences_per_chunk = settings.max_running as usize;
        config.max_stores = Ssd::max_stores(settings);
        let mut core = PrefillCore::new(config).map_err(|error| core_refused(&error))?;
        let shell = NodeShell::new(settings, parts, &mut core)?;
        Ok(Self {
            core,
            shell,
            transport: settings.transport,
            remotes: HashMap::new(),
            pushes: HashMap::new(),
            metrics: Metrics::default(),
        })
    }

    fn core(&mut self) -> &mut PrefillCore {
        &mut self.core
    }

    fn on_input(&mut self, now: Instant, input: Input<PrefillInput>) {
        match input {
            Input::Abort(key) => {
                self.metrics.on_abort(self.core.stage(key));
                self.core.on_abort(now, key);
            }
            Input::Engine(event) => self.on_engine(now, event),
            Input::Fetch(event) | Input::SsdRead(event) => self.on_fetch(now, event),
            Input::Reselect(reselect) => self.core.on_reselect(reselect),
            Input::Role(input) => self.on_role(now, input),
            input => self.shell.on_input(&mut self.core, now, input),
        }
    }

    fn carry_out(&mut self) -> anyhow::Result<()> {
        while let Some(effect) = self.core.poll_effect() {
            self.on_effect(effect)?;
        }
        // What the core has forgotten needs no arena any more.
        self.remotes.retain(|key, _| self.core.knows(*key));
        Ok(())
    }

    fn load(&self, now: Instant) -> Load {
        Load { ssd_write_failures: self.shell.ssd_write_failures(), ..self.core.load(now) }
    }
}
