//! The fake shell: carries effects out after random delays, with faults, and keeps account of what conductors are told.

mod decode_tier;
mod fetches;
mod jobs;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::{Applied, KvEventBatch, PrefixIndex};
use baton_types::{
    Attempt, BlockHash, BlockId, ConductorId, DecodeEvent, DecodeTarget, ErrorKind, FinishReason, Generation, GrantId,
    GrantReply, GrantRequest, Handover, KvDtype, KvEvent, KvLayout, KvTransfer, LeaseReply, LeaseRequest, NodeId,
    PrefillEvent, PrefillJob, PrefixCopy, Redirect, Refused, RequestId, RequestKey, TokenId,
};

use fetches::Fetching;
use moves::Other;

use super::engine::{Arena, BLOCK_TOKENS, NUM_LAYERS, VOCAB, outputs, reference};
use crate::{
    DecodeConfig, DecodeCore, DecodeEffect, ModelConfig, PrefillConfig, PrefillCore, PrefillEffect, PushId, PushReport,
    PushSpan, StepPlan, TierEffect,
};

pub const CONTEXT: u32 = 60;

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// What goes wrong, in percent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub abort: u64,
    pub grant: u64,
    pub push: u64,
    pub handover: u64,
    pub step: u64,
    pub lost_conductor: u64,
    pub late: u64,
    /// Of a lease, and of each layer that is read under it.
    pub fetch: u64,
    /// Of the decode node, which then is on its way out.
    pub drain: u64,
}

/// Something on its way.
enum Event {
    Submit(PrefillJob),
    Copy(PrefixCopy),
    AbortPrefill(RequestKey),
    AbortDecode(RequestKey),
    ConductorLost(ConductorId),
    GrantRequest(GrantRequest),
    GrantReply(RequestKey, Result<GrantReply, Refused>),
    Redirect(Redirect),
    PrefillLayer(Arc<StepPlan>, u32),
    PrefillStep(Arc<StepPlan>, bool),
    LeaseRequest(LeaseRequest),
    LeaseReply(RequestKey, Result<LeaseReply, Refused>),
    FetchLayer(RequestKey, u32),
    ReleaseLease(GrantId),
    Stored(BlockHash, BlockId, Vec<u64>),
    LoadLayer(RequestKey, u32),
    DecodeTier(decode_tier::Event),
    Land(Write),
    Arrival(GrantId, PushId, u64),
    PushDone(RequestKey, PushId, Result<PushReport, Refused>),
    Handover(Handover),
    HandoverReply(RequestKey, Result<(), Refused>),
    ReleaseGrant(RequestKey, GrantId),
    Fenced(GrantId),
    DecodeStep(Arc<StepPlan>, bool),
    DrainDecode,
    Resume(PrefillJob),
    AbortOther(RequestKey),
    OtherLayer(RequestKey, u32),
    OtherStep(Arc<StepPlan>, bool),
}

struct Write {
    key: RequestKey,
    push: PushId,
    grant: GrantId,
    spans: Vec<PushSpan>,
    /// What the source blocks hold when the batch starts, and until it is over.
    values: Vec<u64>,
    started: Instant,
}

/// What the conductor knows of one request.
#[derive(Debug)]
pub struct Story {
    pub job: PrefillJob,
    pub aborted: bool,
    pub tokens: Vec<TokenId>,
    pub finish: Option<FinishReason>,
    pub prefill_ends: u32,
    pub decode_ends: u32,
    pub handed_over: Option<KvTransfer>,
    pub accepted: bool,
    pub granted_blocks: Option<usize>,
    /// Whether the decode node computes the prompt.
    pub is_local: bool,
    /// Whether it computes the prompt's tail.
    pub has_tail: bool,
    /// The attempt that counts: the first one is at the decode node that was chosen, later ones are at the other.
    pub attempt: Attempt,
    pub last_attempt: Attempt,
    /// The attempt that the other decode node was asked for.
    pub moving: Option<Attempt>,
}

