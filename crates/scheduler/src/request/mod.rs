//! One request's life at its conductor: from its first placement to its end, through as many
//! attempts as it takes.
//!
//! ```text
//!             ┌──────────────────── a node failed: Recovering, then placed again ───────────────────┐
//!             ▼                                                                                     │
//!   Placing ─▶ Prefilling ─ first token ─▶ HandingOff ─ handed off ─▶ Decoding ◀─▶ Migrating ────────┤
//!    │  ▲          │                                                     ▲   │                      │
//!    ▼  │          └─ handed off, the decode node computes the rest ─▶ Following                   │
//!    Queued                                                                  │                      │
//!                                 the client has everything: Settling ◀──────┴──────▶ Ended ◀───────┘
//! ```
//!
//! An attempt that fails is followed by one on other nodes, which computes the prompt and the
//! output that the client has, and goes on from there. Sampling has no hidden state, so the next
//! tokens are those that would have come. Tokens already sent never change: one that comes once
//! more, and differently, ends the request with an error. How a request is placed again:
//! `recovery.rs`; how it gets to another decode node: `migration.rs`.
//!
//! **Invariant**: a request ends in exactly one [`RequestEffect::End`], and every attempt that was
//! placed is ended in the cluster's ledger before it.

mod effect;
mod job;
mod migration;
mod order;
mod recovery;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    Attempt, DecodeEvent, DecodeTarget, ErrorKind, FetchReport, FinishReason, KvTransfer, NodeId, PrefillEvent,
    PrefillJob, Refused, RequestKey, Reselect, Tbt, Timeline, Usage,
};

use crate::ledger::NodeStart;
use crate::placement::{Placement, PlacementRequest, Refusal};

pub use baton_types::{Assignment, LedgerEntry, MigrationAssignment};
pub use effect::{RequestEffect, RequestError, RequestNote};
pub use job::RequestJob;
pub use order::OutputToken;

use migration::{MigrationTarget, Migrations};
use order::OutputOrder;
pub use recovery::Departure;
use recovery::{Fault, RECOVERY_POLL, Recovery, lost};

/// How long the report of the handoff may come after the last token.
const HANDOFF_REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Bounds of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Without any event for this long, offers by its decode node not counted, it is ended. Nor
    /// does it wait in the admission queue for longer.
    pub stall_timeout: Duration,
    /// So many attempts may fail. One whose node drains, or had not begun, is not counted.
    pub max_attempts: u32,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self { stall_timeout: Duration::from_secs(120), max_attempts: 3 }
    }
}

/// What a node says of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestEvent {
    /// The node that computes the prompt.
    Prefill(PrefillEvent),
    /// The node that decodes.
    Decode(DecodeEvent),
    /// The decode node would rather have it go on at another one. All of its output so far, so many
    /// tokens, was sent before.
    MigrationRequested(u32),
}

/// Where a request stands.
#[derive(Debug, Clone, PartialEq)]
enum State {
    /// The cluster is asked for nodes, for the first time.
    Placing,
    /// The cluster had no room, and may have some: it waits in the admission queue.
    Queued { look_at: Instant },
    /// No token of this attempt is here.
    Prefilling,
    /// Nor here, but the prefill node has done its part: the decode node computes the rest (partial
    /// prefill).
    Following,
    /// The first token of this attempt is here; the prefill node has not handed off.
    HandingOff,
    /// It is the decode node's alone.
    Decoding,
    /// The same, and another one is asked to go on with it.
    Migrating(MigrationTarget),
    /// A node failed it; the cluster is asked for others.
    Recovering(Recovery),
    /// The client has everything; the report of the handoff is to come.
    Settling { until: Instant },
    /// Nothing happens any more.
    Ended,
}

