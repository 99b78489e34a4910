//! The conductor's picture of which node holds which block.

use std::collections::HashMap;

use baton_types::{BlockHash, Generation, KvEvent, NodeId};

/// What became of a node's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// The index has them.
    Applied,
    /// Events before these are missing: ask the node for a snapshot. Until it comes, the node holds nothing here.
    Gap,
    /// They are of an older generation, or known already.
    Stale,
}

/// Set of node slots: one word for the first 64, more where there are more nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct SlotSet {
    first: u64,
    more: Vec<u64>,
}

impl SlotSet {
    fn word(&mut self, slot: u16) -> (&mut u64, u64) {
        let (word, bit) = (usize::from(slot / 64), 1 << (slot % 64));
        if word == 0 {
            return (&mut self.first, bit);
        }
        if self.more.len() < word {
            self.more.resize(word, 0);
        }
        (&mut self.more[word - 1], bit)
    }

    /// Whether the slot was not in it.
    fn insert(&mut self, slot: u16) -> bool {
        let (word, bit) = self.word(slot);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Whether the slot was in it.
    fn remove(&mut self, slot: u16) -> bool {
        let (word, bit) = self.word(slot);
        let had = *word & bit != 0;
        *word &= !bit;
        had
    }

    fn contains(&self, slot: u16) -> bool {
        let word = match usize::from(slot / 64) {
            0 => self.first,
            word => self.more.get(word - 1).copied().unwrap_or(0),
        };
        word & (1 << (slot % 64)) != 0
    }

    fn is_empty(&self) -> bool {
        self.first == 0 && self.more.iter().all(|word| *word == 0)
    }
}

#[derive(Debug)]
struct Slot {
    node: NodeId,
    generation: Generation,
    /// Number of the event expected next; `None` until a snapshot repairs a gap.
    next: Option<u64>,
    /// Blocks of this node in the index.
    entries: usize,
}

/// Block hash to the nodes that hold the block.
///
/// **Invariant**: a node's entries are what its events said, in order and without a gap, or nothing at all. More than `max_entries_per_node` are not kept:
/// a node cannot fill the conductor's memory, and what is missing costs a cache hit only.
#[derive(Debug)]
pub struct PrefixIndex {
    blocks: HashMap<BlockHash, SlotSet>,
    slots: Vec<Option<Slot>>,
    max_entries_per_node: usize,
}

impl PrefixIndex {
    /// An empty index.
    pub fn new(max_entries_per_node: usize) -> Self {
        Self { blocks: HashMap::new(), slots: Vec::new(), max_entries_per_node }
    }

    /// Takes in events of a node, the first of which has the number `sequence`. Overlap with what is known is skipped.
    pub fn apply(&mut self, node: &NodeId, generation: Generation, sequence: u64, events: &[KvEvent]) -> Applied {
        let Some(slot) = self.slot_for(node, generation) else { return Applied::Stale };
        // A node that is new here begins at 0; whoever hears of it later needs a snapshot.
        let Some(next) = self.slot(slot).next else { return Applied::Gap };
        if sequence > next {
            self.empty_slot(slot);
            self.slot_mut(slot).next = None;
            return Applied::Gap;
        }
        let known = usize::try_from(next - sequence).unwrap_or(usize::MAX);
        let Some(new) = events.get(known..).filter(|new| !new.is_empty()) else { return Applied::Stale };
        for event in new {
            self.apply_event(slot, *event);
        }
        self.slot_mut(slot).next = Some(sequence + events.len() as u64);
        Applied::Applied
    }

    /// Replaces everything known about a node. `sequence` is the number of the node's next event.
    pub fn snapshot(&mut self, node: &NodeId, generation: Generation, sequence: u64, events: &[KvEvent]) -> Applied {
        let Some(slot) = self.slot_for(node, generation) else { return Applied::Stale };
        if self.slot(slot).next.is_some_and(|next| next > sequence) {
            return Applied::Stale;
        }
        self.empty_slot(slot);
        for event in events {
            self.apply_event(slot, *event);
        }
        self.slot_mut(slot).next = Some(sequence);
        Applied::Applied
    }