/// How often each thing happened, so that a test that tests nothing is noticed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub finished: u32,
    pub failed: u32,
    pub aborted: u32,
    pub refused_grants: u32,
    /// Refused for want of room, and asked for again.
    pub redirected: u32,
    pub failed_pushes: u32,
    pub cached_tokens: u64,
    pub held_blocks: u64,
    pub shared_chunks: u32,
    pub batched_steps: u32,
    pub quarantined: u32,
    /// By the prefill node's queue.
    pub refused_at_once: u32,
    pub snapshots: u32,
    pub fetched_tokens: u64,
    pub failed_fetches: u32,
    pub copied_tokens: u64,
    pub failed_copies: u32,
    pub stored: u32,
    pub loaded_tokens: u64,
    /// By the decode node, from its own tier.
    pub loaded_at_decode: u64,
    /// Steps that began before the prefix was here whole.
    pub overlapped_fetches: u32,
    /// Fetches that failed under a step.
    pub spoiled_steps: u32,
    /// Prefixes that the engine did not wait for any longer.
    pub late_prefixes: u32,
    /// Prompts that the decode node computed.
    pub local_prompts: u32,
    /// Prompts of which it computed the tail, and steps that took a tail through some layers before.
    pub tails: u32,
    pub followed: u32,
    pub preemptions: u64,
    /// Sequences that the other decode node took, and did not.
    pub taken: u32,
    pub not_taken: u32,
    /// Of those taken.
    pub moved_tokens: u64,
    /// That went on there.
    pub finished_there: u32,
    /// Taken over because the first decode node had failed.
    pub adopted: u32,
    /// Offered though they run.
    pub offered_running: u32,
}

pub struct World {
    pub prefill: PrefillCore,
    pub decode: DecodeCore,
    pub stories: BTreeMap<RequestKey, Story>,
    pub counts: Counts,
    /// Hash of everything that happened.
    pub trace: u64,
    rng: Random,
    faults: Faults,
    start: Instant,
    now: Instant,
    events: BTreeMap<(Instant, u64), Event>,
    sent: u64,
    prefill_arena: Arena,
    decode_arena: Arena,
    /// What the transfer engine accepts.
    open_grants: BTreeSet<GrantId>,
    open_leases: BTreeSet<GrantId>,
    fetches: BTreeMap<RequestKey, Fetching>,
    /// How often each was answered.
    copies: BTreeMap<RequestKey, u32>,
    /// The prefill node's SSD, oldest first.
    ssd: Vec<(BlockHash, Vec<u64>)>,
    loads: BTreeMap<RequestKey, Vec<Vec<u64>>>,
    /// The decode node's.
    decode_ssd: Vec<(BlockHash, Vec<u64>)>,
    cancelled: BTreeSet<RequestKey>,
    lost: BTreeSet<ConductorId>,
    /// Another decode node.
    other: Other,
    /// As a conductor keeps it, from the events of both nodes.
    index: PrefixIndex,
}

fn index_of_both() -> PrefixIndex {
    let index = PrefixIndex::new(1000);
    for node in ["p0", "d0"] {
        index.add_node(&NodeId::new(node).unwrap(), Generation(1));
    }
    index
}

pub fn model(num_blocks: u32) -> ModelConfig {
    let layout = KvLayout {
        model: 7,
        num_layers: NUM_LAYERS,
        num_kv_heads: 1,
        head_dim: 1,
        block_tokens: BLOCK_TOKENS as u32,
        dtype: KvDtype::F32,
        num_blocks,
    };
    ModelConfig { layout, context_length: CONTEXT, vocab_size: VOCAB }
}

pub fn key(n: u64) -> RequestKey {
    RequestKey { request: RequestId(n.into()), attempt: Attempt(0) }
}

pub fn target() -> DecodeTarget {
    DecodeTarget { node: NodeId::new("d0").unwrap(), generation: Generation(1), address: String::new(), tbt: None }
}