/// The attempt that runs.
#[derive(Debug, Clone)]
struct Attempted {
    key: RequestKey,
    placement: Placement,
    starts: Vec<NodeStart>,
    placed: Instant,
    /// When its nodes became those that they are.
    since: Instant,
    /// Output tokens that its job had: the first one drawn has this index.
    first_index: u32,
    /// When the prefill node said that it begins.
    prefill_started: Instant,
    /// Whether one of its nodes said that it is at work.
    has_begun: bool,
    /// Whether its decode node has given a token.
    decodes: bool,
    /// Whether its decode node said that it is done.
    is_done: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct RequestCore {
    job: RequestJob,
    limits: RequestLimits,
    arrived: Instant,
    state: State,
    /// `None` before the first placement.
    attempted: Option<Attempted>,
    /// The last one that there was, whatever became of it.
    last_attempt: Option<Attempt>,
    /// Attempts that failed.
    failures: u32,
    /// Attempts that ended because their nodes drained, had not begun, or lost a session.
    unfinished: u32,
    /// Separates what the next attempts cache from what others do: not empty once what was cached
    /// is no good.
    salt: Arc<[u8]>,
    /// Nodes that died while they had it.
    died: Vec<NodeId>,
    failed_nodes: Vec<NodeId>,
    was_queued: bool,
    migrations: Migrations,
    output: OutputOrder,
    /// Until when the first token is kept back, so that the gap to the next one is not longer than
    /// the others.
    first_token_due: Option<Instant>,
    finish: Option<FinishReason>,
    /// When the last event came from its nodes.
    heard: Instant,
    /// The attempt that gave the client's first token, and how long after it was placed.
    first_token: Option<(Attempt, Duration)>,
    last_delivery: Option<Instant>,
    gaps: Vec<Duration>,
    timeline: Timeline,
    cached_tokens: u32,
    prompt_logprobs_sent: bool,
    effects: VecDeque<RequestEffect>,
}

impl RequestCore {
    /// A request that arrived at `arrived`. It asks for nodes at once.
    pub fn new(now: Instant, arrived: Instant, job: RequestJob, limits: RequestLimits) -> Self {
        let output = OutputOrder::new(job.sampling.max_tokens);
        let mut core = Self {
            job,
            limits,
            arrived,
            state: State::Placing,
            attempted: None,
            last_attempt: None,
            failures: 0,
            unfinished: 0,
            salt: Arc::from([]),
            died: Vec::new(),
            failed_nodes: Vec::new(),
            was_queued: false,
            migrations: Migrations::default(),
            output,
            first_token_due: None,
            finish: None,
            heard: now,
            first_token: None,
            last_delivery: None,
            gaps: Vec::new(),
            timeline: Timeline::default(),
            cached_tokens: 0,
            prompt_logprobs_sent: false,
            effects: VecDeque::new(),
        };
        core.ask_for_nodes(now, Vec::new());
        core
    }

    /// What to do next; to be called until `None` after each event.
    pub fn poll_effect(&mut self) -> Option<RequestEffect> {
        self.effects.pop_front()
    }

