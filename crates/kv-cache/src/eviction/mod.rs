//! Which block goes when room is needed.
//!
//! The pool tells its policy when a block is stored, used and released, and asks it what to evict.
//! Time is the number of blocks that were released.
//!
//! **Invariant**: of what one sequence released, children are evicted before their parents: a block
//! whose parent is gone can never be matched. No policy follows the tree for that. A parent is
//! released after its children, is used whenever they are, and stands before them. Every order here
//! goes by these alone.

mod lhd;
mod lists;
mod lru;
#[cfg(test)]
mod model_test;

use std::fmt;

use baton_types::{BlockHash, BlockId};

use lhd::Lhd;
use lru::Lru;

/// Where a block stands in the prompt that it was used for last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position {
    /// Blocks before it.
    pub depth: u32,
    /// Blocks of the prompt, a last, partial one included.
    pub length: u32,
}

impl Position {
    /// Of the blocks of one prompt, from the first to the last.
    pub(crate) fn of_prompt(blocks: usize) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator {
        let length = u32::try_from(blocks).unwrap_or(u32::MAX);
        (0..length).map(move |depth| Self { depth, length })
    }

    /// Whether no block follows.
    pub(crate) const fn is_last(self) -> bool {
        self.depth + 1 == self.length
    }
}

/// An order of eviction over the blocks of one cache. Every call takes constant or logarithmic
/// time.
pub(crate) trait EvictionPolicy: fmt::Debug + Send + Sync {
    /// A block that is not in the order has a hash from now on: its first use.
    fn on_store(&mut self, block: BlockId, hash: BlockHash);

    /// One more sequence uses the block: it leaves the order, if it is there.
    fn on_use(&mut self, block: BlockId);

    /// No sequence holds the block any more: it enters the order.
    fn on_release(&mut self, block: BlockId, position: Position);

    /// Takes the block out that goes next.
    fn evict(&mut self) -> Option<BlockId>;

    /// Blocks in the order.
    fn len(&self) -> usize;

    /// The blocks in the order, in no particular one; takes time in their number.
    fn blocks(&self) -> Vec<BlockId>;
}

/// The eviction policies that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EvictionKind {
    /// What is unused for longest: the simulator shows by it what the other one is worth.
    Lru,
    /// Blocks are evicted by least hit density, by uses: LHD (Beckmann et al., NSDI 2018). It is
    /// learned from the blocks before.
    #[default]
    Lhd,
}

impl EvictionKind {
    /// An empty order over a cache of `num_blocks`.
    pub(crate) fn policy(self, num_blocks: u32) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(num_blocks)),
            Self::Lhd => Box::new(Lhd::new(num_blocks)),
        }
    }
}
