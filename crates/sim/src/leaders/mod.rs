//! Several frontends that elect one of them to place for all, while things go wrong.
//!
//! Each has production's `Candidacy`, `Desk`, `Cluster` and `RequestCore`, nodes have its
//! `TermFence`. Etcd, the network, clocks and what nodes compute are models. Faults come for some
//! seconds, and then all is well for some: three times.
//!
//! **Checked**: no two conductors decide in one term. No node carries out an order of an earlier
//! term than one before, while etcd names the leader of that one, and so does a conductor that has
//! a session with the node. Each question is answered once, or its attempt ends before. When all is
//! well, one leads, all others follow it, and its ledger is the sum of what frontends have: also
//! while liars have sessions with nodes, and name other terms. At the end every request is over,
//! and nothing is charged.

mod election;
mod etcd;
mod faults;
mod frontend;
mod net;
mod node;
mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::NodeId;

use etcd::Etcd;
pub use faults::LeaderFault;
use frontend::SimFrontend;
use net::Net;
use node::{Counts, Node, Work};
use wire::{Event, FrontendStart, Input, Place};

/// Rounds of faults, how long each takes, and how long all is well after it. What a conductor had
/// that is gone is charged for ten seconds yet.
const ROUNDS: u32 = 3;
const FAULTS: Duration = Duration::from_secs(9);
const CALM: Duration = Duration::from_secs(14);
/// Once all is well, one leads and all others follow it within this.
const LED_WITHIN: Duration = Duration::from_secs(8);
/// Until what was asked last is over: questions wait for ten seconds, requests take a few.
const END: Duration = Duration::from_secs(40);
/// Nodes report their load, and look whether they have a session with each frontend.
const NODE_TICK: Duration = Duration::from_millis(500);

/// What became of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeadersOutcome {
    /// Terms in which something was decided.
    pub terms: u64,
    /// Terms in which a conductor began to lead.
    pub elections: u64,
    /// Questions of requests.
    pub asked: u64,
    /// Answers of leaders.
    pub decided: u64,
    /// Jobs that nodes carried out.
    pub accepted: u64,
    /// Jobs of earlier terms, which they refused.
    pub stale: u64,
    /// Jobs of an earlier term than the one before, which they carried out.
    pub went_back: u64,
    /// Requests that got their answer.
    pub finished: u64,
    /// Requests that did not, by reason.
    pub failed: BTreeMap<String, u64>,
    /// Faults, by kind.
    pub faults: BTreeMap<LeaderFault, u64>,
}

impl LeadersOutcome {
    /// Adds another run's.
    pub fn add(&mut self, other: Self) {
        self.terms += other.terms;
        self.elections += other.elections;
        self.asked += other.asked;
        self.decided += other.decided;
        self.accepted += other.accepted;
        self.stale += other.stale;
        self.went_back += other.went_back;
        self.finished += other.finished;
        for (why, count) in other.failed {
            *self.failed.entry(why).or_default() += count;
        }
        for (fault, count) in other.faults {
            *self.faults.entry(fault).or_default() += count;
        }
    }
}

/// See the module's text.
struct World {
    net: Net,
    etcd: Etcd,
    fronts: Vec<Option<SimFrontend>>,
    nodes: Vec<Node>,
    prefill: usize,
    names: Arc<[NodeId]>,
    sessions: u64,
    counts: Counts,
    faults: BTreeMap<LeaderFault, u64>,
    liars: u64,
    round: u32,
    /// What has happened to frontends since they were stopped.
    missed: Vec<Vec<(FrontendStart, Input)>>,
    is_calm: bool,
    calm_since: Instant,
    /// When all is to be well again.
    calm_at: Instant,
    is_over: bool,
}

/// Plays one run: 2 to 4 frontends, 2 or 3 prefill and as many decode nodes.
///
/// # Panics
/// If something that is to be true is not.
pub fn simulate_leaders(seed: u64) -> LeadersOutcome {
    let mut world = World::new(seed);
    while let Some(event) = world.net.wire.queue.pop() {
        world.on_event(event);
        if world.is_over {
            break;
        }
    }
    world.outcome()
}

impl World {
    fn new(seed: u64) -> Self {
        let mut chance = crate::Random::new(!seed);
        let fronts = 2 + chance.below(3) as usize;
        let prefill = 2 + chance.below(2) as usize;
        let names: Arc<[_]> = (0..2 * prefill).map(|place| node::name(place, prefill)).collect();
        let nodes = (0..2 * prefill).map(|place| Node::new(place, 1, prefill, fronts)).collect();
        let net = Net::new(seed, fronts);
        let calm_since = net.wire.now();
        let mut world = Self {
            net,
            etcd: Etcd::default(),
            fronts: Vec::new(),
            nodes,
            prefill,
            names,
            sessions: 0,
            counts: Counts::default(),
            faults: BTreeMap::new(),
            liars: 0,
            round: 0,
            missed: (0..fronts).map(|_| Vec::new()).collect(),
            is_calm: false,
            calm_since,
            calm_at: calm_since + LED_WITHIN + FAULTS,
            is_over: false,
        };
        world.fronts.resize_with(fronts, || None);
        (0..fronts).for_each(|front| world.start_front(front));
        world.net.wire.queue.after(Duration::ZERO, Event::NodeTick);
        world.net.wire.queue.after(Duration::ZERO, Event::EtcdTick);
        world.net.wire.queue.after(LED_WITHIN, Event::Fault);
        world.net.wire.queue.after(LED_WITHIN + FAULTS, Event::Calm);
        world
    }

