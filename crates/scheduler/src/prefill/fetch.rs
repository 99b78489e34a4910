//! A longer prefix that another node, or this node's own SSD, holds, on its way into the arena.
//!
//! ```text
//!   start ─▶ Fetch ─▶ on_fetch_begun ─▶ on_fetched, layer by layer ─▶ on_fetch_done: blocks to the cache
//!                                            │                              └─ failed: computed like the rest
//!                                            └─▶ pushed on to the decode node; compute begins once the layers keep ahead of it
//! ```
//!
//! A step may begin before every layer is here: the engine then waits for each layer of the prefix
//! before the layer's attention. If the fetch fails under such a step, what the step gives for the
//! request is thrown away and the prefix is computed. The layers that were final before the failure
//! are right, and are not pushed again. The same holds if the engine has waited for a layer as long
//! as it may. The others in the step must not wait for a holder that stands still, and a source
//! that was so late is not asked again for a while.

use std::ops::Range;
use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, ErrorKind, FetchReport, FetchSource, GrantId, LeaseRelease, LeaseRequest, NodeStart, PrefillEvent,
    PrefillJob, Refused, RequestKey,
};

use super::{Active, FetchedBytes, PrefillCore, PrefillEffect};
use crate::backoff::Backoff;
use crate::step::StepId;
use crate::tier::{AVOIDED_FOR, TierEffect, stored_after};

/// Most that are avoided at once; of more, the first is asked again early.
const MAX_AVOIDED: usize = 64;

/// A prefix on its way.
#[derive(Debug)]
pub(super) struct Fetch {
    /// Which blocks of the prompt come.
    pub blocks: Range<usize>,
    /// Layers of them that are here: the first so many.
    layers: u32,
    asked: Instant,
    /// Whether it comes from this node's SSD.
    is_stored: bool,
    /// When the holder agreed.
    begun: Option<Instant>,
    /// The engine has waited for it in vain: its end is waited for, and its blocks are not.
    is_late: bool,
}

/// Where prefixes come from: a start of another node, or this node's SSD.
pub(super) type Source = Option<NodeStart>;

/// The sources that were late, and are not asked for a while. The pauses do not grow, since the
/// conductor sees to what fails again and again.
pub(super) fn nobody_avoided() -> Backoff<Source> {
    Backoff::new(AVOIDED_FOR, AVOIDED_FOR, MAX_AVOIDED)
}

fn start_of(source: &FetchSource) -> Source {
    Some(NodeStart { node: source.node.clone(), generation: source.generation })
}

fn source_of(job: &PrefillJob, fetch: &Fetch) -> Source {
    job.fetch.as_ref().filter(|_| !fetch.is_stored).and_then(start_of)
}

impl Fetch {
    /// Whether a step of `compute` that begins now finds each layer here when it needs it, at the
    /// rate so far.
    fn keeps_ahead(&self, now: Instant, num_layers: u32, compute: Duration) -> bool {
        let Some(begun) = self.begun.filter(|_| self.layers > 0 && !self.is_late) else { return false };
        let per_layer = now.saturating_duration_since(begun) / self.layers;
        // The last layer's attention begins when the others are computed.
        let until_last = compute.mul_f64(f64::from(num_layers - 1) / f64::from(num_layers));
        per_layer * num_layers.saturating_sub(self.layers) <= until_last
    }
}

impl Active {
    /// Whether its next share of `tokens` tokens can go into a step that begins now.
    pub(super) fn may_compute(&self, now: Instant, num_layers: u32, tokens: usize) -> bool {
        let share = tokens as f64 / self.remaining_tokens().max(1) as f64;
        let compute = self.job.terms.compute.mul_f64(share.min(1.0));
        self.fetch.as_ref().is_none_or(|fetch| fetch.keeps_ahead(now, num_layers, compute))
    }
}

