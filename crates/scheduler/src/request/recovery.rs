//! A request whose nodes failed it goes on at others, after the tokens that its client has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{ErrorKind, NodeId, Refused};

use super::{RequestCore, RequestError, RequestNote, State};
use crate::ledger::NodeStart;
use crate::placement::Refusal;

/// How long a request whose node was lost waits for one that can take it over.
pub(super) const RECOVERY_PATIENCE: Duration = Duration::from_secs(10);
/// So many nodes may die, or hang, while they have one request: it may be what they die of.
const MAX_DEATHS: usize = 2;
/// How often a request is placed again because its nodes drain, or had not begun.
const MAX_UNFINISHED: u32 = 16;
/// How soon it looks again, at first and at last. Many may look at once: each look is twice as late
/// as the one before.
pub(super) const RECOVERY_POLL: Duration = Duration::from_millis(100);
const SLOWEST_POLL: Duration = Duration::from_millis(1600);

/// A node failed the request; the cluster is asked for others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recovery {
    /// Says more than that no node is left.
    pub(super) why: RequestError,
    pub(super) began: Instant,
    /// Since when no node is there that could take it; `None` while some are, and full.
    pub(super) alone_since: Option<Instant>,
    pub(super) poll: Duration,
    /// When the cluster is asked again; `None` while it is being asked.
    pub(super) look_at: Option<Instant>,
    /// Whether it is asked for other nodes than those that failed. These may be back: a supervisor
    /// starts a node again within seconds.
    pub(super) excludes: bool,
    /// Whether the output is computed with the prompt. If no node that computes prompts has room
    /// for both, all comes once more, and what the client has is dropped.
    pub(super) with_output: bool,
}

impl Recovery {
    /// One that asks for other nodes than those that failed, and for output and prompt together.
    pub(super) fn of(why: RequestError, began: Instant) -> Self {
        Self { why, began, alone_since: None, poll: RECOVERY_POLL, look_at: None, excludes: true, with_output: true }
    }

    /// It looks again.
    pub(super) fn again(&self) -> Self {
        let poll = (self.poll * 2).min(SLOWEST_POLL);
        Self { poll, alone_since: self.alone_since, ..Self::of(self.why.clone(), self.began) }
    }
}

/// How a start of a node went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// Its process ended, or its connection broke.
    Died,
    /// Its session was ended in order, or another one took its place: its process may be well.
    Replaced,
    /// It says nothing. It may be on its way back.
    Silent,
    /// Its engine makes no progress in a step, maybe that of the request.
    Stalled,
    /// It was silent for so long that it is given up.
    GivenUp,
    /// It had drained.
    Drained,
}

crate::named!(Departure: Died, Replaced, Silent, Stalled, GivenUp, Drained);

impl Departure {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Died => "the node was lost",
            Self::Replaced => "the session with the node ended, or was replaced",
            Self::Silent => "the node is silent",
            Self::Stalled => "the node's engine makes no progress",
            Self::GivenUp => "the node was silent for too long",
            Self::Drained => "the node has drained",
        }
    }
}

/// What the failure of an attempt says of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing: its node left in order, or had not begun.
    None,
    /// Nothing, and nothing of its node: only their session ended.
    NoneOfNode,
    /// It may fail again.
    Failed,
    /// It may have been what its node died of, or hangs in.
    Died,
}

impl RequestCore {
    /// A start of a node went away, at `at`. The request goes on at others. If the node may come
    /// back, the last attempt waits for it.
    pub fn on_node_away(&mut self, now: Instant, at: Instant, start: &NodeStart, away: Departure) {
        let may_come_back = match away {
            Departure::Silent => true,
            Departure::Stalled => self.died.len() + 1 < MAX_DEATHS,
            Departure::Died | Departure::Replaced | Departure::GivenUp | Departure::Drained => false,
        };
        if may_come_back && self.failures + 1 >= self.limits.max_attempts {
            return;
        }
        if let State::Migrating(asked) = &self.state
            && asked.to == *start
        {
            return self.on_migration_failed(away.as_str());
        }
        let Some(attempted) = &self.attempted else { return };
        // A loss from before the placement is not this attempt's: the node is back, and was chosen
        // since.
        if self.is_over() || at < attempted.since || !attempted.starts.contains(start) {
            return;
        }
        // What the prefill node had to do is done then: the decode node has everything.
        let is_settled = matches!(self.state, State::Following | State::Decoding | State::Migrating(_));
        if is_settled && attempted.placement.decode.as_ref() != Some(&start.node) {
            return;
        }
        let fault = match away {
            Departure::Drained => Fault::None,
            Departure::Replaced => Fault::NoneOfNode,
            _ if !attempted.has_begun => Fault::None,
            Departure::Died | Departure::Stalled => Fault::Died,
            Departure::Silent | Departure::GivenUp => Fault::Failed,
        };
        self.fail_with(now, lost(&start.node, away.as_str()), fault);
    }

