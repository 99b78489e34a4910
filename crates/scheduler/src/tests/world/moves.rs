//! A second decode node, which only takes sequences that the first one offers, and the conductor that asks it to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use baton_types::{
    Attempt, BlockId, DecodeEvent, FetchReport, FetchSource, Generation, GrantId, LeaseReply, LeaseRequest, NodeId,
    PrefillJob, Refused, RequestKey,
};

use super::super::engine::{Arena, NUM_LAYERS, outputs};
use super::fetches::Fetching;
use super::{Event, Random, Story, World, model, target, unavailable};
use crate::{DecodeConfig, DecodeCore, DecodeEffect, FetchedBytes, StepPlan};

/// The node.
pub(super) struct Other {
    pub core: DecodeCore,
    arena: Arena,
    fetches: BTreeMap<RequestKey, Fetching>,
    /// Attempts that it took, and how often each ended.
    ends: BTreeMap<RequestKey, u32>,
    /// Attempts that it was told to forget.
    aborted: BTreeSet<RequestKey>,
}

impl Other {
    pub fn new(rng: &mut Random) -> Self {
        let mut config = DecodeConfig::new(model(20 + rng.below(20) as u32));
        config.max_running = 1 + rng.below(6) as usize;
        config.growth_blocks = rng.below(3) as usize;
        config.prompt_budget = 1 + rng.below(20) as usize;
        let core = DecodeCore::new(config).unwrap();
        let (fetches, ends, aborted) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { core, arena: Arena::default(), fetches, ends, aborted }
    }

    /// What it took of a request ended once, or was aborted.
    pub fn check_story(&self, story: &Story, lost: bool) {
        let of = |(key, _): &(&RequestKey, &u32)| key.request == story.job.key.request;
        for (key, ends) in self.ends.iter().filter(of) {
            let silent = lost || self.aborted.contains(key);
            assert!(*ends == 1 || silent && *ends == 0, "{key:?} ended {ends} times: {story:?}");
        }
        assert!(story.moving.is_none() || lost, "nobody answered: {story:?}");
    }
}

fn first(key: RequestKey) -> RequestKey {
    RequestKey { attempt: Attempt(0), ..key }
}

impl World {
    /// The first decode node would rather have a sequence go on elsewhere: as a conductor, with all tokens that it has told.
    pub(super) fn on_offer(&mut self, key: RequestKey, output_tokens: u32) {
        let (now, runs) = (self.now, self.decode.load().running > 0 && self.decode.load().draining);
        let story = self.stories.get_mut(&key).unwrap();
        if story.attempt != key.attempt {
            return;
        }
        assert_eq!(story.tokens.len(), output_tokens as usize, "all of the output is told: {story:?}");
        assert_eq!((story.decode_ends, story.finish), (0, None));
        let settled = story.prefill_ends == 1 && !story.aborted && !self.lost.contains(&story.job.conductor);
        if !settled || story.moving.is_some() || self.rng.chance(20) {
            return;
        }
        self.counts.offered_running += u32::from(runs);
        story.last_attempt.0 += 1;
        story.moving = Some(story.last_attempt);
        let tokens: Arc<[_]> = story.job.tokens.iter().chain(&story.tokens).copied().collect();
        let source = FetchSource {
            node: target().node,
            generation: Generation(1),
            address: String::new(),
            tokens: tokens.len() as u32,
        };
        let job = PrefillJob {
            key: RequestKey { attempt: story.last_attempt, ..key },
            tokens,
            output_tokens,
            decode: None,
            tail_tokens: 0,
            fetch: (!self.rng.chance(10)).then_some(source),
            ..story.job.clone()
        };
        // At once: what the conductor says of it later comes later.
        self.sent += 1;
        self.events.insert((now, self.sent), Event::Resume(job));
    }

    /// Nobody waits for the other decode node any more.
    pub(super) fn give_move_up(&mut self, key: RequestKey) {
        let Some(story) = self.stories.get_mut(&key) else { return };
        let attempts = story.moving.take().into_iter().chain((story.attempt > Attempt(0)).then_some(story.attempt));
        for attempt in attempts.collect::<Vec<_>>() {
            self.abort_other(RequestKey { attempt, ..key });
        }
    }

    fn abort_other(&mut self, key: RequestKey) {
        self.other.aborted.insert(key);
        self.send(Event::AbortOther(key));
    }

    /// The first decode node failed the request: the other one, if it was asked, goes on.
    pub(super) fn adopt(&mut self, key: RequestKey) {
        let story = self.stories.get_mut(&key).unwrap();
        if let Some(attempt) = story.moving.take() {
            story.attempt = attempt;
            self.counts.adopted += 1;
        }
    }