fn unavailable(message: &str) -> Refused {
    Refused { kind: ErrorKind::Unavailable, message: message.into() }
}

impl World {
    pub fn new(seed: u64, faults: Faults) -> Self {
        let mut rng = Random(seed);
        let mut prefill = PrefillConfig::new(NodeId::new("p0").unwrap(), Generation(1), model(40));
        prefill.token_budget = BLOCK_TOKENS * (1 + rng.below(6) as usize);
        prefill.max_waiting = 20;
        prefill.max_active = 12;
        prefill.max_inflight_pushes = 1 + rng.below(3) as usize;
        prefill.max_spans_per_push = 1 + rng.below(20) as usize;
        prefill.max_kv_events = 50;
        prefill.max_stores = [0, 1, 5][rng.below(3) as usize];
        prefill.cold_after = Duration::from_millis(rng.below(40));
        let mut decode = DecodeConfig::new(model(30 + rng.below(20) as u32));
        decode.max_stores = [0, 1, 5][rng.below(3) as usize];
        decode.max_running = 1 + rng.below(6) as usize;
        decode.max_waiting = 8;
        decode.growth_blocks = [0, 1, 4, usize::MAX][rng.below(4) as usize];
        decode.prompt_budget = 1 + rng.below(20) as usize;
        decode.grant_wait = Duration::from_millis(rng.below(2) * rng.below(300));
        decode.max_tombstones = 30;
        decode.max_kv_events = 50;
        let start = Instant::now();
        let other = Other::new(&mut rng);
        Self {
            other,
            prefill: PrefillCore::new(prefill).unwrap(),
            decode: DecodeCore::new(decode).unwrap(),
            stories: BTreeMap::new(),
            counts: Counts::default(),
            trace: 0,
            rng,
            faults,
            start,
            now: start,
            events: BTreeMap::new(),
            sent: 0,
            prefill_arena: Arena::default(),
            decode_arena: Arena::default(),
            open_grants: BTreeSet::new(),
            open_leases: BTreeSet::new(),
            fetches: BTreeMap::new(),
            copies: BTreeMap::new(),
            ssd: Vec::new(),
            loads: BTreeMap::new(),
            decode_ssd: Vec::new(),
            cancelled: BTreeSet::new(),
            lost: BTreeSet::new(),
            index: index_of_both(),
        }
    }

    fn send_after(&mut self, delay: Duration, event: Event) {
        self.sent += 1;
        self.events.insert((self.now + delay, self.sent), event);
    }

    /// Sends with a short random delay, or a long one where answers come late.
    fn send(&mut self, event: Event) {
        let late = self.rng.chance(self.faults.late);
        let micros = if late { 20_000_000 + self.rng.below(20_000_000) } else { self.rng.below(3000) };
        self.send_after(Duration::from_micros(micros), event);
    }

    /// Random jobs over a few shared prefixes, within the first milliseconds.
    pub fn submit_jobs(&mut self, jobs: u64) {
        for n in 0..jobs {
            let job = self.job(n);
            let at = Duration::from_micros(self.rng.below(100_000));
            if self.rng.chance(self.faults.abort) {
                let after = at + Duration::from_micros(self.rng.below(60_000));
                self.send_after(after, Event::AbortPrefill(job.key));
                let skew = Duration::from_micros(self.rng.below(5000));
                self.send_after(after + skew, Event::AbortDecode(job.key));
            }
            self.order_copy(&job);
            self.send_after(at, Event::Submit(job));
        }
        if self.rng.chance(self.faults.drain) {
            let at = Duration::from_micros(self.rng.below(200_000));
            self.send_after(at, Event::DrainDecode);
        }
        if self.rng.chance(self.faults.lost_conductor) {
            let at = Duration::from_micros(self.rng.below(100_000));
            self.send_after(at, Event::ConductorLost(ConductorId(1)));
        }
    }

