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
mod handoff;
mod integrity;
mod kv;
mod local;
mod mask;
mod migration;
mod partial_prefill;
mod room;
mod sequence;
mod step_time;
mod tier;
mod tombstones;
mod waiting_grant;

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use baton_kv_cache::{BlockPool, KvEventBatch};
use baton_types::{
    ConductorId, DecodeEvent, ErrorKind, GrantId, LeaseRelease, LeaseRequest, Load, NodeStart, Refused, RequestKey,
};

use crate::config::{DecodeConfig, InvalidConfig};
use crate::deadlines::Deadlines;
use crate::lease::Leases;
use crate::load::{PrefixLookups, cache_load};
use crate::tier::Stores;

pub use effect::DecodeEffect;
pub(crate) use partial_prefill::slice_layers;
pub(crate) use sequence::OUTGROWN_MARGIN;

use batch::RunningStep;
use grant::{GrantRecord, Granted};
use sequence::{LastToken, Phase, Sequence};
use step_time::RecentStepTime;
use tombstones::{Outcome, Tombstones};
use waiting_grant::WaitingGrant;

/// What decides on a decode node: grants, arrivals, handoffs, the running batch and its room, the
/// prefix cache of its arena.
#[derive(Debug)]
pub struct DecodeCore {
    config: DecodeConfig,
    pool: BlockPool,
    /// Requests that have a grant, and are not handed off yet.
    granted: BTreeMap<RequestKey, Granted>,
    sequences: BTreeMap<RequestKey, Sequence>,
    /// Sequences whose outcome is told: the engine, the tier or a fetch still uses their blocks.
    ended: BTreeMap<RequestKey, Sequence>,
    grants: BTreeMap<GrantId, GrantRecord>,
    /// Grants that are asked for and that there is no room for, first come, first served.
    waiting_grants: VecDeque<WaitingGrant>,
    /// Sequences that do not run, by their age: those that are here whole, and those that wait for
    /// room.
    waiting: BTreeMap<u64, RequestKey>,
    running: Vec<RequestKey>,
    /// Partial prefills, the oldest first.
    partial_prefills: Vec<RequestKey>,
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
    next_migration_request: Option<Instant>,
    /// Whether a sequence that is here waits for blocks: then no other request gets any.
    lacks_room: bool,
    lookups: PrefixLookups,
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
            granted: BTreeMap::new(),
            sequences: BTreeMap::new(),
            ended: BTreeMap::new(),
            grants: BTreeMap::new(),
            waiting_grants: VecDeque::new(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            partial_prefills: Vec::new(),
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
            next_migration_request: None,
            lacks_room: false,
            lookups: PrefixLookups::default(),
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
        self.deadlines
            .next()
            .into_iter()
            .chain(self.leases.next_expiry())
            .chain(waiting)
            .chain(self.next_migration_request)
            .chain(self.next_release_of_last_token())
            .min()
    }

    /// What the node is doing now.
    pub fn load(&self) -> Load {
        let running = self.running.iter().filter_map(|key| self.sequences.get(key));
        let kv_tokens: usize = running.map(|sequence| sequence.tokens.len()).sum();
        let is_queued = |sequence: &&Sequence| sequence.is_prompt() || sequence.partial_prefill().is_some();
        let queued = self.sequences.values().filter(is_queued);
        let live = self.granted.len() + self.sequences.len() + self.waiting_grants.len();
        Load {
            running: self.running.len() as u32,
            waiting: live.saturating_sub(self.running.len()) as u32,
            queued_tokens: queued.map(|sequence| sequence.remaining_tokens() as u64).sum(),
            kv_tokens: kv_tokens as u64,
            preemptions: self.preemptions,
            draining: self.draining,
            accepts_migrations: self.check_accepts_migrations().is_ok(),
            ..cache_load(&self.pool, &self.lookups)
        }
    }

    /// Every [`Self::stage`].
    pub const STAGES: [&'static str; 5] = ["granted", "waiting", "preempted", "migrating", "running"];

    /// How far a request is: `granted`, `waiting`, `preempted`, `migrating` here or `running`;
    /// `None` if it is not here, or over.
    pub fn stage(&self, key: RequestKey) -> Option<&'static str> {
        if self.granted.contains_key(&key) {
            return Some("granted");
        }
        Some(match self.sequences.get(&key)?.phase {
            Phase::Receiving => "granted",
            Phase::Waiting | Phase::Loading(_) => "waiting",
            Phase::Preempted => "preempted",
            Phase::Fetching(_) => "migrating",
            Phase::Running => "running",
        })
    }

    /// Whether nothing is granted, waits, runs or is read by others.
    pub fn is_idle(&self) -> bool {
        let nothing_waits = self.waiting_grants.is_empty() && self.leases.is_empty() && self.stores.is_idle();
        self.num_requests() == 0 && self.grants.is_empty() && self.step.is_none() && nothing_waits
    }