impl PrefillCore {
    /// What is to be fetched of a prompt whose reusable blocks have these hashes, and of which the
    /// arena holds `held` blocks. From the other node that the conductor named, if that has more
    /// than the SSD.
    pub(super) fn fetch_of(&self, now: Instant, job: &PrefillJob, hashes: &[BlockHash], held: usize) -> Option<Fetch> {
        let is_avoided = |source: &Source| self.avoided.is_paused(now, source);
        let stored = held + if is_avoided(&None) { 0 } else { stored_after(&self.pool, hashes, held) };
        let source = job.fetch.as_ref().filter(|source| source.node != self.config.node);
        let source = source.filter(|source| !is_avoided(&start_of(source)));
        let there = source.map_or(0, |source| source.tokens as usize / self.config.model.block_tokens());
        let end = there.min(hashes.len()).max(stored);
        let is_stored = stored >= there.min(hashes.len());
        (end > held).then_some(Fetch {
            blocks: held..end,
            layers: 0,
            asked: now,
            is_stored,
            begun: None,
            is_late: false,
        })
    }

    /// Asks the shell to fetch the request's prefix.
    pub(super) fn start_fetch(&mut self, request: &Active, fetch: &Fetch) {
        let destinations = request.blocks[fetch.blocks.clone()].to_vec();
        if fetch.is_stored {
            let hashes = request.hashes[fetch.blocks.clone()].to_vec();
            let load = TierEffect::Load { key: request.job.key, hashes, destinations };
            return self.effects.push_back(PrefillEffect::Tier(load));
        }
        let Some(source) = request.job.fetch.clone() else { return };
        let lease = LeaseRequest {
            key: request.job.key,
            reader: self.config.node.clone(),
            reader_generation: self.config.generation,
            block_hashes: request.hashes[fetch.blocks.clone()].into(),
        };
        self.effects.push_back(PrefillEffect::Fetch { source, lease, destinations });
    }

    /// The holder agreed, and has the first `blocks` of the blocks asked for.
    pub fn on_fetch_begun(&mut self, now: Instant, key: RequestKey, blocks: usize) {
        let block_tokens = self.config.model.block_tokens();
        let Some(request) = self.active.get_mut(&key) else { return };
        let Some(fetch) = &mut request.fetch else { return };
        fetch.begun = Some(now);
        fetch.blocks.end = fetch.blocks.end.min(fetch.blocks.start + blocks);
        let tokens = fetch.blocks.end * block_tokens;
        request.reset_to(tokens);
    }

    /// One more layer of the blocks that come is here; the first layer first.
    pub fn on_fetched(&mut self, now: Instant, key: RequestKey, layer: u32) {
        let Some(request) = self.active.get_mut(&key) else { return };
        let Some(fetch) = &mut request.fetch else { return };
        assert_eq!(layer, fetch.layers, "layers of a prefix come in order");
        fetch.layers += 1;
        if let (Some(transfer), false) = (&mut request.transfer, request.ended) {
            transfer.on_ready(layer, fetch.blocks.clone());
        }
        self.advance_transfer(now, key);
        self.plan_step(now);
    }

    /// The engine has waited for the request's prefix as long as it may, and goes on without. What
    /// the step gives for the request from here on means nothing. Told before the engine goes on.
    pub fn on_prefix_late(&mut self, now: Instant, step: StepId, key: RequestKey) {
        self.assert_running(step);
        let Some(request) = self.active.get_mut(&key).filter(|request| request.is_in_step() && !request.ended) else {
            return;
        };
        // Even if all has come meanwhile: by then the engine had given up.
        request.spoil_step();
        let Some(fetch) = request.fetch.as_mut().filter(|fetch| !fetch.is_late) else { return };
        fetch.is_late = true;
        self.avoided.failed(now, source_of(&request.job, fetch));
        self.effects.push_back(PrefillEffect::CancelFetch { key });
    }

