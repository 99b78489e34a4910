//! What a prefill node's shell does.

use std::time::Duration;

use baton_scheduler::{PrefillEffect, PushId, PushReport, PushSpan, RequestKey};
use baton_types::Refused;

use super::{Core, Node, Push};
use crate::cluster::wire::{Event, Input, Report, Wire};
use crate::faults::FaultKind;

impl Node {
    pub(super) fn on_prefill_input(&mut self, wire: &mut Wire, input: Input) {
        let now = wire.now();
        let Core::Prefill(core) = &mut self.core else { return };
        match input {
            Input::Reselect(reselect) => core.on_reselect(*reselect),
            Input::GrantReply(key, reply) => core.on_grant_reply(now, key, reply.map(|reply| *reply)),
            Input::HandoffReply(key, result) => core.on_handoff_reply(now, key, result),
            Input::PushCancelled(key, push) if self.pushes.remove(&(key, push)).is_some() => {
                core.on_push_done(now, key, push, Err(super::unavailable("it was cancelled")));
            }
            // Only decode nodes are told these.
            _ => {}
        }
    }

    pub(super) fn on_prefill_effect(&mut self, wire: &mut Wire, effect: PrefillEffect) {
        let now = wire.now();
        match effect {
            PrefillEffect::RequestGrant { target, request, delay } => {
                let to = wire.start(&target.node, target.generation);
                let lost = Input::GrantReply(request.key, Err(super::unavailable("the answer was lost")));
                self.ask(wire, delay, to, |from| Input::GrantRequest(from, Box::new(request)), lost);
            }
            PrefillEffect::RunStep(plan) => self.run_step(wire, plan),
            PrefillEffect::Fetch { source, lease, destinations } => {
                self.start_fetch(wire, &source, lease, destinations);
            }
            PrefillEffect::CancelFetch { key } => self.cancel_fetch(wire, key),
            PrefillEffect::Tier(effect) => self.on_tier_effect(wire, effect),
            PrefillEffect::Lease(effect) => self.on_lease_effect(wire, effect),
            PrefillEffect::Push { key, push, target, grant, spans } => {
                let bytes = (self.info.layout.block_bytes() * spans.len()) as u64;
                let to = wire.start(&target.node, target.generation);
                let contents = &wire.contents;
                let node = self.start.node;
                let held = |span: &PushSpan| Some((*span, contents.as_ref()?.read(node, span.layer, span.source)));
                let spans = spans.iter().filter_map(held).collect();
                self.pushes.insert((key, push), Push { to, grant, bytes, started: now, spans });
                wire.queue.at(self.send.reserve(now, bytes), Event::Pushed { from: self.start, key, push });
            }
            PrefillEffect::CancelPushes { key } => {
                let first = (key, PushId(0));
                for (_, push) in self.pushes.range(first..).map(|(id, _)| *id).take_while(|id| id.0 == key) {
                    wire.at(now, self.start, Input::PushCancelled(key, push));
                }
            }
            PrefillEffect::Handoff { target, handoff } => {
                let to = wire.start(&target.node, target.generation);
                let lost = Input::HandoffReply(handoff.key, Err(super::unavailable("the answer was lost")));
                self.ask(wire, Duration::ZERO, to, |from| Input::Handoff(from, Box::new(handoff)), lost);
            }
            PrefillEffect::ReleaseGrant { key, target, grant } => {
                let to = wire.start(&target.node, target.generation);
                wire.tell(self.start.node, to, Input::ReleaseGrant(key, grant));
            }
            PrefillEffect::Emit { conductor: _, key, event } => {
                wire.report(self.start, Report::Prefill(key, Box::new(event)));
            }
        }
    }

    /// Whether this batch of writes fails.
    pub(in crate::cluster) fn push_fails(&mut self, wire: &mut Wire) -> bool {
        self.fails(wire, FaultKind::Push)
    }

    /// A batch of writes is over.
    pub(in crate::cluster) fn on_pushed(
        &mut self,
        wire: &mut Wire,
        key: RequestKey,
        push: PushId,
        arrived: Result<Push, Refused>,
    ) {
        let now = wire.now();
        let result = arrived.map(|push| PushReport {
            bytes: push.bytes,
            transport: "simulated".to_owned(),
            started: push.started,
            completed: now,
        });
        if let Core::Prefill(core) = &mut self.core {
            core.on_push_done(now, key, push, result);
        }
        self.carry_out(wire);
    }
}
