//! What a decode core has to do with the tier below its arena.
//!
//! Every block that is full is written through. It is read back when a sequence gets its blocks.
//! Such a sequence was preempted, or its prompt is computed here, or it migrated here and was not
//! fetched whole. It joins the batch once everything was read, or failed: then it is computed.
//!
//! What only the tier holds is not told to conductors and not leased, since a reader would wait for
//! this node's disk. A grant takes no blocks from it, since a push that overlaps with compute is
//! there sooner.

use std::time::Instant;

use baton_kv_cache::BlockPool;
use baton_types::{BlockHash, ErrorKind, Refused, RequestKey};

use super::sequence::Phase;
use super::{DecodeCore, DecodeEffect};
use crate::tier::{AVOIDED_FOR, BlockAccounts, Stores, TierEffect, stored_after};

impl BlockAccounts for DecodeCore {
    fn accounts(&mut self) -> (&mut BlockPool, &mut Stores) {
        (&mut self.pool, &mut self.stores)
    }

    fn after_store(&mut self, now: Instant) {
        self.start_stores();
        self.plan_step(now);
    }
}

impl DecodeCore {
    /// What a sequence has in the cache is no good.
    pub(super) fn forget_prefix(&mut self, key: RequestKey) {
        let Some(sequence) = self.sequences.get(&key) else { return };
        let hashes = sequence.kv.hashes.clone();
        self.forget_blocks(&hashes);
    }

    /// These blocks, and those that follow them, are no good.
    pub fn forget_blocks(&mut self, hashes: &[BlockHash]) {
        let forgotten = self.pool.forget_with_successors(hashes);
        self.effects.extend(self.stores.forget(forgotten).map(DecodeEffect::Tier));
    }

    pub(super) fn start_stores(&mut self) {
        while let Some(effect) = self.stores.start(&mut self.pool) {
            self.effects.push_back(DecodeEffect::Tier(effect));
        }
    }

    /// A sequence just got its blocks, of which the first `held` were cached: whether more of them
    /// come from the tier first.
    pub(super) fn start_load(&mut self, now: Instant, key: RequestKey, held: usize) -> bool {
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key) else { return false };
        let reusable = &sequence.kv.hashes[..sequence.reusable_blocks(block_tokens)];
        let stored = stored_after(&self.pool, reusable, held);
        if stored == 0 || self.tier_avoided_until.is_some_and(|until| now < until) {
            return false;
        }
        let blocks = held..held + stored;
        let hashes = sequence.kv.hashes[blocks.clone()].to_vec();
        let destinations = sequence.kv.blocks[blocks.clone()].to_vec();
        sequence.phase = Phase::Loading(blocks);
        self.effects.push_back(DecodeEffect::Tier(TierEffect::Load { key, hashes, destinations }));
        true
    }

    /// So many leading blocks of those asked for are here, or none is: nothing is written into the
    /// others any more.
    pub fn on_load_done(&mut self, now: Instant, key: RequestKey, result: Result<usize, Refused>) {
        if self.release_ended(key) {
            return self.plan_step(now);
        }
        let block_tokens = self.config.model.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let Phase::Loading(loading) = &sequence.phase else { return };
        let loading = loading.clone();
        sequence.phase = Phase::Waiting;
        match result {
            Ok(blocks) => {
                let blocks = blocks.min(loading.len());
                sequence.kv.num_computed_tokens = (loading.start + blocks) * block_tokens;
                self.lookups.count_ssd(blocks * block_tokens);
                self.complete_blocks(key);
            }
            Err(refused) if refused.kind == ErrorKind::DeadlineExceeded => {
                self.tier_avoided_until = Some(now + AVOIDED_FOR);
            }
            Err(_) => {}
        }
        self.on_local_started(now, key);
        self.plan_step(now);
    }
}
