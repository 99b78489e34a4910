//! A request whose decode node has no room for it, or is on its way out, goes on at another one.
//!
//! Its node offers it and goes on as it can. Where another node has room, that one is asked to go on under an attempt of its own, with the tokens that the client has, and brings the blocks from
//! where they are. Until it says that it has taken the sequence, what the first node gives counts, and whatever fails leaves the request there; from then on the new attempt counts, and the first
//! node is told to forget it. Tokens that come from both are the same, and come to the client once.

use std::sync::Arc;

use baton_proto::v1;
use baton_types::{
    Attempt, FetchReport, Generation, KvTransfer, NodeId, PrefillEvent, PrefillJob, QueueTerms, RequestKey, TokenId,
};

use crate::front_door::{FrontDoor, Job, fetch_source};
use crate::live::{Entry, LiveEvent};
use crate::relay::Relay;

/// How often other nodes are asked to take one request off a decode node.
const MAX_TRIES: u32 = 16;
/// How often one request moves.
const MAX_MOVES: u32 = 4;

/// Where a request stands on its way to another decode node.
#[derive(Debug, Default)]
pub struct Moves {
    /// Who was asked, which start of it, and the attempt that it would go on under.
    asked: Option<(Attempt, NodeId, Generation)>,
    /// How often somebody was, at this decode node.
    tries: u32,
    /// Who was, and did not take it; they are asked again once nobody else is left.
    refused: Vec<NodeId>,
    /// Whether the attempt began at another decode node.
    has_moved: bool,
}

impl Moves {
    /// Whether an event of this attempt is from the node that was asked.
    pub fn is_to(&self, attempt: Attempt) -> bool {
        self.asked.as_ref().is_some_and(|(asked, ..)| *asked == attempt)
    }

    /// Whether the attempt goes on with what another decode node began.
    pub fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// The request was placed again, from its prompt on.
    pub fn on_placed(&mut self) {
        *self = Self::default();
    }
}

impl Relay {
    /// The request's decode node would rather have it go on elsewhere.
    pub(crate) fn on_offered(&mut self, door: &FrontDoor, output_tokens: u32) {
        let is_free = self.moves.asked.is_none() && self.moves.tries < MAX_TRIES && self.timeline.moves < MAX_MOVES;
        // Before the first token is in order, or the prefill node is done, it is early: it is offered again.
        let is_settled = self.transfer_settled && self.finish.is_none() && self.output.len() == output_tokens;
        if !is_free || !is_settled {
            return;
        }
        let to = RequestKey { attempt: Attempt(self.last_attempt.0 + 1), ..self.key() };
        let (keys, refused) = ((self.key(), to), &self.moves.refused);
        match door.place_move(&self.job, keys, self.output.tokens(), refused, &self.entry) {
            Some((node, generation)) => {
                tracing::debug!(request = %self.job.request, attempt = to.attempt.0, %node, output_tokens, "asking another decode node to go on");
                self.last_attempt = to.attempt;
                self.moves.tries += 1;
                self.moves.asked = Some((to.attempt, node, generation));
            }
            None => self.moves.refused.clear(),
        }
    }

    /// The node that was asked answers.
    pub(crate) fn on_moving(&mut self, door: &FrontDoor, event: LiveEvent) {
        match event {
            LiveEvent::Prefill(PrefillEvent::Fetched(report)) => {
                self.go_on_at_other(door);
                self.on_taken(door, report);
            }
            LiveEvent::Prefill(PrefillEvent::Failed(refused)) => self.on_moving_failed(door, &refused.message),
            LiveEvent::NodeLost(_) => self.on_moving_failed(door, "the node was lost"),
            // It has nothing else to say before.
            LiveEvent::Prefill(_) | LiveEvent::Decode(_) | LiveEvent::Offered(_) => {}
        }
    }

    /// The node that was asked does not take the request: it stays where it is.
    pub(crate) fn on_moving_failed(&mut self, door: &FrontDoor, reason: &str) {
        tracing::debug!(request = %self.job.request, reason, "the request stays at its decode node");
        door.metrics.on_move_failed();
        self.moves.refused.extend(self.moves.asked.as_ref().map(|(_, node, _)| node.clone()));
        self.give_move_up(door);
    }

    /// Whoever was asked need not go on with it.
    pub(crate) fn give_move_up(&mut self, door: &FrontDoor) {
        let Some((attempt, node, _)) = self.moves.asked.take() else { return };
        self.entry.stays();
        door.end_move(RequestKey { attempt, ..self.key() }, &node);
    }

    /// The request is the other node's from now on; also where that has not answered yet, and the one that it was on has failed. `false`: nobody was asked.
    pub(crate) fn go_on_at_other(&mut self, door: &FrontDoor) -> bool {
        let Some((attempt, node, generation)) = self.moves.asked.take() else { return false };
        door.end(self.key(), &self.placement, true);
        self.attempt = attempt;
        self.entry.placed(attempt, vec![(node.clone(), generation)]);
        if let Some(record) = &self.job.record {
            record.turned(&format_args!("{node} after {} tokens", self.output.len()));
        }
        self.placement.decode = Some(node);
        self.moves = Moves { has_moved: true, ..Moves::default() };
        self.ended_by_node = false;
        self.timeline.moves += 1;
        true
    }

    /// The other node has it, and has brought so much of it.
    pub(crate) fn on_taken(&mut self, door: &FrontDoor, report: FetchReport) {
        door.metrics.on_moved(&report);
        door.cluster().on_fetch_done(self.key());
        if let Some(reason) = report.failure {
            tracing::info!(request = %self.job.request, attempt = self.attempt.0, %reason, "a sequence that moved is computed");
        }
        let moved = &mut self.timeline.moved;
        *moved = KvTransfer {
            bytes: moved.bytes + report.bytes,
            transport: if report.transport.is_empty() { moved.transport.clone() } else { report.transport },
            elapsed: moved.elapsed + report.elapsed,
            ..KvTransfer::default()
        };
    }
}

impl FrontDoor {
    /// Asks a decode node with room to go on with a request after these tokens of its output; `None` where there is none.
    fn place_move(
        &self,
        job: &Job,
        (key, to): (RequestKey, RequestKey),
        output: &[TokenId],
        refused: &[NodeId],
        entry: &Entry,
    ) -> Option<(NodeId, Generation)> {
        let tokens: Arc<[_]> = job.tokens.iter().chain(output).copied().collect();
        let (start, fetch) = {
            let mut cluster = self.cluster();
            let chosen = cluster.place_move(self.clock.now(), (key, to), tokens.len() as u32, refused)?;
            let start = cluster.node(&chosen.to).map(|node| (chosen.to.clone(), node.info().generation));
            (start, fetch_source(&cluster, &chosen.fetch))
        };
        let (node, generation) = start?;
        // Before it hears of it: its answer must find the attempt entered.
        entry.moving(to.attempt, node.clone(), generation);
        let resumed = PrefillJob {
            tokens,
            output_tokens: output.len() as u32,
            ..job.prefill_job(self.id, to, None, fetch, QueueTerms::default())
        };
        if self.nodes.send(&node, v1::node_command::Command::Prefill((&resumed).into())) {
            return Some((node, generation));
        }
        entry.stays();
        self.cluster().on_ended(self.clock.now(), to);
        None
    }

    fn end_move(&self, key: RequestKey, node: &NodeId) {
        self.cluster().on_ended(self.clock.now(), key);
        self.nodes.send(node, v1::node_command::Command::Abort(key.into()));
    }
}
