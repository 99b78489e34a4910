//! Grants: destination blocks that prefill nodes write into, from the request to the fence.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockHasher;
use baton_types::{BlockId, ErrorKind, GrantId, GrantReply, GrantRequest, Handoff, Refused, RequestKey};

use super::partial_prefill::PartialPrefill;
use super::{DecodeCore, DecodeEffect, HandedOff, Outcome, Phase, Sequence, failed};
use crate::prefill::PushId;

/// A grant that the transfer engine may still accept bytes for.
#[derive(Debug)]
pub(super) enum GrantRecord {
    /// Its sequence is here.
    Live(RequestKey),
    /// Its sequence ended; these blocks wait for the fence.
    Closing {
        /// In quarantine: not everything had arrived.
        quarantined: Vec<BlockId>,
        /// Cached still: everything had arrived.
        held: Vec<BlockId>,
    },
}

fn refused<T>(kind: ErrorKind, message: String) -> Result<T, Refused> {
    Err(Refused { kind, message })
}

/// A prefill node whose wait for room is over asks again a moment later; its place in the line is
/// kept for so long.
const PLACE_KEPT: Duration = Duration::from_secs(1);

/// A prefill node that wants a grant for which there is no room.
#[derive(Debug)]
pub(super) struct WaitingGrant {
    pub request: GrantRequest,
    /// When it is refused; if it was refused already, when its place is given up.
    pub until: Instant,
    /// Whether it waits for the answer. A refused one keeps its place for a moment, and none passes
    /// it: what comes free would always be too little for a large one.
    pub waits: bool,
}

/// Blocks that a request needs.
struct Needed {
    max_total_tokens: usize,
    /// For the tokens that come with the grant.
    given: usize,
    /// For the output, as far as room for it is promised. The last token's KV is not needed.
    growth: usize,
}

impl DecodeCore {
    /// A prefill node asks for room. Answered by [`DecodeEffect::OpenGrant`] or
    /// [`DecodeEffect::RefuseGrant`], at once or, if room is all that is missing, within
    /// [`crate::DecodeConfig::grant_wait`].
    pub fn on_grant_request(&mut self, now: Instant, request: GrantRequest) {
        let until = now + self.config.grant_wait;
        if let Some(waiting) = self.waiting_grants.iter_mut().find(|waiting| waiting.request.key == request.key) {
            // Its place is the one that it had; the answer goes to who asked last.
            *waiting = WaitingGrant { request, until, waits: true };
            return self.answer_asked(now);
        }
        let first = self.waiting_grants.is_empty() && !self.lacks_room;
        let opened = if first { self.open_grant(now, &request) } else { self.check_request(&request).and(Ok(None)) };
        match opened {
            Ok(None)
                if self.config.grant_wait > Duration::ZERO && self.waiting_grants.len() < self.config.max_waiting =>
            {
                self.waiting_grants.push_back(WaitingGrant { request, until, waits: true });
            }
            Ok(reply) => self.answer_grant(request, reply),
            Err(refused) => self.effects.push_back(DecodeEffect::RefuseGrant { key: request.key, refused }),
        }
    }

    fn answer_grant(&mut self, request: GrantRequest, reply: Option<GrantReply>) {
        let key = request.key;
        let effect = match reply {
            Some(reply) => {
                let prefill = request.prefill;
                let prefill_generation = request.prefill_generation;
                DecodeEffect::OpenGrant { key, prefill, prefill_generation, reply }
            }
            None => DecodeEffect::RefuseGrant { key, refused: self.no_room(&request) },
        };
        self.effects.push_back(effect);
    }

    /// Room may have come free. Those who asked for it get it, first come, first served, unless a
    /// running sequence already waits for it.
    pub(super) fn answer_asked(&mut self, now: Instant) {
        while !self.lacks_room
            && let Some(waiting) = self.waiting_grants.pop_front_if(|waiting| waiting.waits)
        {
            match self.open_grant(now, &waiting.request) {
                Ok(None) => return self.waiting_grants.push_front(waiting),
                Ok(reply) => self.answer_grant(waiting.request, reply),
                Err(refused) => self.effects.push_back(DecodeEffect::RefuseGrant { key: waiting.request.key, refused }),
            }
        }
    }

