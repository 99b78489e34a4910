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
//! more, and differently, ends the request with an error. What nodes say:
//! `events.rs`. How a request is placed again: `recovery.rs`. How it gets to another decode node:
//! `migration.rs`.
//!
//! **Invariant**: a request ends in exactly one [`RequestEffect::End`], and every attempt that was
//! placed is ended in the cluster's ledger before it.

mod effect;
mod events;
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
    Attempt, DecodeEvent, ErrorKind, FinishReason, NodeId, PrefillEvent, PrefillJob, RequestKey, Tbt, Timeline, Usage,
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
use recovery::{RECOVERY_POLL, Recovery};

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