    pub(super) fn on_other_effect(&mut self, effect: DecodeEffect) {
        match effect {
            DecodeEffect::Fetch { key, block_hashes, destinations, .. } => {
                assert_eq!(block_hashes.len(), destinations.len());
                let sources = Vec::new();
                let fetch = Fetching {
                    lease: None,
                    sources,
                    destinations,
                    layers: 0,
                    cancelled: false,
                    failed: false,
                    late: false,
                };
                assert!(self.other.fetches.insert(key, fetch).is_none(), "fetched twice: {key:?}");
                let reader = NodeId::new("d1").unwrap();
                let lease = LeaseRequest { key, reader, reader_generation: Generation(1), block_hashes };
                match self.rng.chance(self.faults.fetch) {
                    true => self.send(Event::LeaseReply(key, Err(unavailable("holder fault")))),
                    false => self.send(Event::LeaseRequest(lease)),
                }
            }
            DecodeEffect::CancelFetch { key } => self.other.fetches.get_mut(&key).unwrap().cancelled = true,
            DecodeEffect::AnswerMove { key, result, .. } => self.on_answer(key, result),
            DecodeEffect::RunStep(plan) => {
                let ok = !self.rng.chance(self.faults.step);
                let took = Duration::from_micros(1 + self.rng.below(3000));
                self.send_after(took, Event::OtherStep(Arc::new(plan), ok));
            }
            DecodeEffect::Emit { events, .. } => {
                for (key, event) in events {
                    self.on_other_event(key, event);
                }
            }
            // There is no third one.
            DecodeEffect::Offer { .. } => {}
            other => panic!("the other decode node only goes on with sequences, but {other:?}"),
        }
    }

    fn on_answer(&mut self, key: RequestKey, result: Result<FetchReport, Refused>) {
        let taken = result.is_ok();
        if let Ok(report) = result {
            self.counts.taken += 1;
            self.counts.moved_tokens += u64::from(report.tokens);
            self.other.ends.insert(key, 0);
        } else {
            self.counts.not_taken += 1;
        }
        let story = self.stories.get_mut(&first(key)).unwrap();
        if story.moving == Some(key.attempt) {
            story.moving = None;
            if taken {
                story.attempt = key.attempt;
                self.send(Event::AbortDecode(first(key)));
                self.other.aborted.remove(&key);
            }
        }
    }

    fn on_other_event(&mut self, key: RequestKey, event: DecodeEvent) {
        let ends = self.other.ends.get_mut(&key).expect("an event of a sequence that was not taken");
        assert_eq!(*ends, 0, "an event after the end: {event:?}");
        let story = self.stories.get_mut(&first(key)).unwrap();
        match event {
            DecodeEvent::Token { index, token, finish, queue, .. } => {
                *ends += u32::from(finish.is_some());
                assert_eq!(queue, None);
                if story.attempt != key.attempt {
                    return;
                }
                // The first decode node may have gone on meanwhile: what comes again is the same.
                match story.tokens.get(index as usize) {
                    Some(known) => assert_eq!(*known, token, "{key:?} at {index}"),
                    None => {
                        assert_eq!(index as usize, story.tokens.len());
                        story.tokens.push(token);
                        story.finish = finish;
                        self.counts.finished_there += u32::from(finish.is_some());
                    }
                }
            }
            DecodeEvent::Failed(_) => *ends += 1,
        }
    }

    pub(super) fn on_other_step(&mut self, plan: &StepPlan, ok: bool) {
        for layer in 0..NUM_LAYERS {
            self.other.arena.compute_layer(plan, layer);
        }
        let result = if ok { Ok(outputs(plan)) } else { Err(unavailable("step fault")) };
        self.other.core.on_step_done(self.now, plan.id, result);
    }

    pub(super) fn on_other_lease(&mut self, key: RequestKey, reply: Result<LeaseReply, Refused>) {
        let Some(fetch) = self.other.fetches.get_mut(&key) else { return };
        match reply {
            Ok(LeaseReply { lease, blocks }) => {
                fetch.lease = Some(lease);
                fetch.destinations.truncate(blocks.len());
                fetch.sources = blocks;
                let blocks = fetch.sources.len();
                self.other.core.on_fetch_begun(key, blocks);
                self.send(Event::OtherLayer(key, 0));
            }
            Err(refused) => self.end_other_fetch(key, Err(refused)),
        }
    }

    pub(super) fn on_other_layer(&mut self, key: RequestKey, layer: u32) {
        let fault = self.rng.chance(self.faults.fetch);
        let Some(fetch) = self.other.fetches.get(&key) else { return };
        let open = fetch.lease.is_some_and(|lease: GrantId| self.open_leases.contains(&lease));
        let (from, to): (&[BlockId], &[BlockId]) = (&fetch.sources, &fetch.destinations);
        if fault || fetch.cancelled || !open {
            // What is read while a lease ends may be anything.
            to.iter().for_each(|block| self.other.arena.write(layer, *block, 0xdead));
            return self.end_other_fetch(key, Err(unavailable("fetch fault")));
        }
        for (from, to) in from.iter().zip(to) {
            self.other.arena.write(layer, *to, self.decode_arena.read(layer, *from));
        }
        let bytes = from.len() as u64;
        match layer + 1 == NUM_LAYERS {
            true => self.end_other_fetch(key, Ok(FetchedBytes { bytes, transport: "fake".into() })),
            false => self.send(Event::OtherLayer(key, layer + 1)),
        }
    }

    fn end_other_fetch(&mut self, key: RequestKey, result: Result<FetchedBytes, Refused>) {
        let Some(fetch) = self.other.fetches.remove(&key) else { return };
        // A release that is lost: the lease expires.
        if let Some(lease) = fetch.lease
            && !self.rng.chance(self.faults.fetch)
        {
            self.send(Event::ReleaseLease(lease));
        }
        self.other.core.on_fetch_done(self.now, key, result);
    }
}