    /// Output tokens that the next attempt's job has.
    pub(super) fn next_first_index(&self) -> u32 {
        match &self.state {
            State::Recovering(Recovery { with_output: false, .. }) => 0,
            _ => self.output.len(),
        }
    }

    /// The cluster has no other nodes for it, or none of those that were asked for.
    pub(super) fn on_no_other_nodes(&mut self, now: Instant, refusal: &Refusal) {
        let State::Recovering(recovery) = &mut self.state else { return };
        if recovery.excludes {
            recovery.excludes = false;
            return self.ask_for_nodes(now, Vec::new());
        }
        if refusal.kind == ErrorKind::Invalid && recovery.with_output && self.output.len() > 0 {
            recovery.excludes = true;
            recovery.with_output = false;
            self.ask_for_nodes(now, self.failed_nodes.clone());
            return;
        }
        // Nodes that are full will have room.
        let give_up_at = match refusal.kind {
            ErrorKind::Overloaded => {
                recovery.alone_since = None;
                recovery.began + self.limits.stall_timeout
            }
            _ => *recovery.alone_since.get_or_insert(now) + RECOVERY_PATIENCE,
        };
        if refusal.kind == ErrorKind::Invalid || now >= give_up_at {
            let why = recovery.why.clone();
            self.end(now, Err(why));
        } else {
            recovery.look_at = Some((now + recovery.poll).min(give_up_at));
        }
    }

    pub(super) fn fail_at_decode(&mut self, now: Instant, refused: Refused) {
        let Some(placement) = self.placement() else { return };
        let node = placement.decode.clone().unwrap_or_else(|| placement.prefill.clone());
        self.fail(now, RequestError::Node { node, refused });
    }

    /// An attempt failed. If its node had not begun, it is not counted: it drains, or was about to
    /// be lost.
    pub(super) fn fail(&mut self, now: Instant, why: RequestError) {
        let has_begun = self.attempted.as_ref().is_some_and(|attempted| attempted.has_begun);
        let fault = if has_begun { Fault::Failed } else { Fault::None };
        self.fail_with(now, why, fault);
    }

    /// Starts over on other nodes after a failure that another node may not have; ends with the
    /// error if that cannot help.
    pub(super) fn fail_with(&mut self, now: Instant, why: RequestError, fault: Fault) {
        if self.is_over() {
            return;
        }
        if matches!(self.state, State::Settling { .. }) {
            // Only the report of the handoff is missing.
            return self.complete(now);
        }
        // Its nodes forget what they had cached of it, and others may have that, too.
        let is_spoiled = why.kind() == ErrorKind::DataLoss && self.salt.is_empty();
        if is_spoiled {
            self.salt = Arc::from(self.job.request.0.to_be_bytes());
        }
        let helps = is_spoiled || matches!(why.kind(), ErrorKind::Unavailable | ErrorKind::Overloaded);
        if helps && self.go_on_at_other(now) {
            return;
        }
        match fault {
            // A stranger takes sessions as often as it likes: the request's deadline is the bound.
            Fault::NoneOfNode => {}
            Fault::None => self.unfinished += 1,
            Fault::Failed | Fault::Died => self.failures += 1,
        }
        if let (Fault::Died, RequestError::Node { node, .. }) = (fault, &why) {
            self.died.push(node.clone());
            if self.died.len() >= MAX_DEATHS {
                return self.end(now, Err(RequestError::NodesDied(self.died.clone())));
            }
        }
        // Without cache it is tried once more in any case: it was not the request that failed.
        let is_last = !is_spoiled && self.failures >= self.limits.max_attempts;
        if !helps || is_last || self.unfinished >= MAX_UNFINISHED {
            return self.end(now, Err(why));
        }
        self.end_attempt(true);
        if let RequestError::Node { node, .. } = &why
            && fault != Fault::NoneOfNode
            && !self.failed_nodes.contains(node)
        {
            self.failed_nodes.push(node.clone());
        }
        self.first_token_due = None;
        self.note(RequestNote::Retried { attempt: self.attempt(), why: why.clone() });
        let mut recovery = Recovery::of(why, now);
        if fault == Fault::NoneOfNode {
            recovery.look_at = Some(now + RECOVERY_POLL);
            self.state = State::Recovering(recovery);
            return;
        }
        self.state = State::Recovering(recovery);
        self.ask_for_nodes(now, self.failed_nodes.clone());
    }
}

/// The error of a node that is gone.
pub(super) fn lost(node: &NodeId, message: &str) -> RequestError {
    let refused = Refused { kind: ErrorKind::Unavailable, message: message.to_owned() };
    RequestError::Node { node: node.clone(), refused }
}
