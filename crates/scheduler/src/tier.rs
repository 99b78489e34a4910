//! The tier below a node's arena, on either kind of node. Blocks are written through to it when
//! they are full, and read back if the arena has lost them.
//!
//! Blocks are pinned while they are written. How many at once is bounded, and so is how many wait
//! for it. Under a load that the disk cannot follow some are not written, which costs a miss later.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use baton_kv_cache::BlockPool;
use baton_types::{BlockHash, BlockId, RequestKey};

/// A tier, or another node, that let a prefix wait for too long is not asked for so long.
pub(crate) const AVOIDED_FOR: Duration = Duration::from_secs(5);
/// Most blocks that wait to be written.
const MAX_QUEUED: usize = 4096;

/// What the shell carries out on the tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TierEffect {
    /// Write a block. Answer: `on_stored`, and until then the block is left alone.
    Store {
        /// Its hash.
        hash: BlockHash,
        /// The block before it; `None` for a first block.
        parent: Option<BlockHash>,
        /// Where it is.
        block: BlockId,
    },
    /// Read blocks into the arena. Answers: on a prefill node as of `PrefillEffect::Fetch`, on a
    /// decode node `on_load_done`. Until the last one the destinations are left alone.
    Load {
        /// The request.
        key: RequestKey,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// Where they go, in the same order.
        destinations: Vec<BlockId>,
    },
    /// Forget these blocks. No answer.
    Forget(Vec<BlockHash>),
    /// Forget everything. No answer.
    Clear,
}

crate::named!(TierEffect: Store, Load, Forget, Clear);

/// What a core hears of its tier. Both cores hear the same.
pub trait TieredCore {
    /// What the tier holds from an earlier life of the node.
    fn on_store_recovered(&mut self, blocks: impl IntoIterator<Item = (BlockHash, Option<BlockHash>)>);
    /// A write is over.
    fn on_stored(&mut self, now: Instant, hash: BlockHash, stored: bool);
    /// The tier has lost a block: it made room for another, or what was read was no good.
    fn on_store_lost(&mut self, hash: BlockHash);
}

/// A core's books of its blocks.
pub trait BlockAccounts {
    /// The arena's, and those of writes to the tier.
    fn accounts(&mut self) -> (&mut BlockPool, &mut Stores);
    /// A block that was written is released: the next writes may begin, and a request may have
    /// room.
    fn after_store(&mut self, now: Instant);
}

impl<C: BlockAccounts> TieredCore for C {
    fn on_store_recovered(&mut self, blocks: impl IntoIterator<Item = (BlockHash, Option<BlockHash>)>) {
        for (hash, parent) in blocks {
            self.accounts().0.stored_below(hash, parent);
        }
    }

    fn on_stored(&mut self, now: Instant, hash: BlockHash, stored: bool) {
        let (pool, stores) = self.accounts();
        if stores.done(pool, hash, stored) {
            self.after_store(now);
        }
    }

    fn on_store_lost(&mut self, hash: BlockHash) {
        self.accounts().0.removed_below(hash);
    }
}

/// Writes under way and to come.
#[derive(Debug)]
pub struct Stores {
    /// Most at once; 0 if there is no tier.
    max: usize,
    /// Nothing new is written: the node is on its way out.
    stopped: bool,
    /// Oldest first; a block that is not in the arena any more when its turn comes is passed over.
    queued: VecDeque<(BlockHash, Option<BlockHash>)>,
    under_way: BTreeMap<BlockHash, (BlockId, Option<BlockHash>)>,
    /// Of those under way, what is to be forgotten once it is written.
    unwanted: BTreeSet<BlockHash>,
    /// What was written all the same.
    to_forget: Vec<BlockHash>,
}

impl Stores {
    /// At most `max` writes at once.
    pub fn new(max: usize) -> Self {
        Self {
            max,
            stopped: false,
            queued: VecDeque::new(),
            under_way: BTreeMap::new(),
            unwanted: BTreeSet::new(),
            to_forget: Vec::new(),
        }
    }

    /// A block is full: it goes to the tier when its turn comes.
    pub fn queue(&mut self, pool: &BlockPool, hash: BlockHash, parent: Option<BlockHash>) {
        if self.max == 0 || self.stopped || pool.is_below(hash) {
            return;
        }
        if self.queued.len() == MAX_QUEUED {
            self.queued.pop_front();
        }
        self.queued.push_back((hash, parent));
    }

