//! What nodes say of a request's attempts, and what comes of it.

use std::time::{Duration, Instant};

use baton_types::{
    Attempt, DecodeEvent, DecodeTarget, ErrorKind, FetchReport, FinishReason, KvTransfer, NodeId, PrefillEvent,
    Refused, RequestKey, Reselect,
};

use super::recovery::{Fault, lost};
use super::{
    Attempted, LedgerEntry, OutputToken, RequestCore, RequestEffect, RequestError, RequestEvent, RequestNote, State,
};
use crate::ledger::NodeStart;

/// How long the report of the handoff may come after the last token.
pub(super) const HANDOFF_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

impl RequestCore {
    /// A node that a job was to go to cannot be reached.
    pub fn on_unreachable(&mut self, now: Instant, node: &NodeId) {
        let message = "its session ended in this moment";
        match &self.state {
            State::Migrating(asked) if asked.to.node == *node => self.on_migration_failed(message),
            // No node has worked for it yet: it is as good as not placed, and may still be refused,
            // or wait.
            State::Prefilling if self.last_attempt == Some(Attempt(0)) => {
                self.end_attempt(false);
                self.attempted = None;
                self.last_attempt = None;
                self.state = State::Placing;
                self.failed_nodes.push(node.clone());
                self.ask_for_nodes(now, self.failed_nodes.clone());
            }
            _ => self.fail(now, lost(node, message)),
        }
    }

    /// A node said something about an attempt. What is about an attempt that is over is ignored:
    /// what was on its way when it failed must not fail the next one.
    pub fn on_event(&mut self, now: Instant, attempt: Attempt, event: RequestEvent) {
        if !matches!(event, RequestEvent::MigrationRequested(_)) && self.is_heard(attempt) {
            self.heard = now;
        }
        match &self.state {
            State::Migrating(asked) if asked.attempt == attempt => self.on_migrating(now, event),
            _ if self.is_over() || self.attempt() != attempt => {}
            _ => match event {
                RequestEvent::Prefill(event) => self.on_prefill(now, event),
                RequestEvent::Decode(event) => self.on_decode(now, event),
                RequestEvent::MigrationRequested(output_tokens) => self.on_migration_requested(output_tokens),
            },
        }
    }

    fn is_heard(&self, attempt: Attempt) -> bool {
        self.attempt() == attempt || matches!(&self.state, State::Migrating(asked) if asked.attempt == attempt)
    }