    /// Runs until nothing is on its way and no deadline is left.
    pub fn run(&mut self) {
        for _ in 0..1_000_000 {
            let event = self.events.keys().next().map(|(at, _)| *at);
            let wakeup = [self.prefill.next_wakeup(), self.decode.next_wakeup(), self.other.core.next_wakeup()];
            let wakeup = wakeup.into_iter().flatten().min();
            match (event, wakeup) {
                (None, None) => return,
                (Some(at), wakeup) if wakeup.is_none_or(|wakeup| at <= wakeup) => {
                    let ((at, _), event) = self.events.pop_first().unwrap();
                    self.now = at;
                    self.deliver(event);
                }
                (_, Some(wakeup)) => {
                    self.now = wakeup;
                    self.prefill.on_wakeup(wakeup);
                    self.decode.on_wakeup(wakeup);
                    self.other.core.on_wakeup(wakeup);
                }
                (Some(_), None) => unreachable!("taken above"),
            }
            self.carry_out();
            // Seldom enough for the logs to run over now and then.
            if self.rng.chance(5) {
                self.index_events(10);
            }
            self.prefill.check_integrity().unwrap();
            self.decode.check_integrity().unwrap();
            self.other.core.check_integrity().unwrap();
        }
        panic!("the world does not come to rest");
    }

