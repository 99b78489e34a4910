//! Along a chain of blocks: who holds how much of its beginning.

use baton_types::BlockHash;

use super::holders::{Holders, Members};
use super::table::MANY;
use super::{Inner, NodeSlot};

/// Blocks of a chain that are looked at after its first `MANY`, about, however long it is. Both
/// together are what `PrefixMatches` promises.
const LOOKS: usize = 48;

/// How many leading blocks of a chain each node holds; nodes that hold none are not in it.
///
/// Of a chain of more than 80 blocks every second, third... is looked at after the first 32. Those
/// between two looks are looked at only if a node is lost from one to the next. A node that holds a
/// block holds those before it, but for what was evicted from their middle; the node finds that
/// out.
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
    /// Nodes that were lost, with the blocks that they hold, and then those that hold every block
    /// so far, ascending.
    nodes: Vec<(NodeSlot, u32)>,
    /// How many were lost.
    lost: usize,
    /// Who holds the last block.
    last: Option<Holders>,
}

impl Walk<'_> {
    /// Whether no node is lost with this block.
    fn keeps_all(&self, holders: Option<Holders>) -> bool {
        if holders == self.last {
            return true;
        }
        let Some(holders) = holders else { return false };
        let members = self.inner.sets.members(holders);
        let mut members = members.as_slice().iter();
        self.nodes[self.lost..].iter().all(|(slot, _)| members.any(|member| *member == slot.0))
    }

    /// Goes on to the block with the number `depth`, from 0; whether any node holds it.
    fn step(&mut self, depth: u32, holders: Option<Holders>) -> bool {
        if holders == self.last {
            return true;
        }
        self.last = holders;
        let members = holders.map(|holders| self.inner.sets.members(holders));
        let members = members.as_ref().map_or(&[][..], Members::as_slice);
        let alive = &mut self.nodes[self.lost..];
        let lost = keep(alive, members);
        alive[..lost].iter_mut().for_each(|(_, blocks)| *blocks = depth);
        self.lost += lost;
        self.lost < self.nodes.len()
    }
}

/// Moves the nodes that are among the members to the end, in their order; how many are not.
fn keep(nodes: &mut [(NodeSlot, u32)], members: &[u16]) -> usize {
    let mut lost = nodes.len();
    let mut keep = |nodes: &mut [(NodeSlot, u32)], at| {
        lost -= 1;
        nodes.swap(at, lost);
    };
    // From the end, so that those that change places with them have been looked at. Each of the
    // fewer is looked for among the others.
    if members.len() < nodes.len() {
        let mut end = nodes.len();
        for member in members.iter().rev() {
            let at = search_back(&nodes[..end], *member, |(slot, _)| slot.0);
            end = at.unwrap_or_else(|at| at);
            if at.is_ok() {
                keep(nodes, end);
            }
        }
    } else {
        let mut end = members.len();
        for n in (0..nodes.len()).rev() {
            let at = search_back(&members[..end], nodes[n].0.0, |member| *member);
            end = at.unwrap_or_else(|at| at);
            if at.is_ok() {
                keep(nodes, n);
            }
        }
    }
    lost
}

/// Where a slot is, or would be. Takes the logarithm of how far it is from the end.
fn search_back<T>(sorted: &[T], slot: u16, slot_of: impl Fn(&T) -> u16) -> Result<usize, usize> {
    let mut reach = 1;
    while reach < sorted.len() && slot_of(&sorted[sorted.len() - reach]) > slot {
        reach *= 2;
    }
    let begin = sorted.len().saturating_sub(reach);
    let at = sorted[begin..].binary_search_by_key(&slot, slot_of);
    at.map(|at| begin + at).map_err(|at| begin + at)
}

impl Inner {
    pub(super) fn walk(&self, hashes: &[BlockHash]) -> PrefixMatches {
        let (head, rest) = hashes.split_at(hashes.len().min(MANY));
        let looked = self.table.get_many(head.iter());
        let Some(first) = looked[0].filter(|_| !hashes.is_empty()) else { return PrefixMatches::default() };
        let mut nodes: Vec<_> = self.sets.members(first).as_slice().iter().map(|slot| (NodeSlot(*slot), 0)).collect();
        if self.clearing > 0 {
            nodes.retain(|(slot, _)| !self.is_clearing(*slot));
        }
        let mut walk = Walk { inner: self, nodes, lost: 0, last: Some(first) };
        let depth = walk.along(&looked[..head.len()], rest);
        let Walk { mut nodes, lost, .. } = walk;
        nodes[lost..].iter_mut().for_each(|(_, blocks)| *blocks = depth);
        PrefixMatches(nodes)
    }
}

impl Walk<'_> {
    /// Goes on along the chain, after its first block, to its end or until no node holds more. It
    /// has been seen who holds the first few. Returns how many blocks those hold that are left.
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

    /// Goes on along some blocks, the last of which these hold; whether a node is left.
    fn along_stride(&mut self, depth: &mut u32, blocks: &[BlockHash], far: Option<Holders>) -> bool {
        if blocks.len() > 1 && self.keeps_all(far) {
            self.last = far;
            *depth += blocks.len() as u32;
            return true;
        }
        let between = blocks[..blocks.len() - 1].iter().map(|hash| self.inner.table.get(self.inner.table.key(hash)));
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
        #[test]
        fn prefix_walk_keeps_only_nodes_that_hold_the_block(
            nodes in prop::collection::btree_set(0u16..200, 0..100),
            members in prop::collection::btree_set(0u16..200, 0..100),
        ) {
            let mut found: Vec<_> = nodes.iter().map(|slot| (NodeSlot(*slot), 0)).collect();
            let lost = keep(&mut found, &members.iter().copied().collect::<Vec<_>>());
            prop_assert!(found[lost..].iter().map(|(slot, _)| &slot.0).eq(nodes.intersection(&members)));
            found.sort_unstable();
            prop_assert!(found.iter().map(|(slot, _)| &slot.0).eq(&nodes));
        }

        /// Nodes that hold the beginning of a chain are found with as many blocks as they hold,
        /// however long it is.
        #[test]
        fn prefix_walk_finds_cached_length_of_each_node_in_long_chain(
            blocks in 1u64..3000,
            held in prop::collection::vec(0u64..3000, 1..8),
        ) {
            let index = PrefixIndex::new(1 << 20);
            let chain = chain(blocks);
            let mut expected = Vec::new();
            for (n, held) in held.into_iter().enumerate() {
                let node = NodeId::new(&format!("n{n}")).unwrap();
                let held = held.min(blocks);
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
