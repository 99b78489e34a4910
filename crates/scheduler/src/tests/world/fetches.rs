//! Prefixes on their way into the prefill node, from the decode node and from its SSD, and the steps that wait for them.

use std::sync::Arc;
use std::time::Duration;

use baton_kv_cache::BlockHasher;
use baton_types::{
    Attempt, BlockHash, BlockId, FetchReport, FetchSource, Generation, GrantId, LeaseReply, LeaseRequest, PrefillJob,
    PrefixCopy, Refused, RequestId, RequestKey,
};

use super::super::engine::{BLOCK_TOKENS, NUM_LAYERS, Past, VOCAB, outputs};
use super::{Event, World, model, target, unavailable};
use crate::{FetchedBytes, LeaseEffect, StepPlan, StepSequence, TieredCore};

/// A prefix on its way from the decode node to the prefill node.
pub(super) struct Fetching {
    pub lease: Option<GrantId>,
    pub sources: Vec<BlockId>,
    pub destinations: Vec<BlockId>,
    /// Layers that are here.
    pub layers: u32,
    pub cancelled: bool,
    pub failed: bool,
    /// The engine has given it up.
    pub late: bool,
}

impl World {
    /// Sometimes a conductor wants the prompt's prefix here, before or after the prompt comes.
    pub(super) fn order_copy(&mut self, job: &PrefillJob) {
        if !self.rng.chance(25) {
            return;
        }
        let hasher = BlockHasher::new(model(1).layout.fingerprint(), &job.salt);
        let block_hashes: Arc<[_]> = hasher.chain(&job.tokens, BLOCK_TOKENS as u32).into();
        let source = FetchSource {
            node: target().node,
            generation: Generation(1),
            address: String::new(),
            tokens: job.tokens.len() as u32,
        };
        if !block_hashes.is_empty() {
            // The name of no request.
            let key = RequestKey { request: RequestId(job.key.request.0 + 1_000_000), attempt: Attempt(0) };
            let at = Duration::from_micros(self.rng.below(150_000));
            self.send_after(at, Event::Copy(PrefixCopy { key, conductor: job.conductor, source, block_hashes }));
        }
    }

    pub(super) fn on_copy(&mut self, order: PrefixCopy) {
        if !self.lost.contains(&order.conductor) {
            self.copies.insert(order.key, 0);
            self.prefill.on_copy(self.now, order);
        }
    }

    pub(super) fn on_copied(&mut self, key: RequestKey, report: &FetchReport) {
        *self.copies.get_mut(&key).expect("nobody ordered it") += 1;
        self.counts.copied_tokens += u64::from(report.tokens);
        self.counts.failed_copies += u32::from(report.failure.is_some());
    }

    /// As an engine does: K and V of a layer, then its attention, which waits for the layer of the prefix.
    pub(super) fn on_prefill_layer(&mut self, plan: Arc<StepPlan>, layer: u32) {
        if plan.sequences.iter().any(|sequence| self.waits_for(&plan, sequence, layer)) {
            return self.send_after(Duration::from_micros(50), Event::PrefillLayer(plan, layer));
        }
        for sequence in &plan.sequences {
            let past = match self.fetches.get(&sequence.key).filter(|_| sequence.awaits_prefix) {
                Some(fetch) if fetch.late || fetch.failed && fetch.layers < layer => Past::Wrong,
                Some(fetch) if fetch.layers <= layer => Past::Coming,
                _ => Past::Here,
            };
            self.prefill_arena.compute_sequence(sequence, layer, past);
        }
        self.prefill.on_kv_ready(self.now, plan.id, layer);
        match layer + 1 < NUM_LAYERS {
            true => {
                let took = Duration::from_micros(1 + self.rng.below(2000));
                self.send_after(took, Event::PrefillLayer(plan, layer + 1));
            }
            false => {
                let ok = !self.rng.chance(self.faults.step);
                let took = Duration::from_micros(1 + self.rng.below(2000));
                self.send_after(took, Event::PrefillStep(plan, ok));
            }
        }
    }

