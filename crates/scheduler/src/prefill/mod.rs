//! The loop of a prefill node.
//!
//! ```text
//!   on_submit ─▶ queue ─▶ blocks, prefix, grant asked ─▶ chunks ─▶ first token ─▶ handoff ─▶ last push acknowledged ─▶ blocks to the cache
//!                                                          └─▶ pushes, layer by layer, as soon as there is a grant ─┘
//! ```
//!
//! A prefix that another node holds comes in before and beside the chunks: `fetch.rs`.
//!
//! **Invariant**: an accepted job ends in exactly one of a first token with a finish reason,
//! [`PrefillEvent::HandedOff`], [`PrefillEvent::Failed`], [`PrefillEvent::DecodeFailed`], or
//! silence after an abort. Its blocks stay until its step is over, its fetch, and each of its
//! batches has answered.

mod chunk;
mod effect;
mod fetch;
mod integrity;
mod mask;
mod request;
mod tier;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::{BlockHasher, BlockPool, KvEventBatch};
use baton_types::{BlockHash, ConductorId, ErrorKind, Load, PrefillEvent, PrefillJob, Refused, RequestKey};

use crate::backoff::Backoff;
use crate::config::{InvalidConfig, PrefillConfig};
use crate::deadlines::Deadlines;
use crate::lease::Leases;
use crate::load::{PrefixLookups, cache_load};
use crate::tier::Stores;

pub use effect::{FetchedBytes, PrefillEffect, PushId, PushReport, PushSpan};

pub(crate) use chunk::SPLIT_CHUNKS;

use chunk::{RunningStep, reusable_blocks};
use fetch::{Source, nobody_avoided};
use request::{Active, GrantState, HandoffState, Queued, Transfer};

/// What decides on a prefill node: queue, chunks, grants, layer-wise pushes, handoffs, the prefix
/// cache of its arena.
#[derive(Debug)]
pub struct PrefillCore {
    config: PrefillConfig,
    pool: BlockPool,
    queued: BTreeMap<RequestKey, Queued>,
    active: BTreeMap<RequestKey, Active>,
    /// Active requests whose prompt is not computed yet.
    computing: Vec<RequestKey>,
    /// Requests whose last chunk waits for the mask of their first token.
    awaiting_mask: BTreeSet<RequestKey>,
    step: Option<RunningStep>,
    /// When the last layer of the step in flight was computed, once it is.
    layers_ended: Option<Instant>,
    /// Requests that ended before their grant request was answered, by the answer's key. Bounded by
    /// the calls that are out.
    late_grants: BTreeMap<RequestKey, baton_types::DecodeTarget>,
    leases: Leases,
    stores: Stores,
    avoided: Backoff<Source>,
    deadlines: Deadlines,
    effects: VecDeque<PrefillEffect>,
    next_step: u64,
    next_lease: u64,
    submitted: u64,
    lookups: PrefixLookups,
    draining: bool,
}

fn failed(kind: ErrorKind, message: String) -> PrefillEvent {
    PrefillEvent::Failed(Refused { kind, message })
}

fn decode_failed(kind: ErrorKind, message: String) -> PrefillEvent {
    PrefillEvent::DecodeFailed(Refused { kind, message })
}

impl PrefillCore {
    /// A core with an empty arena.
    pub fn new(config: PrefillConfig) -> Result<Self, InvalidConfig> {
        config.validate()?;
        let pool = BlockPool::with_eviction(config.model.layout.num_blocks, config.max_kv_events, config.eviction);
        let leases = Leases::new(config.max_leases, config.lease_ttl);
        let stores = Stores::new(config.max_stores);
        Ok(Self {
            config,
            pool,
            queued: BTreeMap::new(),
            active: BTreeMap::new(),
            computing: Vec::new(),
            awaiting_mask: BTreeSet::new(),
            step: None,
            layers_ended: None,
            late_grants: BTreeMap::new(),
            leases,
            stores,
            avoided: nobody_avoided(),
            deadlines: Deadlines::default(),
            effects: VecDeque::new(),
            next_step: 0,
            next_lease: 0,
            submitted: 0,
            lookups: PrefixLookups::default(),
            draining: false,
        })
    }

    /// What to do next; to be called until `None` after each event.
    pub fn poll_effect(&mut self) -> Option<PrefillEffect> {
        self.effects.pop_front()
    }

    /// When [`Self::on_wakeup`] is due.
    pub fn next_wakeup(&self) -> Option<Instant> {
        self.deadlines.next().into_iter().chain(self.leases.next_expiry()).min()
    }

    /// What the node is doing now.
    pub fn load(&self, now: Instant) -> Load {
        let num_layers = self.config.model.layout.num_layers;
        let step = self.step.as_ref();
        let done = step.map_or(0, |step| step.tokens_done(num_layers));
        let live = self.active.values().filter(|request| !request.ended);
        let waiting_tokens: usize =
            self.queued.values().map(|request| request.job.tokens.len() - request.cached_tokens).sum();
        let running_tokens: usize = live.clone().map(Active::remaining_tokens).sum();
        Load {
            running: live.count() as u32,
            waiting: self.queued.len() as u32,
            queued_tokens: ((waiting_tokens + running_tokens) as u64).saturating_sub(done),
            step: step.and_then(|step| step.progress(now, num_layers)),
            draining: self.draining,
            ..cache_load(&self.pool, &self.lookups)
        }
    }

