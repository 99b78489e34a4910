//! A request whose nodes failed it goes on at others, after the tokens that its client has.

use std::time::{Duration, Instant};

use baton_types::{ErrorKind, Generation, NodeId, Refused};

use super::{RequestCore, RequestError, RequestNote, State};
use crate::ledger::NodeStart;
use crate::placement::Refusal;

/// How long a request whose node was lost waits for one that can take it over.
pub(super) const RECOVERY_PATIENCE: Duration = Duration::from_secs(10);
/// How often it looks.
pub(super) const RECOVERY_POLL: Duration = Duration::from_millis(100);

/// A node failed the request; the cluster is asked for others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recovery {
    /// Says more than that no node is left.
    pub(super) why: RequestError,
    pub(super) give_up_at: Instant,
    /// When the cluster is asked again; `None` while it is being asked.
    pub(super) look_at: Option<Instant>,
    /// Whether it is asked for other nodes than those that failed. These may be back: a supervisor starts a node again within seconds.
    pub(super) excludes: bool,
    /// Whether the output is computed with the prompt. If no node that computes prompts has room for both, all comes once more, and what the client has is
    /// dropped.
    pub(super) with_output: bool,
}

impl Recovery {
    /// One that asks for other nodes than those that failed, and for output and prompt together.
    pub(super) fn of(why: RequestError, give_up_at: Instant) -> Self {
        Self { why, give_up_at, look_at: None, excludes: true, with_output: true }
    }
}

impl RequestCore {
    /// A start of a node was lost, at `at`.
    pub fn on_node_lost(&mut self, now: Instant, at: Instant, node: &NodeId, generation: Generation) {
        self.on_node_away(now, at, (node, generation), "the node was lost");
    }

    /// A start of a node says nothing any more, and there are others: the request goes on there. After the last attempt it waits for that node.
    pub fn on_node_silent(&mut self, now: Instant, at: Instant, node: &NodeId, generation: Generation) {
        if self.retries + 1 < self.limits.max_attempts {
            self.on_node_away(now, at, (node, generation), "the node is silent");
        }
    }

    fn on_node_away(&mut self, now: Instant, at: Instant, (node, generation): (&NodeId, Generation), why: &str) {
        let start = |(other, start): &NodeStart| (other, *start) == (node, generation);
        if let State::Moving(asked) = &self.state
            && start(&asked.to)
        {
            return self.on_move_failed(why);
        }
        let Some(attempted) = &self.attempted else { return };
        // A loss from before the placement is not this attempt's: the node is back, and was chosen since.
        if self.is_over() || at < attempted.placed || !attempted.starts.iter().any(start) {
            return;
        }
        // What the prefill node had to do is done then: the decode node has everything.
        let is_settled = matches!(self.state, State::Following | State::Decoding | State::Moving(_));
        if is_settled && attempted.placement.decode.as_ref() != Some(node) {
            return;
        }
        self.fail(now, lost(node, why));
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
            self.ask_for_nodes(now, Vec::new());
        } else if refusal.kind == ErrorKind::Invalid && recovery.with_output && self.output.len() > 0 {
            (recovery.excludes, recovery.with_output) = (true, false);
            self.ask_for_nodes(now, self.failed_nodes.clone());
        } else if refusal.kind == ErrorKind::Invalid || now >= recovery.give_up_at {
            let why = recovery.why.clone();
            self.end(now, Err(why));
        } else {
            recovery.look_at = Some(now + RECOVERY_POLL);
        }
    }

    pub(super) fn fail_at_decode(&mut self, now: Instant, refused: Refused) {
        let Some(placement) = self.placement() else { return };
        let node = placement.decode.clone().unwrap_or_else(|| placement.prefill.clone());
        self.fail(now, RequestError::Node { node, refused });
    }

    /// Starts over on other nodes after a failure that another node may not have; ends with the error where that cannot help.
    pub(super) fn fail(&mut self, now: Instant, why: RequestError) {
        if self.is_over() {
            return;
        }
        if matches!(self.state, State::Settling { .. }) {
            // Only the report of the hand-over is missing.
            return self.complete(now);
        }
        let helps = matches!(why.kind(), ErrorKind::Unavailable | ErrorKind::Overloaded);
        if helps && self.go_on_at_other() {
            return;
        }
        if !helps || self.retries + 1 >= self.limits.max_attempts {
            return self.end(now, Err(why));
        }
        self.end_attempt(true);
        if let RequestError::Node { node, .. } = &why {
            self.failed_nodes.push(node.clone());
        }
        self.retries += 1;
        self.paced_until = None;
        self.note(RequestNote::Retried { attempt: self.attempt(), why: why.clone() });
        let give_up_at = now + RECOVERY_PATIENCE;
        self.state = State::Recovering(Recovery::of(why, give_up_at));
        self.ask_for_nodes(now, self.failed_nodes.clone());
    }
}

/// The error of a node that is gone.
pub(super) fn lost(node: &NodeId, message: &str) -> RequestError {
    let refused = Refused { kind: ErrorKind::Unavailable, message: message.to_owned() };
    RequestError::Node { node: node.clone(), refused }
}
