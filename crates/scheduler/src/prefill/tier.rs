//! What a prefill core has to do with the tier below its arena. What reads back is a fetch like one from another node: `fetch.rs`.

use std::time::Instant;

use baton_types::BlockHash;

use super::{PrefillCore, PrefillEffect};
use crate::tier::TieredCore;

impl TieredCore for PrefillCore {
    fn on_store_recovered(&mut self, blocks: impl IntoIterator<Item = (BlockHash, Option<BlockHash>)>) {
        for (hash, parent) in blocks {
            self.pool.stored_below(hash, parent);
        }
    }

    fn on_stored(&mut self, now: Instant, hash: BlockHash, stored: bool) {
        if self.stores.done(&mut self.pool, hash, stored) {
            self.start_stores();
            self.plan_step(now);
        }
    }

    fn on_store_lost(&mut self, hash: BlockHash) {
        self.pool.removed_below(hash);
    }
}

impl PrefillCore {
    pub(super) fn start_stores(&mut self) {
        while let Some(effect) = self.stores.start(&mut self.pool) {
            self.effects.push_back(PrefillEffect::Tier(effect));
        }
    }
}