    /// When [`Self::on_wakeup`] is due. It becomes later with every event, so that a shell may look
    /// at it late.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let due = match &self.state {
            State::Ended => return None,
            State::Placing => None,
            State::Settling { until } => return Some(*until),
            State::Queued { look_at } => Some(*look_at),
            State::Recovering(recovery) => recovery.look_at,
            State::Prefilling | State::Following | State::HandingOff | State::Decoding | State::Migrating(_) => {
                let stalled = self.heard + self.limits.stall_timeout;
                Some(self.first_token_due.map_or(stalled, |paced| paced.min(stalled)))
            }
        };
        due.into_iter().chain(self.deadline()).min()
    }

    /// When it has to be over.
    fn deadline(&self) -> Option<Instant> {
        self.arrived.checked_add(self.job.timeout)
    }

    /// What it asks.
    pub fn job(&self) -> &RequestJob {
        &self.job
    }

    /// Whether it was taken in: from then on it is served, or ends with an error of its own.
    pub fn is_admitted(&self) -> bool {
        self.attempted.is_some()
    }

    /// The attempt that runs; of one that ended, the last one.
    pub fn attempt(&self) -> Attempt {
        self.attempted.as_ref().map_or(Attempt(0), |attempted| attempted.key.attempt)
    }

    /// Where it runs, or ran last; `None` before it was placed.
    pub fn placement(&self) -> Option<&Placement> {
        self.attempted.as_ref().map(|attempted| &attempted.placement)
    }

    /// The starts of the nodes that a job sent now counts on.
    pub fn needed(&self) -> &[NodeStart] {
        match (&self.state, &self.attempted) {
            (State::Migrating(asked), _) => std::slice::from_ref(&asked.to),
            (_, attempted) => attempted.as_ref().map_or(&[], |attempted| &attempted.starts),
        }
    }

    /// Where its time went so far.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// What is asked of the cluster at [`RequestEffect::Place`].
    pub fn placement_request<'a>(
        &'a self,
        key: RequestKey,
        exclude: &'a [NodeId],
        waited: Duration,
    ) -> PlacementRequest<'a> {
        let wanted = self.job.placement_request(key, self.next_first_index(), exclude, waited);
        PlacementRequest { bypass_cache: wanted.bypass_cache || !self.salt.is_empty(), ..wanted }
    }

    /// Index of the first token that the attempt draws; those before it are the client's.
    pub fn first_index(&self) -> u32 {
        self.attempted.as_ref().map_or(0, |attempted| attempted.first_index)
    }

    fn count_cached(&mut self, tokens: u32) {
        if self.first_index() == 0 {
            // Nodes may say more than there is.
            let prompt = self.job.tokens.len() as u32;
            self.cached_tokens = self.cached_tokens.saturating_add(tokens).min(prompt);
        }
    }

    /// Whether a node has this attempt, or is asked to go on with it.
    pub fn is_at(&self, attempt: Attempt, node: &NodeId) -> bool {
        match (&self.state, &self.attempted) {
            (State::Migrating(asked), _) if asked.attempt == attempt => asked.to.node == *node,
            (_, Some(Attempted { key, placement, .. })) if key.attempt == attempt => {
                placement.prefill == *node || placement.decode.as_ref() == Some(node)
            }
            _ => false,
        }
    }

    /// Its tokens so far.
    pub fn usage(&self) -> Usage {
        let prompt_tokens = self.job.tokens.len() as u32;
        Usage { prompt_tokens, completion_tokens: self.output.len(), cached_tokens: self.cached_tokens }
    }

    /// The attempt that gave the first token, and how long after that was placed.
    pub fn first_token(&self) -> Option<(Attempt, Duration)> {
        self.first_token
    }

    /// The mean of the longest tenth of the gaps between deliveries.
    pub fn tbt(&self) -> Option<Tbt> {
        Tbt::of_gaps(&mut self.gaps.clone())
    }

    /// The cluster's answer to the [`RequestEffect::Place`] that names this attempt; `now` is when
    /// it decided.
    pub fn on_placed(&mut self, now: Instant, key: RequestKey, placed: Result<Assignment, Refusal>) {
        if key != self.next_key() {
            return;
        }
        match (placed, &self.state) {
            (Ok(to), State::Placing | State::Recovering(_)) => self.begin(now, to),
            (Err(refusal), State::Placing) => self.on_refused(now, refusal),
            (Err(refusal), State::Recovering(_)) => self.on_no_other_nodes(now, &refusal),
            // It was not asked for.
            _ => {}
        }
    }

    /// Before it is taken in: it is refused, or waits while its objective leaves time for the
    /// cluster to get room.
    fn on_refused(&mut self, now: Instant, refusal: Refusal) {
        let waited = now.saturating_duration_since(self.arrived);
        let may_wait = waited <= self.limits.stall_timeout;
        // What was taken in with another answer waits for room as long as the request may take.
        let room = Some(RECOVERY_POLL)
            .filter(|_| !self.job.first_completion_nodes.is_empty() && refusal.kind != ErrorKind::Invalid);
        match refusal.hold.filter(|_| may_wait).or(room) {
            Some(hold) => {
                if !std::mem::replace(&mut self.was_queued, true) {
                    self.effects.push_back(RequestEffect::Note(RequestNote::Queued));
                }
                self.state = State::Queued { look_at: now + hold };
            }
            None => self.end(now, Err(RequestError::Refused(refusal))),
        }
    }

    fn next_key(&self) -> RequestKey {
        let attempt = Attempt(self.last_attempt.map_or(0, |last| last.0 + 1));
        RequestKey { request: self.job.request, attempt }
    }

    fn ask_for_nodes(&mut self, now: Instant, exclude: Vec<NodeId>) {
        let waited = now.saturating_duration_since(self.arrived);
        self.effects.push_back(RequestEffect::Place { key: self.next_key(), exclude, waited });
    }

    fn begin(&mut self, now: Instant, to: Assignment) {
        let key = self.next_key();
        let node = to.placement.prefill.clone();
        let left = self.job.timeout.saturating_sub(now.saturating_duration_since(self.arrived));
        let first_index = self.next_first_index();
        let output = &self.output.sent()[..first_index as usize];
        let job = self.job.prefill_job(key, output, &to, left);
        let mut job = PrefillJob { salt: Arc::clone(&self.salt), ..job };
        if self.prompt_logprobs_sent && job.sampling.prompt_logprobs.is_some() {
            Arc::make_mut(&mut job.sampling).prompt_logprobs = None;
        }
        if self.last_attempt.is_none() {
            self.timeline.placement = now.saturating_duration_since(self.arrived);
        }
        let Assignment { placement, starts, .. } = to;
        self.attempted = Some(Attempted {
            key,
            placement,
            starts,
            placed: now,
            since: now,
            first_index,
            prefill_started: now,
            has_begun: false,
            decodes: false,
            is_done: false,
        });
        self.last_attempt = Some(key.attempt);
        if first_index == 0 {
            // After the first token it is settled what the prompt has cost.
            self.cached_tokens = 0;
        }
        self.timeline.prefix_fetch = None;
        // Its nodes have not been silent so far.
        self.heard = now;
        self.first_token_due = None;
        self.migrations = Migrations::default();
        self.output.forget_early();
        self.state = State::Prefilling;
        self.effects.push_back(RequestEffect::Submit { node, job });
    }

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
    fn is_over(&self) -> bool {
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
    fn deliver(&mut self, now: Instant) {
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

    fn complete(&mut self, now: Instant) {
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

    /// The client went away, or the request was aborted.
    pub fn on_abort(&mut self, now: Instant) {
        self.end(now, Err(RequestError::Aborted));
    }

    /// The client does not read.
    pub fn on_client_stalled(&mut self, now: Instant, why: RequestError) {
        self.end(now, Err(why));
    }

    /// The conductor takes nothing new: who waits in the admission queue is sent away.
    pub fn on_draining(&mut self, now: Instant) {
        // One that was taken in with another answer is part of what runs.
        if matches!(self.state, State::Queued { .. }) && self.job.first_completion_nodes.is_empty() {
            self.end(now, Err(RequestError::GoingDown));
        }
    }

    /// The conductor ends what is left.
    pub fn on_closing(&mut self, now: Instant) {
        self.end(now, Err(RequestError::GoingDown));
    }

    /// A time has come.
    pub fn on_wakeup(&mut self, now: Instant) {
        let has_everything = matches!(self.state, State::Settling { .. } | State::Ended);
        if !has_everything && self.deadline().is_some_and(|deadline| now >= deadline) {
            return self.end(now, Err(RequestError::TimedOut(self.job.timeout)));
        }
        match &mut self.state {
            State::Queued { look_at } if now >= *look_at => {
                self.state = State::Placing;
                self.ask_for_nodes(now, Vec::new());
            }
            State::Recovering(recovery) if recovery.look_at.is_some_and(|at| now >= at) => {
                *recovery = recovery.again();
                self.ask_for_nodes(now, self.failed_nodes.clone());
            }
            State::Settling { until } if now >= *until => self.complete(now),
            State::Placing | State::Queued { .. } | State::Recovering(_) | State::Settling { .. } | State::Ended => {}
            State::Prefilling | State::Following | State::HandingOff | State::Decoding | State::Migrating(_) => {
                if now >= self.heard + self.limits.stall_timeout {
                    return self.end(now, Err(RequestError::Stalled(self.limits.stall_timeout)));
                }
                self.deliver(now);
            }
        }
    }

    fn end(&mut self, now: Instant, outcome: Result<FinishReason, RequestError>) {
        if matches!(self.state, State::Ended) {
            return;
        }
        self.give_up_migration();
        // What has not been asked is not asked any more: its answer would come after the end, and
        // stay charged.
        self.effects.retain(|effect| !effect.is_question());
        let is_running = !self.is_over();
        if let (Ok(_), Some(Attempted { key, placement, .. })) = (&outcome, &self.attempted)
            && placement.decode.is_some()
        {
            // If one token was asked for, its number says nothing of answers.
            self.update_ledger(*key, LedgerEntry::Finished { output_tokens: self.output.len() });
        }
        if is_running {
            // A stop string ends the output while the decode node goes on.
            let is_done = outcome.is_ok() && self.attempted.as_ref().is_some_and(|attempted| attempted.is_done);
            self.end_attempt(!is_done);
        } else {
            // Who waits in the admission queue is in the ledger as one who waits.
            self.update_ledger(self.next_key(), LedgerEntry::Ended);
        }
        self.timeline.total = now.saturating_duration_since(self.arrived);
        if self.attempted.is_none() {
            self.timeline.placement = self.timeline.total;
        }
        self.state = State::Ended;
        self.effects.push_back(RequestEffect::End(outcome));
    }

    /// Ends the attempt in the ledger, and on its nodes. Nodes that are gone do not mind.
    fn end_attempt(&mut self, abort: bool) {
        let Some(Attempted { key, placement, .. }) = &self.attempted else { return };
        let key = *key;
        let nodes = placement.nodes();
        if let Some(asking) = self.migrations.take_asking() {
            // Whatever the answer is, it comes before this to those who answer, and too late here.
            self.update_ledger(asking, LedgerEntry::Ended);
        }
        self.update_ledger(key, LedgerEntry::Ended);
        if abort {
            self.effects.extend(nodes.into_iter().map(|node| RequestEffect::Abort { node, key }));
        }
    }

    fn update_ledger(&mut self, key: RequestKey, entry: LedgerEntry) {
        self.effects.push_back(RequestEffect::UpdateLedger { key, entry });
    }

    fn note(&mut self, note: RequestNote) {
        self.effects.push_back(RequestEffect::Note(note));
    }
}