    /// Whether a request is here, also if it has ended and its blocks are in use.
    fn is_here(&self, key: RequestKey) -> bool {
        self.granted.contains_key(&key) || self.sequences.contains_key(&key) || self.ended.contains_key(&key)
    }

    fn num_requests(&self) -> usize {
        self.granted.len() + self.sequences.len() + self.ended.len()
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

    /// Frees the prefix cache, of both tiers, and ends the leases of it. What requests hold stays
    /// until they end.
    pub fn clear_cache(&mut self) {
        while let Some(effect) = self.leases.end(&mut self.pool) {
            self.effects.push_back(DecodeEffect::Lease(effect));
        }
        self.pool.clear_cached();
        // They are held for the write alone.
        self.pool.forget_with_successors(&self.stores.under_way());
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
        let lost = self.sequences.iter().filter(|(_, sequence)| sequence.conductor == conductor);
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
        self.send_due_migration_requests(now);
    }

    /// Take requests again.
    pub fn on_undrain(&mut self, now: Instant) {
        self.draining = false;
        self.stores.go_on();
        self.send_due_migration_requests(now);
    }

    /// Deadlines that have come: grants that got no room are refused, and those whose transfers
    /// have stalled end.
    pub fn on_wakeup(&mut self, now: Instant) {
        while let Some(key) = self.deadlines.pop_due(now) {
            let Some(grant) = self.live_grant(key) else { continue };
            let arrived = grant.arrived_bytes;
            let expected = grant.expected_bytes;
            let message = format!("{arrived} of {expected} bytes came, and no more within {:?}", self.config.grant_ttl);
            self.end(key, Outcome::Failed, Some(failed(ErrorKind::Unavailable, message)));
        }
        self.end_grant_waits(now);
        self.expire_leases(now);
        self.release_last_tokens(now);
        self.plan_step(now);
    }

    /// When the first sequence that waits for a larger node has waited long enough.
    fn next_release_of_last_token(&self) -> Option<Instant> {
        let running = self.running.iter().filter_map(|key| self.sequences.get(key));
        let held = running.filter_map(|sequence| match sequence.last_token {
            LastToken::HeldUntil(until) => Some(until),
            LastToken::Ahead | LastToken::Released => None,
        });
        held.min()
    }

    fn release_last_tokens(&mut self, now: Instant) {
        for key in &self.running {
            let Some(sequence) = self.sequences.get_mut(key) else { continue };
            if matches!(sequence.last_token, LastToken::HeldUntil(until) if until <= now) {
                sequence.last_token = LastToken::Released;
            }
        }
    }

    fn expire_leases(&mut self, now: Instant) {
        while let Some(effect) = self.leases.expire(now, &mut self.pool) {
            self.effects.push_back(DecodeEffect::Lease(effect));
        }
    }

    /// A conductor lost another node, which is probably gone: nothing is kept for it to read.
    pub fn on_node_lost(&mut self, now: Instant, lost: &NodeStart) {
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
        let effect = if self.draining && !migrates {
            self.leases.refuse_draining(&request)
        } else {
            // Who takes a sequence off this node reads its blocks once, and is not one of those
            // that come without end.
            let wanted = self.wanted_blocks().filter(|_| !migrates);
            self.leases.open(now, &mut self.pool, id, request, wanted, migrates)
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
        if let Some(granted) = self.granted.remove(&key) {
            self.release_receiving(&granted.grant, granted.kv);
        } else if let Some(sequence) = self.sequences.remove(&key) {
            self.end_sequence(key, sequence, event);
        } else {
            return;
        }
        self.deadlines.clear(key);
        self.tombstones.put(key, outcome);
    }

    fn end_sequence(&mut self, key: RequestKey, sequence: Sequence, event: Option<DecodeEvent>) {
        if let Phase::Fetching(_) = sequence.phase {
            self.effects.push_back(DecodeEffect::CancelFetch { key });
        }
        let conductor = sequence.conductor;
        self.effects.extend(event.map(|event| DecodeEffect::Emit { conductor, events: vec![(key, event)] }));
        self.waiting.remove(&sequence.turn);
        self.running.retain(|other| *other != key);
        if self.is_in_use(key, &sequence) {
            self.ended.insert(key, sequence);
        } else {
            self.release_sequence(sequence);
        }
    }

    /// Whether the engine, the tier or a fetch has something to do with a sequence's blocks.
    fn is_in_use(&self, key: RequestKey, sequence: &Sequence) -> bool {
        let is_in_step = self.step.as_ref().is_some_and(|step| step.keys().any(|other| other == key));
        is_in_step || matches!(sequence.phase, Phase::Loading(_) | Phase::Fetching(_))
    }

    /// What used the blocks of a sequence that ended is done with them. `false`: it has not ended.
    fn release_ended(&mut self, key: RequestKey) -> bool {
        let Some(sequence) = self.ended.remove(&key) else { return false };
        self.release_sequence(sequence);
        true
    }
}
