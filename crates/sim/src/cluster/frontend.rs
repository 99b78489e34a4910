//! The conductor: production's picture of the cluster, and a core for each request.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_scheduler::{
    Applied, Cluster, Departure, NodeState, Refusal, RequestCore, RequestEffect, RequestError, RequestEvent,
    RequestJob, RequestKey, RequestLimits,
};
use baton_types::{ConductorId, FinishReason, Generation, NodeId, NodeRole, NodeStart, RequestId};

use super::engine::output_token;
use super::wire::{Event, Input, Report, Start, StepReport, Wire};
use crate::Random;

pub(super) const CONDUCTOR_ID: ConductorId = ConductorId(1);

/// A request that is being served.
#[derive(Debug)]
struct Live {
    core: RequestCore,
    /// When its timer fires.
    timer: Option<Instant>,
    /// Predicted when it was first placed: time to first token from its arrival on, and between
    /// tokens.
    predicted: Option<(Duration, Option<Duration>)>,
}

/// A request that is over.
#[derive(Debug)]
pub(super) struct Ended {
    pub request: usize,
    pub outcome: Result<FinishReason, RequestError>,
    pub core: RequestCore,
    pub predicted: Option<(Duration, Option<Duration>)>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Frontend {
    pub cluster: Cluster,
    live: BTreeMap<usize, Box<Live>>,
    /// The start that each node's session is with.
    sessions: Vec<Option<Generation>>,
    roles: Vec<NodeRole>,
    names: Vec<NodeId>,
    /// Of placement's ties.
    ties: Random,
    /// Whether first tokens are kept back for the second.
    smooths: bool,
    /// Requests that ended since this was last looked at.
    pub ended: Vec<Ended>,
}

impl Frontend {
    pub(super) fn new(cluster: Cluster, names: Vec<NodeId>, seed: u64, smooths: bool) -> Self {
        Self {
            cluster,
            live: BTreeMap::new(),
            sessions: vec![None; names.len()],
            roles: vec![NodeRole::Prefill; names.len()],
            names,
            ties: Random::new(seed),
            smooths,
            ended: Vec::new(),
        }
    }

    pub(super) fn on_joined(&mut self, wire: &mut Wire, node: usize, info: baton_types::NodeInfo) {
        // What was sent without a session is lost.
        wire.sessions[node] += 1;
        let now = wire.now();
        self.sessions[node] = Some(info.generation);
        self.roles[node] = info.role;
        self.cluster.on_node_joined(now, info);
    }

    /// A request arrives.
    pub(super) fn on_request(&mut self, wire: &mut Wire, request: usize, job: RequestJob) {
        let now = wire.now();
        let core = RequestCore::new(now, now, job, RequestLimits::default());
        self.live.insert(request, Box::new(Live { core, timer: None, predicted: None }));
        self.carry_out(wire, request);
    }

    pub(super) fn on_timer(&mut self, wire: &mut Wire, request: usize) {
        let now = wire.now();
        let Some(live) = self.live.get_mut(&request) else { return };
        // One that was set before an earlier one has its turn later.
        if live.timer.is_some_and(|timer| timer <= now) {
            live.timer = None;
            live.core.on_wakeup(now);
            self.carry_out(wire, request);
        }
    }

    /// A node said something.
    pub(super) fn on_report(&mut self, wire: &mut Wire, from: Start, report: Report) {
        if self.sessions[from.node] != Some(from.generation) {
            return;
        }
        let now = wire.now();
        match report {
            Report::Load(load) => self.cluster.on_load(now, &self.names[from.node], *load),
            Report::Prefill(key, event) => self.on_event(wire, key, RequestEvent::Prefill(*event)),
            Report::Decode(events) => {
                for (key, event) in events {
                    self.on_event(wire, key, RequestEvent::Decode(event));
                }
            }
            Report::Offer(key, output_tokens) => {
                self.on_event(wire, key, RequestEvent::MigrationRequested(output_tokens))
            }
            Report::Kv(batch) => {
                let index = self.cluster.index();
                let name = &self.names[from.node];
                let applied = index.on_events(name, from.generation, batch.sequence, batch.snapshot, &batch.events);
                if applied == Applied::Gap {
                    wire.command(from, Input::Snapshot);
                }
            }
            Report::Step(step) => self.on_step(now, from.node, *step),
        }
    }

    fn on_step(&mut self, now: Instant, node: usize, step: StepReport) {
        let name = &self.names[node];
        // A step of a decode node that computed prompts, too, says nothing of one that did not.
        if self.roles[node] == NodeRole::Prefill || step.prompt_rows == 0 {
            self.cluster.on_step(now, name, step.rows, step.attended_tokens, step.seconds);
        }
        if let Some((rows, attended_tokens, seconds)) = step.slice {
            self.cluster.on_slice(name, rows, attended_tokens, seconds);
        }
    }

    fn on_event(&mut self, wire: &mut Wire, key: RequestKey, event: RequestEvent) {
        let Ok(request) = usize::try_from(key.request.0) else { return };
        if let Some(live) = self.live.get_mut(&request) {
            live.core.on_event(wire.now(), key.attempt, event);
            self.carry_out(wire, request);
        }
    }

