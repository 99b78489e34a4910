//! What both roles own beside their cores, and do alike with it: steps, fetches, leases, the SSD.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use baton_proto::v1;
use baton_scheduler::{FetchedBytes, LeaseEffect, RequestKey, StepId, StepPlan, TierEffect, TieredCore};
use baton_types::{BlockId, ConductorId, FetchSource, LeaseRequest, NodeRole, Refused, SamplingParams};

use crate::config::Settings;
use crate::engine_thread::{EngineEvent, StepDone};
use crate::fetch::{Fetching, start_fetch};
use crate::input::Input;
use crate::layer_barrier::LayerBarrier;
use crate::lease_desk::LeaseDesk;
use crate::metrics::StepMetrics;
use crate::node::NodeParts;
use crate::node_core::NodeCore;
use crate::peers::Peers;
use crate::ssd::Ssd;

/// The step that the engine works on.
struct StepInFlight {
    id: StepId,
    /// But for its times.
    report: v1::StepReport,
    /// Layers of its slice, as a part of all.
    slice_part: f64,
}

/// Carries out what cores of both roles ask for.
pub struct NodeShell<E> {
    /// The node.
    pub parts: NodeParts<E>,
    /// The nodes that it calls.
    pub peers: Peers,
    /// Blocks on their way here.
    fetches: HashMap<RequestKey, Fetching>,
    /// Other nodes that read here.
    leases: LeaseDesk,
    /// The tier below the arena, if there is one.
    ssd: Option<Ssd>,
    step: Option<StepInFlight>,
    /// Requests with a grammar.
    constrained: HashSet<RequestKey>,
    metrics: StepMetrics,
}

