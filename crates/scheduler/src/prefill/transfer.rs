//! The way of a request's KV to its decode node: grant, pushes, handoff.

use std::time::{Duration, Instant};

use baton_types::{ErrorKind, GrantId, GrantReply, Handoff, PrefillEvent, Refused, RequestKey, Reselect};

use super::{GrantState, HandoffState, PrefillCore, PrefillEffect, PushId, PushReport, decode_failed};

/// A decode node that refused is not asked again before.
const GRANT_RETRY: Duration = Duration::from_millis(100);

impl PrefillCore {
    /// The decode node's answer to a grant request.
    pub fn on_grant_reply(&mut self, now: Instant, key: RequestKey, reply: Result<GrantReply, Refused>) {
        let request = self.active.get_mut(&key);
        let transfer = request.and_then(|request| Some((request.job.conductor, request.transfer.as_mut()?)));
        let asked = transfer.filter(|(_, transfer)| matches!(transfer.grant, GrantState::Requested));
        let Some((conductor, transfer)) = asked else { return self.on_late_grant(key, reply) };
        let target = transfer.target.node.clone();
        match reply {
            Ok(reply) => {
                let partial_prefill_tokens = reply.partial_prefill_tokens as usize;
                transfer.grant = GrantState::Granted(reply);
                self.deadlines.clear(key);
                if let Err(message) = self.settle_tail(key, partial_prefill_tokens).and_then(|()| self.check_grant(key))
                {
                    self.end(key, Some(decode_failed(ErrorKind::Internal, message)));
                }
            }
            // Within the time limit it may wait for room again, there or elsewhere: what is
            // computed stays.
            Err(refused) if refused.kind == ErrorKind::Overloaded && self.deadlines.is_after(key, now) => {
                transfer.grant = GrantState::Refused;
                let refused = Refused { message: format!("decode node {target}: {refused}"), ..refused };
                self.emit(conductor, key, PrefillEvent::GrantRefused(refused));
            }
            Err(Refused { kind, message }) => {
                transfer.grant = GrantState::Gone;
                let message = format!("decode node {target}: {message}");
                self.end(key, Some(decode_failed(kind, message)));
            }
        }
        self.advance_transfer(now, key);
        self.plan_step(now);
    }

    /// The conductor's answer to [`PrefillEvent::GrantRefused`]. Ignored if the request has ended,
    /// or waits for no such answer.
    pub fn on_reselect(&mut self, reselect: Reselect) {
        let key = reselect.key;
        let transfer = self.active.get_mut(&key).and_then(|request| request.transfer.as_mut());
        let Some(transfer) = transfer.filter(|transfer| matches!(transfer.grant, GrantState::Refused)) else { return };
        transfer.grant = GrantState::Requested;
        let asked = std::mem::replace(&mut transfer.target, reselect.decode);
        let is_other = asked.node != transfer.target.node;
        // Two that refuse at once are not asked in turn without a pause.
        let at_once = is_other && !std::mem::replace(&mut transfer.was_reselected, true);
        if is_other {
            // No request is to wait behind its place in the line.
            self.effects.push_back(PrefillEffect::ReleaseGrant { key, target: asked, grant: GrantId::NONE });
        }
        // Another attempt at sharing the prompt would come too late to be worth it.
        if let Some(request) = self.active.get_mut(&key) {
            request.end = request.num_tokens();
        }
        self.ask_for_grant(key, if at_once { Duration::ZERO } else { GRANT_RETRY });
    }

    /// A batch is over. Its bytes are visible at the decode node, or it failed or was cancelled and
    /// its blocks are not read any more. Batches that are not known are ignored.
    pub fn on_push_done(&mut self, now: Instant, key: RequestKey, push: PushId, result: Result<PushReport, Refused>) {
        let Some(request) = self.active.get_mut(&key) else { return };
        let Some(transfer) = &mut request.transfer else { return };
        let Some(expected) = transfer.inflight.remove(&push) else { return };
        if request.ended {
            self.release_if_unused(key);
            return self.plan_step(now);
        }
        let target = &transfer.target.node;
        match result {
            Ok(report) if report.bytes == expected => transfer.on_acked(&report),
            Ok(report) => {
                let message = format!("push to {target}: {} bytes acknowledged of {expected}", report.bytes);
                self.end(key, Some(decode_failed(ErrorKind::DataLoss, message)));
            }
            Err(Refused { kind, message }) => {
                let message = format!("push to {target} failed: {message}");
                self.end(key, Some(decode_failed(kind, message)));
            }
        }
        self.advance_transfer(now, key);
        self.plan_step(now);
    }

    /// The decode node's answer to the handoff. Ignored if the request has ended.
    pub fn on_handoff_reply(&mut self, now: Instant, key: RequestKey, reply: Result<(), Refused>) {
        let Some(request) = self.active.get_mut(&key).filter(|request| !request.ended) else { return };
        let Some(transfer) = &mut request.transfer else { return };
        if transfer.handoff != HandoffState::Sent {
            return;
        }
        self.deadlines.clear(key);
        match reply {
            Ok(()) => transfer.handoff = HandoffState::Accepted,
            Err(Refused { kind, message }) => {
                let message = format!("decode node {} refused the handoff: {message}", transfer.target.node);
                self.end(key, Some(decode_failed(kind, message)));
            }
        }
        self.advance_transfer(now, key);
        self.plan_step(now);
    }

