//! A node: one of production's cores, and what its shell does, on virtual time.

mod decode;
mod fetch;
mod prefill;
mod ssd;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_profile::{Link, ModelProfile};
use baton_scheduler::{
    DecodeCore, KV_EVENTS_PER_MESSAGE, KvEventBatch, LeaseEffect, PrefillCore, PushId, PushSpan, RequestKey,
};
use baton_types::{ErrorKind, Generation, GrantId, LeaseRequest, Load, NodeInfo, NodeRole, Refused};

use super::config::NodeConfig;
use super::engine::{Engine, Running};
use super::frontend::CONDUCTOR_ID;
use super::wire::{Input, Report, Start, Wire};
use crate::faults::FaultKind;
use fetch::Fetch;
use ssd::Ssd;

/// Until a node notices that a question was lost.
const LOST_AFTER: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) enum Core {
    Prefill(Box<PrefillCore>),
    Decode(Box<DecodeCore>),
}

/// A call on whichever core it is.
macro_rules! with_core {
    ($node:expr, $core:ident => $call:expr) => {
        match &mut $node.core {
            Core::Prefill($core) => $call,
            Core::Decode($core) => $call,
        }
    };
}
pub(super) use with_core;

/// A batch of writes on its way.
#[derive(Debug)]
pub(super) struct Push {
    pub to: Start,
    pub grant: GrantId,
    pub bytes: u64,
    pub started: Instant,
    /// What is written, with what it contained when the batch began; nothing if contents are not
    /// checked.
    pub spans: Vec<(PushSpan, u64)>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Node {
    pub start: Start,
    pub info: NodeInfo,
    core: Core,
    engine: Engine,
    step: Option<Running>,
    /// Its adapter sends and receives at the same time.
    send: Link,
    receive: Link,
    ssd: Option<Ssd>,
    migrates: bool,
    /// Prefixes on their way here, from other nodes or the SSD.
    fetches: BTreeMap<RequestKey, Fetch>,
    /// Fetches that began here so far.
    num_fetches: u64,
    /// Batches on their way from here.
    pub pushes: BTreeMap<(RequestKey, PushId), Push>,
    /// What others may write and read here.
    pub open: BTreeSet<GrantId>,
    /// Nodes that wait for a grant, a lease, or the answer to a handoff.
    grants_asked: BTreeMap<RequestKey, Start>,
    leases_asked: BTreeMap<RequestKey, Start>,
    handoffs_asked: BTreeMap<RequestKey, Start>,
    /// When it will be woken.
    wakeup: Option<Instant>,
    /// It takes nothing in before.
    pub hung_until: Instant,
    /// Questions that were lost.
    num_lost: u64,
    /// What fails here next.
    armed: BTreeSet<FaultKind>,
    /// Whether it reports its load.
    pub reports: bool,
    /// It ends when it is idle.
    pub is_draining: bool,
}

pub(super) fn unavailable(message: &str) -> Refused {
    Refused { kind: ErrorKind::Unavailable, message: message.to_owned() }
}

impl Node {
    /// A start of a node.
    pub(super) fn new(now: Instant, start: Start, config: &NodeConfig, profile: &ModelProfile, seed: u64) -> Self {
        let info = config.info(start.generation);
        let core = match info.role {
            NodeRole::Prefill => Core::Prefill(Box::new(config.prefill_core(&info))),
            NodeRole::Decode => Core::Decode(Box::new(config.decode_core())),
        };
        let cost = match info.role {
            NodeRole::Prefill => profile.prefill_cost(),
            NodeRole::Decode => profile.decode_cost(),
        };
        let ssd = (config.ssd_blocks > 0).then(|| Ssd::new(config.ssd_blocks, profile.ssd_bytes_per_s));
        Self {
            start,
            engine: Engine::new(cost, info.layout.num_layers, seed),
            info,
            core,
            step: None,
            send: Link::new(profile.network_bytes_per_s, profile.latency()),
            receive: Link::new(profile.network_bytes_per_s, profile.latency()),
            ssd,
            migrates: config.migrates,
            fetches: BTreeMap::new(),
            num_fetches: 0,
            pushes: BTreeMap::new(),
            open: BTreeSet::new(),
            grants_asked: BTreeMap::new(),
            leases_asked: BTreeMap::new(),
            handoffs_asked: BTreeMap::new(),
            wakeup: None,
            hung_until: now,
            num_lost: 0,
            armed: BTreeSet::new(),
            reports: start.generation == Generation(1),
            is_draining: false,
        }
    }

