//! The loop of a decode node.
//!
//! ```text
//!   on_grant_request ─▶ blocks, room for the answer, OpenGrant ─▶ bytes arrive ─┐
//!                                                   on_handoff ─────────────────┼▶ waits ─▶ runs, a token per step ─▶ blocks to the cache
//!     of a prompt whose rest is computed here, before the bytes: layers of it as the first's arrive             │
//!   on_submit: a prompt that is computed here ──────────────────────────────────┘    ▲          │
//!   on_submit: a sequence of another decode node ─▶ its blocks, Fetch ─▶ on_fetch_done ┘     └ preempted┘ if blocks run out: `room.rs`
//! ```
//!
//! **Invariant**: a sequence that was handed off, or submitted, ends in exactly one of a token with
//! a finish reason, [`DecodeEvent::Failed`] (before its first token: a failed
//! [`baton_types::PrefillEvent`]), or silence after an abort. Its blocks stay until its step is
//! over and its grant is fenced.

mod batch;
mod effect;
mod grant;
mod integrity;
mod local;
mod migration;
mod partial_prefill;
mod room;
mod sequence;
mod step_time;
mod tier;
mod tombstones;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use baton_kv_cache::{BlockPool, KvEventBatch};
use baton_types::{
    ConductorId, DecodeEvent, ErrorKind, Generation, GrantId, LeaseRelease, LeaseRequest, Load, NodeId, Refused,
    RequestKey,
};

use crate::config::{DecodeConfig, InvalidConfig};
use crate::deadlines::Deadlines;
use crate::lease::Leases;
use crate::load::pool_load;
use crate::tier::Stores;

pub use effect::DecodeEffect;
pub(crate) use partial_prefill::slice_layers;

use batch::RunningStep;
use grant::{GrantRecord, WaitingGrant};
use sequence::{HandedOff, Phase, Sequence};
use step_time::RecentStepTime;
use tombstones::{Outcome, Tombstones};

/// What decides on a decode node: grants, arrivals, handoffs, the running batch and its room, the
/// prefix cache of its arena.
#[derive(Debug)]
pub struct DecodeCore {
    config: DecodeConfig,
    pool: BlockPool,
    sequences: BTreeMap<RequestKey, Sequence>,
    grants: BTreeMap<GrantId, GrantRecord>,
    /// Grants that are asked for and that there is no room for, first come, first served.
    waiting_grants: VecDeque<WaitingGrant>,
    /// Sequences that do not run, by their age: those that are here whole, and those that wait for
    /// room.
    waiting: BTreeMap<u64, RequestKey>,
    running: Vec<RequestKey>,
    /// Partial prefills, the oldest first.
    tails: Vec<RequestKey>,
    step: Option<RunningStep>,
    step_time: RecentStepTime,
    tombstones: Tombstones,
    leases: Leases,
    stores: Stores,
    /// The tier has let a sequence wait for too long: it is asked again then.
    tier_avoided_until: Option<Instant>,
    deadlines: Deadlines,
    effects: VecDeque<DecodeEffect>,
    next_step: u64,
    next_grant: u64,
    next_turn: u64,
    preemptions: u64,
    /// When a sequence that waits for room is offered next.
    next_offer: Option<Instant>,
    /// Whether a sequence that is here waits for blocks: then no other request gets any.
    lacks_room: bool,
    prefix_queries: u64,
    prefix_hits: u64,
    prefix_hits_ssd: u64,
    prefix_hits_fetched: u64,
    draining: bool,
}

fn failed(kind: ErrorKind, message: String) -> DecodeEvent {
    DecodeEvent::Failed(Refused { kind, message })
}