    fn deliver(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Submit(job) => self.on_submit(job),
            Event::Copy(order) => self.on_copy(order),
            Event::AbortPrefill(key) => {
                // Not here where its conductor was lost before it came.
                if let Some(story) = self.stories.get_mut(&key) {
                    story.aborted = true;
                }
                self.prefill.on_abort(now, key);
            }
            Event::AbortDecode(key) => {
                // Not where it is told to forget what went on elsewhere.
                if self.stories.get(&key).is_some_and(|story| story.aborted) {
                    self.give_move_up(key);
                }
                self.decode.on_abort(now, key);
            }
            Event::DrainDecode => self.decode.on_drain(now),
            Event::Resume(job) => self.other.core.on_submit(now, job),
            Event::AbortOther(key) => self.other.core.on_abort(now, key),
            Event::OtherLayer(key, layer) => self.on_other_layer(key, layer),
            Event::OtherStep(plan, ok) => self.on_other_step(&plan, ok),
            Event::ConductorLost(conductor) => {
                self.lost.insert(conductor);
                self.prefill.on_conductor_lost(now, conductor);
                self.decode.on_conductor_lost(now, conductor);
                self.other.core.on_conductor_lost(now, conductor);
            }
            Event::GrantRequest(request) => self.decode.on_grant_request(now, request),
            Event::GrantReply(key, reply) => self.prefill.on_grant_reply(now, key, reply),
            Event::Redirect(redirect) => self.prefill.on_redirect(redirect),
            Event::PrefillLayer(plan, layer) => self.on_prefill_layer(plan, layer),
            Event::PrefillStep(plan, ok) => self.on_prefill_step(plan, ok),
            Event::LeaseRequest(request) => self.decode.on_lease_request(now, request),
            Event::LeaseReply(key, reply) if key.attempt > Attempt(0) => self.on_other_lease(key, reply),
            Event::LeaseReply(key, reply) => self.on_lease_reply(key, reply),
            Event::FetchLayer(key, layer) => self.on_fetch_layer(key, layer),
            Event::Stored(hash, block, values) => self.on_ssd_written(hash, block, values),
            Event::DecodeTier(event) => self.on_decode_tier(event),
            Event::LoadLayer(key, layer) => self.on_load_layer(key, layer),
            Event::ReleaseLease(lease) => self.decode.on_release_lease(now, lease),
            Event::Land(write) => self.on_land(write),
            Event::Arrival(grant, push, bytes) => self.decode.on_arrival(now, grant, push, bytes),
            Event::PushDone(key, push, result) => self.prefill.on_push_done(now, key, push, result),
            Event::Handover(handover) => self.decode.on_handover(now, handover),
            Event::HandoverReply(key, reply) => self.prefill.on_handover_reply(now, key, reply),
            Event::ReleaseGrant(key, grant) => self.decode.on_release_grant(now, key, grant),
            Event::Fenced(grant) => {
                self.open_grants.remove(&grant);
                self.decode.on_grant_fenced(now, grant);
            }
            Event::DecodeStep(plan, ok) => {
                for layer in 0..NUM_LAYERS {
                    self.decode_arena.compute_layer(&plan, layer);
                }
                let result = if ok { Ok(outputs(&plan)) } else { Err(unavailable("step fault")) };
                self.decode.on_step_done(now, plan.id, result);
            }
        }
    }

    fn on_submit(&mut self, job: PrefillJob) {
        if self.lost.contains(&job.conductor) {
            return;
        }
        let story = Story {
            job: job.clone(),
            aborted: false,
            tokens: Vec::new(),
            finish: None,
            prefill_ends: 0,
            decode_ends: 0,
            handed_over: None,
            accepted: false,
            granted_blocks: None,
            is_local: self.rng.chance(15),
            has_tail: false,
            attempt: Attempt(0),
            last_attempt: Attempt(0),
            moving: None,
        };
        let is_local = story.is_local;
        self.stories.insert(job.key, story);
        match is_local {
            true => self.decode.on_submit(self.now, job),
            false => self.prefill.on_submit(self.now, job),
        }
    }

    /// The bytes of a push land, if the grant is open and nobody cancelled it.
    fn on_land(&mut self, write: Write) {
        let bytes = write.spans.len() as u64 * 4 * 2 * BLOCK_TOKENS as u64;
        let fault = self.rng.chance(self.faults.push);
        // A write that fails or is cancelled may have landed in part.
        let cancelled = self.cancelled.contains(&write.key);
        let open = self.open_grants.contains(&write.grant);
        let landed = match (open, fault || cancelled) {
            (false, _) => 0,
            (true, true) => self.rng.below(write.spans.len() as u64 + 1) as usize,
            (true, false) => write.spans.len(),
        };
        for (index, (span, value)) in write.spans.iter().zip(&write.values).enumerate() {
            let found = self.prefill_arena.read(span.layer, span.source);
            assert_eq!(found, *value, "a source block was reused while {:?} was under way", write.push);
            if index < landed {
                self.decode_arena.write(span.layer, span.destination, *value);
            }
        }
        if !open || fault || cancelled {
            self.counts.failed_pushes += 1;
            return self.send(Event::PushDone(write.key, write.push, Err(unavailable("push fault"))));
        }
        self.send_after(Duration::ZERO, Event::Arrival(write.grant, write.push, bytes));
        if self.rng.chance(self.faults.late) {
            self.send(Event::Arrival(write.grant, write.push, bytes));
        }
        let report = PushReport { bytes, transport: "fake".into(), started: write.started, completed: self.now };
        self.send(Event::PushDone(write.key, write.push, Ok(report)));
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.prefill.poll_effect() {
            self.record(&effect);
            self.on_prefill_effect(effect);
        }
        while let Some(effect) = self.decode.poll_effect() {
            self.record(&effect);
            self.on_decode_effect(effect);
        }
        while let Some(effect) = self.other.core.poll_effect() {
            self.record(&effect);
            self.on_other_effect(effect);
        }
    }

    fn record(&mut self, effect: &impl std::fmt::Debug) {
        let at = (self.now - self.start).as_nanos();
        let text = format!("{at} {effect:?}");
        self.trace = super::engine::hash([self.trace].into_iter().chain(text.bytes().map(u64::from)));
    }

    fn on_prefill_effect(&mut self, effect: PrefillEffect) {
        match effect {
            PrefillEffect::RequestGrant { request, delay, .. } => match self.rng.chance(self.faults.grant) {
                true => self.send(Event::GrantReply(request.key, Err(unavailable("grant fault")))),
                false => {
                    let way = Duration::from_micros(self.rng.below(3000));
                    self.send_after(delay + way, Event::GrantRequest(request));
                }
            },
            PrefillEffect::RunStep(plan) => self.run_prefill(plan),
            PrefillEffect::Push { key, push, grant, spans, .. } => {
                let values = spans.iter().map(|span| self.prefill_arena.read(span.layer, span.source)).collect();
                let write = Write { key, push, grant, spans, values, started: self.now };
                self.send(Event::Land(write));
            }
            PrefillEffect::CancelPushes { key } => {
                self.cancelled.insert(key);
            }
            PrefillEffect::Fetch { lease, destinations, .. } => self.on_fetch_effect(lease, destinations),
            PrefillEffect::CancelFetch { key } => {
                if let Some(fetch) = self.fetches.get_mut(&key) {
                    fetch.cancelled = true;
                }
            }
            PrefillEffect::Tier(TierEffect::Store { hash, block, .. }) => {
                let values = (0..NUM_LAYERS).map(|layer| self.prefill_arena.read(layer, block)).collect();
                self.send(Event::Stored(hash, block, values));
            }
            PrefillEffect::Tier(TierEffect::Load { key, hashes, destinations }) => {
                self.on_load(key, &hashes, destinations);
            }
            PrefillEffect::Tier(TierEffect::Clear) => self.ssd.clear(),
            PrefillEffect::Lease(effect) => panic!("nobody reads from the prefill node, but {effect:?}"),
            PrefillEffect::Handover { handover, .. } => {
                if self.rng.chance(self.faults.handover) {
                    self.send(Event::Handover(handover.clone()));
                }
                match self.rng.chance(self.faults.handover) {
                    true => self.send(Event::HandoverReply(handover.key, Err(unavailable("hand-over fault")))),
                    false => self.send(Event::Handover(handover)),
                }
            }
            PrefillEffect::ReleaseGrant { key, grant, .. } => {
                // A release that is lost: the grant expires.
                if !self.rng.chance(self.faults.grant) {
                    self.send(Event::ReleaseGrant(key, grant));
                }
            }
            PrefillEffect::Emit { key, event, .. } => self.on_prefill_event(key, event),
        }
    }

    fn run_prefill(&mut self, plan: StepPlan) {
        self.counts.shared_chunks += u32::from(plan.sequences.len() > 1);
        self.counts.overlapped_fetches +=
            plan.sequences.iter().filter(|sequence| sequence.awaits_prefix).count() as u32;
        let took = Duration::from_micros(1 + self.rng.below(2000));
        self.send_after(took, Event::PrefillLayer(Arc::new(plan), 0));
    }

    fn on_decode_effect(&mut self, effect: DecodeEffect) {
        match effect {
            DecodeEffect::OpenGrant { key, reply, .. } => {
                self.counts.held_blocks += u64::from(reply.held_blocks);
                let story = self.stories.get_mut(&key).unwrap();
                story.granted_blocks = Some(reply.blocks.len());
                story.has_tail = reply.tail_tokens > 0;
                if self.rng.chance(self.faults.grant) {
                    self.decode.on_release_grant(self.now, key, reply.grant);
                    return self.send(Event::GrantReply(key, Err(unavailable("open fault"))));
                }
                self.open_grants.insert(reply.grant);
                self.send(Event::GrantReply(key, Ok(reply)));
            }
            DecodeEffect::RefuseGrant { key, refused } => {
                self.counts.refused_grants += 1;
                self.send(Event::GrantReply(key, Err(refused)));
            }
            DecodeEffect::RevokeGrant { grant } => {
                self.counts.quarantined += 1;
                self.send(Event::Fenced(grant));
            }
            DecodeEffect::Lease(effect) => self.on_lease_effect(effect),
            DecodeEffect::Tier(effect) => self.on_decode_tier_effect(effect),
            DecodeEffect::Offer { key, output_tokens, .. } => self.on_offer(key, output_tokens),
            DecodeEffect::Fetch { .. } | DecodeEffect::CancelFetch { .. } | DecodeEffect::AnswerMove { .. } => {
                panic!("nobody moves to the first decode node, but {effect:?}")
            }
            DecodeEffect::HandoverReply { key, result } => {
                self.stories.get_mut(&key).unwrap().accepted |= result.is_ok();
                let lost = self.rng.chance(self.faults.handover);
                let reply = if lost { Err(unavailable("reply fault")) } else { result };
                self.send(Event::HandoverReply(key, reply));
            }
            DecodeEffect::RunStep(plan) => {
                self.counts.batched_steps += u32::from(plan.sequences.len() > 1);
                if let Some(slice) = &plan.slice {
                    self.counts.tails += u32::from(slice.layers.end == NUM_LAYERS);
                    self.counts.followed += u32::from(slice.layers.end < NUM_LAYERS);
                }
                let ok = !self.rng.chance(self.faults.step);
                let took = Duration::from_micros(1 + self.rng.below(3000));
                self.send_after(took, Event::DecodeStep(Arc::new(plan), ok));
            }
            DecodeEffect::EmitPrefill { key, event, .. } => {
                self.counts.local_prompts += u32::from(matches!(event, PrefillEvent::FirstToken { .. }));
                let goes_on = matches!(event, PrefillEvent::HandedOver(_));
                self.stories.get_mut(&key).unwrap().accepted |= goes_on;
                self.on_prefill_event(key, event);
            }
            DecodeEffect::Emit { events, .. } => {
                for (key, event) in events {
                    self.on_decode_event(key, event);
                }
            }
        }
    }

    fn on_prefill_event(&mut self, key: RequestKey, event: PrefillEvent) {
        if let PrefillEvent::Copied(report) = &event {
            return self.on_copied(key, report);
        }
        let story = self.stories.get_mut(&key).unwrap();
        assert!(!self.lost.contains(&story.job.conductor), "a lost conductor is told {event:?}");
        match event {
            PrefillEvent::Started { cached_tokens, .. } => self.counts.cached_tokens += u64::from(cached_tokens),
            PrefillEvent::Fetched(report) => self.counts.fetched_tokens += u64::from(report.tokens),
            PrefillEvent::FirstToken { token, finish, prompt_logprobs, .. } => {
                assert!(story.tokens.is_empty() && story.prefill_ends == 0);
                let wanted = if story.job.sampling.prompt_logprobs.is_some() { story.job.tokens.len() } else { 0 };
                assert_eq!(prompt_logprobs.len(), wanted);
                story.tokens.push(token);
                story.finish = finish;
                story.prefill_ends += u32::from(finish.is_some());
            }
            PrefillEvent::HandedOver(transfer) => {
                story.prefill_ends += 1;
                story.handed_over = Some(transfer);
            }
            PrefillEvent::Failed(refused) | PrefillEvent::DecodeFailed(refused) => {
                story.prefill_ends += 1;
                self.counts.refused_at_once += u32::from(refused.message.contains("p0"));
            }
            PrefillEvent::GrantRefused(_) => {
                self.counts.redirected += 1;
                self.send(Event::Redirect(Redirect { key, decode: target() }));
            }
            PrefillEvent::Copied(_) => unreachable!("told above"),
        }
    }

    fn on_decode_event(&mut self, key: RequestKey, event: DecodeEvent) {
        let story = self.stories.get_mut(&key).unwrap();
        assert_eq!(story.decode_ends, 0, "an event after the end: {event:?}");
        // What comes from where it was before it moved is not believed.
        if story.attempt != key.attempt {
            return;
        }
        match event {
            DecodeEvent::Token { index, token, finish, queue, .. } => {
                let waited = index == 1 && !story.is_local && !story.has_tail;
                assert_eq!((index as usize, queue.is_some()), (story.tokens.len(), waited));
                story.tokens.push(token);
                story.finish = finish;
                story.decode_ends += u32::from(finish.is_some());
                if finish.is_some() {
                    self.give_move_up(key);
                }
            }
            DecodeEvent::Failed(_) => {
                story.decode_ends += 1;
                self.adopt(key);
            }
        }
    }

    fn index_events(&mut self, max: usize) {
        let batches = [("p0", self.prefill.drain_kv_events(max)), ("d0", self.decode.drain_kv_events(max))];
        for (node, batch) in batches {
            let Some(KvEventBatch { sequence, snapshot, events }) = batch else { continue };
            self.counts.snapshots += u32::from(snapshot);
            let node = NodeId::new(node).unwrap();
            let applied = match snapshot {
                true => self.index.snapshot(&node, Generation(1), sequence, &events),
                false => self.index.apply(&node, Generation(1), sequence, &events),
            };
            assert_eq!(applied, Applied::Applied);
        }
    }

    /// The conductor's index says exactly what the nodes hold.
    fn check_index(&mut self) {
        for _ in 0..100 {
            self.index_events(10);
        }
        for (node, batch) in [("p0", self.prefill.kv_snapshot()), ("d0", self.decode.kv_snapshot())] {
            let node = NodeId::new(node).unwrap();
            assert_eq!(self.index.entries(&node), batch.events.len());
            for event in batch.events {
                let KvEvent::Stored { hash, .. } = event else { panic!("{event:?} in a snapshot") };
                assert!(self.index.longest_prefix(&[hash]).contains(&(node.clone(), 1)));
            }
        }
    }

    /// Everything that must hold once the world is at rest.
    pub fn check(&mut self) {
        self.check_index();
        assert!(self.copies.values().all(|answers| *answers == 1), "{:?}", self.copies);
        self.counts.preemptions = self.decode.load().preemptions;
        assert!(self.decode.is_idle(), "{:?}", self.decode);
        for (key, story) in &self.stories {
            check_story(story, self.lost.contains(&story.job.conductor), key);
            self.other.check_story(story, self.lost.contains(&story.job.conductor));
            match (story.finish, story.aborted) {
                (Some(_), _) => self.counts.finished += 1,
                (None, true) => self.counts.aborted += 1,
                (None, false) => self.counts.failed += 1,
            }
        }
        assert!(self.prefill.is_idle() && self.decode.is_idle() && self.other.core.is_idle());
        for load in [self.prefill.load(self.now), self.decode.load(), self.other.core.load()] {
            assert_eq!((load.blocks_used, load.blocks_reserved, load.running, load.waiting), (0, 0, 0, 0));
            assert_eq!(load.queued_tokens, 0);
        }
        self.prefill.check_integrity().unwrap();
        self.decode.check_integrity().unwrap();
    }
}

