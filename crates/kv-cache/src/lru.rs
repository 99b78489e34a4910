//! Order of eviction: a doubly linked list through an array indexed by block, so that every operation takes constant time.

use baton_types::BlockId;

/// No block.
const NIL: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
    linked: bool,
}

/// Blocks in the order in which they were put in.
#[derive(Debug)]
pub(crate) struct Lru {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Lru {
    pub(crate) fn new(num_blocks: u32) -> Self {
        let unlinked = Link { older: NIL, newer: NIL, linked: false };
        Self { links: vec![unlinked; num_blocks as usize], oldest: NIL, newest: NIL, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Puts a block in as the newest.
    pub(crate) fn push(&mut self, block: BlockId) {
        let link = Link { older: self.newest, newer: NIL, linked: true };
        let before = std::mem::replace(&mut self.links[block.index()], link);
        assert!(!before.linked, "block {} is in the list already", block.0);
        match self.newest {
            NIL => self.oldest = block.0,
            newest => self.links[newest as usize].newer = block.0,
        }
        self.newest = block.0;
        self.len += 1;
    }

    /// Takes a block out, wherever it is.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let link = self.links[block.index()];
        assert!(link.linked, "block {} is not in the list", block.0);
        match link.older {
            NIL => self.oldest = link.newer,
            older => self.links[older as usize].newer = link.newer,
        }
        match link.newer {
            NIL => self.newest = link.older,
            newer => self.links[newer as usize].older = link.older,
        }
        self.links[block.index()].linked = false;
        self.len -= 1;
    }

    /// Takes the oldest block out.
    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        let oldest = (self.oldest != NIL).then_some(BlockId(self.oldest))?;
        self.remove(oldest);
        Some(oldest)
    }

    /// From the oldest to the newest.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let at = |block: u32| (block != NIL).then_some(BlockId(block));
        std::iter::successors(at(self.oldest), move |block| at(self.links[block.index()].newer))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_deque(operations in prop::collection::vec((0u8..3, 0u32..8), 0..200)) {
            let (mut lru, mut naive) = (Lru::new(8), VecDeque::new());
            for (operation, block) in operations {
                let present = naive.contains(&block);
                match operation {
                    0 if !present => {
                        lru.push(BlockId(block));
                        naive.push_back(block);
                    }
                    1 if present => {
                        lru.remove(BlockId(block));
                        naive.retain(|other| *other != block);
                    }
                    _ => prop_assert_eq!(lru.pop().map(|b| b.0), naive.pop_front()),
                }
                prop_assert_eq!(lru.len(), naive.len());
                prop_assert!(lru.iter().map(|b| b.0).eq(naive.iter().copied()));
            }
        }
    }
}
