//! What happens in the cluster, and how long messages travel.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use baton_kv_cache::KvEventBatch;
use baton_scheduler::{PushId, StepId};
use baton_types::{
    BlockHash, DecodeEvent, Generation, GrantId, GrantReply, GrantRequest, Handoff, LeaseRelease, LeaseReply,
    LeaseRequest, Load, NodeId, NodeStart, PrefillEvent, PrefillJob, Refused, RequestKey, Reselect,
};

use super::contents::Contents;
use crate::Random;
use crate::event::EventQueue;
use crate::faults::FaultKind;

/// From one process to another: measured between the processes of one host, framing included.
const MESSAGE_DELAY: Duration = Duration::from_micros(200);

/// How much longer a message takes at most, if messages differ.
const MAX_JITTER: Duration = Duration::from_millis(3);
/// Where the conductor is among the processes that messages go between.
pub(super) const CONDUCTOR: usize = usize::MAX;

/// One start of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Start {
    /// Index of the node.
    pub node: usize,
    /// Which start of it.
    pub generation: Generation,
}

/// Something happens.
#[derive(Debug)]
pub(super) enum Event {
    /// A request arrives.
    Arrival(usize),
    /// A request's core asked to be woken.
    RequestTimer(usize),
    /// A message, or an answer of the engine or the network, is at a node.
    Node(Start, Input),
    /// A message of the conductor's session of that number is at a node.
    Command(Start, u64, Input),
    /// A message of a node is at the conductor, by the session of that number.
    Conductor(Start, u64, Report),
    /// One layer of a prefix is due at its reader, or has not come in time.
    FetchedLayer { reader: Start, key: RequestKey, serial: u64, is_late: bool },
    /// A batch of writes is due at the decode node.
    Pushed { from: Start, key: RequestKey, push: PushId },
    /// Something goes wrong.
    Fault,
    /// The conductor notices that its session with a node is over.
    Left(Start),
    /// A process that was asked to end has had its time.
    GraceOver(Start),
    /// A node has a session with the conductor again.
    Returned(Start),
    /// The conductor looks who has reported.
    Tick,
    /// The load is noted.
    Sample,
}

/// What a node takes in.
#[derive(Debug)]
pub(super) enum Input {
    Submit(Box<PrefillJob>),
    Abort(RequestKey),
    Reselect(Box<Reselect>),
    NodeLost(NodeStart),
    Snapshot,
    GrantRequest(Start, Box<GrantRequest>),
    GrantReply(RequestKey, Result<Box<GrantReply>, Refused>),
    Handoff(Start, Box<Handoff>),
    HandoffReply(RequestKey, Result<(), Refused>),
    ReleaseGrant(RequestKey, GrantId),
    LeaseRequest(Start, Box<LeaseRequest>),
    LeaseReply(RequestKey, Result<LeaseReply, Refused>),
    ReleaseLease(Box<LeaseRelease>),
    /// Bytes have arrived under a grant.
    Arrived(GrantId, PushId, u64),
    Fenced(GrantId),
    PushCancelled(RequestKey, PushId),
    FetchCancelled(RequestKey, u64),
    /// The holder should have answered by now.
    LeaseDue(RequestKey, u64),
    /// A write to the SSD is over, well or not.
    Stored(BlockHash, bool),
    /// The engine may begin the next layer.
    Layer(StepId),
    /// A prefix has not come in time for this layer.
    PrefixLate(StepId, u32),
    StepDone(StepId),
    Wakeup,
    Report,
    SessionClosed,
    Drain,
    /// An operator has it drain, or take requests again.
    DrainOrdered(bool),
}

/// What the conductor takes in.
#[derive(Debug)]
pub(super) enum Report {
    Load(Box<Load>),
    Prefill(RequestKey, Box<PrefillEvent>),
    Decode(Vec<(RequestKey, DecodeEvent)>),
    Offer(RequestKey, u32),
    Kv(KvEventBatch),
    Step(Box<StepReport>),
}

/// What a step took.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepReport {
    pub rows: u32,
    pub attended_tokens: u64,
    pub prompt_rows: u32,
    pub seconds: f64,
    /// Rows, tokens attended to and seconds of all layers of its slice.
    pub slice: Option<(u32, u64, f64)>,
}

