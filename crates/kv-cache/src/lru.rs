//! The order in which cached blocks are evicted: the one that is unused for longest first. One
//! doubly linked list through an array indexed by block, so that every operation takes constant
//! time.
//!
//! **Invariant**: of what one sequence released, children are evicted before their parents: a block
//! whose parent is gone can never be matched. The list does not follow the tree for that. A parent
//! is released after its children and is used whenever they are, so it is newer than they are.

use baton_types::BlockId;

/// No block.
const NIL: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Outside,
    /// Its neighbours, [`NIL`] at the ends.
    Inside {
        older: u32,
        newer: u32,
    },
}

/// Blocks in the order in which they were released.
#[derive(Debug)]
pub(crate) struct LruList {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

impl LruList {
    /// An empty list over a pool of `num_blocks`.
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self { links: vec![Link::Outside; num_blocks as usize], oldest: NIL, newest: NIL, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a block in as the newest.
    ///
    /// # Panics
    /// If it is in.
    pub(crate) fn push(&mut self, block: BlockId) {
        assert_eq!(self.links[block.index()], Link::Outside, "block {} is in the list already", block.0);
        self.links[block.index()] = Link::Inside { older: self.newest, newer: NIL };
        *self.newer_of(self.newest) = block.0;
        self.newest = block.0;
        self.len += 1;
    }

    /// Takes a block out, wherever it is.
    ///
    /// # Panics
    /// If it is not in.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let link = std::mem::replace(&mut self.links[block.index()], Link::Outside);
        let Link::Inside { older, newer } = link else { panic!("block {} is not in the list", block.0) };
        *self.newer_of(older) = newer;
        *self.older_of(newer) = older;
        self.len -= 1;
    }

    /// Takes the oldest block out.
    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        let oldest = self.iter().next()?;
        self.remove(oldest);
        Some(oldest)
    }

    /// Every block, from the oldest to the newest. Ends even if the links should form a ring: a
    /// block more than there are would be too many.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let after = |block: &BlockId| match self.links[block.index()] {
            Link::Inside { newer, .. } => some(newer),
            Link::Outside => None,
        };
        std::iter::successors(some(self.oldest), after).take(self.links.len() + 1)
    }

    /// What names the block after `block`; after no block comes the oldest.
    fn newer_of(&mut self, block: u32) -> &mut u32 {
        match self.links.get_mut(block as usize) {
            Some(Link::Inside { newer, .. }) => newer,
            _ => &mut self.oldest,
        }
    }

    /// What names the block before `block`; before no block comes the newest.
    fn older_of(&mut self, block: u32) -> &mut u32 {
        match self.links.get_mut(block as usize) {
            Some(Link::Inside { older, .. }) => older,
            _ => &mut self.newest,
        }
    }
}

fn some(block: u32) -> Option<BlockId> {
    (block != NIL).then_some(BlockId(block))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn lru_list_matches_a_deque(operations in prop::collection::vec((0u8..3, 0u32..8), 0..200)) {
            let mut list = LruList::new(8);
            let mut naive = VecDeque::new();
            for (operation, block) in operations {
                let present = naive.contains(&block);
                match operation {
                    0 if !present => {
                        list.push(BlockId(block));
                        naive.push_back(block);
                    }
                    1 if present => {
                        list.remove(BlockId(block));
                        naive.retain(|other| *other != block);
                    }
                    _ => prop_assert_eq!(list.pop().map(|b| b.0), naive.pop_front()),
                }
                prop_assert_eq!(list.len(), naive.len());
                prop_assert!(list.iter().map(|b| b.0).eq(naive.iter().copied()));
            }
        }
    }
}