    /// Those who waited long enough are refused, and keep their place until it is clear that they
    /// do not ask again.
    pub(super) fn end_grant_waits(&mut self, now: Instant) {
        self.waiting_grants.retain(|waiting| waiting.waits || waiting.until > now);
        let due = |waiting: &WaitingGrant| waiting.waits && waiting.until <= now;
        let refused: Vec<_> =
            self.waiting_grants.iter().filter(|waiting| due(waiting)).map(|waiting| waiting.request.clone()).collect();
        for waiting in self.waiting_grants.iter_mut().filter(|waiting| due(waiting)) {
            *waiting = WaitingGrant { request: waiting.request.clone(), until: now + PLACE_KEPT, waits: false };
        }
        refused
            .iter()
            .for_each(|request| self.refuse_grant(request, ErrorKind::Overloaded, "no room came free in time"));
    }

    /// Refuses those who asked for room and of whom `which` is true, and forgets their places.
    pub(super) fn refuse_asked(&mut self, kind: ErrorKind, reason: &str, which: impl Fn(&GrantRequest) -> bool) {
        let waiting = std::mem::take(&mut self.waiting_grants);
        let (refused, kept): (VecDeque<_>, _) = waiting.into_iter().partition(|waiting| which(&waiting.request));
        self.waiting_grants = kept;
        let refused = refused.into_iter().filter(|waiting| waiting.waits);
        refused.for_each(|waiting| self.refuse_grant(&waiting.request, kind, reason));
    }

    fn refuse_grant(&mut self, request: &GrantRequest, kind: ErrorKind, reason: &str) {
        let message = match kind {
            ErrorKind::Overloaded => format!("{reason}: {}", self.no_room(request).message),
            _ => reason.to_owned(),
        };
        self.effects.push_back(DecodeEffect::RefuseGrant { key: request.key, refused: Refused { kind, message } });
    }

    /// Blocks that must be free or cached before the first of those who asked has its grant.
    pub(super) fn asked_blocks(&self) -> Option<usize> {
        let request = &self.waiting_grants.front()?.request;
        let needed = self.needed_blocks(request).ok()?;
        let matched = self.held_of(request);
        Some(self.pool.count_cached(&matched) + needed.given + needed.growth - matched.len())
    }

    /// What is cached of a prompt: blocks of another KV compatibility class are not those that this
    /// node would compute.
    fn held_of(&self, request: &GrantRequest) -> Vec<BlockId> {
        if request.is_other_class { Vec::new() } else { self.pool.match_prefix(&request.block_hashes) }
    }

    fn no_room(&self, request: &GrantRequest) -> Refused {
        let prompt = request.prompt_tokens;
        let output = request.max_tokens;
        let missing = match self.needed_blocks(request) {
            Ok(needed) => {
                let matched = self.held_of(request);
                self.pool.check_fits(&matched, needed.given + needed.growth - matched.len()).err()
            }
            Err(refused) => return refused,
        };
        let missing = missing.map_or_else(|| "others wait for it, too".to_owned(), |error| error.to_string());
        let message = format!("no room for {prompt} prompt and {output} output tokens: {missing}");
        Refused { kind: ErrorKind::Overloaded, message }
    }

    /// A batch has arrived whole under a grant; `push` tells batches apart. Arrivals of grants that
    /// ended are ignored.
    pub fn on_arrival(&mut self, now: Instant, grant: GrantId, push: PushId, bytes: u64) {
        let Some(GrantRecord::Live(key)) = self.grants.get(&grant) else { return };
        let key = *key;
        let Some(sequence) = self.sequences.get_mut(&key).filter(|sequence| !sequence.ended) else { return };
        if bytes == 0 || !sequence.pushes.insert(push) {
            return;
        }
        sequence.arrived_bytes = sequence.arrived_bytes.saturating_add(bytes);
        let arrived = sequence.arrived_bytes;
        let expected = sequence.expected_bytes;
        if arrived > expected {
            let message = format!("{arrived} bytes arrived under a grant of {expected}");
            self.end(key, Outcome::Failed, Some(failed(ErrorKind::DataLoss, message)));
            return self.plan_step(now);
        }
        self.deadlines.set(key, now + self.config.grant_ttl);
        let is_followed = sequence.tail.is_some();
        self.admit_if_complete(now, key);
        if is_followed {
            self.plan_step(now);
        }
    }