impl DecodeCore {
    /// A core with an empty arena.
    pub fn new(config: DecodeConfig) -> Result<Self, InvalidConfig> {
        config.validate()?;
        let mut pool = BlockPool::with_eviction(config.model.layout.num_blocks, config.max_kv_events, config.eviction);
        pool.keep_below_to_itself();
        let stores = Stores::new(config.max_stores);
        let leases = Leases::new(config.max_leases, config.lease_ttl);
        let tombstones = Tombstones::new(config.max_tombstones);
        Ok(Self {
            config,
            pool,
            sequences: BTreeMap::new(),
            grants: BTreeMap::new(),
            waiting_grants: VecDeque::new(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            tails: Vec::new(),
            step: None,
            step_time: RecentStepTime::default(),
            tombstones,
            leases,
            stores,
            tier_avoided_until: None,
            deadlines: Deadlines::default(),
            effects: VecDeque::new(),
            next_step: 0,
            next_grant: 0,
            next_turn: 0,
            preemptions: 0,
            next_offer: None,
            lacks_room: false,
            prefix_queries: 0,
            prefix_hits: 0,
            prefix_hits_ssd: 0,
            prefix_hits_fetched: 0,
            draining: false,
        })
    }

    /// What to do next; to be called until `None` after each event.
    pub fn poll_effect(&mut self) -> Option<DecodeEffect> {
        self.effects.pop_front()
    }

    /// When [`Self::on_wakeup`] is due.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let waiting = self.waiting_grants.iter().map(|waiting| waiting.until).min();
        self.deadlines.next().into_iter().chain(self.leases.next_expiry()).chain(waiting).chain(self.next_offer).min()
    }

    /// What the node is doing now.
    pub fn load(&self) -> Load {
        let kv_tokens: usize =
            self.running.iter().filter_map(|key| self.sequences.get(key)).map(Sequence::num_tokens).sum();
        let live = self.sequences.values().filter(|sequence| !sequence.ended);
        let prompts = live.clone().filter(|sequence| sequence.is_prompt() || sequence.tail.is_some());
        Load {
            running: self.running.len() as u32,
            waiting: (live.count() + self.waiting_grants.len()).saturating_sub(self.running.len()) as u32,
            queued_tokens: prompts.map(|sequence| sequence.remaining_tokens() as u64).sum(),
            kv_tokens: kv_tokens as u64,
            preemptions: self.preemptions,
            blocks_ssd: self.pool.len_below() as u32,
            prefix_queries: self.prefix_queries,
            prefix_hits: self.prefix_hits,
            prefix_hits_ssd: self.prefix_hits_ssd,
            prefix_hits_fetched: self.prefix_hits_fetched,
            draining: self.draining,
            takes_sequences: self.check_takes_sequences().is_ok(),
            ..pool_load(&self.pool)
        }
    }

    /// Every [`Self::stage`].
    pub const STAGES: [&'static str; 5] = ["granted", "waiting", "preempted", "migrating", "running"];

    /// How far a request is: `granted`, `waiting`, `preempted`, `migrating` here or `running`;
    /// `None` if it is not here, or over.
    pub fn stage(&self, key: RequestKey) -> Option<&'static str> {
        let sequence = self.sequences.get(&key).filter(|sequence| !sequence.ended)?;
        Some(match sequence.phase {
            Phase::Granted => "granted",
            Phase::Waiting => "waiting",
            Phase::Preempted => "preempted",
            Phase::Fetching => "migrating",
            Phase::Running => "running",
        })
    }

    /// Whether nothing is granted, waits, runs or is read by others.
    pub fn is_idle(&self) -> bool {
        let nothing_waits = self.waiting_grants.is_empty() && self.leases.is_empty() && self.stores.is_idle();
        self.sequences.is_empty() && self.grants.is_empty() && self.step.is_none() && nothing_waits
    }

    /// Up to `max` changes of the prefix cache that were not told yet, or a snapshot if they ran
    /// over.
    pub fn drain_kv_events(&mut self, max: usize) -> Option<KvEventBatch> {
        self.pool.drain_events(max)
    }

    /// Everything in the prefix cache.
    pub fn kv_snapshot(&self) -> KvEventBatch {
        self.pool.snapshot()
    }

    /// Frees the prefix cache, of both tiers.
    pub fn clear_cache(&mut self) {
        self.pool.clear_cached();
        self.effects.extend(self.stores.clear().map(DecodeEffect::Tier));
    }

    /// The request's owner gave up. What comes for it later is refused.
    pub fn on_abort(&mut self, now: Instant, key: RequestKey) {
        self.refuse_asked(ErrorKind::Cancelled, "the request was aborted", |request| request.key == key);
        self.end(key, Outcome::Aborted, None);
        self.tombstones.put(key, Outcome::Aborted);
        self.plan_step(now);
    }

