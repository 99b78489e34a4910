//! What happens in the cluster, and how long messages travel.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use baton_kv_cache::KvEventBatch;
use baton_scheduler::{PushId, StepId};
use baton_types::{
    BlockHash, DecodeEvent, Generation, GrantId, GrantReply, GrantRequest, Handover, LeaseRelease, LeaseReply,
    LeaseRequest, Load, NodeId, PrefillEvent, PrefillJob, PrefixCopy, Redirect, Refused, RequestKey,
};

use crate::event::EventQueue;

/// From one process to another: measured between the processes of one host, framing included.
const MESSAGE_DELAY: Duration = Duration::from_micros(200);

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
    /// A message of a node is at the conductor.
    Conductor(Start, Report),
    /// One layer of a prefix is due at its reader.
    FetchedLayer { reader: Start, key: RequestKey, serial: u64 },
    /// A batch of writes is due at the decode node.
    Pushed { from: Start, key: RequestKey, push: PushId },
    /// A node is killed.
    Kill,
    /// The conductor's session with a start of a node breaks.
    Left(usize),
    /// A node that was killed is back.
    Returned(Start),
    /// The conductor looks who has reported.
    Tick,
    /// The conductor looks for prefixes to copy.
    Replicate,
    /// The load is noted.
    Sample,
}

/// What a node takes in.
#[derive(Debug)]
pub(super) enum Input {
    Submit(Box<PrefillJob>),
    Abort(RequestKey),
    Redirect(Box<Redirect>),
    Copy(Box<PrefixCopy>),
    NodeLost(NodeId, Generation),
    Snapshot,
    GrantRequest(Start, Box<GrantRequest>),
    GrantReply(RequestKey, Result<Box<GrantReply>, Refused>),
    Handover(Start, Box<Handover>),
    HandoverReply(RequestKey, Result<(), Refused>),
    ReleaseGrant(RequestKey, GrantId),
    LeaseRequest(Start, Box<LeaseRequest>),
    LeaseReply(RequestKey, Result<LeaseReply, Refused>),
    ReleaseLease(Box<LeaseRelease>),
    /// Bytes have arrived under a grant.
    Arrived(GrantId, PushId, u64),
    Fenced(GrantId),
    PushCancelled(RequestKey, PushId),
    FetchCancelled(RequestKey, u64),
    Stored(BlockHash),
    /// The engine may begin the next layer.
    Layer(StepId),
    /// A prefix has not come in time for this layer.
    PrefixLate(StepId, u32),
    StepDone(StepId),
    Wakeup,
    Report,
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

/// The events that are to come, and the way of messages.
#[derive(Debug)]
pub(super) struct Wire {
    pub queue: EventQueue<Event>,
    names: HashMap<NodeId, usize>,
}

impl Wire {
    pub(super) fn new(names: HashMap<NodeId, usize>) -> Self {
        Self { queue: EventQueue::new(), names }
    }

    pub(super) fn now(&self) -> Instant {
        self.queue.now()
    }

    /// A node by its name.
    pub(super) fn index(&self, node: &NodeId) -> usize {
        self.names[node]
    }

    /// A start of a node by its name.
    pub(super) fn start(&self, node: &NodeId, generation: Generation) -> Start {
        Start { node: self.index(node), generation }
    }

    /// A message to a node.
    pub(super) fn tell(&mut self, to: Start, input: Input) {
        self.queue.after(MESSAGE_DELAY, Event::Node(to, input));
    }

    /// The same, some time later.
    pub(super) fn tell_after(&mut self, delay: Duration, to: Start, input: Input) {
        self.queue.after(delay + MESSAGE_DELAY, Event::Node(to, input));
    }

    /// Something that happens at a node itself.
    pub(super) fn at(&mut self, at: Instant, node: Start, input: Input) {
        self.queue.at(at, Event::Node(node, input));
    }

    /// A message to the conductor.
    pub(super) fn report(&mut self, from: Start, report: Report) {
        self.queue.after(MESSAGE_DELAY, Event::Conductor(from, report));
    }
}