    /// Every [`Self::stage`].
    pub const STAGES: [&'static str; 5] = ["queued", "computing", "granted", "pushing", "handing_off"];

    /// How far a request is: `queued`, `computing`, `granted`, `pushing` or `handing_off`; `None`
    /// if it is not here, or over.
    pub fn stage(&self, key: RequestKey) -> Option<&'static str> {
        if self.queued.contains_key(&key) {
            return Some("queued");
        }
        let request = self.active.get(&key).filter(|request| !request.ended)?;
        Some(request.transfer.as_ref().map_or("computing", Transfer::stage))
    }

    /// Whether the request is here, or its blocks still are.
    pub fn knows(&self, key: RequestKey) -> bool {
        self.queued.contains_key(&key) || self.active.contains_key(&key)
    }

    /// Whether nothing is queued, computed, pushed, handed off or read by others.
    pub fn is_idle(&self) -> bool {
        let nothing_migrates = self.leases.is_empty() && self.stores.is_idle();
        self.queued.is_empty() && self.active.is_empty() && self.step.is_none() && nothing_migrates
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
            self.effects.push_back(PrefillEffect::Lease(effect));
        }
        self.pool.clear_cached();
        // They are held for the write alone.
        self.pool.forget_with_successors(&self.stores.under_way());
        self.effects.extend(self.stores.clear().map(PrefillEffect::Tier));
    }

    /// A conductor sends a job. A job that is here already is ignored; one that cannot be taken
    /// fails at once.
    pub fn on_submit(&mut self, now: Instant, job: PrefillJob) {
        if self.queued.contains_key(&job.key) || self.active.contains_key(&job.key) {
            return;
        }
        if let Err(Refused { kind, message }) = self.check_job(&job) {
            self.emit(job.conductor, job.key, failed(kind, message));
            return;
        }
        let hasher = BlockHasher::new(self.config.model.layout.fingerprint(), &job.salt);
        let hashes: Arc<[_]> = hasher.chain(&job.tokens, self.config.model.layout.block_tokens).into();
        let cached_tokens = self.cached_tokens(&job, &hashes);
        let key = job.key;
        let turn = self.submitted;
        let timeout = job.terms.timeout;
        self.submitted += 1;
        if job.sampling.grammar.is_some() {
            self.awaiting_mask.insert(key);
        }
        self.queued.insert(key, Queued { job, hashes, submitted: now, turn, cached_tokens });
        self.deadlines.set(key, now + timeout);
        self.plan_step(now);
    }

    /// The owner of a request gave up. Unknown ones are ignored.
    pub fn on_abort(&mut self, now: Instant, key: RequestKey) {
        self.end(key, None);
        self.plan_step(now);
    }

    /// A conductor is gone: its requests are aborted.
    pub fn on_conductor_lost(&mut self, now: Instant, conductor: ConductorId) {
        let queued = self.queued.values().map(|request| &request.job);
        let jobs = queued.chain(self.active.values().map(|request| &request.job));
        let lost: Vec<_> = jobs.filter(|job| job.conductor == conductor).map(|job| job.key).collect();
        for key in lost {
            self.end(key, None);
        }
        self.plan_step(now);
    }

    /// Finish what is here, take nothing new.
    pub fn on_drain(&mut self, _now: Instant) {
        self.draining = true;
        self.stores.stop();
    }

    /// Take requests again.
    pub fn on_undrain(&mut self, _now: Instant) {
        self.draining = false;
        self.stores.go_on();
    }

    /// Deadlines that have come: requests that waited too long fail.
    pub fn on_wakeup(&mut self, now: Instant) {
        while let Some(key) = self.deadlines.pop_due(now) {
            let event = self.timeout_event(key);
            self.end(key, Some(event));
        }
        self.expire_leases(now);
        self.plan_step(now);
    }

    /// Tokens of a prompt that are cached here now, of those that may be.
    fn cached_tokens(&self, job: &PrefillJob, hashes: &[BlockHash]) -> usize {
        let block_tokens = self.config.model.block_tokens();
        self.pool.match_prefix(&hashes[..reusable_blocks(job, block_tokens)]).len() * block_tokens
    }

    fn check_job(&self, job: &PrefillJob) -> Result<(), Refused> {
        let refuse = |kind, message| Err(Refused { kind, message });
        let model = &self.config.model;
        let tokens = job.tokens.len();
        if self.draining {
            return refuse(ErrorKind::Unavailable, format!("node {} is draining", self.config.node));
        }
        if let Err(error) = job.sampling.validate() {
            return refuse(ErrorKind::Invalid, error.to_string());
        }
        if tokens == 0 {
            return refuse(ErrorKind::Invalid, "the prompt is empty".into());
        }
        let output = job.output_tokens;
        let max_tokens = job.sampling.max_tokens;
        if job.is_migration || output as usize >= tokens || output >= max_tokens {
            let message = format!("{output} of {tokens} tokens are output, of {max_tokens}: no prompt to compute");
            return refuse(ErrorKind::Invalid, message);
        }
        if tokens >= model.context_length as usize {
            let context = model.context_length;
            let message = format!("the prompt has {tokens} tokens, the context holds {context}, the output included");
            return refuse(ErrorKind::Invalid, message);
        }
        if let Some(token) = job.tokens.iter().find(|token| **token >= model.vocab_size) {
            return refuse(
                ErrorKind::Invalid,
                format!("token {token} is not in the vocabulary of {}", model.vocab_size),
            );
        }
        let blocks = model.layout.blocks_for(tokens);
        let total = model.layout.num_blocks;
        if blocks > total as usize {
            let message = format!("the prompt has {tokens} tokens in {blocks} blocks, the node has {total} blocks");
            return refuse(ErrorKind::Invalid, message);
        }
        if job.decode.is_none() && job.wants_decode() {
            let message = format!("max_tokens is {max_tokens}, but no decode node was named");
            return refuse(ErrorKind::Invalid, message);
        }
        if self.queued.len() >= self.config.max_waiting {
            let message = format!("{} requests wait at node {}, as many as may", self.queued.len(), self.config.node);
            return refuse(ErrorKind::Overloaded, message);
        }
        Ok(())
    }

    fn timeout_event(&self, key: RequestKey) -> PrefillEvent {
        let config = &self.config;
        let Some(request) = self.active.get(&key) else {
            let timeout = self.queued.get(&key).map_or(Duration::ZERO, |queued| queued.job.terms.timeout);
            let message = format!("no room at node {} within {timeout:?}", config.node);
            return failed(ErrorKind::Overloaded, message);
        };
        let target = request.transfer.as_ref().map_or("none", |transfer| transfer.target.node.as_str());
        let handed_off = request.transfer.as_ref().is_some_and(|transfer| transfer.handoff == HandoffState::Sent);
        let message = if handed_off {
            format!("decode node {target} did not answer the handoff within {:?}", config.handoff_timeout)
        } else {
            format!("decode node {target} did not grant room within {:?}", config.grant_timeout)
        };
        decode_failed(ErrorKind::Unavailable, message)
    }

    fn emit(&mut self, conductor: ConductorId, key: RequestKey, event: PrefillEvent) {
        self.effects.push_back(PrefillEffect::Emit { conductor, key, event });
    }

    /// Ends a request, wherever it is, with the event that says so, or silently. What ended
    /// already, or is not here, stays as it is.
    fn end(&mut self, key: RequestKey, event: Option<PrefillEvent>) {
        let conductor = match self.remove_queued(key) {
            Some(queued) => queued.job.conductor,
            None => {
                let Some(request) = self.active.get_mut(&key).filter(|request| !request.ended) else { return };
                request.ended = true;
                request.job.conductor
            }
        };
        self.deadlines.clear(key);
        self.awaiting_mask.remove(&key);
        self.computing.retain(|other| *other != key);
        if let Some(event) = event {
            self.emit(conductor, key, event);
        }
        self.drop_transfer(key);
        if self.active.get(&key).is_some_and(|request| request.fetch.is_some()) {
            self.effects.push_back(PrefillEffect::CancelFetch { key });
        }
        self.release_if_unused(key);
    }

    fn remove_queued(&mut self, key: RequestKey) -> Option<Queued> {
        self.queued.remove(&key)
    }

    /// Stops the batches of a request that ended, and gives its grant back if the decode node did
    /// not accept the handoff.
    fn drop_transfer(&mut self, key: RequestKey) {
        let Some(transfer) = self.active.get_mut(&key).and_then(|request| request.transfer.as_mut()) else { return };
        if !transfer.inflight.is_empty() {
            self.effects.push_back(PrefillEffect::CancelPushes { key });
        }
        let complete = transfer.is_complete(&self.config.model);
        let target = transfer.target.clone();
        match std::mem::replace(&mut transfer.grant, GrantState::Gone) {
            GrantState::Requested => {
                self.late_grants.insert(key, target);
            }
            GrantState::Granted(reply) if !complete => {
                self.effects.push_back(PrefillEffect::ReleaseGrant { key, target, grant: reply.grant });
            }
            GrantState::Granted(_) | GrantState::Refused | GrantState::Gone => {}
        }
    }

    /// Releases the blocks of a request that ended, once neither the engine nor the transfer engine
    /// touches them.
    fn release_if_unused(&mut self, key: RequestKey) {
        let unused = |request: &Active| {
            request.ended && !request.is_in_step() && !request.is_pushing() && request.fetch.is_none()
        };
        if self.active.get(&key).is_some_and(unused)
            && let Some(request) = self.active.remove(&key)
        {
            self.pool.release(&request.blocks);
        }
    }
}