    /// The next write, if one more may begin; to be called until `None`.
    pub fn start(&mut self, pool: &mut BlockPool) -> Option<TierEffect> {
        if !self.to_forget.is_empty() {
            return Some(TierEffect::Forget(std::mem::take(&mut self.to_forget)));
        }
        while self.under_way.len() < self.max {
            let (hash, parent) = self.queued.pop_front()?;
            let known = pool.is_below(hash) || self.under_way.contains_key(&hash);
            let found = pool.match_prefix(&[hash]);
            let Some(&block) = found.first().filter(|_| !known && pool.check_fits(&found, 0).is_ok()) else { continue };
            pool.acquire(&found);
            self.under_way.insert(hash, (block, parent));
            return Some(TierEffect::Store { hash, parent, block });
        }
        None
    }

    /// A write is over. `false`: it is not known.
    pub fn done(&mut self, pool: &mut BlockPool, hash: BlockHash, stored: bool) -> bool {
        let Some((block, parent)) = self.under_way.remove(&hash) else { return false };
        match (stored, self.unwanted.remove(&hash)) {
            (true, false) => pool.stored_below(hash, parent),
            (true, true) => self.to_forget.push(hash),
            (false, _) => {}
        }
        pool.release(&[block]);
        true
    }

    /// These blocks are no good.
    pub fn forget(&mut self, hashes: Vec<BlockHash>) -> Option<TierEffect> {
        let unwanted: BTreeSet<_> = hashes.iter().copied().collect();
        self.queued.retain(|(hash, _)| !unwanted.contains(hash));
        self.unwanted.extend(self.under_way.keys().filter(|hash| unwanted.contains(*hash)));
        (self.max > 0 && !hashes.is_empty()).then_some(TierEffect::Forget(hashes))
    }

    /// The node takes nothing new: what has not begun is not written.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.queued.clear();
    }

    /// It takes something new again.
    pub fn go_on(&mut self) {
        self.stopped = false;
    }

    /// Everything is to be forgotten.
    pub fn clear(&mut self) -> Option<TierEffect> {
        self.queued.clear();
        self.unwanted.extend(self.under_way.keys());
        (self.max > 0).then_some(TierEffect::Clear)
    }

    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Hashes of the blocks that are being written.
    pub fn under_way(&self) -> Vec<BlockHash> {
        self.under_way.keys().copied().collect()
    }

    /// Blocks that are being written.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.under_way.values().map(|(block, _)| *block)
    }
}

/// Blocks after the first `held` of these that the tier holds.
pub(crate) fn stored_after(pool: &BlockPool, hashes: &[BlockHash], held: usize) -> usize {
    hashes[held..].iter().take_while(|hash| pool.is_below(**hash)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool whose first block is being written.
    fn writing() -> (BlockPool, Stores, BlockHash) {
        let hash = BlockHash([1; 16]);
        let mut pool = BlockPool::new(4, 100);
        let mut stores = Stores::new(2);
        let blocks = pool.allocate(1).unwrap();
        pool.complete(blocks[0], hash, None);
        stores.queue(&pool, hash, None);
        assert!(matches!(stores.start(&mut pool), Some(TierEffect::Store { .. })));
        pool.release(&blocks);
        (pool, stores, hash)
    }

    #[test]
    fn block_that_is_being_written_is_forgotten_when_it_is_there() {
        for clears in [false, true] {
            let (mut pool, mut stores, hash) = writing();
            if clears {
                pool.clear_cached();
                assert_eq!(stores.clear(), Some(TierEffect::Clear));
            } else {
                let forgotten = pool.forget_with_successors(&[hash]);
                assert_eq!(stores.forget(forgotten), Some(TierEffect::Forget(vec![hash])));
            }
            assert!(stores.done(&mut pool, hash, true));
            assert!(!pool.is_below(hash), "clears: {clears}");
            assert_eq!(stores.start(&mut pool), Some(TierEffect::Forget(vec![hash])));
            assert_eq!(stores.start(&mut pool), None);
        }
        let (mut pool, mut stores, hash) = writing();
        stores.done(&mut pool, hash, true);
        assert!(pool.is_below(hash));
    }
}
