//! What goes wrong, and when.

use std::time::Duration;

use baton_scheduler::{Candidate, LeaderKey};
use baton_types::ConductorId;

use super::World;
use super::node::Node;
use super::wire::{Event, FrontendStart, Input, Place};
use crate::named::named;

named! {
    /// Something that goes wrong with several frontends.
    LeaderFault {
        /// Etcd does not answer for some seconds. Leases begin anew when it is back.
        EtcdAway = "etcd-away",
        /// Etcd takes up to one and a half seconds for each answer.
        EtcdSlow = "etcd-slow",
        /// Etcd is started anew with nothing: revisions begin again.
        EtcdLost = "etcd-lost",
        /// Etcd is started anew with what it had at some time.
        EtcdRestored = "etcd-restored",
        /// All leases end at once, so that all may want to lead.
        LeasesLost = "leases-lost",
        /// The leader's key is deleted while its lease lives.
        KeyDeleted = "key-deleted",
        /// What watches are told comes up to three seconds late.
        WatchLate = "watch-late",
        /// Watches end.
        WatchEnded = "watch-ended",
        /// An answer of etcd is lost, though what was asked is done.
        AnswerLost = "answer-lost",
        /// A frontend cannot reach etcd.
        EtcdCut = "etcd-cut",
        /// Two frontends cannot reach each other.
        FrontCut = "front-cut",
        /// A frontend and a node cannot reach each other.
        NodeCut = "node-cut",
        /// A frontend cannot reach any node.
        NodesCut = "nodes-cut",
        /// A frontend does nothing for up to ten seconds, and goes on.
        Stop = "stop",
        /// A frontend dies, and is started anew.
        Kill = "kill",
        /// A frontend resigns, ends, and is started anew.
        Resign = "resign",
        /// A node dies, and is started anew.
        NodeKill = "node-kill",
        /// Streams to the leader break for want of room.
        Behind = "behind",
        /// A liar has a session with a node, names terms that no leader has, and goes on while all
        /// is well.
        LiarAtNode = "liar-at-node",
        /// A node tells frontends of a term that no conductor has named.
        NodeLies = "node-lies",
        /// The leader's key is overwritten: with a conductor that does not lead, under no lease, as
        /// of any revision.
        FalseKey = "false-key",
        /// A leader greets with another term than its key has.
        LeaderLies = "leader-lies",
    }
}

/// Mean time between faults.
const EVERY_S: f64 = 0.4;
/// Until a cut or a stop makes the other end give up: as the keep-alives of connections have it.
const NOTICE: Duration = Duration::from_millis(1500);
const LONGEST_CUT: Duration = Duration::from_secs(6);
const LONGEST_STOP: Duration = Duration::from_secs(10);
/// Ids of liars are above those of frontends.
const LIARS: u64 = 1000;

impl World {
    pub(super) fn on_fault(&mut self) {
        if self.is_calm {
            return;
        }
        let after = self.net.wire.chance.exponential(EVERY_S);
        self.net.wire.queue.after(Duration::from_secs_f64(after), Event::Fault);
        let drawn = self.net.wire.chance.below(LeaderFault::ALL.len() as u64) as usize;
        let fault = LeaderFault::ALL[drawn];
        if self.goes_wrong(fault) {
            *self.faults.entry(fault).or_default() += 1;
        }
        if self.net.wire.chance.below(3) == 0 {
            self.etcd.back_up();
        }
    }

    fn goes_wrong(&mut self, fault: LeaderFault) -> bool {
        let front = self.net.wire.chance.below(self.fronts.len() as u64) as usize;
        let node = self.net.wire.chance.below(self.nodes.len() as u64) as usize;
        let own = Place::SimFrontend(front);
        match fault {
            LeaderFault::EtcdAway => self.etcd_leaves(),
            LeaderFault::EtcdSlow => self.net.wire.etcd_slow = Duration::from_millis(1500),
            LeaderFault::EtcdLost => {
                self.etcd_leaves();
                self.etcd.lose_data();
            }
            LeaderFault::EtcdRestored => {
                self.etcd_leaves();
                self.etcd.restore();
            }
            LeaderFault::LeasesLost => self.etcd.end_leases(),
            LeaderFault::KeyDeleted => self.etcd.delete(),
            LeaderFault::WatchLate => self.net.wire.watch_late = self.net.wire.up_to(Duration::from_secs(3)),
            LeaderFault::WatchEnded => self.end_watches(),
            // Counted one by one.
            LeaderFault::AnswerLost => {
                self.net.wire.lost_answers = 20;
                return false;
            }
            LeaderFault::EtcdCut => self.cut(own, Place::Etcd),
            LeaderFault::FrontCut => {
                let other = (front + 1) % self.fronts.len();
                self.cut(own, Place::SimFrontend(other));
            }
            LeaderFault::NodeCut => self.cut(own, Place::Node(node)),
            LeaderFault::NodesCut => (0..self.nodes.len()).for_each(|node| self.cut(own, Place::Node(node))),
            LeaderFault::Stop => {
                if !self.net.runs[front] || self.net.is_stopped(front) {
                    return false;
                }
                let lasts = self.net.wire.up_to(LONGEST_STOP);
                self.net.stopped_until[front] = Some(self.net.wire.now() + lasts);
                self.net.wire.queue.after(NOTICE, Event::StopNoticed(front));
                self.net.wire.queue.after(lasts, Event::Continue(front));
            }
            LeaderFault::Kill => return self.end_front(front),
            LeaderFault::Resign => {
                let at = FrontendStart { front, start: self.net.starts[front] };
                if !self.net.runs[front] {
                    return false;
                }
                self.net.wire.queue.after(Duration::ZERO, Event::SimFrontend(at, Input::Drains));
                self.net.wire.queue.after(Duration::from_secs(3), Event::SimFrontend(at, Input::Ends));
            }
            LeaderFault::NodeKill => self.end_node(node),
            LeaderFault::Behind => self.net.behind = 20,
            LeaderFault::LiarAtNode => {
                self.liars += 1;
                self.lie(node, self.nodes[node].start, LIARS + self.liars);
            }
            LeaderFault::NodeLies => {
                let term = self.false_term();
                self.nodes[node].tell_lie(&mut self.net.wire, term, &self.net.starts);
            }
            LeaderFault::FalseKey => {
                let revisions = [i64::MIN, -1, 0, 1, i64::MAX - 1, i64::MAX];
                let create_revision = revisions[self.net.wire.chance.below(revisions.len() as u64) as usize];
                let id = ConductorId(self.net.wire.chance.next_u64());
                let leader = Candidate { id, address: front.to_string() };
                self.etcd.put_false_key(LeaderKey { leader, lease: 0, create_revision });
                let lasts = self.net.wire.up_to(Duration::from_secs(3));
                self.net.wire.queue.after(lasts, Event::FalseKeyGone);
            }
            LeaderFault::LeaderLies => self.net.false_greeting = Some(self.false_term()),
        }
        true
    }