    /// Whether no attempt runs.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Placing | State::Queued { .. } | State::Recovering(_) | State::Ended)
    }

    fn on_prefill(&mut self, now: Instant, event: PrefillEvent) {
        match event {
            PrefillEvent::Started { queue, cached_tokens } => {
                if self.output.len() == 0 {
                    self.timeline.prefill_queue = queue;
                }
                self.count_cached(cached_tokens);
                if let Some(attempted) = &mut self.attempted {
                    attempted.prefill_started = now;
                    attempted.has_begun = true;
                }
            }
            PrefillEvent::Fetched(report) if self.migrations.has_migrated() => self.on_kv_fetched(report),
            PrefillEvent::Fetched(report) => self.on_fetched(report),
            PrefillEvent::FirstToken { token, logprobs, prompt_logprobs, finish, compute } => {
                // What is computed again comes after the first token, and is no part of the TTFT.
                if self.output.len() == 0 {
                    self.timeline.prefill_compute = compute;
                }
                if !prompt_logprobs.is_empty() && !std::mem::replace(&mut self.prompt_logprobs_sent, true) {
                    self.effects.push_back(RequestEffect::PromptLogprobs(prompt_logprobs));
                }
                if finish.is_some() {
                    // No report of a handoff follows.
                    self.on_handed_off();
                }
                self.on_first_token(now, OutputToken { token, logprobs, finish });
            }
            PrefillEvent::HandedOff(transfer) => {
                self.on_pushed(&transfer);
                self.timeline.kv_transfer = transfer;
                match self.state {
                    State::Settling { .. } => self.complete(now),
                    _ => self.on_handed_off(),
                }
            }
            PrefillEvent::Failed(refused) if self.migrations.has_migrated() => {
                self.note(RequestNote::MigrationFailed { reason: refused.message.clone() });
                self.fail_at_decode(now, refused);
            }
            PrefillEvent::Failed(refused) => {
                if let Some(node) = self.placement().map(|placement| placement.prefill.clone()) {
                    self.fail(now, RequestError::Node { node, refused });
                }
            }
            // It has not begun there: the decode node drains, or is gone.
            PrefillEvent::DecodeFailed(refused)
                if self.state == State::Prefilling && refused.kind == ErrorKind::Unavailable =>
            {
                if let Some(node) = self.placement().and_then(|placement| placement.decode.clone()) {
                    self.fail_with(now, RequestError::Node { node, refused }, Fault::None);
                }
            }
            PrefillEvent::DecodeFailed(refused) => self.fail_at_decode(now, refused),
            PrefillEvent::GrantRefused(refused) => self.on_grant_refused(refused),
            // Nothing is needed of it but that it came.
            PrefillEvent::Progress { .. } => {}
        }
    }

    /// What a push took; in a partial prefill compute hides it in another way.
    fn on_pushed(&mut self, transfer: &KvTransfer) {
        let Some(Attempted { key, placement, .. }) = &self.attempted else { return };
        if let Some(to) =
            placement.decode.clone().filter(|_| placement.partial_prefill_tokens == 0 && transfer.bytes > 0)
        {
            self.update_ledger(*key, LedgerEntry::Pushed { to, transfer: transfer.clone() });
        }
    }

    /// The prefill node is done with it.
    fn on_handed_off(&mut self) {
        match self.state {
            State::Prefilling => self.state = State::Following,
            State::HandingOff => self.state = State::Decoding,
            _ => {}
        }
    }

    fn on_decode(&mut self, now: Instant, event: DecodeEvent) {
        match event {
            DecodeEvent::Token { index, token, logprobs, finish, queue } => {
                if let Some(queue) = queue {
                    self.timeline.decode_queue = queue;
                }
                let token = OutputToken { token, logprobs, finish };
                if index != self.first_index() {
                    self.tell_decodes();
                    return self.on_token(now, index, token);
                }
                // The decode node computed the last part of the prompt.
                if let Some(attempted) = self.attempted.as_ref().filter(|_| self.output.len() == 0) {
                    self.timeline.prefill_compute = now.saturating_duration_since(attempted.prefill_started);
                }
                self.on_first_token(now, token);
            }
            DecodeEvent::Failed(refused) => self.fail_at_decode(now, refused),
        }
    }

    /// The ledger hears of the decode node's first token.
    fn tell_decodes(&mut self) {
        let Some(Attempted { key, decodes, .. }) = &mut self.attempted else { return };
        let key = *key;
        if !std::mem::replace(decodes, true) {
            self.update_ledger(key, LedgerEntry::Decodes);
        }
    }

    fn on_first_token(&mut self, now: Instant, token: OutputToken) {
        match self.state {
            State::Prefilling => self.state = State::HandingOff,
            State::Following => self.state = State::Decoding,
            _ => {}
        }
        if let Some(Attempted { key, placement, has_begun, .. }) = &mut self.attempted {
            *has_begun = true;
            let key = *key;
            let first_token_delay = placement.first_token_delay;
            if self.output.len() == 0 && token.finish.is_none() && !first_token_delay.is_zero() {
                self.first_token_due = Some(now + first_token_delay);
            }
            self.update_ledger(key, LedgerEntry::FirstToken);
        }
        self.on_token(now, self.first_index(), token);
    }

    fn on_token(&mut self, now: Instant, index: u32, token: OutputToken) {
        if let Some(attempted) = &mut self.attempted {
            attempted.is_done |= token.finish.is_some();
        }
        if self.finish.is_some() {
            return;
        }
        // The client has more than this node can hold: a larger one gave it, and failed.
        let ends_before = token.finish == Some(FinishReason::Length) && index < self.output.len();
        match self.output.push(index, token) {
            Ok(()) if ends_before => self.on_finish(now, FinishReason::Length),
            Ok(()) => self.deliver(now),
            Err(contradiction) => self.end(now, Err(RequestError::Contradicted(contradiction))),
        }
    }

    /// Gives the client what is in order, unless the first token is kept back.
    pub(super) fn deliver(&mut self, now: Instant) {
        if self.first_token_due.is_some_and(|until| now < until) {
            return;
        }
        self.first_token_due = None;
        let index = self.output.len();
        let tokens = self.output.take();
        let Some(last) = tokens.last() else { return };
        let finish = last.finish;
        let before = self.last_delivery.replace(now);
        let gap = before.map(|before| now.saturating_duration_since(before));
        match (gap, &self.attempted) {
            (Some(gap), _) => self.gaps.push(gap),
            (None, Some(Attempted { key, placed, .. })) => {
                self.timeline.ttft = now.saturating_duration_since(self.arrived);
                self.first_token = Some((key.attempt, now.saturating_duration_since(*placed)));
            }
            (None, None) => {}
        }
        self.effects.push_back(RequestEffect::Deliver { index, gap, tokens });
        if let Some(finish) = finish {
            self.on_finish(now, finish);
        }
    }

    /// The text of what was delivered ended at a stop string, within its token number `tokens` - 1.
    pub fn on_stopped(&mut self, now: Instant, tokens: u32) {
        self.output.stop_after(tokens);
        match self.state {
            State::Ended => {}
            State::Settling { .. } => self.finish = Some(FinishReason::Stop),
            _ => self.on_finish(now, FinishReason::Stop),
        }
    }

    /// The client has everything. Who was asked to go on need not.
    fn on_finish(&mut self, now: Instant, finish: FinishReason) {
        self.finish = Some(finish);
        self.give_up_migration();
        match self.state {
            State::Prefilling | State::HandingOff => {
                self.state = State::Settling { until: now + HANDOFF_REPORT_TIMEOUT };
            }
            _ => self.complete(now),
        }
    }

    pub(super) fn complete(&mut self, now: Instant) {
        let finish = self.finish.unwrap_or(FinishReason::Length);
        self.end(now, Ok(finish));
    }

    /// A prefix came from another node, or did not.
    fn on_fetched(&mut self, report: FetchReport) {
        let Some(Attempted { key, placement, .. }) = &self.attempted else { return };
        // What a node found on its own SSD says nothing of the way between nodes.
        let fetch = placement.fetch.as_ref().filter(|_| report.transport != FetchReport::SSD);
        let way = fetch.map(|fetch| (fetch.from.clone(), placement.prefill.clone()));
        self.update_ledger(*key, LedgerEntry::Fetched { way, report: report.clone() });
        if let Some(refused) = report.failure {
            return self.note(RequestNote::FetchFailed(refused));
        }
        self.count_cached(report.tokens);
        let bytes = report.bytes;
        let transport = report.transport;
        let elapsed = report.elapsed;
        self.timeline.prefix_fetch = Some(KvTransfer { bytes, transport, elapsed, ..KvTransfer::default() });
    }

    fn on_grant_refused(&mut self, refused: Refused) {
        let Some(Attempted { key, placement, .. }) = &self.attempted else { return };
        if let Some(from) = placement.decode.clone() {
            self.effects.push_back(RequestEffect::AskReselect { key: *key, from, refused });
        }
    }

    /// The cluster's answer to [`RequestEffect::AskReselect`]: another decode node, or the same
    /// one. The same one need not keep to the objective then: an admitted request is served.
    /// `None`: that node is gone.
    pub fn on_reselected(
        &mut self,
        now: Instant,
        key: RequestKey,
        from: &NodeId,
        refused: Refused,
        to: Option<DecodeTarget>,
    ) {
        // The attempt may have failed since it was asked.
        let waits = !self.is_over() && !matches!(self.state, State::Settling { .. });
        let Some(attempted) = self.attempted.as_mut().filter(|attempted| waits && attempted.key == key) else { return };
        let Some(decode) = to else {
            return self.fail_with(now, lost(from, "the node is gone, or drains"), Fault::None);
        };
        let other = (decode.node != *from).then(|| decode.node.clone());
        if let Some(other) = &other {
            attempted.placement.decode = Some(other.clone());
            // They were of the other node.
            attempted.placement.predicted_tbt = None;
            attempted.placement.predicted_exposed = None;
            attempted.since = now;
            attempted.starts.retain(|start| start.node != *from);
            attempted.starts.push(NodeStart { node: other.clone(), generation: decode.generation });
        }
        let key = attempted.key;
        let node = attempted.placement.prefill.clone();
        self.note(RequestNote::GrantRefused { from: from.clone(), to: other, refused });
        self.effects.push_back(RequestEffect::Reselect { node, reselect: Reselect { key, decode } });
    }
}