    /// Whether the first `layers` layers of a sequence's prefix are still coming. Sometimes the engine has no patience left.
    pub(super) fn waits_for(&mut self, plan: &StepPlan, sequence: &StepSequence, layers: u32) -> bool {
        let gives_up = self.rng.chance(self.faults.fetch / 4);
        let Some(fetch) = self.fetches.get_mut(&sequence.key).filter(|_| sequence.awaits_prefix) else { return false };
        if fetch.failed || fetch.late || fetch.layers >= layers {
            return false;
        }
        if gives_up {
            fetch.late = true;
            self.counts.late_prefixes += 1;
            self.prefill.on_prefix_late(self.now, plan.id, sequence.key);
        }
        !gives_up
    }

    pub(super) fn on_prefill_step(&mut self, plan: Arc<StepPlan>, ok: bool) {
        if plan.sequences.iter().any(|sequence| self.waits_for(&plan, sequence, NUM_LAYERS)) {
            return self.send_after(Duration::from_micros(50), Event::PrefillStep(plan, ok));
        }
        let mut outputs = outputs(&plan);
        for (sequence, output) in plan.sequences.iter().zip(&mut outputs).filter(|(s, _)| s.awaits_prefix) {
            if self.fetches[&sequence.key].failed || self.fetches[&sequence.key].late {
                self.counts.spoiled_steps += 1;
                output.sampled = output.sampled.take().map(|(token, logprobs)| ((token + 1) % VOCAB, logprobs));
            }
        }
        let result = if ok { Ok(outputs) } else { Err(unavailable("step fault")) };
        self.prefill.on_step_done(self.now, plan.id, result);
    }

    pub(super) fn on_lease_reply(&mut self, key: RequestKey, reply: Result<LeaseReply, Refused>) {
        match reply {
            Ok(reply) => {
                let Some(fetch) = self.fetches.get_mut(&key) else { return };
                fetch.lease = Some(reply.lease);
                fetch.destinations.truncate(reply.blocks.len());
                fetch.sources = reply.blocks;
                let blocks = fetch.sources.len();
                self.prefill.on_fetch_begun(self.now, key, blocks);
                self.send(Event::FetchLayer(key, 0));
            }
            Err(refused) => self.end_fetch(key, Err(refused)),
        }
    }

    pub(super) fn on_fetch_layer(&mut self, key: RequestKey, layer: u32) {
        let fault = self.rng.chance(self.faults.fetch);
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        let open = fetch.lease.is_some_and(|lease| self.open_leases.contains(&lease));
        if fault || fetch.cancelled || !open {
            // What is read while a lease ends may be anything.
            for block in &fetch.destinations {
                self.prefill_arena.write(layer, *block, 0xdead);
            }
            return self.end_fetch(key, Err(unavailable("fetch fault")));
        }
        for (from, to) in fetch.sources.iter().zip(&fetch.destinations) {
            self.prefill_arena.write(layer, *to, self.decode_arena.read(layer, *from));
        }
        let bytes = fetch.sources.len() as u64 * u64::from(NUM_LAYERS);
        self.prefill.on_fetched(self.now, key, layer);
        if layer + 1 == NUM_LAYERS {
            self.end_fetch(key, Ok(FetchedBytes { bytes, transport: "fake".into() }));
        } else {
            self.send(Event::FetchLayer(key, layer + 1));
        }
        if let Some(fetch) = self.fetches.get_mut(&key) {
            fetch.layers = layer + 1;
        }
    }

    /// What was written is what the block held, from the beginning to the end.
    pub(super) fn on_ssd_written(&mut self, hash: BlockHash, block: BlockId, values: Vec<u64>) {
        let now: Vec<_> = (0..NUM_LAYERS).map(|layer| self.prefill_arena.read(layer, block)).collect();
        assert_eq!(now, values, "a block changed while it was written");
        let stored = !self.rng.chance(self.faults.fetch);
        if stored {
            self.ssd.push((hash, values));
            self.counts.stored += 1;
        }
        self.prefill.on_stored(self.now, hash, stored);
        if self.ssd.len() > 25 {
            let (lost, _) = self.ssd.remove(self.rng.below(5) as usize);
            self.prefill.on_store_lost(lost);
        }
    }