    /// The prefill node hands a sequence off. Answered by [`DecodeEffect::HandoffReply`]; a handoff
    /// that is told twice is accepted twice and counts once.
    pub fn on_handoff(&mut self, now: Instant, handoff: Handoff) {
        let key = handoff.key;
        let result = self.take_over(now, handoff);
        self.effects.push_back(DecodeEffect::HandoffReply { key, result });
        self.admit_if_complete(now, key);
        if self.tails.contains(&key) {
            self.plan_step(now);
        }
    }

    /// The prefill node, or the shell, gives a grant up, or its place in the line for one. The
    /// attempt has failed there, so a sequence that was handed off under it ends too, or the
    /// attempt goes to another decode node.
    pub fn on_release_grant(&mut self, now: Instant, key: RequestKey, grant: GrantId) {
        if grant == GrantId::NONE {
            self.refuse_asked(ErrorKind::Overloaded, "the place in the line was given up", |request| {
                request.key == key
            });
            return self.plan_step(now);
        }
        if self.sequences.get(&key).is_some_and(|sequence| sequence.grant == Some(grant)) {
            let message = "the prefill node gave up the handoff".to_owned();
            self.end(key, Outcome::Failed, Some(failed(ErrorKind::Unavailable, message)));
            self.plan_step(now);
        }
    }

    /// Nothing can land under the grant any more, because it was revoked or because it expired in
    /// the transfer engine.
    pub fn on_grant_fenced(&mut self, now: Instant, grant: GrantId) {
        match self.grants.remove(&grant) {
            Some(GrantRecord::Closing { quarantined, held }) => {
                self.pool.unquarantine(&quarantined);
                self.pool.release(&held);
            }
            Some(GrantRecord::Live(key)) if self.sequences.get(&key).is_some_and(|s| s.phase == Phase::Granted) => {
                let message = "the grant expired before everything had arrived".to_owned();
                self.end(key, Outcome::Failed, Some(failed(ErrorKind::Unavailable, message)));
            }
            Some(GrantRecord::Live(_)) | None => {}
        }
        self.plan_step(now);
    }

    /// `None` if only room is missing.
    fn open_grant(&mut self, now: Instant, request: &GrantRequest) -> Result<Option<GrantReply>, Refused> {
        let needed = self.check_request(request)?;
        let matched = self.held_of(request);
        if self.pool.check_fits(&matched, needed.given + needed.growth - matched.len()).is_err() {
            return Ok(None);
        }
        self.prune_tails();
        let tail = self.accept_partial_prefill(request, matched.len()).map(PartialPrefill::new);
        let head = tail.as_ref().map_or(needed.given, |tail| tail.from() / self.config.model.block_tokens());
        let out_of_blocks =
            |error: baton_kv_cache::OutOfBlocks| Refused { kind: error.kind(), message: error.to_string() };
        let grant = GrantId(self.next_grant);
        self.next_grant += 1;
        self.pool.acquire(&matched);
        let received = self.pool.allocate_receiving(head - matched.len(), grant).map_err(out_of_blocks)?;
        let own = self.pool.allocate(needed.given - head).map_err(out_of_blocks)?;
        let reservation = self.pool.reserve(needed.growth).map_err(out_of_blocks)?;
        let held_blocks = matched.len();
        self.prefix_queries += request.tokens() as u64;
        self.prefix_hits += (held_blocks * self.config.model.block_tokens()) as u64;
        let partial_prefill_tokens = if tail.is_some() { request.partial_prefill_tokens } else { 0 };
        let reply =
            GrantReply { grant, held_blocks: held_blocks as u32, blocks: received.clone(), partial_prefill_tokens };
        self.tails.extend(tail.is_some().then_some(request.key));
        let sequence = Sequence {
            grant: Some(grant),
            is_other_class: request.is_other_class,
            turn: self.next_turn(),
            prompt_tokens: request.prompt_tokens as usize,
            given_tokens: request.tokens(),
            max_tokens: request.max_tokens,
            max_total_tokens: needed.max_total_tokens,
            hashes: request.block_hashes.to_vec(),
            expected_bytes: self.config.model.bytes(received.len()),
            blocks: Arc::new(matched.into_iter().chain(received).chain(own).collect()),
            held_blocks,
            head_blocks: head,
            reservation,
            pushes: BTreeSet::new(),
            arrived_bytes: 0,
            handed_off: None,
            phase: Phase::Granted,
            num_computed_tokens: 0,
            num_complete_blocks: held_blocks,
            local: None,
            tail,
            loading: None,
            fetch: None,
            offered: None,
            told: now,
            in_step: false,
            ended: false,
        };
        self.grants.insert(grant, GrantRecord::Live(request.key));
        self.sequences.insert(request.key, sequence);
        self.deadlines.set(request.key, now + self.config.grant_ttl);
        Ok(Some(reply))
    }