    fn on_late_grant(&mut self, key: RequestKey, reply: Result<GrantReply, Refused>) {
        if let (Some(target), Ok(reply)) = (self.late_grants.remove(&key), reply) {
            self.effects.push_back(PrefillEffect::ReleaseGrant { key, target, grant: reply.grant });
        }
    }

    /// The decode node says whether it computes the partial prefill that it was asked for. If it
    /// does not, this node does.
    fn settle_tail(&mut self, key: RequestKey, partial_prefill_tokens: usize) -> Result<(), String> {
        let Some(request) = self.active.get_mut(&key) else { return Ok(()) };
        match partial_prefill_tokens {
            0 => request.end = request.num_tokens(),
            tail if tail == request.partial_prefill_tokens() => {}
            tail => {
                return Err(format!("it computes {tail} tokens, {} were asked for", request.partial_prefill_tokens()));
            }
        }
        Ok(())
    }

    /// Whether the grant covers the prompt, or what comes before the partial prefill. The decode
    /// node's word decides what is not pushed.
    fn check_grant(&self, key: RequestKey) -> Result<(), String> {
        let Some(request) = self.active.get(&key) else { return Ok(()) };
        let Some(GrantState::Granted(grant)) = request.transfer.as_ref().map(|transfer| &transfer.grant) else {
            return Ok(());
        };
        let held = grant.cached_blocks as usize;
        let granted = grant.blocks.len();
        let all = self.config.model.layout.blocks_for(request.end);
        if held <= request.hashes.len() && held + granted == all {
            return Ok(());
        }
        let full = request.hashes.len();
        Err(format!(
            "the grant holds {held} and takes {granted} blocks of a prompt of {full} full and {all} blocks in all"
        ))
    }

    /// Does whatever can be done next for a request's transfer: pushes, handoff, end.
    pub(super) fn advance_transfer(&mut self, now: Instant, key: RequestKey) {
        if self.active.get(&key).is_none_or(|request| request.ended) {
            return;
        }
        self.start_pushes(key);
        self.send_handoff(now, key);
        self.finish_transfer(key);
    }

    /// What becomes ready while `max_inflight_pushes` batches are out is pushed in one batch later.
    fn start_pushes(&mut self, key: RequestKey) {
        let max_inflight = self.config.max_inflight_pushes;
        let max_spans = self.config.max_spans_per_push;
        let Some(request) = self.active.get_mut(&key) else { return };
        let Some(transfer) = &mut request.transfer else { return };
        while transfer.inflight.len() < max_inflight {
            let spans = transfer.take_spans(&request.blocks, max_spans);
            let GrantState::Granted(GrantReply { grant, .. }) = transfer.grant else { return };
            if spans.is_empty() {
                return;
            }
            let push = transfer.next_push(self.config.model.layout.blocks_for(request.end));
            transfer.inflight.insert(push, (spans.len() * self.config.model.layout.block_bytes()) as u64);
            let target = transfer.target.clone();
            self.effects.push_back(PrefillEffect::Push { key, push, target, grant, spans });
        }
    }

    /// The handoff goes out with the first token, or, if the decode node draws that, with the
    /// grant. The decode node counts the bytes that are still to come.
    fn send_handoff(&mut self, now: Instant, key: RequestKey) {
        let Some(request) = self.active.get_mut(&key) else { return };
        let first_token = request.first_token;
        let is_partial = request.partial_prefill_tokens() > 0;
        let Some(transfer) = request.transfer.as_mut().filter(|_| is_partial || first_token.is_some()) else { return };
        let GrantState::Granted(grant) = &transfer.grant else { return };
        if transfer.handoff != HandoffState::NotSent {
            return;
        }
        transfer.handoff = HandoffState::Sent;
        let handoff = Handoff {
            key,
            conductor: request.job.conductor,
            grant: grant.grant,
            tokens: request.job.tokens.clone(),
            first_token,
            sampling: request.job.sampling.clone(),
            expected_bytes: self.config.model.bytes(grant.blocks.len()),
            salt: request.job.salt.clone(),
        };
        self.deadlines.set(key, now + self.config.handoff_timeout);
        self.effects.push_back(PrefillEffect::Handoff { target: transfer.target.clone(), handoff });
    }

    fn finish_transfer(&mut self, key: RequestKey) {
        let Some(transfer) = self.active.get(&key).and_then(|request| request.transfer.as_ref()) else { return };
        if !transfer.is_complete(&self.config.model) {
            return;
        }
        let GrantState::Granted(grant) = &transfer.grant else { return };
        assert_eq!(transfer.acked_bytes(), self.config.model.bytes(grant.blocks.len()), "bytes pushed of {key:?}");
        let event = PrefillEvent::HandedOff(transfer.report());
        self.end(key, Some(event));
    }
}
