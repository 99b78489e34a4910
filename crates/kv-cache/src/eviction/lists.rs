//! Doubly linked lists through one array indexed by block, so that every operation takes constant
//! time.

use baton_types::BlockId;

/// No block, and no list.
const NIL: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
    /// The list that the block is in.
    list: u32,
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
}

/// Lists of blocks in the order in which they were put in; a block is in one of them at most.
#[derive(Debug)]
pub(crate) struct BlockLists {
    links: Vec<Link>,
    ends: Vec<Ends>,
    len: usize,
}

impl BlockLists {
    pub(crate) fn new(num_blocks: u32, lists: usize) -> Self {
        let links = vec![Link { older: NIL, newer: NIL, list: NIL }; num_blocks as usize];
        Self { links, ends: vec![Ends { oldest: NIL, newest: NIL }; lists], len: 0 }
    }

    /// Blocks in all lists.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].list != NIL
    }

    /// Puts a block into a list as its newest.
    pub(crate) fn push(&mut self, list: usize, block: BlockId) {
        assert!(!self.contains(block), "block {} is in a list already", block.0);
        let newest = std::mem::replace(&mut self.ends[list].newest, block.0);
        self.links[block.index()] = Link { older: newest, newer: NIL, list: list as u32 };
        match newest {
            NIL => self.ends[list].oldest = block.0,
            newest => self.links[newest as usize].newer = block.0,
        }
        self.len += 1;
    }

    /// Takes a block out, wherever it is.
    pub(crate) fn remove(&mut self, block: BlockId) {
        assert!(self.contains(block), "block {} is in no list", block.0);
        let Link { older, newer, list } = self.links[block.index()];
        match older {
            NIL => self.ends[list as usize].oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NIL => self.ends[list as usize].newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.links[block.index()].list = NIL;
        self.len -= 1;
    }

    pub(crate) fn oldest(&self, list: usize) -> Option<BlockId> {
        block(self.ends[list].oldest)
    }

    /// Every block, list by list, from the oldest to the newest. Ends even if the links should form
    /// a ring: a block more than there are would be too many.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let newer = |block_id: &BlockId| block(self.links[block_id.index()].newer);
        let lists = self.ends.iter().flat_map(move |ends| std::iter::successors(block(ends.oldest), newer));
        lists.take(self.links.len() + 1)
    }
}

fn block(id: u32) -> Option<BlockId> {
    (id != NIL).then_some(BlockId(id))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn block_lists_match_deques(operations in prop::collection::vec((0u8..3, 0usize..2, 0u32..8), 0..200)) {
            let mut lists = BlockLists::new(8, 2);
            let mut naive = [VecDeque::new(), VecDeque::new()];
            for (operation, list, block) in operations {
                let present = naive.iter().any(|list| list.contains(&block));
                prop_assert_eq!(lists.contains(BlockId(block)), present);
                match operation {
                    0 if !present => {
                        lists.push(list, BlockId(block));
                        naive[list].push_back(block);
                    }
                    1 if present => {
                        lists.remove(BlockId(block));
                        naive.iter_mut().for_each(|list| list.retain(|other| *other != block));
                    }
                    _ => prop_assert_eq!(lists.oldest(list).map(|b| b.0), naive[list].front().copied()),
                }
                prop_assert_eq!(lists.len(), naive[0].len() + naive[1].len());
                prop_assert!(lists.iter().map(|b| b.0).eq(naive.iter().flatten().copied()));
            }
        }
    }
}