impl<E: Send + 'static> NodeShell<E> {
    /// Opens the SSD if the settings name one, and tells the core what is there.
    ///
    /// # Errors
    /// The SSD cannot be opened.
    pub fn new(settings: &Settings, parts: NodeParts<E>, core: &mut impl TieredCore) -> anyhow::Result<Self> {
        Ok(Self {
            ssd: Ssd::open(settings, &parts, core)?,
            parts,
            peers: Peers::default(),
            fetches: HashMap::new(),
            leases: LeaseDesk::default(),
            step: None,
            constrained: HashSet::new(),
            metrics: StepMetrics::default(),
        })
    }

    /// Takes in what means the same to both roles, and ignores the rest.
    pub fn on_input(&mut self, core: &mut impl NodeCore, now: Instant, input: Input<E>) {
        match input {
            Input::Prefill(job) => {
                let key = job.key;
                let conductor = job.conductor;
                let sampling = Arc::clone(&job.sampling);
                core.on_submit(now, job);
                self.prepare(core, now, key, conductor, &sampling);
            }
            Input::SessionClosed(conductor) => core.on_conductor_lost(now, conductor),
            Input::Engine(EngineEvent::StepDone(done)) => self.on_step_done(core, now, done),
            Input::Engine(EngineEvent::MaskReady(key)) => core.on_mask_ready(now, key),
            Input::Drain => core.on_drain(now),
            Input::Undrain => core.on_undrain(now),
            Input::ClearCache => core.clear_cache(),
            Input::ForgetPrefix(hashes) => core.forget_blocks(&hashes),
            Input::NodeLost(lost) => core.on_node_lost(now, &lost),
            Input::Lease(request, answer) => {
                self.leases.ask(request.key, answer);
                core.on_lease_request(now, request);
            }
            Input::ReleaseLease(lease) => core.on_release_lease(now, lease),
            Input::Ssd(event) => {
                if let Some(ssd) = &mut self.ssd {
                    ssd.on_event(core, event);
                }
            }
            // The loop answers these.
            Input::SessionOpened(_) | Input::KvSnapshot(_) | Input::CheckIntegrity(_) => {}
            // Of one role: the other one is never sent them, or does nothing about them.
            Input::Engine(EngineEvent::KvReady { .. } | EngineEvent::PrefixLate { .. }) => {}
            Input::Fetch(_) | Input::SsdRead(_) | Input::Abort(_) | Input::Reselect(_) => {}
            Input::Grant(..) | Input::ReleaseGrant(..) | Input::Handoff(..) | Input::Role(_) => {}
        }
    }

    /// Starts a step.
    ///
    /// # Errors
    /// The engine's thread is gone, which is the end of the node.
    pub fn run_step(&mut self, plan: StepPlan) -> anyhow::Result<()> {
        let num_layers = self.parts.model.layout.num_layers;
        let slice_part = plan.slice.as_ref().map_or(0.0, |slice| slice.layers.len() as f64 / f64::from(num_layers));
        let slice = plan.slice.as_ref().map(|slice| v1::SliceReport {
            rows: slice.sequence.range.len() as u32,
            attended_tokens: slice.sequence.attended_tokens(),
            seconds: 0.0,
        });
        let rows = plan.rows();
        let attended_tokens = plan.attended_tokens();
        let prompt_rows = if self.parts.info.role == NodeRole::Prefill { rows } else { plan.prompt_rows() };
        let report = v1::StepReport { rows, attended_tokens, seconds: 0.0, prompt_rows, slice };
        self.step = Some(StepInFlight { id: plan.id, report, slice_part });
        let waiting = plan.sequences.iter().filter(|sequence| sequence.awaits_prefix);
        let barriers =
            waiting.filter_map(|waiting| Some((waiting.key, self.fetches.get(&waiting.key)?.barrier.clone())));
        let barriers = barriers.collect();
        anyhow::ensure!(self.parts.engine.submit(plan, barriers), "the engine's thread is gone");
        Ok(())
    }

    /// A step is over: conductors are told, and the core.
    pub fn on_step_done(&mut self, core: &mut impl NodeCore, now: Instant, done: StepDone) {
        let StepDone { step, result, elapsed, slice, layers_ended: _ } = done;
        if let Some(StepInFlight { mut report, slice_part, .. }) = self.step.take_if(|in_flight| in_flight.id == step) {
            let slice_rows = report.slice.map_or(0, |slice| slice.rows);
            self.metrics.on_step(report.rows + slice_rows, elapsed);
            report.seconds = elapsed.saturating_sub(slice).as_secs_f64();
            if let Some(report) = &mut report.slice {
                report.seconds = slice.as_secs_f64() / slice_part;
            }
            self.parts.sessions.broadcast(&v1::node_event::Event::Step(report));
        }
        core.on_step_done(now, step, result);
        self.forget_ended(core);
    }

    /// Has the grammar of a request compiled, if it has one and the core took the request in.
    pub fn prepare(
        &mut self,
        core: &mut impl NodeCore,
        now: Instant,
        key: RequestKey,
        conductor: ConductorId,
        sampling: &SamplingParams,
    ) {
        let Some(grammar) = &sampling.grammar else { return };
        self.forget_ended(core);
        let Some(output) = core.output(key) else { return };
        self.constrained.insert(key);
        if self.parts.engine.prepare(key, conductor, grammar, output) {
            core.on_mask_ready(now, key);
        }
    }

    /// Forgets grammars of requests that are over here, or elsewhere now.
    fn forget_ended(&mut self, core: &impl NodeCore) {
        let ended: Vec<_> = self.constrained.iter().filter(|key| core.output(**key).is_none()).copied().collect();
        if ended.is_empty() {
            return;
        }
        self.constrained.retain(|key| core.output(*key).is_some());
        self.parts.engine.forget(&ended);
    }

    /// Starts to fetch blocks from another node.
    pub fn fetch(&mut self, source: FetchSource, lease: LeaseRequest, destinations: Vec<BlockId>) {
        let key = lease.key;
        let fetching = start_fetch(&mut self.parts, &self.peers, source, lease, destinations);
        self.fetches.insert(key, fetching);
    }

    /// Ends a fetch early; its end is told all the same.
    pub fn cancel_fetch(&self, key: RequestKey) {
        if let Some(fetching) = self.fetches.get(&key) {
            fetching.cancel.cancel();
        }
    }

    /// A fetch or SSD read is over. Returns where a step may wait for it.
    pub fn end_fetch(&mut self, key: RequestKey, result: &Result<FetchedBytes, Refused>) -> Option<LayerBarrier> {
        if let (Some(ssd), Ok(fetched)) = (&self.ssd, result) {
            ssd.on_fetched(fetched);
        }
        Some(self.fetches.remove(&key)?.barrier)
    }

    /// Writes to the SSD in a row that failed, if it takes no blocks since; else 0.
    pub fn ssd_write_failures(&self) -> u32 {
        self.ssd.as_ref().map_or(0, Ssd::write_failures)
    }

    /// Carries out what a core decided about its SSD.
    ///
    /// # Errors
    /// There is none, which is a bug of the core.
    pub fn carry_out_tier(&mut self, core: &mut impl TieredCore, effect: TierEffect) -> anyhow::Result<()> {
        let ssd = self.ssd.as_mut().context("the core wants an SSD, and this node has none")?;
        self.fetches.extend(ssd.carry_out(&self.parts, core, effect));
        Ok(())
    }

    /// Carries out what a core decided about its readers.
    pub fn carry_out_lease(&mut self, core: &mut impl NodeCore, effect: LeaseEffect) {
        if let Some(failed) = self.leases.carry_out(&self.parts, effect) {
            core.on_release_lease(self.parts.clock.now(), failed.into());
        }
    }

    /// Runs a call, and sends its answer back into the loop.
    pub fn answer(&self, name: &'static str, call: impl Future<Output = E> + Send + 'static) {
        let inputs = self.parts.inputs.clone();
        self.parts.tasks.spawn_request(name, async move {
            // The loop is gone only when the process ends.
            let _ = inputs.send(Input::Role(call.await)).await;
        });
    }
}
