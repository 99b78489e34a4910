//! Grants: destination blocks that prefill nodes write into, from the request to the fence.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::OutOfBlocks;
use baton_types::{BlockId, ErrorKind, GrantId, GrantReply, GrantRequest, Refused, RequestKey};

use super::kv::SequenceKv;
use super::partial_prefill::PartialPrefill;
use super::sequence::{Lengths, Origin, Phase, Sequence};
use super::{DecodeCore, DecodeEffect, Outcome, failed};
use crate::prefill::PushId;

/// The right of a prefill node to write a request's KV here, and what it has written.
#[derive(Debug)]
pub(super) struct Grant {
    pub id: GrantId,
    /// The prefill node is of another KV compatibility class: its blocks do not become cache.
    pub is_other_class: bool,
    /// Which of the request's blocks it writes. Those before were here already, and those after are
    /// computed here.
    pub receiving: Range<usize>,
    /// Batches that arrived, so that one that is told twice counts once.
    pushes: BTreeSet<PushId>,
    pub arrived_bytes: u64,
    pub expected_bytes: u64,
    /// If the last part of the prompt is computed here, and no token was drawn yet.
    pub partial_prefill: Option<PartialPrefill>,
}

impl Grant {
    /// Counts a batch; `false` if it is empty or was counted before.
    fn arrive(&mut self, push: PushId, bytes: u64) -> bool {
        let is_new = bytes > 0 && self.pushes.insert(push);
        if is_new {
            self.arrived_bytes = self.arrived_bytes.saturating_add(bytes);
        }
        is_new
    }

    pub(super) fn is_complete(&self) -> bool {
        self.arrived_bytes == self.expected_bytes
    }

    /// Leading layers of its blocks that are here whole.
    pub(super) fn whole_layers(&self, num_layers: u32) -> u32 {
        if self.is_complete() {
            return num_layers;
        }
        let in_order = self.pushes.iter().zip(0..).take_while(|(push, number)| push.number() == *number);
        in_order.last().map_or(0, |(push, _)| push.layers().min(num_layers))
    }
}

/// A request that waits for its handoff, while its KV arrives.
#[derive(Debug)]
pub(super) struct Granted {
    /// As [`Sequence::turn`].
    pub turn: u64,
    pub grant: Grant,
    pub lengths: Lengths,
    /// Most tokens of the output; the handoff must name as many.
    pub max_tokens: u32,
    pub kv: SequenceKv,
    pub since: Instant,
}

/// A grant that the transfer engine may still accept bytes for.
#[derive(Debug)]
pub(super) enum GrantRecord {
    /// Its request is here.
    Live(RequestKey),
    /// Its request ended before everything had arrived: these blocks are in quarantine until the
    /// fence.
    Quarantined(Vec<BlockId>),
    /// Its request ended after everything had arrived: these blocks are in use until the fence.
    Held(Vec<BlockId>),
}

/// Blocks that a request needs.
pub(super) struct Needed {
    lengths: Lengths,
    /// For the tokens that come with the grant.
    given: usize,
    /// For the output, as far as room for it is promised. The last token's KV is not needed.
    growth: usize,
}

impl Needed {
    /// Those that must be found, if these are cached.
    pub(super) fn beside(&self, cached: &[BlockId]) -> usize {
        self.given + self.growth - cached.len()
    }
}

pub(super) fn refused<T>(kind: ErrorKind, message: String) -> Result<T, Refused> {
    Err(Refused { kind, message })
}

fn out_of_blocks(error: OutOfBlocks) -> Refused {
    Refused { kind: error.kind(), message: error.to_string() }
}