    fn start_front(&mut self, front: usize) {
        self.net.starts[front] += 1;
        self.net.runs[front] = true;
        let at = FrontendStart { front, start: self.net.starts[front] };
        self.fronts[front] = Some(SimFrontend::new(&mut self.net, at, Arc::clone(&self.names)));
        self.net.wire.queue.after(Duration::ZERO, Event::SimFrontend(at, Input::Arrival));
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::SimFrontend(at, input) => self.on_front(at, input),
            Event::Command { node, session, front, command } => {
                let wire = &mut self.net.wire;
                let starts = &self.net.starts;
                let leader = self.etcd.leader_term();
                self.nodes[node].on_command(wire, (front, session), command, starts, leader, &mut self.counts);
            }
            Event::Work { node, start, work } => self.on_work(node, start, work),
            Event::NodeTick => self.on_node_tick(),
            Event::Etcd(from, asked, request) => self.on_etcd(from, asked, request),
            Event::EtcdTick => {
                self.etcd.expire(self.net.wire.now());
                self.tell_watches();
                self.net.wire.queue.after(Duration::from_millis(50), Event::EtcdTick);
            }
            Event::Continue(front) => {
                if self.net.stopped_until[front].is_some_and(|until| until <= self.net.wire.now()) {
                    self.go_on(front);
                }
            }
            Event::EtcdBack => self.etcd_back(),
            Event::Lie { node, start, liar } => self.lie(node, start, liar),
            Event::FalseKeyGone => self.end_false_key(),
            Event::Fault => self.on_fault(),
            Event::Restart(place) => self.restart(place),
            Event::CutNoticed(a, b) => {
                if self.net.wire.cut_until(a, b).is_some() {
                    self.give_up(a, b);
                }
            }
            Event::StopNoticed(front) => {
                if self.net.is_stopped(front) {
                    self.give_up_front(front);
                }
            }
            Event::Calm => self.on_calm(),
            Event::Check(tries) => self.check(tries),
        }
    }

    fn on_front(&mut self, at: FrontendStart, input: Input) {
        if self.net.is_stopped(at.front) {
            return self.missed[at.front].push((at, input));
        }
        if matches!(input, Input::ToLeader(..) | Input::FromLeader(..)) {
            self.net.wire.in_flight -= 1;
        }
        if self.net.starts[at.front] == at.start && matches!(input, Input::Ends) {
            self.end_front(at.front);
        }
        let Some(front) = self.fronts[at.front].as_mut().filter(|front| front.at == at) else { return };
        if matches!(input, Input::Arrival) {
            if self.round == ROUNDS {
                return;
            }
            let next = self.net.wire.chance.exponential(if self.is_calm { 1.0 } else { 0.3 });
            let wire = &mut self.net.wire;
            wire.queue.after(Duration::from_secs_f64(next), Event::SimFrontend(at, Input::Arrival));
            if wire.chance.below(20) == 0 {
                wire.queue.after(Duration::from_millis(100), Event::SimFrontend(at, Input::Leaves));
            }
        }
        front.on_input(&mut self.net, input);
    }

    /// A frontend that was stopped goes on, with all that it has missed.
    fn go_on(&mut self, front: usize) {
        self.net.stopped_until[front] = None;
        for (at, input) in std::mem::take(&mut self.missed[front]) {
            self.on_front(at, input);
        }
    }

    fn on_work(&mut self, node: usize, start: u64, work: Work) {
        let is_here = self.nodes[node].start == start;
        if let Work::Handoff(job, index, (from, start)) = work {
            let wire = &mut self.net.wire;
            let is_taken = is_here && self.nodes[node].on_handoff(wire, (*job).clone(), index);
            let at = wire.arrives(Place::Node(node), Place::Node(from), Duration::ZERO);
            return wire.queue.at(at, Event::Work { node: from, start, work: Work::HandedOff(job, is_taken) });
        }
        if !is_here {
            return;
        }
        let wire = &mut self.net.wire;
        let starts = &self.net.starts;
        if let Some((target, job, index)) = self.nodes[node].on_work(wire, work, starts) {
            let to = self.names.iter().position(|name| *name == target.node).expect("a node of this cluster");
            let at = wire.arrives(Place::Node(node), Place::Node(to), Duration::ZERO);
            let work = Work::Handoff(Box::new(job), index, (node, start));
            wire.queue.at(at, Event::Work { node: to, start: target.generation.0, work });
        }
    }

    /// Nodes report, and open the sessions that they do not have.
    fn on_node_tick(&mut self) {
        for node in 0..self.nodes.len() {
            self.nodes[node].report(&mut self.net.wire, &self.net.starts);
            for front in 0..self.fronts.len() {
                let is_there = self.net.runs[front] && !self.net.is_stopped(front);
                let is_cut = self.net.wire.cut_until(Place::SimFrontend(front), Place::Node(node)).is_some();
                if is_there && !is_cut && self.nodes[node].sessions[front].is_none() {
                    self.sessions += 1;
                    let name = self.names[node].clone();
                    let wire = &mut self.net.wire;
                    let starts = &self.net.starts;
                    self.nodes[node].on_session(wire, front, self.sessions, starts, name);
                }
            }
        }
        self.net.wire.queue.after(NODE_TICK, Event::NodeTick);
    }

    fn on_etcd(&mut self, from: FrontendStart, asked: u64, request: etcd::EtcdRequest) {
        if self.etcd.is_away {
            return;
        }
        if self.net.wire.chance.below(4) == 0 {
            self.etcd.on_other_write();
        }
        let answer = self.etcd.answer(self.net.wire.now(), from, request);
        self.tell_watches();
        if self.net.wire.chance.below(100) >= self.net.wire.lost_answers {
            let event = Event::SimFrontend(from, Input::Etcd(asked, answer));
            self.net.wire.send(Place::Etcd, Place::SimFrontend(from.front), event);
        } else {
            *self.faults.entry(LeaderFault::AnswerLost).or_default() += 1;
        }
    }

    fn tell_watches(&mut self) {
        for (front, revision, change) in self.etcd.told() {
            let late = self.net.wire.watch_late;
            let at = self.net.wire.arrives(Place::Etcd, Place::SimFrontend(front.front), late);
            self.net.wire.queue.at(at, Event::SimFrontend(front, Input::Watch(revision, change)));
        }
    }

    /// All is well from now on.
    fn on_calm(&mut self) {
        (self.is_calm, self.calm_since) = (true, self.net.wire.now());
        self.net.wire.heal();
        self.net.behind = 0;
        self.net.false_greeting = None;
        (0..self.fronts.len()).for_each(|front| self.go_on(front));
        self.etcd_back();
        self.end_false_key();
        for front in 0..self.fronts.len() {
            if self.fronts[front].as_ref().is_some_and(SimFrontend::drains) {
                self.end_front(front);
            }
        }
        self.round += 1;
        self.net.wire.queue.after(LED_WITHIN, Event::Check(0));
        let calm = if self.round == ROUNDS { END } else { CALM };
        self.net.wire.queue.after(calm, Event::Check(0));
    }

    /// One leads, and all others follow it. Its ledger is what all have, once nothing is on its way
    /// that changes them.
    fn check(&mut self, tries: u32) {
        let fronts: Vec<&SimFrontend> = self.fronts.iter().flatten().collect();
        let is_quiet = self.net.wire.in_flight == 0 && !fronts.iter().any(|front| front.holds_back());
        if !is_quiet {
            assert!(tries < 10_000, "never quiet");
            let soon = Duration::from_micros(300);
            return self.net.wire.queue.after(soon, Event::Check(tries + 1));
        }
        let leaders: Vec<_> = fronts.iter().filter(|front| front.desk.leads()).collect();
        assert_eq!(leaders.len(), 1, "one leads {LED_WITHIN:?} after all is well");
        let leader = leaders[0];
        assert_eq!(fronts.len(), self.fronts.len(), "all run");
        for front in &fronts {
            let known = front.desk.term();
            let term = leader.desk.term();
            assert!(front.desk.has_leader() && known == term, "{} of term {term}: {}", leader.at.front, front.state());
        }
        assert_eq!(leader.desk.followers(), fronts.len() - 1);
        let is_late = self.net.wire.now() >= self.calm_since + CALM;
        if !is_late {
            return;
        }
        // Those that went away for good are forgotten, too.
        let placed: usize = fronts.iter().map(|front| front.desk.placed().len()).sum();
        assert_eq!(leader.cluster.placed(), placed, "the leader's ledger is what all have");
        assert!(fronts.iter().filter(|front| !front.desk.leads()).all(|front| front.cluster.placed() == 0));
        if self.round < ROUNDS {
            self.is_calm = false;
            self.net.wire.queue.after(Duration::ZERO, Event::Fault);
            self.calm_at = self.net.wire.now() + FAULTS;
            return self.net.wire.queue.after(FAULTS, Event::Calm);
        }
        for front in &fronts {
            assert_eq!((front.live(), front.desk.waiting()), (0, 0), "each request is over");
            let books = &front.cluster;
            assert_eq!((books.placed(), books.requests_queued()), (0, 0));
            assert!(books.nodes().all(|node| node.placed() == 0));
        }
        assert_eq!(self.nodes.iter().map(Node::jobs).sum::<usize>(), 0, "no node has a job left");
        self.is_over = true;
    }

    fn outcome(self) -> LeadersOutcome {
        let log = self.net.log;
        LeadersOutcome {
            terms: log.deciders.len() as u64,
            elections: log.elections,
            asked: log.asked,
            decided: log.decided,
            accepted: self.counts.accepted,
            stale: self.counts.stale,
            went_back: self.counts.went_back,
            finished: log.finished,
            failed: log.failed,
            faults: self.faults,
        }
    }
}
