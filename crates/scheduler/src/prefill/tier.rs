//! What a prefill core has to do with the tier below its arena. What reads back is a fetch like one
//! from another node: `fetch.rs`.

use std::time::Instant;

use baton_kv_cache::BlockPool;
use baton_types::{BlockHash, RequestKey};

use super::{PrefillCore, PrefillEffect};
use crate::tier::{BlockAccounts, Stores};

impl BlockAccounts for PrefillCore {
    fn accounts(&mut self) -> (&mut BlockPool, &mut Stores) {
        (&mut self.pool, &mut self.stores)
    }

    fn after_store(&mut self, now: Instant) {
        self.start_stores();
        self.plan_step(now);
    }
}

impl PrefillCore {
    /// What a request's prompt has in the cache is no good.
    pub(super) fn forget_prefix(&mut self, key: RequestKey) {
        let Some(request) = self.active.get(&key) else { return };
        let hashes = request.hashes.clone();
        self.forget_blocks(&hashes);
    }

    /// These blocks, and those that follow them, are no good.
    pub fn forget_blocks(&mut self, hashes: &[BlockHash]) {
        let forgotten = self.pool.forget_with_successors(hashes);
        self.effects.extend(self.stores.forget(forgotten).map(PrefillEffect::Tier));
    }

    pub(super) fn start_stores(&mut self) {
        while let Some(effect) = self.stores.start(&mut self.pool) {
            self.effects.push_back(PrefillEffect::Tier(effect));
        }
    }
}