    /// Everything is here, or the rest will not come: nothing is written into the blocks any more.
    /// Told before the engine is let past the layer concerned.
    pub fn on_fetch_done(&mut self, now: Instant, key: RequestKey, result: Result<FetchedBytes, Refused>) {
        let Some(request) = self.active.get_mut(&key) else { return };
        let Some(fetch) = request.fetch.take() else { return };
        if request.ended {
            self.release_if_unused(key);
            return self.plan_step(now);
        }
        let result = self.whole(fetch.layers, result);
        let report = self.take_in(now, key, &fetch, result);
        if let Some(conductor) = self.active.get(&key).map(|request| request.job.conductor) {
            self.emit(conductor, key, PrefillEvent::Fetched(report));
        }
        self.plan_step(now);
    }

    /// A prefix that is said to be here, if so many layers of it came.
    fn whole(&self, layers: u32, result: Result<FetchedBytes, Refused>) -> Result<FetchedBytes, Refused> {
        if layers == self.config.model.layout.num_layers {
            result
        } else {
            result.and(Err(Refused { kind: ErrorKind::Internal, message: format!("{layers} layers came") }))
        }
    }

    fn take_in(
        &mut self,
        now: Instant,
        key: RequestKey,
        fetch: &Fetch,
        result: Result<FetchedBytes, Refused>,
    ) -> FetchReport {
        let block_tokens = self.config.model.block_tokens();
        let elapsed = now.saturating_duration_since(fetch.asked);
        match result {
            Ok(FetchedBytes { bytes, transport }) => {
                self.complete_blocks(key, fetch.blocks.end);
                let tokens = fetch.blocks.len() * block_tokens;
                if transport == FetchReport::SSD {
                    self.lookups.count_ssd(tokens);
                } else {
                    self.lookups.count_fetched(tokens);
                }
                FetchReport { tokens: tokens as u32, bytes, transport, elapsed, failure: None }
            }
            Err(refused) => {
                let refused = if fetch.is_late {
                    Refused {
                        kind: ErrorKind::DeadlineExceeded,
                        message: format!("layer {} of the prefix did not come in time", fetch.layers),
                    }
                } else {
                    refused
                };
                if let Some(request) = self.active.get_mut(&key) {
                    if refused.kind == ErrorKind::DeadlineExceeded {
                        self.avoided.failed(now, source_of(&request.job, fetch));
                    }
                    request.spoil_step();
                    request.reset_to(fetch.blocks.start * block_tokens);
                }
                // Not the other node's fault.
                let transport = if fetch.is_stored { FetchReport::SSD.to_owned() } else { String::new() };
                FetchReport { transport, elapsed, failure: Some(refused), ..FetchReport::default() }
            }
        }
    }

    /// Another node wants to read blocks of the prefix cache. Answered by
    /// [`crate::LeaseEffect::Open`] or [`crate::LeaseEffect::Refuse`].
    pub fn on_lease_request(&mut self, now: Instant, request: LeaseRequest) {
        let id = GrantId(self.next_lease);
        self.next_lease += 1;
        let effect = if self.draining {
            self.leases.refuse_draining(&request)
        } else {
            let wanted = self.wanted_blocks(now);
            self.leases.open(now, &mut self.pool, id, request, wanted, false)
        };
        self.effects.push_back(PrefillEffect::Lease(effect));
    }

    /// The reader, or the shell, gives a lease back. Unknown ones are ignored.
    pub fn on_release_lease(&mut self, now: Instant, release: impl Into<LeaseRelease>) {
        if let Some(effect) = self.leases.release(&mut self.pool, &release.into()) {
            self.effects.push_back(PrefillEffect::Lease(effect));
            self.plan_step(now);
        }
    }

    /// A conductor lost another node, which is probably gone: nothing is kept for it to read.
    pub fn on_node_lost(&mut self, now: Instant, lost: &NodeStart) {
        self.leases.on_reader_lost(now, lost);
        self.expire_leases(now);
        self.plan_step(now);
    }

    pub(super) fn expire_leases(&mut self, now: Instant) {
        while let Some(effect) = self.leases.expire(now, &mut self.pool) {
            self.effects.push_back(PrefillEffect::Lease(effect));
        }
    }
}