    pub(super) fn next_turn(&mut self) -> u64 {
        self.next_turn += 1;
        self.next_turn
    }

    fn check_request(&self, request: &GrantRequest) -> Result<Needed, Refused> {
        if self.draining {
            return refused(ErrorKind::Unavailable, "the decode node is draining".into());
        }
        match self.tombstones.of(request.key) {
            Some(Outcome::Aborted) => return refused(ErrorKind::Cancelled, "the request was aborted".into()),
            Some(outcome) => return refused(ErrorKind::Unavailable, format!("the attempt ended here: {outcome:?}")),
            None => {}
        }
        match self.sequences.get(&request.key).map(|sequence| sequence.grant) {
            Some(Some(grant)) => {
                return refused(ErrorKind::Invalid, format!("the request has grant {} already", grant.0));
            }
            Some(None) => return refused(ErrorKind::Invalid, "the request's prompt is computed here".into()),
            None => {}
        }
        let needed = self.needed_blocks(request)?;
        self.check_step_time(request)?;
        let open = self.sequences.len().max(self.grants.len());
        let limit = self.config.max_running + self.config.max_waiting;
        if open >= limit {
            return refused(ErrorKind::Overloaded, format!("{open} sequences are granted or running, as many as may"));
        }
        Ok(needed)
    }

    fn needed_blocks(&self, request: &GrantRequest) -> Result<Needed, Refused> {
        let model = &self.config.model;
        let prompt = request.prompt_tokens as usize;
        let given = request.tokens();
        let context = model.context_length as usize;
        let max_total_tokens = prompt.saturating_add(request.max_tokens as usize).min(context);
        if prompt == 0 || max_total_tokens < given + 2 {
            let message = format!(
                "{prompt} prompt and {} output tokens, of which {} are given, in a context of {context}: nothing to decode",
                request.max_tokens, request.output_tokens
            );
            return refused(ErrorKind::Invalid, message);
        }
        let hashes = request.block_hashes.len();
        let full = given / model.block_tokens();
        if hashes != full {
            return refused(ErrorKind::Invalid, format!("{hashes} block hashes for {full} full blocks of the prompt"));
        }
        let total = model.layout.blocks_for(max_total_tokens - 1);
        if total > model.layout.num_blocks as usize {
            let message = format!(
                "{prompt} prompt and {} output tokens take {total} blocks, the node has {}",
                request.max_tokens, model.layout.num_blocks
            );
            return refused(ErrorKind::Invalid, message);
        }
        let for_given = model.layout.blocks_for(given);
        let growth = (total - for_given).min(self.config.growth_blocks);
        Ok(Needed { max_total_tokens, given: for_given, growth })
    }