/// What messages between two processes meet with; `None` for any other process.
#[derive(Debug)]
pub(super) struct Disturbance {
    pub between: (usize, Option<usize>),
    pub until: Instant,
    /// How much longer messages travel; none arrives before the end without it.
    pub delay: Option<Duration>,
}

/// The events that are to come, and the way of messages.
#[derive(Debug)]
pub(super) struct Wire {
    pub queue: EventQueue<Event>,
    names: HashMap<NodeId, usize>,
    /// Numbers of the sessions between conductor and nodes.
    pub sessions: Vec<u64>,
    pub disturbances: Vec<Disturbance>,
    /// When the last message that was disturbed arrives, from one process to another: they arrive
    /// in order.
    last: HashMap<(usize, usize), Instant>,
    /// Of how much longer each message takes, if they do.
    jitter: Option<Random>,
    /// What blocks hold, if it is checked.
    pub contents: Option<Contents>,
    /// What went wrong so far.
    pub faults: BTreeMap<FaultKind, u64>,
}

impl Wire {
    pub(super) fn new(names: HashMap<NodeId, usize>, jitter: Option<Random>, contents: Option<Contents>) -> Self {
        Self {
            queue: EventQueue::new(),
            sessions: vec![0; names.len()],
            names,
            disturbances: Vec::new(),
            last: HashMap::new(),
            jitter,
            contents,
            faults: BTreeMap::new(),
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.queue.now()
    }

    pub(super) fn has_jitter(&self) -> bool {
        self.jitter.is_some()
    }

    /// A node by its name.
    pub(super) fn index(&self, node: &NodeId) -> usize {
        self.names[node]
    }

    /// A start of a node by its name.
    pub(super) fn start(&self, node: &NodeId, generation: Generation) -> Start {
        Start { node: self.index(node), generation }
    }

    /// Something has gone wrong.
    pub(super) fn note(&mut self, fault: FaultKind) {
        *self.faults.entry(fault).or_default() += 1;
    }

    /// Until when nothing gets from one process to the other.
    pub(super) fn cut_until(&self, from: usize, to: usize) -> Option<Instant> {
        let cuts = self.disturbances.iter().filter(|one| one.delay.is_none() && one.meets(from, to));
        cuts.map(|one| one.until).filter(|until| *until > self.now()).max()
    }

    /// When a message that is sent at `sent` arrives.
    fn arrival(&mut self, from: usize, to: usize, sent: Instant) -> Instant {
        let mut at = sent + MESSAGE_DELAY;
        if let Some(jitter) = &mut self.jitter {
            at += MAX_JITTER.mul_f64(jitter.unit());
        } else if self.disturbances.is_empty() && self.last.is_empty() {
            return at;
        }
        let now = self.now();
        self.disturbances.retain(|one| one.until > now);
        self.last.retain(|_, last| *last > now);
        for one in self.disturbances.iter().filter(|one| one.meets(from, to)) {
            at = at.max(one.delay.map_or(one.until, |delay| sent + delay) + MESSAGE_DELAY);
        }
        let last = self.last.entry((from, to)).or_insert(at);
        *last = at.max(*last);
        *last
    }

    /// A message from node to node.
    pub(super) fn tell(&mut self, from: usize, to: Start, input: Input) {
        self.tell_after(Duration::ZERO, from, to, input);
    }

    /// The same, some time later.
    pub(super) fn tell_after(&mut self, delay: Duration, from: usize, to: Start, input: Input) {
        let at = self.arrival(from, to.node, self.now() + delay);
        self.queue.at(at, Event::Node(to, input));
    }

    /// A message of the conductor.
    pub(super) fn command(&mut self, to: Start, input: Input) {
        let at = self.arrival(CONDUCTOR, to.node, self.now());
        self.queue.at(at, Event::Command(to, self.sessions[to.node], input));
    }

    /// A message to the conductor.
    pub(super) fn report(&mut self, from: Start, report: Report) {
        let at = self.arrival(from.node, CONDUCTOR, self.now());
        self.queue.at(at, Event::Conductor(from, self.sessions[from.node], report));
    }

    /// Something that happens at a node itself.
    pub(super) fn at(&mut self, at: Instant, node: Start, input: Input) {
        self.queue.at(at, Event::Node(node, input));
    }
}

impl Disturbance {
    fn meets(&self, from: usize, to: usize) -> bool {
        let (one, other) = self.between;
        (one == from && other.is_none_or(|other| other == to)) || (one == to && other.is_none_or(|other| other == from))
    }
}
