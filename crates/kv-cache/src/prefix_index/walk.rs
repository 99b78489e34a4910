//! Along a chain of blocks: who holds how much of its beginning.

use baton_types::BlockHash;

use super::holders::Holders;
use super::table::MANY;
use super::{Inner, NodeSlot};

/// Blocks of a chain that are looked at after its first ones, about, however long it is.
const LOOKS: usize = 64;
/// Looking for one slot among so many members takes about as long as going over them.
const FEW: usize = 8;

/// How many leading blocks of a chain each node holds; nodes that hold none are not in it.
///
/// Of a chain of more than 80 blocks every second, third... is looked at after the first 16, and those between two looks only where a node is lost from one to the next: a node that holds a block holds those before it, but for
/// what was evicted from their middle, and the node finds that out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixMatches(Vec<(NodeSlot, u32)>);

impl PrefixMatches {
    /// Nodes and blocks, ascending by blocks.
    pub fn by_slot(&self) -> &[(NodeSlot, u32)] {
        &self.0
    }
}

/// Where the walk is.
struct Walk<'a> {
    inner: &'a Inner,
    /// Nodes that hold every block so far, ascending.
    alive: Vec<u16>,
    /// Who holds the last block.
    last: Option<Holders>,
    matches: Vec<(NodeSlot, u32)>,
}

impl Walk<'_> {
    /// Whether nobody is lost with this block.
    fn keeps_all(&self, holders: Option<Holders>) -> bool {
        if holders == self.last {
            return true;
        }
        let Some(holders) = holders else { return false };
        let members = self.inner.sets.members(holders);
        let mut members = members.as_slice().iter();
        self.alive.iter().all(|slot| members.any(|member| member == slot))
    }

    /// Goes on to the block with the number `depth`, from 0; whether anybody holds it.
    fn step(&mut self, depth: u32, holders: Option<Holders>) -> bool {
        if holders == self.last {
            return true;
        }
        self.last = holders;
        let members = holders.map(|holders| self.inner.sets.members(holders));
        let members = members.as_ref().map_or(&[][..], |members| members.as_slice());
        let matches = &mut self.matches;
        let mut keep = |slot: &u16, holds: bool| {
            if !holds {
                matches.push((NodeSlot(*slot), depth));
            }
            holds
        };
        if members.len() > FEW * self.alive.len() {
            self.alive.retain(|slot| keep(slot, members.binary_search(slot).is_ok()));
        } else {
            let mut members = members.iter().peekable();
            self.alive.retain(|slot| {
                while members.next_if(|member| *member < slot).is_some() {}
                keep(slot, members.peek() == Some(&slot))
            });
        }
        !self.alive.is_empty()
    }
}

impl Inner {
    pub(super) fn walk(&self, hashes: &[BlockHash]) -> PrefixMatches {
        let (head, rest) = hashes.split_at(hashes.len().min(MANY));
        let looked = self.table.get_many(head.iter());
        let Some(first) = looked[0].filter(|_| !hashes.is_empty()) else { return PrefixMatches::default() };
        let alive = self.sets.members(first).as_slice().to_vec();
        let matches = Vec::with_capacity(alive.len());
        let mut walk = Walk { inner: self, alive, last: Some(first), matches };
        if self.clearing > 0 {
            walk.alive.retain(|slot| !self.is_clearing(NodeSlot(*slot)));
        }
        let depth = walk.along(&looked[..head.len()], rest);
        let Walk { alive, mut matches, .. } = walk;
        matches.extend(alive.into_iter().map(|slot| (NodeSlot(slot), depth)));
        PrefixMatches(matches)
    }
}

impl Walk<'_> {
    /// Goes on along the chain to its end or until nobody holds more, after its first block, when it has been seen who holds the first few; how many blocks those hold that are left.
    fn along(&mut self, looked: &[Option<Holders>], rest: &[BlockHash]) -> u32 {
        let mut depth = 1;
        for holders in looked.iter().skip(1) {
            if !self.step(depth, *holders) {
                return depth;
            }
            depth += 1;
        }
        let stride = rest.len().div_ceil(LOOKS).max(1);
        for group in rest.chunks(stride * MANY) {
            let strides = group.chunks(stride);
            let far = self.inner.table.get_many(strides.clone().filter_map(<[_]>::last));
            for (blocks, far) in strides.zip(far) {
                if !self.along_stride(&mut depth, blocks, far) {
                    return depth;
                }
            }
        }
        depth
    }

    /// Goes on along some blocks, the last of which these hold; whether somebody is left.
    fn along_stride(&mut self, depth: &mut u32, blocks: &[BlockHash], far: Option<Holders>) -> bool {
        if blocks.len() > 1 && self.keeps_all(far) {
            self.last = far;
            *depth += blocks.len() as u32;
            return true;
        }
        let between = blocks[..blocks.len() - 1].iter().map(|hash| self.inner.table.get(hash));
        for holders in between.chain([far]) {
            if !self.step(*depth, holders) {
                return false;
            }
            *depth += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Generation, KvEvent, NodeId};
    use proptest::prelude::*;

    use super::super::PrefixIndex;
    use super::*;

    fn chain(blocks: u64) -> Vec<BlockHash> {
        (0..blocks).map(|block| BlockHash(u128::from(block + 1).to_le_bytes())).collect()
    }

    proptest! {
        /// Nodes that hold the beginning of a chain are found with as many blocks as they hold, however long it is.
        #[test]
        fn of_long_chains_the_beginnings_are_found(
            blocks in 1u64..3000,
            held in prop::collection::vec(0u64..3000, 1..8),
        ) {
            let (index, chain) = (PrefixIndex::new(1 << 20), chain(blocks));
            let mut expected = Vec::new();
            for (n, held) in held.into_iter().enumerate() {
                let (node, held) = (NodeId::new(&format!("n{n}")).unwrap(), held.min(blocks));
                let slot = index.add_node(&node, Generation(1)).unwrap();
                let stored = chain[..held as usize].iter().map(|hash| KvEvent::Stored { hash: *hash, parent: None });
                index.apply(&node, Generation(1), 0, &stored.collect::<Vec<_>>());
                expected.extend((held > 0).then_some((held as u32, slot)));
            }
            expected.sort_unstable();
            let found = index.matches(&chain);
            prop_assert!(found.by_slot().is_sorted_by_key(|(_, blocks)| *blocks));
            let mut found: Vec<_> = found.by_slot().iter().map(|(slot, blocks)| (*blocks, *slot)).collect();
            found.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }
}