    fn take_over(&mut self, now: Instant, handoff: Handoff) -> Result<(), Refused> {
        let key = handoff.key;
        let Some(sequence) = self.sequences.get(&key).filter(|sequence| !sequence.ended) else {
            return match self.tombstones.of(key) {
                Some(Outcome::Finished) => Ok(()),
                Some(Outcome::Aborted) => refused(ErrorKind::Cancelled, "the request was aborted".into()),
                _ => refused(ErrorKind::Unavailable, format!("grant {} is not open", handoff.grant.0)),
            };
        };
        if sequence.grant != Some(handoff.grant) {
            let has = sequence.grant.map_or_else(|| "none".to_owned(), |grant| grant.0.to_string());
            let message = format!("the handoff names grant {}, the request has {has}", handoff.grant.0);
            return refused(ErrorKind::Invalid, message);
        }
        if sequence.handed_off.is_some() {
            return Ok(());
        }
        let hasher = BlockHasher::new(self.config.model.layout.fingerprint(), &handoff.salt);
        if let Err(message) = self.check_handoff(sequence, &handoff, &hasher) {
            self.end(key, Outcome::Failed, None);
            return refused(ErrorKind::Invalid, message);
        }
        let mut tokens = Vec::with_capacity(sequence.max_total_tokens.min(handoff.tokens.len() + 1024));
        tokens.extend_from_slice(&handoff.tokens);
        tokens.extend(handoff.first_token);
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.num_computed_tokens = sequence.tail.as_ref().map_or(0, PartialPrefill::from);
            sequence.handed_off = Some(HandedOff {
                conductor: handoff.conductor,
                at: now,
                tokens: Arc::new(tokens),
                sampling: handoff.sampling,
                hasher,
                first_step: None,
                // After a partial prefill the first token has no wait of its own between the
                // handoff and a step.
                first_token_told: handoff.first_token.is_none(),
            });
        }
        self.deadlines.set(key, now + self.config.grant_ttl);
        Ok(())
    }

    /// Compares the handoff with what was granted. The hashes prove that blocks which were here
    /// already belong to this very prompt.
    fn check_handoff(&self, sequence: &Sequence, handoff: &Handoff, hasher: &BlockHasher) -> Result<(), String> {
        let differ = |field, granted: String, handed: String| {
            if granted == handed { Ok(()) } else { Err(format!("{field}: {granted} granted, {handed} handed off")) }
        };
        differ("tokens", sequence.given_tokens.to_string(), handoff.tokens.len().to_string())?;
        differ("max_tokens", sequence.max_tokens.to_string(), handoff.sampling.max_tokens.to_string())?;
        differ("bytes", sequence.expected_bytes.to_string(), handoff.expected_bytes.to_string())?;
        handoff.sampling.validate().map_err(|error| error.to_string())?;
        match handoff.first_token {
            Some(token) if sequence.tail.is_some() => {
                return Err(format!("first_token: {token} handed off, but this node computes the partial prefill"));
            }
            None if sequence.tail.is_none() => return Err("first_token: none handed off".to_owned()),
            _ => {}
        }
        let mut tokens = handoff.tokens.iter().chain(&handoff.first_token);
        let vocab_size = self.config.model.vocab_size;
        if let Some(token) = tokens.find(|token| **token >= vocab_size) {
            return Err(format!("token {token} is not in the vocabulary of {vocab_size}"));
        }
        if hasher.chain(&handoff.tokens, self.config.model.layout.block_tokens) != sequence.hashes {
            return Err("the prompt does not have the block hashes that the grant was asked with".into());
        }
        Ok(())
    }

    /// Puts a sequence in line for the batch once it is here whole, and closes its grant.
    fn admit_if_complete(&mut self, now: Instant, key: RequestKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        if sequence.ended || sequence.phase != Phase::Granted || !sequence.is_complete() {
            return;
        }
        sequence.phase = Phase::Waiting;
        sequence.num_computed_tokens = sequence.tail.as_ref().map_or(sequence.given_tokens, PartialPrefill::from);
        self.pool.received(&sequence.blocks[sequence.held_blocks..sequence.head_blocks]);
        if let Some(grant) = sequence.grant.filter(|grant| self.grants.contains_key(grant)) {
            self.effects.push_back(DecodeEffect::RevokeGrant { grant });
        }
        self.deadlines.clear(key);
        self.waiting.insert(sequence.turn, key);
        self.complete_blocks(key);
        self.plan_step(now);
    }

    /// Releases a sequence's blocks, as far as its grant is fenced; the rest waits for the fence.
    pub(super) fn release_under_grant(&mut self, sequence: Sequence) {
        let Sequence { grant, blocks, held_blocks, head_blocks, reservation, phase, .. } = sequence;
        self.pool.cancel_reservation(reservation);
        let open = grant.filter(|grant| self.grants.contains_key(grant));
        let (quarantined, held) = match phase {
            Phase::Granted => {
                let held = &blocks[..held_blocks];
                let receiving = &blocks[held_blocks..head_blocks];
                self.pool.release(held);
                self.pool.release(&blocks[head_blocks..]);
                self.pool.quarantine(receiving);
                (receiving.to_vec(), Vec::new())
            }
            Phase::Waiting | Phase::Fetching | Phase::Preempted | Phase::Running => {
                (Vec::new(), Arc::unwrap_or_clone(blocks))
            }
        };
        let Some(grant) = open else {
            self.pool.unquarantine(&quarantined);
            self.pool.release(&held);
            return;
        };
        if phase == Phase::Granted {
            self.effects.push_back(DecodeEffect::RevokeGrant { grant });
        }
        self.grants.insert(grant, GrantRecord::Closing { quarantined, held });
    }
}