    pub(super) fn on_load(&mut self, key: RequestKey, hashes: &[BlockHash], destinations: Vec<BlockId>) {
        let fetch = Fetching {
            lease: None,
            sources: Vec::new(),
            destinations,
            layers: 0,
            cancelled: false,
            failed: false,
            late: false,
        };
        assert!(self.fetches.insert(key, fetch).is_none(), "fetched twice: {key:?}");
        // The records are held from here on, as handles hold them.
        let records: Option<Vec<_>> = hashes
            .iter()
            .map(|hash| self.ssd.iter().find(|(other, _)| other == hash).map(|(_, values)| values.clone()))
            .collect();
        match records {
            Some(records) => {
                self.loads.insert(key, records);
                self.prefill.on_fetch_begun(self.now, key, hashes.len());
                self.send(Event::LoadLayer(key, 0));
            }
            None => self.send(Event::LeaseReply(key, Err(unavailable("not on the disk")))),
        }
    }

    pub(super) fn on_load_layer(&mut self, key: RequestKey, layer: u32) {
        let fault = self.rng.chance(self.faults.fetch);
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        if fault || fetch.cancelled {
            return self.end_fetch(key, Err(unavailable("disk fault")));
        }
        for (values, to) in self.loads[&key].iter().zip(&fetch.destinations) {
            self.prefill_arena.write(layer, *to, values[layer as usize]);
        }
        self.counts.loaded_tokens += (fetch.destinations.len() * BLOCK_TOKENS) as u64;
        self.prefill.on_fetched(self.now, key, layer);
        if layer + 1 == NUM_LAYERS {
            self.end_fetch(key, Ok(FetchedBytes { bytes: 1, transport: "ssd".into() }));
        } else {
            self.send(Event::LoadLayer(key, layer + 1));
        }
        if let Some(fetch) = self.fetches.get_mut(&key) {
            fetch.layers = layer + 1;
        }
    }

    pub(super) fn end_fetch(&mut self, key: RequestKey, result: Result<FetchedBytes, Refused>) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        fetch.failed = result.is_err();
        self.counts.failed_fetches += u32::from(fetch.failed);
        // A release that is lost: the lease expires.
        if let Some(lease) = fetch.lease
            && !self.rng.chance(self.faults.fetch)
        {
            self.send(Event::ReleaseLease(lease));
        }
        self.prefill.on_fetch_done(self.now, key, result);
    }

    pub(super) fn on_lease_effect(&mut self, effect: LeaseEffect) {
        match effect {
            LeaseEffect::Open { key, reply, .. } if self.rng.chance(self.faults.fetch) => {
                self.decode.on_release_lease(self.now, reply.lease);
                self.send(Event::LeaseReply(key, Err(unavailable("lease fault"))));
            }
            LeaseEffect::Open { key, reply, .. } => {
                self.open_leases.insert(reply.lease);
                self.send(Event::LeaseReply(key, Ok(reply)));
            }
            LeaseEffect::Refuse { key, refused } => self.send(Event::LeaseReply(key, Err(refused))),
            LeaseEffect::End { lease } => {
                self.open_leases.remove(&lease);
            }
        }
    }

    pub(super) fn on_fetch_effect(&mut self, lease: LeaseRequest, destinations: Vec<BlockId>) {
        assert_eq!(lease.block_hashes.len(), destinations.len());
        let (key, sources) = (lease.key, Vec::new());
        let fetch =
            Fetching { lease: None, sources, destinations, layers: 0, cancelled: false, failed: false, late: false };
        assert!(self.fetches.insert(key, fetch).is_none(), "fetched twice: {key:?}");
        match self.rng.chance(self.faults.fetch) {
            true => self.send(Event::LeaseReply(key, Err(unavailable("holder fault")))),
            false => self.send(Event::LeaseRequest(lease)),
        }
    }
}
