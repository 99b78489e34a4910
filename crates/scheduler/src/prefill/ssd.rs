//! The tier below the arena: blocks are written through to it when they are full, and read back where a prompt begins with them and the arena has lost them.
//!
//! What reads back is a fetch like one from another node: `fetch.rs`. Blocks are held while they are written; how many at once is bounded, and so is how many wait for it: under a
//! load that the disk cannot follow some are not written, which costs a miss later.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use baton_types::{BlockHash, BlockId};

use super::{PrefillCore, PrefillEffect};

/// Most blocks that wait to be written.
const MAX_QUEUED: usize = 4096;

/// Writes under way and to come.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// Oldest first; a block that is not in the arena any more when its turn comes is passed over.
    queued: VecDeque<(BlockHash, Option<BlockHash>)>,
    under_way: BTreeMap<BlockHash, (BlockId, Option<BlockHash>)>,
}

impl Stores {
    /// What has not begun is not written.
    pub(super) fn forget_queued(&mut self) {
        self.queued.clear();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Blocks that are being written.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.under_way.values().map(|(block, _)| *block)
    }
}

impl PrefillCore {
    /// What the tier holds from an earlier life of the node.
    pub fn on_store_recovered(&mut self, blocks: impl IntoIterator<Item = (BlockHash, Option<BlockHash>)>) {
        for (hash, parent) in blocks {
            self.pool.stored_below(hash, parent);
        }
    }

    /// A block is full: it goes to the tier when its turn comes.
    pub(super) fn queue_store(&mut self, hash: BlockHash, parent: Option<BlockHash>) {
        if self.config.max_stores == 0 || self.draining || self.pool.is_below(hash) {
            return;
        }
        if self.stores.queued.len() == MAX_QUEUED {
            self.stores.queued.pop_front();
        }
        self.stores.queued.push_back((hash, parent));
    }

    pub(super) fn start_stores(&mut self) {
        while self.stores.under_way.len() < self.config.max_stores
            && let Some((hash, parent)) = self.stores.queued.pop_front()
        {
            let known = self.pool.is_below(hash) || self.stores.under_way.contains_key(&hash);
            let block = self.pool.match_prefix(&[hash]);
            if known || block.is_empty() || self.pool.check_fits(&block, 0).is_err() {
                continue;
            }
            self.pool.acquire(&block);
            self.stores.under_way.insert(hash, (block[0], parent));
            self.effects.push_back(PrefillEffect::Store { hash, parent, block: block[0] });
        }
    }

    /// A write is over.
    pub fn on_stored(&mut self, now: Instant, hash: BlockHash, stored: bool) {
        let Some((block, parent)) = self.stores.under_way.remove(&hash) else { return };
        if stored {
            self.pool.stored_below(hash, parent);
        }
        self.pool.release(&[block]);
        self.start_stores();
        self.plan_step(now);
    }

    /// The tier has lost a block: it made room for another, or what was read was no good.
    pub fn on_store_lost(&mut self, hash: BlockHash) {
        self.pool.removed_below(hash);
    }

    /// Blocks after the first `held` of these that the tier holds.
    pub(super) fn stored_after(&self, hashes: &[BlockHash], held: usize) -> usize {
        hashes[held..].iter().take_while(|hash| self.pool.is_below(**hash)).count()
    }
}