    /// A conductor is gone: its sequences are aborted. Grants that were not handed off yet do not
    /// know their conductor; the prefill node releases them, or they expire.
    pub fn on_conductor_lost(&mut self, now: Instant, conductor: ConductorId) {
        let of = |sequence: &Sequence| sequence.handed_off.as_ref().map(|handed_off| handed_off.conductor);
        let lost = self.sequences.iter().filter(|(_, sequence)| of(sequence) == Some(conductor));
        for key in lost.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.end(key, Outcome::Aborted, None);
        }
        self.plan_step(now);
    }

    /// Finish what is here, or let other decode nodes take it; take nothing new.
    pub fn on_drain(&mut self, now: Instant) {
        self.draining = true;
        self.stores.stop();
        self.refuse_asked(ErrorKind::Unavailable, "the decode node is draining", |_| true);
        self.offer_due(now);
    }

    /// Take requests again.
    pub fn on_undrain(&mut self, now: Instant) {
        self.draining = false;
        self.stores.go_on();
        self.offer_due(now);
    }

    /// Deadlines that have come: grants that got no room are refused, and those whose transfers
    /// have stalled end.
    pub fn on_wakeup(&mut self, now: Instant) {
        while let Some(key) = self.deadlines.pop_due(now) {
            let Some(sequence) = self.sequences.get(&key) else { continue };
            let arrived = sequence.arrived_bytes;
            let expected = sequence.expected_bytes;
            let message = format!("{arrived} of {expected} bytes came, and no more within {:?}", self.config.grant_ttl);
            self.end(key, Outcome::Failed, Some(failed(ErrorKind::Unavailable, message)));
        }
        self.end_grant_waits(now);
        self.expire_leases(now);
        self.plan_step(now);
    }

    fn expire_leases(&mut self, now: Instant) {
        while let Some(effect) = self.leases.expire(now, &mut self.pool) {
            self.effects.push_back(DecodeEffect::Lease(effect));
        }
    }

    /// A conductor lost another node, which is probably gone: nothing is kept for it to read.
    pub fn on_node_lost(&mut self, now: Instant, lost: &(NodeId, Generation)) {
        self.leases.on_reader_lost(now, lost);
        self.expire_leases(now);
        self.plan_step(now);
    }

    /// Another node wants to read blocks of the prefix cache. Answered by
    /// [`crate::LeaseEffect::Open`] or [`crate::LeaseEffect::Refuse`].
    pub fn on_lease_request(&mut self, now: Instant, request: LeaseRequest) {
        let id = GrantId(self.next_grant);
        self.next_grant += 1;
        let migrates = self.is_migrating(request.key);
        let effect = match self.draining && !migrates {
            true => self.leases.refuse_draining(&request),
            false => {
                // Who takes a sequence off this node reads its blocks once, and is not one of those
                // that come without end.
                let wanted = self.wanted_blocks().filter(|_| !migrates);
                self.leases.open(now, &mut self.pool, id, request, (wanted, migrates))
            }
        };
        self.effects.push_back(DecodeEffect::Lease(effect));
    }

    /// The reader, or the shell, gives a lease back. Unknown ones are ignored.
    pub fn on_release_lease(&mut self, now: Instant, release: impl Into<LeaseRelease>) {
        if let Some(effect) = self.leases.release(&mut self.pool, &release.into()) {
            self.effects.push_back(DecodeEffect::Lease(effect));
            self.plan_step(now);
        }
    }

    /// Ends a request, wherever it is. `event` goes to its conductor if it was handed off. What
    /// ended already, or is not here, stays as it is.
    fn end(&mut self, key: RequestKey, outcome: Outcome, event: Option<DecodeEvent>) {
        let Some(sequence) = self.sequences.get_mut(&key).filter(|sequence| !sequence.ended) else { return };
        sequence.ended = true;
        if sequence.fetch.is_some() {
            self.effects.push_back(DecodeEffect::CancelFetch { key });
        }
        let conductor = sequence.handed_off.as_ref().map(|handed_off| handed_off.conductor);
        if let (Some(event), Some(conductor)) = (event, conductor) {
            self.effects.push_back(DecodeEffect::Emit { conductor, events: vec![(key, event)] });
        }
        self.deadlines.clear(key);
        self.waiting.retain(|_, other| *other != key);
        self.running.retain(|other| *other != key);
        self.tombstones.put(key, outcome);
        self.release_if_unused(key);
    }

    /// Releases the blocks of a sequence that ended, once they are no longer in use.
    fn release_if_unused(&mut self, key: RequestKey) {
        let unused = |sequence: &Sequence| sequence.ended && sequence.is_untouched();
        if self.sequences.get(&key).is_some_and(unused)
            && let Some(sequence) = self.sequences.remove(&key)
        {
            self.release_under_grant(sequence);
        }
    }
}
