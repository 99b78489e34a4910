//! Least hit density: what promises the fewest hits for the room and time that it will take.
//!
//! Blocks are told apart by how often they were used. Conversations that went on go on; most
//! prompts never come again. The last block of a prompt, which ends where its text happens to end,
//! hardly ever comes again. Each class is a list, oldest first. What a class of an age is worth is
//! learned from all blocks of that class and age before, evicted ones included. Their hashes are
//! remembered for a while, so that the cost of eviction is seen.

mod density;
mod ghosts;

use baton_types::{BlockHash, BlockId};

use self::density::{CLASSES, Densities};
use self::ghosts::Ghosts;
use super::lists::BlockLists;
use super::{EvictionPolicy, Position};

/// Ages are told apart in parts of the time in which as many blocks are released as the cache has.
const EPOCHS_PER_CACHE: u32 = 16;
/// Evicted blocks that are remembered, per block of the cache: as many as are released while they
/// count.
const GHOSTS_PER_BLOCK: usize = density::WINDOW as usize / EPOCHS_PER_CACHE as usize;

/// What is known of a block that has a hash, or had one and is remembered.
#[derive(Debug, Clone, Copy)]
struct Life {
    uses: u8,
    class: u8,
    /// When it was released last: blocks released until then.
    released: u64,
}

/// Orders blocks by their class and age.
#[derive(Debug)]
pub(super) struct Lhd {
    /// One per class.
    lists: BlockLists,
    lives: Vec<Life>,
    hashes: Vec<BlockHash>,
    ghosts: Ghosts,
    densities: Densities,
    /// Blocks released so far.
    now: u64,
    epoch_blocks: u64,
}

impl Lhd {
    pub(super) fn new(num_blocks: u32) -> Self {
        let blocks = num_blocks as usize;
        let unused = Life { uses: 0, class: 0, released: 0 };
        Self {
            lists: BlockLists::new(num_blocks, CLASSES),
            lives: vec![unused; blocks],
            hashes: vec![BlockHash([0; 16]); blocks],
            ghosts: Ghosts::new(blocks.saturating_mul(GHOSTS_PER_BLOCK)),
            densities: Densities::new(),
            now: 0,
            epoch_blocks: u64::from(num_blocks / EPOCHS_PER_CACHE).max(1),
        }
    }

    fn density(&self, life: Life) -> f64 {
        self.densities.density(life.class.into(), life.released / self.epoch_blocks)
    }

    fn on_hit(&mut self, life: Life) {
        self.densities.on_hit(life.class.into(), life.released / self.epoch_blocks);
    }

    fn on_loss(&mut self, life: Life) {
        self.densities.on_loss(life.class.into(), life.released / self.epoch_blocks);
    }

    /// The oldest block of the class that is worth least; of equals the one unused for longest.
    fn least(&self) -> Option<BlockId> {
        let worth = |block: BlockId| {
            let life = self.lives[block.index()];
            (self.density(life), life.released)
        };
        let oldest = (0..CLASSES).filter_map(|class| self.lists.oldest(class)).map(|block| (worth(block), block));
        let least = oldest.min_by(|((a, older), _), ((b, newer), _)| a.total_cmp(b).then(older.cmp(newer)));
        least.map(|(_, block)| block)
    }
}

impl EvictionPolicy for Lhd {
    fn on_store(&mut self, block: BlockId, hash: BlockHash) {
        let ghost = self.ghosts.take(hash);
        if let Some(life) = ghost {
            self.on_hit(life);
        }
        let uses = ghost.map_or(0, |ghost| ghost.uses).saturating_add(1);
        self.lives[block.index()].uses = uses;
        self.hashes[block.index()] = hash;
    }

    fn on_use(&mut self, block: BlockId) {
        if self.lists.contains(block) {
            self.lists.remove(block);
            self.on_hit(self.lives[block.index()]);
        }
        let uses = &mut self.lives[block.index()].uses;
        *uses = uses.saturating_add(1);
    }

    fn on_release(&mut self, block: BlockId, position: Position) {
        self.now += 1;
        if self.now.is_multiple_of(self.epoch_blocks) {
            self.densities.next_epoch();
        }
        let life = &mut self.lives[block.index()];
        let class = density::class(life.uses, position);
        life.class = class as u8;
        life.released = self.now;
        self.densities.on_release(class);
        self.lists.push(class, block);
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.least()?;
        self.lists.remove(block);
        if let Some(life) = self.ghosts.push(self.hashes[block.index()], self.lives[block.index()]) {
            self.on_loss(life);
        }
        Some(block)
    }

    fn len(&self) -> usize {
        self.lists.len()
    }

    fn blocks(&self) -> Vec<BlockId> {
        self.lists.iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lhd_evicts_a_block_of_least_density(
            prompts in prop::collection::vec((0u8..24, 1usize..6), 1..200),
        ) {
            let mut policy = Lhd::new(16);
            let mut free: Vec<_> = (0..16).map(BlockId).collect();
            for (first, length) in prompts {
                let blocks: Vec<_> = (0..length).filter_map(|_| free.pop()).collect();
                for (n, block) in (first..).zip(&blocks) {
                    policy.on_store(*block, BlockHash([n; 16]));
                }
                for (block, position) in blocks.iter().zip(Position::of_prompt(length)).rev() {
                    policy.on_release(*block, position);
                }
                while free.len() < 5 {
                    let all = policy.blocks().into_iter().map(|block| policy.lives[block.index()]);
                    let densities = all.map(|life| policy.density(life));
                    let least = densities.fold(f64::INFINITY, f64::min);
                    let block = policy.evict().expect("11 blocks are in the order");
                    let life = policy.lives[block.index()];
                    prop_assert_eq!(policy.density(life), least);
                    free.push(block);
                }
            }
        }
    }
}