    /// The next operation of that kind fails.
    pub(super) fn arm(&mut self, fault: FaultKind) {
        self.armed.insert(fault);
    }

    /// Whether this one does.
    fn fails(&mut self, wire: &mut Wire, fault: FaultKind) -> bool {
        let fails = self.armed.remove(&fault);
        if fails {
            wire.note(fault);
        }
        fails
    }

    pub(super) fn is_idle(&self) -> bool {
        match &self.core {
            Core::Prefill(core) => core.is_idle(),
            Core::Decode(core) => core.is_idle(),
        }
    }

    /// Whether anything is on its way from or to it, or may be written or read here.
    pub(super) fn transfers_anything(&self) -> bool {
        !(self.pushes.is_empty() && self.fetches.is_empty() && self.open.is_empty() && self.step.is_none())
    }

    /// Whether each block is accounted for.
    pub(super) fn check(&self) -> Result<(), String> {
        let integrity = match &self.core {
            Core::Prefill(core) => core.check_integrity(),
            Core::Decode(core) => core.check_integrity(),
        };
        integrity.map_err(|error| format!("{}: {error}", self.info.node))
    }

    pub(super) fn load(&self, now: Instant) -> Load {
        match &self.core {
            Core::Prefill(core) => core.load(now),
            Core::Decode(core) => core.load(),
        }
    }

    /// Takes something in and carries out what follows.
    pub(super) fn on_input(&mut self, wire: &mut Wire, input: Input) {
        let now = wire.now();
        match input {
            Input::Submit(job) => with_core!(self, core => core.on_submit(now, *job)),
            Input::Abort(key) => with_core!(self, core => core.on_abort(now, key)),
            Input::NodeLost(lost) => with_core!(self, core => core.on_node_lost(now, &lost)),
            Input::Snapshot => self.send_snapshot(wire),
            Input::LeaseRequest(from, request) => self.on_lease_request(now, from, *request),
            Input::LeaseReply(key, reply) => self.on_lease_reply(wire, key, reply),
            Input::ReleaseLease(release) => with_core!(self, core => core.on_release_lease(now, *release)),
            Input::LeaseDue(key, serial) => self.on_lease_due(wire, key, serial),
            Input::FetchCancelled(key, serial) => self.on_fetch_cancelled(wire, key, serial),
            Input::Stored(hash, stored) => self.on_stored(now, hash, stored),
            Input::SessionClosed => with_core!(self, core => core.on_conductor_lost(now, CONDUCTOR_ID)),
            Input::Drain => {
                self.is_draining = true;
                with_core!(self, core => core.on_drain(now));
                wire.report(self.start, Report::Load(Box::new(self.load(now))));
            }
            Input::DrainOrdered(drains) => {
                if drains || self.is_draining {
                    with_core!(self, core => core.on_drain(now))
                } else {
                    with_core!(self, core => core.on_undrain(now))
                }
                wire.report(self.start, Report::Load(Box::new(self.load(now))));
            }
            Input::Layer(step) => self.on_layer(wire, step),
            Input::PrefixLate(step, layer) => self.on_prefix_late(wire, step, layer),
            Input::StepDone(step) => self.on_step_done(wire, step),
            Input::Wakeup => {
                // One that was set before an earlier one has its turn later.
                if self.wakeup.is_none_or(|due| due > now) {
                    return;
                }
                self.wakeup = None;
                with_core!(self, core => core.on_wakeup(now));
            }
            Input::Report => wire.report(self.start, Report::Load(Box::new(self.load(now)))),
            input => match &self.core {
                Core::Prefill(_) => self.on_prefill_input(wire, input),
                Core::Decode(_) => self.on_decode_input(wire, input),
            },
        }
        self.carry_out(wire);
    }

