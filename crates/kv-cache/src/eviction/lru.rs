//! Least recently used.

use baton_types::{BlockHash, BlockId};

use super::lists::BlockLists;
use super::{EvictionPolicy, Position};

/// Blocks in the order in which they were released.
#[derive(Debug)]
pub(super) struct Lru {
    list: BlockLists,
}

impl Lru {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self { list: BlockLists::new(num_blocks, 1) }
    }
}

impl EvictionPolicy for Lru {
    fn on_store(&mut self, _: BlockId, _: BlockHash) {}

    fn on_use(&mut self, block: BlockId) {
        if self.list.contains(block) {
            self.list.remove(block);
        }
    }

    fn on_release(&mut self, block: BlockId, _: Position) {
        self.list.push(0, block);
    }

    fn evict(&mut self) -> Option<BlockId> {
        let oldest = self.list.oldest(0)?;
        self.list.remove(oldest);
        Some(oldest)
    }

    fn len(&self) -> usize {
        self.list.len()
    }

    fn blocks(&self) -> Vec<BlockId> {
        self.list.iter().collect()
    }
}
