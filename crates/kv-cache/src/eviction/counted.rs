//! Least frequently used, and its length-aware kind.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use baton_types::{BlockHash, BlockId};

use super::{EvictionPolicy, Position};

/// What goes first: fewest uses, then latest in its prompt (if that counts), then unused for
/// longest.
type Rank = (u32, Reverse<u32>, u64);

/// Blocks in the order of their uses since they were stored.
#[derive(Debug)]
pub(super) struct Counted {
    uses: Vec<u32>,
    /// Of the blocks in the order.
    ranks: Vec<Option<Rank>>,
    order: BTreeSet<(Rank, BlockId)>,
    /// Blocks released so far.
    now: u64,
    by_depth: bool,
}

impl Counted {
    pub(super) fn lfu(num_blocks: u32) -> Self {
        Self::new(num_blocks, false)
    }

    pub(super) fn length_aware(num_blocks: u32) -> Self {
        Self::new(num_blocks, true)
    }

    fn new(num_blocks: u32, by_depth: bool) -> Self {
        let uses = vec![0; num_blocks as usize];
        let ranks = vec![None; num_blocks as usize];
        Self { uses, ranks, order: BTreeSet::new(), now: 0, by_depth }
    }
}

impl EvictionPolicy for Counted {
    fn on_store(&mut self, block: BlockId, _: BlockHash) {
        self.uses[block.index()] = 1;
    }

    fn on_use(&mut self, block: BlockId) {
        self.on_forget(block);
        let uses = &mut self.uses[block.index()];
        *uses = uses.saturating_add(1);
    }

    fn on_release(&mut self, block: BlockId, position: Position) {
        self.now += 1;
        let depth = if self.by_depth { position.depth } else { 0 };
        let rank = (self.uses[block.index()], Reverse(depth), self.now);
        let before = self.ranks[block.index()].replace(rank);
        assert!(before.is_none(), "block {} is in the order already", block.0);
        self.order.insert((rank, block));
    }

    fn on_forget(&mut self, block: BlockId) {
        if let Some(rank) = self.ranks[block.index()].take() {
            self.order.remove(&(rank, block));
        }
    }

    fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.order.pop_first()?;
        self.ranks[block.index()] = None;
        Some(block)
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn blocks(&self) -> Vec<BlockId> {
        self.order.iter().map(|(_, block)| *block).collect()
    }
}