    /// A client leaves; `draw` says which one of so many.
    pub(super) fn abort(&mut self, wire: &mut Wire, draw: impl FnOnce(u64) -> u64) -> bool {
        let count = self.live.len() as u64;
        let chosen = (count > 0).then(|| draw(count) as usize).and_then(|turn| self.live.iter_mut().nth(turn));
        let Some((&request, live)) = chosen else { return false };
        live.core.on_abort(wire.now());
        self.carry_out(wire, request);
        true
    }

    /// Whether a node has a session.
    pub(super) fn has_session(&self, node: usize) -> bool {
        self.sessions[node].is_some()
    }

    /// A session is over: the start of the node is gone, as far as the conductor knows.
    pub(super) fn on_left(&mut self, wire: &mut Wire, gone: Start) {
        if self.sessions[gone.node].take_if(|generation| *generation == gone.generation).is_none() {
            return;
        }
        wire.sessions[gone.node] += 1;
        let now = wire.now();
        let lost = NodeStart { node: self.names[gone.node].clone(), generation: gone.generation };
        let away = match self.cluster.on_node_goodbye(now, &lost.node, lost.generation) {
            NodeState::Drained => Departure::Drained,
            _ => Departure::Died,
        };
        for (node, session) in self.sessions.iter().enumerate() {
            if let Some(generation_of) = *session {
                let to = Start { node, generation: generation_of };
                wire.command(to, Input::NodeLost(lost.clone()));
            }
        }
        for request in self.live.keys().copied().collect::<Vec<_>>() {
            if let Some(live) = self.live.get_mut(&request) {
                live.core.on_node_away(now, now, &lost, away);
                self.carry_out(wire, request);
            }
        }
    }

    /// Tells a node. `false`: there is no session with it.
    fn tell(&self, wire: &mut Wire, node: &NodeId, input: Input) -> bool {
        let node = wire.index(node);
        let Some(generation) = self.sessions[node] else { return false };
        wire.command(Start { node, generation }, input);
        true
    }

    /// Carries out what a request's core wants.
    fn carry_out(&mut self, wire: &mut Wire, request: usize) {
        let now = wire.now();
        let Some(mut live) = self.live.remove(&request) else { return };
        while let Some(effect) = live.core.poll_effect() {
            match effect {
                RequestEffect::Place { key, exclude, waited } => self.place(now, &mut live, key, &exclude, waited),
                RequestEffect::AskReselect { key, from, refused } => {
                    let other = self.cluster.reselect(now, key);
                    let target = self.cluster.decode_target(other.as_ref().unwrap_or(&from));
                    live.core.on_reselected(now, key, &from, refused, target);
                }
                RequestEffect::PlaceMigration(question) => {
                    let chosen = self.cluster.place_migration(now, &question);
                    let chosen = chosen.and_then(|chosen| self.cluster.assign_migration(&chosen));
                    live.core.on_migration_placed(question.migrated, chosen);
                }
                RequestEffect::Submit { node, job } => {
                    if !self.tell(wire, &node, Input::Submit(Box::new(job))) {
                        live.core.on_unreachable(now, &node);
                    }
                }
                RequestEffect::Reselect { node, reselect } => {
                    self.tell(wire, &node, Input::Reselect(Box::new(reselect)));
                }
                RequestEffect::Abort { node, key } => {
                    self.tell(wire, &node, Input::Abort(key));
                }
                RequestEffect::UpdateLedger { key, entry } => self.cluster.update_ledger(now, key, &entry),
                RequestEffect::End(outcome) => {
                    let Live { core, predicted, .. } = *live;
                    return self.ended.push(Ended { request, outcome, core, predicted });
                }
                RequestEffect::Deliver { index, tokens, .. } => {
                    for (index, token) in (index as usize..).zip(tokens) {
                        assert_eq!(
                            token.token,
                            output_token(RequestId(request as u128), index),
                            "{request} at {index}"
                        );
                    }
                }
                RequestEffect::PromptLogprobs(_) | RequestEffect::Note(_) => {}
            }
        }
        // A timer becomes later with every event; one entry stays in the queue.
        if let Some(due) = live.core.next_wakeup()
            && live.timer.is_none_or(|set| due < set)
        {
            live.timer = Some(due);
            wire.queue.at(due, Event::RequestTimer(request));
        }
        self.live.insert(request, live);
    }

    fn place(&mut self, now: Instant, live: &mut Live, key: RequestKey, exclude: &[NodeId], waited: Duration) {
        let wanted = live.core.placement_request(key, exclude, waited);
        let ties = &mut self.ties;
        let mut placed = self.cluster.place(now, &wanted, &mut || ties.next_u64());
        if let Ok(placement) = &mut placed {
            if !self.smooths {
                placement.first_token_delay = Duration::ZERO;
            }
            let ttft = waited + placement.predicted_ttft.0 + placement.first_token_delay;
            live.predicted.get_or_insert((ttft, placement.predicted_tbt.map(|tbt| tbt.0)));
        }
        let assigned: Result<_, Refusal> = placed.map(|placement| self.cluster.assign(placement, wanted.slo.tbt));
        live.core.on_placed(now, key, assigned);
    }
}