    /// Forgets a node.
    pub fn remove_node(&mut self, node: &NodeId) {
        if let Some(slot) = self.find(node) {
            self.empty_slot(slot);
            self.slots[usize::from(slot)] = None;
        }
    }

    /// How many leading blocks of a chain each node holds; nodes that hold none are left out.
    pub fn longest_prefix(&self, hashes: &[BlockHash]) -> Vec<(NodeId, u32)> {
        let mut alive: Vec<u16> = (0..self.slots.len() as u16).collect();
        let mut matched = vec![0; self.slots.len()];
        for hash in hashes {
            let Some(holders) = self.blocks.get(hash) else { break };
            alive.retain(|slot| holders.contains(*slot));
            for slot in &alive {
                matched[usize::from(*slot)] += 1;
            }
            if alive.is_empty() {
                break;
            }
        }
        let named = self.slots.iter().zip(matched).filter(|(_, matched)| *matched > 0);
        named.filter_map(|(slot, matched)| Some((slot.as_ref()?.node.clone(), matched))).collect()
    }

    /// Blocks known of a node.
    pub fn entries(&self, node: &NodeId) -> usize {
        self.find(node).map_or(0, |slot| self.slot(slot).entries)
    }

    /// Different blocks known.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    fn find(&self, node: &NodeId) -> Option<u16> {
        let index = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|slot| slot.node == *node))?;
        u16::try_from(index).ok()
    }

    fn slot(&self, slot: u16) -> &Slot {
        self.slots[usize::from(slot)].as_ref().expect("slots in hand are in use")
    }

    fn slot_mut(&mut self, slot: u16) -> &mut Slot {
        self.slots[usize::from(slot)].as_mut().expect("slots in hand are in use")
    }

    /// The node's slot in this generation; `None` where a later generation is known, or where there are 65,536 nodes.
    fn slot_for(&mut self, node: &NodeId, generation: Generation) -> Option<u16> {
        if let Some(slot) = self.find(node) {
            let known = self.slot(slot).generation;
            if generation == known {
                return Some(slot);
            }
            if generation < known {
                return None;
            }
            self.remove_node(node);
        }
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or(self.slots.len());
        let slot = u16::try_from(index).ok()?;
        if index == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[index] = Some(Slot { node: node.clone(), generation, next: Some(0), entries: 0 });
        Some(slot)
    }

    fn apply_event(&mut self, slot: u16, event: KvEvent) {
        match event {
            KvEvent::Stored { hash, .. } => self.store(slot, hash),
            KvEvent::Removed { hash } => self.remove(slot, hash),
            KvEvent::Cleared => self.empty_slot(slot),
        }
    }

    fn store(&mut self, slot: u16, hash: BlockHash) {
        if self.slot(slot).entries >= self.max_entries_per_node {
            return;
        }
        if self.blocks.entry(hash).or_default().insert(slot) {
            self.slot_mut(slot).entries += 1;
        }
    }

    fn remove(&mut self, slot: u16, hash: BlockHash) {
        let Some(holders) = self.blocks.get_mut(&hash) else { return };
        let had = holders.remove(slot);
        if holders.is_empty() {
            self.blocks.remove(&hash);
        }
        if had {
            self.slot_mut(slot).entries -= 1;
        }
    }

    /// Takes time in the size of the index: nodes leave and clear rarely.
    fn empty_slot(&mut self, slot: u16) {
        if self.slot(slot).entries == 0 {
            return;
        }
        self.blocks.retain(|_, holders| {
            holders.remove(slot);
            !holders.is_empty()
        });
        self.slot_mut(slot).entries = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn node(n: usize) -> NodeId {
        NodeId::new(&format!("n{n}")).unwrap()
    }

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 16])
    }

    fn stored(n: u8) -> KvEvent {
        KvEvent::Stored { hash: hash(n), parent: None }
    }

    const ONE: Generation = Generation(1);

    #[test]
    fn a_gap_empties_the_node_until_its_snapshot() {
        let mut index = PrefixIndex::new(100);
        assert_eq!(index.apply(&node(0), ONE, 0, &[stored(1), stored(2)]), Applied::Applied);
        assert_eq!(index.longest_prefix(&[hash(1), hash(2), hash(3)]), [(node(0), 2)]);
        assert_eq!(index.apply(&node(0), ONE, 3, &[stored(4)]), Applied::Gap);
        assert!(index.is_empty());
        assert_eq!(index.apply(&node(0), ONE, 4, &[stored(5)]), Applied::Gap);
        assert_eq!(index.snapshot(&node(0), ONE, 5, &[stored(1)]), Applied::Applied);
        assert_eq!(index.apply(&node(0), ONE, 4, &[stored(5), stored(2)]), Applied::Applied);
        assert_eq!(index.longest_prefix(&[hash(1), hash(2)]), [(node(0), 2)]);
        assert_eq!(index.longest_prefix(&[hash(5)]), [], "event 4 is older than the snapshot");
        assert_eq!(index.apply(&node(0), ONE, 5, &[stored(2)]), Applied::Stale);
        assert_eq!(index.snapshot(&node(0), ONE, 5, &[]), Applied::Stale);
    }

    #[test]
    fn a_new_generation_replaces_the_old_for_good() {
        let mut index = PrefixIndex::new(100);
        index.apply(&node(0), ONE, 0, &[stored(1)]);
        assert_eq!(index.apply(&node(0), Generation(2), 0, &[stored(2)]), Applied::Applied);
        assert_eq!(index.apply(&node(0), ONE, 1, &[stored(3)]), Applied::Stale);
        assert_eq!((index.len(), index.entries(&node(0))), (1, 1));
        index.remove_node(&node(0));
        assert!(index.is_empty());
    }

    #[test]
    fn a_node_cannot_fill_the_memory_and_slots_are_used_again() {
        let mut index = PrefixIndex::new(2);
        for n in 0..130 {
            index.apply(&node(n), ONE, 0, &[stored(1), stored(2), stored(3)]);
        }
        assert_eq!((index.len(), index.entries(&node(129))), (2, 2));
        assert_eq!(index.longest_prefix(&[hash(1), hash(2), hash(3)]).len(), 130);
        index.remove_node(&node(100));
        index.apply(&node(500), ONE, 0, &[stored(1)]);
        assert_eq!(index.slots.len(), 130);
        assert!(index.longest_prefix(&[hash(1)]).contains(&(node(500), 1)));
    }

    proptest! {
        #[test]
        fn equals_a_map_of_sets(
            operations in prop::collection::vec((0usize..3, 0u8..5, 0u8..6), 0..150),
            chain in prop::collection::vec(0u8..6, 0..6),
        ) {
            let mut index = PrefixIndex::new(100);
            let mut naive: BTreeMap<usize, (u64, BTreeSet<u8>)> = BTreeMap::new();
            for (n, operation, h) in operations {
                let (next, blocks) = naive.entry(n).or_default();
                let event = match operation {
                    0 | 1 => { blocks.insert(h); stored(h) }
                    2 => { blocks.remove(&h); KvEvent::Removed { hash: hash(h) } }
                    3 => { blocks.clear(); KvEvent::Cleared }
                    _ => {
                        naive.remove(&n);
                        index.remove_node(&node(n));
                        continue;
                    }
                };
                prop_assert_eq!(index.apply(&node(n), ONE, *next, &[event]), Applied::Applied);
                *next += 1;
            }
            let hashes: Vec<_> = chain.iter().map(|h| hash(*h)).collect();
            let found: BTreeMap<_, _> = index.longest_prefix(&hashes).into_iter().collect();
            for (n, (_, blocks)) in &naive {
                let expected = chain.iter().take_while(|h| blocks.contains(h)).count() as u32;
                prop_assert_eq!(found.get(&node(*n)).copied().unwrap_or(0), expected);
                prop_assert_eq!(index.entries(&node(*n)), blocks.len());
            }
            let all: BTreeSet<_> = naive.values().flat_map(|(_, blocks)| blocks).collect();
            prop_assert_eq!(index.len(), all.len());
        }
    }
}