fn check_story(story: &Story, lost: bool, key: &RequestKey) {
    let (expected, finish) = reference(&story.job.tokens, &story.job.sampling, CONTEXT as usize);
    assert!(expected.starts_with(&story.tokens), "{key:?}: {:?} is no prefix of {expected:?}", story.tokens);
    if story.finish.is_some() {
        assert_eq!((story.tokens.len(), story.finish), (expected.len(), Some(finish)), "{key:?}");
    }
    let silent = story.aborted || lost;
    assert!(story.prefill_ends == 1 || silent && story.prefill_ends == 0, "{key:?} at prefill: {story:?}");
    let taken_over = u32::from(story.accepted);
    // Where it went on elsewhere it was aborted here, or ended in the same moment.
    let silent = silent || story.attempt > Attempt(0);
    assert!(story.decode_ends == taken_over || silent && story.decode_ends == 0, "{key:?} at decode: {story:?}");
    if let Some(transfer) = &story.handed_over {
        // None were granted where the prompt was computed at the decode node.
        let blocks = story.granted_blocks.unwrap_or(0) as u64;
        let bytes = blocks * u64::from(NUM_LAYERS) * 4 * 2 * BLOCK_TOKENS as u64;
        assert_eq!(transfer.bytes, bytes, "{key:?}");
        assert!(transfer.bytes_at_compute_end <= bytes);
        assert_eq!(transfer.transport.is_empty(), bytes == 0);
    }
}