    /// A term that no leader has, but by chance the largest ones.
    fn false_term(&mut self) -> u64 {
        let known = self.etcd.leader_term().unwrap_or(1);
        let terms = [u64::MAX, u64::MAX - 1, 1 << 63, known.wrapping_add(1), known ^ (1 << 30), 1, 0];
        terms[self.net.wire.chance.below(terms.len() as u64) as usize]
    }

    /// A liar names a term at a node, and another one later, until it leaves or the node ends.
    pub(super) fn lie(&mut self, node: usize, start: u64, liar: u64) {
        if self.nodes[node].start != start {
            return;
        }
        if self.net.wire.chance.below(8) == 0 {
            return self.nodes[node].on_liar_gone(&mut self.net.wire, liar, &self.net.starts);
        }
        let term = self.false_term();
        self.nodes[node].on_lie(&mut self.net.wire, liar, term, &self.net.starts);
        let again = self.net.wire.up_to(Duration::from_secs(4)) + Duration::from_millis(100);
        self.net.wire.queue.after(again, Event::Lie { node, start, liar });
    }

    pub(super) fn end_false_key(&mut self) {
        self.etcd.delete_false_key();
    }

    fn etcd_leaves(&mut self) {
        let lasts = self.net.wire.up_to(Duration::from_secs(4));
        for front in self.etcd.leave() {
            // Some notice at once, and some when they ask.
            if self.net.wire.chance.below(2) == 0 {
                self.net.wire.queue.after(Duration::ZERO, Event::SimFrontend(front, Input::WatchEnded));
            }
        }
        self.net.wire.queue.after(lasts, Event::EtcdBack);
    }

    pub(super) fn etcd_back(&mut self) {
        if self.etcd.is_away {
            self.etcd.come_back(self.net.wire.now());
        }
    }

    fn end_watches(&mut self) {
        for (front, start) in self.net.starts.iter().enumerate() {
            let at = FrontendStart { front, start: *start };
            self.net.wire.queue.after(Duration::ZERO, Event::SimFrontend(at, Input::WatchEnded));
        }
    }

    fn cut(&mut self, a: Place, b: Place) {
        let lasts = self.net.wire.up_to(LONGEST_CUT);
        // Messages keep their order: what waits for the end of a cut holds up what comes after.
        let until = (self.net.wire.now() + lasts).min(self.calm_at);
        self.net.wire.cut(a, b, until);
        self.net.wire.queue.after(NOTICE, Event::CutNoticed(a, b));
    }

    /// Two places have heard nothing of each other for so long that what is between them is over.
    pub(super) fn give_up(&mut self, a: Place, b: Place) {
        match (a, b) {
            (Place::SimFrontend(a), Place::SimFrontend(b)) => {
                self.net.break_all(|x, y| (x.front, y.front) == (a, b) || (x.front, y.front) == (b, a));
            }
            (Place::SimFrontend(front), Place::Node(node)) => self.end_session(front, node),
            _ => {}
        }
    }

    pub(super) fn give_up_front(&mut self, front: usize) {
        self.net.break_all(|x, y| x.front == front || y.front == front);
        (0..self.nodes.len()).for_each(|node| self.end_session(front, node));
    }

    fn end_session(&mut self, front: usize, node: usize) {
        let Some(session) = self.nodes[node].sessions[front] else { return };
        self.nodes[node].on_session_over(&mut self.net.wire, front, session, &self.net.starts);
        let at = FrontendStart { front, start: self.net.starts[front] };
        self.net.wire.queue.after(Duration::ZERO, Event::SimFrontend(at, Input::SessionOver(node, session)));
    }

    /// A frontend dies. It is started anew within a second.
    pub(super) fn end_front(&mut self, front: usize) -> bool {
        if self.fronts[front].take().is_none() {
            return false;
        }
        self.net.runs[front] = false;
        self.go_on(front);
        self.give_up_front(front);
        let after = self.net.wire.up_to(Duration::from_secs(1));
        self.net.wire.queue.after(after, Event::Restart(Place::SimFrontend(front)));
        true
    }

    fn end_node(&mut self, node: usize) {
        (0..self.fronts.len()).for_each(|front| self.end_session(front, node));
        let start = self.nodes[node].start + 1;
        self.nodes[node] = Node::new(node, start, self.prefill, self.fronts.len());
    }

    pub(super) fn restart(&mut self, place: Place) {
        if let Place::SimFrontend(front) = place
            && !self.net.runs[front]
        {
            self.start_front(front);
        }
    }
}
