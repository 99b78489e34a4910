//! What gets from process to process, and when: queues that keep their order, delays, and cuts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_scheduler::{RequestEvent, RequestKey};
use baton_types::{FromLeader, Load, NodeInfo, PrefillJob, Reselect, ToLeader};

use super::etcd::{Change, EtcdAnswer, EtcdRequest};
use super::node::Work;
use crate::Random;
use crate::event::EventQueue;

/// A start of a frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FrontendStart {
    pub front: usize,
    pub start: u64,
}

/// A place in the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    SimFrontend(usize),
    Node(usize),
    Etcd,
}

/// What a node is told on a session.
#[derive(Debug)]
pub(super) enum Command {
    Job(u64, Box<PrefillJob>),
    Reselect(Box<Reselect>),
    Abort(RequestKey),
    /// Who leads, and what is denied.
    Leader {
        term: u64,
        denied: u64,
    },
}

/// What a node says on a session.
#[derive(Debug)]
pub(super) enum NodeMessage {
    Joined(Box<NodeInfo>),
    Load(Box<Load>),
    Event(RequestKey, Box<RequestEvent>),
    LeaderTerm(u64),
}

/// What happens to a frontend. What it does itself waits for it while it is stopped, too.
#[derive(Debug)]
pub(super) enum Input {
    Arrival,
    Leaves,
    RequestTimer(u128),
    Tick,
    Drains,
    Ends,
    /// Of a session: its number, and what was said.
    Node(usize, u64, NodeMessage),
    SessionOver(usize, u64),
    Etcd(u64, EtcdAnswer),
    EtcdSilent(u64),
    ElectionTimer(u64),
    Watch(i64, Change),
    WatchEnded,
    FollowTimer(u64),
    /// Of a connection between conductors.
    Connected(u64),
    ToLeader(u64, Box<ToLeader>),
    FromLeader(u64, Box<FromLeader<()>>),
    Settled(u64),
    Closed(u64),
}

#[derive(Debug)]
pub(super) enum Event {
    SimFrontend(FrontendStart, Input),
    Command {
        node: usize,
        session: u64,
        front: usize,
        command: Command,
    },
    Work {
        node: usize,
        start: u64,
        work: Work,
    },
    NodeTick,
    /// A liar at a node says something else, or leaves.
    Lie {
        node: usize,
        start: u64,
        liar: u64,
    },
    Etcd(FrontendStart, u64, EtcdRequest),
    EtcdTick,
    Fault,
    Restart(Place),
    /// What is between two places is given up, if they still cannot reach each other.
    CutNoticed(Place, Place),
    /// The same of a process that is stopped.
    StopNoticed(usize),
    /// A frontend that was stopped goes on.
    Continue(usize),
    EtcdBack,
    /// What a liar has put into etcd is deleted.
    FalseKeyGone,
    Calm,
    Check(u32),
}

/// The network.
#[derive(Debug)]
pub(super) struct Wire {
    pub queue: EventQueue<Event>,
    pub chance: Random,
    cuts: BTreeMap<(Place, Place), Instant>,
    /// When the last message on each way arrives.
    last: BTreeMap<(Place, Place), Instant>,
    /// Messages to and from etcd, and changes that are watched, take so much longer.
    pub etcd_slow: Duration,
    pub watch_late: Duration,
    /// Answers of etcd that are lost, of a hundred.
    pub lost_answers: u64,
    /// Messages between conductors that have not been taken in.
    pub in_flight: usize,
}

fn way(a: Place, b: Place) -> (Place, Place) {
    (a.min(b), a.max(b))
}

impl Wire {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            queue: EventQueue::new(),
            chance: Random::new(seed),
            cuts: BTreeMap::new(),
            last: BTreeMap::new(),
            etcd_slow: Duration::ZERO,
            watch_late: Duration::ZERO,
            lost_answers: 0,
            in_flight: 0,
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.queue.now()
    }

    /// A time of up to `most`.
    pub(super) fn up_to(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.chance.unit())
    }

    pub(super) fn cut(&mut self, a: Place, b: Place, until: Instant) {
        let cut = self.cuts.entry(way(a, b)).or_insert(until);
        *cut = until.max(*cut);
    }

    pub(super) fn cut_until(&self, a: Place, b: Place) -> Option<Instant> {
        self.cuts.get(&way(a, b)).copied().filter(|until| *until > self.now())
    }

    /// When a message gets there: after those before it, and not during a cut.
    pub(super) fn arrives(&mut self, from: Place, to: Place, late: Duration) -> Instant {
        let now = self.now();
        let mut takes = Duration::from_micros(200) + self.up_to(Duration::from_millis(2)) + late;
        if from == Place::Etcd || to == Place::Etcd {
            takes += self.etcd_slow.mul_f64(self.chance.unit());
        }
        let leaves = self.cut_until(from, to).unwrap_or(now);
        let last = self.last.entry((from, to)).or_insert(now);
        *last = (leaves + takes).max(*last);
        *last
    }

    pub(super) fn send(&mut self, from: Place, to: Place, event: Event) {
        let at = self.arrives(from, to, Duration::ZERO);
        self.queue.at(at, event);
    }

    /// All is well again. Cuts have ended by themselves.
    pub(super) fn heal(&mut self) {
        self.etcd_slow = Duration::ZERO;
        self.watch_late = Duration::ZERO;
        self.lost_answers = 0;
    }
}
