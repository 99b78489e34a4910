//! The engine's step, layer by layer.

use baton_scheduler::{MAX_PREFIX_WAIT_PER_STEP, RequestKey, StepId, StepPlan};

use super::fetch::Fetch;
use super::{Core, Node, with_core};
use crate::cluster::contents::Past;
use crate::cluster::wire::{Input, Report, Wire};
use crate::faults::FaultKind;

impl Node {
    pub(super) fn run_step(&mut self, wire: &mut Wire, plan: StepPlan) {
        let now = wire.now();
        let id = plan.id;
        let step = self.engine.begin(now, plan);
        match &self.core {
            // Layers are pushed as they are ready.
            Core::Prefill(_) => wire.at(now, self.start, Input::Layer(id)),
            Core::Decode(_) => wire.at(now + step.time, self.start, Input::StepDone(id)),
        }
        self.step = Some(step);
    }

    /// The engine comes to its next layer.
    pub(super) fn on_layer(&mut self, wire: &mut Wire, id: StepId) {
        let now = wire.now();
        let num_layers = self.info.layout.num_layers;
        let Some(step) = self.step.as_mut().filter(|step| step.plan.id == id) else { return };
        let layer = step.layer;
        let missing = |key: &RequestKey| self.fetches.get(key).filter(|fetch| fetch.layers_here <= layer);
        let patience = step.awaited.iter().filter_map(missing).map(Fetch::patience).max();
        if let Some(patience) = patience {
            if step.waiting_since.is_none() {
                step.waiting_since = Some(now);
                let patience = patience.min(MAX_PREFIX_WAIT_PER_STEP.saturating_sub(step.waited));
                wire.at(now + patience, self.start, Input::PrefixLate(id, layer));
            }
            return;
        }
        if let Some(since) = step.waiting_since.take() {
            step.waited += now - since;
        }
        step.layer += 1;
        if let Some(contents) = &mut wire.contents {
            for sequence in &step.plan.sequences {
                let past = if step.late.contains(&sequence.key) { Past::Wrong } else { Past::Here };
                contents.compute(self.start.node, sequence, layer, past);
            }
        }
        let due = step.layer_due(step.layer, num_layers);
        let next = if step.layer < num_layers { Input::Layer(id) } else { Input::StepDone(id) };
        wire.at(due, self.start, next);
        if let Core::Prefill(core) = &mut self.core {
            core.on_kv_ready(now, id, layer);
        }
    }

    /// Something that the step may wait for is here.
    pub(super) fn resume_step(&mut self, wire: &mut Wire) {
        if let Some(id) = self.step.as_ref().filter(|step| step.waiting_since.is_some()).map(|step| step.plan.id) {
            self.on_layer(wire, id);
        }
    }

    /// The step has waited for long enough and goes on without.
    pub(super) fn on_prefix_late(&mut self, wire: &mut Wire, id: StepId, layer: u32) {
        let now = wire.now();
        let Some(step) = self.step.as_mut().filter(|step| step.plan.id == id && step.layer == layer) else { return };
        if step.waiting_since.is_none() {
            return;
        }
        let (late, awaited) = std::mem::take(&mut step.awaited)
            .into_iter()
            .partition(|key| self.fetches.get(key).is_some_and(|fetch| fetch.layers_here <= layer));
        step.awaited = awaited;
        step.late.extend(&late);
        let late: Vec<RequestKey> = late;
        if let Core::Prefill(core) = &mut self.core {
            for key in late {
                core.on_prefix_late(now, id, key);
            }
        }
        self.on_layer(wire, id);
    }

    pub(super) fn on_step_done(&mut self, wire: &mut Wire, id: StepId) {
        let now = wire.now();
        let num_layers = self.info.layout.num_layers;
        let Some(step) = self.step.take_if(|step| step.plan.id == id) else { return };
        wire.report(self.start, Report::Step(Box::new(step.report(now, num_layers))));
        if let (Some(contents), Core::Decode(_)) = (&mut wire.contents, &self.core) {
            contents.compute_step(self.start.node, &step.plan, num_layers);
        }
        let outputs = step.outputs(num_layers);
        // The cores append to what it shares with them.
        drop(step);
        let fails = self.fails(wire, FaultKind::Step);
        let result = if fails { Err(super::unavailable("the step failed")) } else { Ok(outputs) };
        if let Core::Prefill(core) = &mut self.core {
            core.on_layers_done(id, now);
        }
        with_core!(self, core => core.on_step_done(now, id, result));
    }
}