impl DecodeCore {
    /// A batch has arrived whole under a grant; `push` tells batches apart. Arrivals of grants that
    /// ended are ignored.
    pub fn on_arrival(&mut self, now: Instant, grant: GrantId, push: PushId, bytes: u64) {
        let Some(GrantRecord::Live(key)) = self.grants.get(&grant) else { return };
        let key = *key;
        let Some(grant) = self.live_grant_mut(key) else { return };
        if !grant.arrive(push, bytes) {
            return;
        }
        if grant.arrived_bytes > grant.expected_bytes {
            let message = format!("{} bytes arrived under a grant of {}", grant.arrived_bytes, grant.expected_bytes);
            self.end(key, Outcome::Failed, Some(failed(ErrorKind::DataLoss, message)));
            return self.plan_step(now);
        }
        let is_followed = grant.partial_prefill.is_some();
        self.deadlines.set(key, now + self.config.grant_ttl);
        self.admit_if_complete(now, key);
        if is_followed {
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
        if self.grant_of(key).is_some_and(|granted| granted.id == grant) {
            let message = "the prefill node gave up the handoff".to_owned();
            self.end(key, Outcome::Failed, Some(failed(ErrorKind::Unavailable, message)));
            self.plan_step(now);
        }
    }

    /// Nothing can land under the grant any more, because it was revoked or because it expired in
    /// the transfer engine.
    pub fn on_grant_fenced(&mut self, now: Instant, grant: GrantId) {
        match self.grants.remove(&grant) {
            Some(GrantRecord::Quarantined(blocks)) => self.pool.unquarantine(&blocks),
            Some(GrantRecord::Held(blocks)) => self.pool.release(&blocks),
            Some(GrantRecord::Live(key)) if self.is_receiving(key) => {
                let message = "the grant expired before everything had arrived".to_owned();
                self.end(key, Outcome::Failed, Some(failed(ErrorKind::Unavailable, message)));
            }
            Some(GrantRecord::Live(_)) | None => {}
        }
        self.plan_step(now);
    }

    fn is_receiving(&self, key: RequestKey) -> bool {
        let handed_off = self.sequences.get(&key);
        self.granted.contains_key(&key) || handed_off.is_some_and(|sequence| sequence.phase == Phase::Receiving)
    }

    /// The grant of a request, also if it has ended and its blocks are in use.
    pub(super) fn grant_of(&self, key: RequestKey) -> Option<&Grant> {
        self.live_grant(key).or_else(|| self.ended.get(&key)?.grant())
    }

    pub(super) fn live_grant(&self, key: RequestKey) -> Option<&Grant> {
        match self.granted.get(&key) {
            Some(granted) => Some(&granted.grant),
            None => self.sequences.get(&key)?.grant(),
        }
    }

    fn live_grant_mut(&mut self, key: RequestKey) -> Option<&mut Grant> {
        match self.granted.get_mut(&key) {
            Some(granted) => Some(&mut granted.grant),
            None => self.sequences.get_mut(&key)?.grant_mut(),
        }
    }

    /// `None` if only room is missing.
    pub(super) fn open_grant(&mut self, now: Instant, request: &GrantRequest) -> Result<Option<GrantReply>, Refused> {
        let needed = self.check_request(request)?;
        let cached = self.cached_blocks(request);
        if self.pool.check_fits(&cached, needed.beside(&cached)).is_err() {
            return Ok(None);
        }
        self.prune_partial_prefills();
        let block_tokens = self.config.model.block_tokens();
        let partial_prefill = self.accept_partial_prefill(request, cached.len());
        let num_computed_tokens = partial_prefill.as_ref().map_or(request.tokens(), PartialPrefill::from);
        let receiving = cached.len()..num_computed_tokens.div_ceil(block_tokens);
        let id = GrantId(self.next_grant);
        self.next_grant += 1;
        self.pool.acquire(&cached);
        let received = self.pool.allocate_receiving(receiving.len(), id).map_err(out_of_blocks)?;
        let own = self.pool.allocate(needed.given - receiving.end).map_err(out_of_blocks)?;
        let reservation = self.pool.reserve(needed.growth).map_err(out_of_blocks)?;
        self.lookups.count(request.tokens(), cached.len() * block_tokens);
        let reply = GrantReply {
            grant: id,
            cached_blocks: cached.len() as u32,
            blocks: received.clone(),
            partial_prefill_tokens: if partial_prefill.is_some() { request.partial_prefill_tokens } else { 0 },
        };
        self.partial_prefills.extend(partial_prefill.is_some().then_some(request.key));
        let kv = SequenceKv {
            hashes: request.block_hashes.to_vec(),
            num_complete_blocks: cached.len(),
            blocks: Arc::new(cached.into_iter().chain(received).chain(own).collect()),
            reservation,
            num_computed_tokens,
        };
        let grant = Grant {
            id,
            is_other_class: request.is_other_class,
            pushes: BTreeSet::new(),
            arrived_bytes: 0,
            expected_bytes: self.config.model.bytes(receiving.len()),
            receiving,
            partial_prefill,
        };
        let lengths = needed.lengths;
        let turn = self.next_turn();
        let granted = Granted { turn, grant, lengths, max_tokens: request.max_tokens, kv, since: now };
        self.grants.insert(id, GrantRecord::Live(request.key));
        self.granted.insert(request.key, granted);
        self.deadlines.set(request.key, now + self.config.grant_ttl);
        Ok(Some(reply))
    }

    pub(super) fn next_turn(&mut self) -> u64 {
        self.next_turn += 1;
        self.next_turn
    }

    /// What is cached of a prompt: blocks of another KV compatibility class are not those that this
    /// node would compute.
    pub(super) fn cached_blocks(&self, request: &GrantRequest) -> Vec<BlockId> {
        if request.is_other_class { Vec::new() } else { self.pool.match_prefix(&request.block_hashes) }
    }

    pub(super) fn check_request(&self, request: &GrantRequest) -> Result<Needed, Refused> {
        if self.draining {
            return refused(ErrorKind::Unavailable, "the decode node is draining".into());
        }
        match self.tombstones.of(request.key) {
            Some(Outcome::Aborted) => return refused(ErrorKind::Cancelled, "the request was aborted".into()),
            Some(outcome) => return refused(ErrorKind::Unavailable, format!("the attempt ended here: {outcome:?}")),
            None => {}
        }
        if let Some(grant) = self.grant_of(request.key) {
            return refused(ErrorKind::Invalid, format!("the request has grant {} already", grant.id.0));
        }
        if self.is_here(request.key) {
            return refused(ErrorKind::Invalid, "the request's prompt is computed here".into());
        }
        let needed = self.needed_blocks(request)?;
        self.check_step_time(request)?;
        let open = self.num_requests().max(self.grants.len());
        let limit = self.config.max_running + self.config.max_waiting;
        if open >= limit {
            return refused(ErrorKind::Overloaded, format!("{open} sequences are granted or running, as many as may"));
        }
        Ok(needed)
    }

    pub(super) fn needed_blocks(&self, request: &GrantRequest) -> Result<Needed, Refused> {
        let model = &self.config.model;
        let prompt_tokens = request.prompt_tokens as usize;
        let given_tokens = request.tokens();
        let lengths = Lengths::new(model, prompt_tokens, given_tokens, request.max_tokens);
        if prompt_tokens == 0 || lengths.max_total_tokens < given_tokens + 2 {
            let message = format!(
                "{prompt_tokens} prompt and {} output tokens, of which {} are given, and this node holds {}: nothing \
                 to decode",
                request.max_tokens,
                request.output_tokens,
                model.layout.max_sequence_tokens(model.context_length)
            );
            return refused(ErrorKind::Invalid, message);
        }
        let hashes = request.block_hashes.len();
        let full = given_tokens / model.block_tokens();
        if hashes != full {
            return refused(ErrorKind::Invalid, format!("{hashes} block hashes for {full} full blocks of the prompt"));
        }
        let total = model.layout.blocks_for(lengths.max_total_tokens - 1);
        let given = model.layout.blocks_for(given_tokens);
        let growth = (total - given).min(self.config.growth_blocks);
        Ok(Needed { lengths, given, growth })
    }

    /// Releases a sequence's blocks, as far as its grant is fenced; the rest waits for the fence.
    pub(super) fn release_sequence(&mut self, sequence: Sequence) {
        let Sequence { origin, phase, mut kv, .. } = sequence;
        match origin {
            Origin::Granted(grant) if phase == Phase::Receiving => self.release_receiving(&grant, kv),
            Origin::Granted(grant) if self.grants.contains_key(&grant.id) => {
                self.pool.cancel_reservation(kv.reservation);
                self.grants.insert(grant.id, GrantRecord::Held(Arc::unwrap_or_clone(kv.blocks)));
            }
            Origin::Granted(_) | Origin::Submitted(_) | Origin::Migrated => kv.release(&mut self.pool),
        }
    }

    /// The same of blocks of which some are still written, unless the grant is fenced.
    pub(super) fn release_receiving(&mut self, grant: &Grant, kv: SequenceKv) {
        let receiving = &kv.blocks[grant.receiving.clone()];
        self.pool.cancel_reservation(kv.reservation);
        self.pool.release(&kv.blocks[..grant.receiving.start]);
        self.pool.release(&kv.blocks[grant.receiving.end..]);
        self.pool.quarantine(receiving);
        if self.grants.contains_key(&grant.id) {
            self.effects.push_back(DecodeEffect::RevokeGrant { grant: grant.id });
            self.grants.insert(grant.id, GrantRecord::Quarantined(receiving.to_vec()));
        } else {
            self.pool.unquarantine(receiving);
        }
    }
}
