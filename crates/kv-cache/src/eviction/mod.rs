//! Which block goes when room is needed.
//!
//! A cache tells its policy when a block is stored, used, released and forgotten, and asks it what
//! to evict. Time is the number of blocks that were released.
//!
//! **Invariant**: of what one sequence released, children are evicted before their parents: a block
//! whose parent is gone can never be matched. No policy follows the tree for that. A parent is
//! released after its children, is used whenever they are, and stands before them. Every order here
//! goes by these alone.

mod counted;
mod lhd;
mod lists;
mod lru;
#[cfg(test)]
mod model_test;
mod tier_cache;

use std::fmt;
use std::str::FromStr;

use baton_types::{BlockHash, BlockId};

use counted::Counted;
use lhd::Lhd;
use lru::Lru;

pub use tier_cache::TierCache;

/// Where a block stands in the prompt that it was used for last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
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

    /// The block is dropped, but not for its place in the order.
    fn on_forget(&mut self, block: BlockId);

    /// Takes the block out that goes next.
    fn evict(&mut self) -> Option<BlockId>;

    /// Blocks in the order.
    fn len(&self) -> usize;

    /// The blocks in the order, in no particular one; takes time in their number.
    fn blocks(&self) -> Vec<BlockId>;
}

/// The eviction policies that there are, by the names used in settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum EvictionKind {
    /// What is unused for longest.
    Lru,
    /// What was used least often since it was stored, then what is unused for longest.
    Lfu,
    /// What was used least often, then what stands latest in its prompt: LengthAwareCache of
    /// Mooncake (arXiv 2407.00079, section 4.2).
    LengthAware,
    /// Blocks are evicted by least hit density, by uses: LHD (Beckmann et al., NSDI 2018). It is
    /// learned from the blocks before.
    #[default]
    Lhd,
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an eviction policy (lru, lfu, length-aware, lhd)")]
pub struct UnknownEviction(pub String);

impl EvictionKind {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Lru, Self::Lfu, Self::LengthAware, Self::Lhd];

    /// Its name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::LengthAware => "length-aware",
            Self::Lhd => "lhd",
        }
    }

    /// An empty order over a cache of `num_blocks`.
    pub(crate) fn policy(self, num_blocks: u32) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(num_blocks)),
            Self::Lfu => Box::new(Counted::lfu(num_blocks)),
            Self::LengthAware => Box::new(Counted::length_aware(num_blocks)),
            Self::Lhd => Box::new(Lhd::new(num_blocks)),
        }
    }
}

impl fmt::Display for EvictionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for EvictionKind {
    type Err = UnknownEviction;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name).ok_or_else(|| UnknownEviction(name.to_owned()))
    }
}
