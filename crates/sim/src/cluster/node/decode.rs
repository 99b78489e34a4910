//! What a decode node's shell does.

use std::time::Duration;

use baton_scheduler::DecodeEffect;
use baton_types::{LeaseRequest, PrefillEvent};

use super::{Core, Node};
use crate::cluster::wire::{Input, Report, Wire};

/// Until nothing can land under a grant that was revoked. What is on its way may land before.
const FENCE_DELAY: Duration = Duration::from_millis(1);
/// The same if messages are slow.
const SLOW_FENCE: Duration = Duration::from_millis(100);

impl Node {
    pub(super) fn on_decode_input(&mut self, wire: &mut Wire, input: Input) {
        let now = wire.now();
        let Core::Decode(core) = &mut self.core else { return };
        match input {
            Input::GrantRequest(from, request) => {
                self.grants_asked.insert(request.key, from);
                core.on_grant_request(now, *request);
            }
            Input::Handoff(from, handoff) => {
                self.handoffs_asked.insert(handoff.key, from);
                core.on_handoff(now, *handoff);
            }
            Input::ReleaseGrant(key, grant) => core.on_release_grant(now, key, grant),
            Input::Arrived(grant, push, bytes) => core.on_arrival(now, grant, push, bytes),
            Input::Fenced(grant) => {
                self.open.remove(&grant);
                core.on_grant_fenced(now, grant);
            }
            // Only prefill nodes are told these.
            _ => {}
        }
    }

    pub(super) fn on_decode_effect(&mut self, wire: &mut Wire, effect: DecodeEffect) {
        let now = wire.now();
        match effect {
            DecodeEffect::OpenGrant { key, reply, .. } => {
                self.open.insert(reply.grant);
                if let Some(asked) = self.grants_asked.remove(&key) {
                    wire.tell(self.start.node, asked, Input::GrantReply(key, Ok(Box::new(reply))));
                }
            }
            DecodeEffect::RefuseGrant { key, refused } => {
                if let Some(asked) = self.grants_asked.remove(&key) {
                    wire.tell(self.start.node, asked, Input::GrantReply(key, Err(refused)));
                }
            }
            DecodeEffect::RevokeGrant { grant } => {
                let delay = if wire.has_jitter() { SLOW_FENCE } else { FENCE_DELAY };
                wire.at(now + delay, self.start, Input::Fenced(grant));
            }
            DecodeEffect::HandoffReply { key, result } => {
                if let Some(asked) = self.handoffs_asked.remove(&key) {
                    wire.tell(self.start.node, asked, Input::HandoffReply(key, result));
                }
            }
            DecodeEffect::RunStep(plan) => self.run_step(wire, plan),
            DecodeEffect::Lease(effect) => self.on_lease_effect(wire, effect),
            DecodeEffect::Tier(effect) => self.on_tier_effect(wire, effect),
            DecodeEffect::Emit { conductor: _, events } => wire.report(self.start, Report::Decode(events)),
            DecodeEffect::RequestMigration { conductor: _, key, output_tokens } => {
                if self.migrates {
                    wire.report(self.start, Report::Offer(key, output_tokens));
                }
            }
            DecodeEffect::Fetch { key, source, block_hashes, destinations } => {
                let reader = self.info.node.clone();
                let reader_generation = self.start.generation;
                let lease = LeaseRequest { key, reader, reader_generation, block_hashes };
                self.start_fetch(wire, &source, lease, destinations);
            }
            DecodeEffect::CancelFetch { key } => self.cancel_fetch(wire, key),
            DecodeEffect::AnswerMigration { conductor: _, key, result } => {
                let event = result.map_or_else(PrefillEvent::Failed, PrefillEvent::Fetched);
                wire.report(self.start, Report::Prefill(key, Box::new(event)));
            }
            DecodeEffect::EmitPrefill { conductor: _, key, event } => {
                wire.report(self.start, Report::Prefill(key, Box::new(event)));
            }
        }
    }
}