    fn carry_out(&mut self, wire: &mut Wire) {
        loop {
            match &mut self.core {
                Core::Prefill(core) => match core.poll_effect() {
                    Some(effect) => self.on_prefill_effect(wire, effect),
                    None => break,
                },
                Core::Decode(core) => match core.poll_effect() {
                    Some(effect) => self.on_decode_effect(wire, effect),
                    None => break,
                },
            }
        }
        while let Some(batch) = with_core!(self, core => core.drain_kv_events(KV_EVENTS_PER_MESSAGE)) {
            if !self.fails(wire, FaultKind::Events) {
                wire.report(self.start, Report::Kv(batch));
            }
        }
        self.set_timer(wire);
    }

    /// One entry at a time: a wakeup that was put off is noticed when the earlier one comes.
    fn set_timer(&mut self, wire: &mut Wire) {
        let Some(due) = with_core!(self, core => core.next_wakeup()) else { return };
        if self.wakeup.is_none_or(|set| due < set) {
            self.wakeup = Some(due);
            wire.at(due, self.start, Input::Wakeup);
        }
    }

    fn send_snapshot(&mut self, wire: &mut Wire) {
        while let Some(batch) = with_core!(self, core => core.drain_kv_events(KV_EVENTS_PER_MESSAGE)) {
            wire.report(self.start, Report::Kv(batch));
        }
        let snapshot: KvEventBatch = with_core!(self, core => core.kv_snapshot());
        wire.report(self.start, Report::Kv(snapshot));
    }

    /// The process ends: what waits for its answer hears so.
    pub(super) fn on_killed(&mut self, wire: &mut Wire) {
        let gone = || unavailable("the node is gone");
        for (key, asked) in std::mem::take(&mut self.grants_asked) {
            wire.tell(self.start.node, asked, Input::GrantReply(key, Err(gone())));
        }
        for (key, asked) in std::mem::take(&mut self.handoffs_asked) {
            wire.tell(self.start.node, asked, Input::HandoffReply(key, Err(gone())));
        }
        for (key, asked) in std::mem::take(&mut self.leases_asked) {
            wire.tell(self.start.node, asked, Input::LeaseReply(key, Err(gone())));
        }
    }

    /// Asks another node. `refusal` is the answer if the question or its answer is lost.
    fn ask(
        &mut self,
        wire: &mut Wire,
        delay: Duration,
        to: Start,
        question: impl FnOnce(Start) -> Input,
        refusal: Input,
    ) {
        if !self.fails(wire, FaultKind::Message) {
            return wire.tell_after(delay, self.start.node, to, question(self.start));
        }
        self.num_lost += 1;
        wire.at(wire.now() + delay + LOST_AFTER, self.start, refusal);
        if self.num_lost.is_multiple_of(2) {
            // It arrives, and no request waits for its answer.
            wire.tell_after(delay, self.start.node, to, question(Start { generation: Generation(0), ..self.start }));
        }
    }

    fn on_lease_request(&mut self, now: Instant, from: Start, request: LeaseRequest) {
        self.leases_asked.insert(request.key, from);
        with_core!(self, core => core.on_lease_request(now, request));
    }

    fn on_lease_effect(&mut self, wire: &mut Wire, effect: LeaseEffect) {
        let (key, reply) = match effect {
            LeaseEffect::Open { key, reply, .. } => {
                self.open.insert(reply.lease);
                (key, Ok(reply))
            }
            LeaseEffect::Refuse { key, refused } => (key, Err(refused)),
            LeaseEffect::End { lease } => {
                self.open.remove(&lease);
                return;
            }
        };
        if let Some(reader) = self.leases_asked.remove(&key) {
            wire.tell(self.start.node, reader, Input::LeaseReply(key, reply));
        }
    }
}
