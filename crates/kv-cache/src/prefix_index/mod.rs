//! The conductor's picture of which node holds which block: a map behind a lock.

mod holders;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use baton_types::{BlockHash, Generation, KvEvent, NodeId};
use hashbrown::DefaultHashBuilder;
use hashbrown::hash_map::Entry;

use holders::Holders;

/// What became of a node's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// The index has them.
    Applied,
    /// Events before these are missing: ask the node for a snapshot. Until it comes, the node holds
    /// nothing here. Said once per gap.
    Gap,
    /// They are of another generation, of a node that is not in the index, known already, or wait
    /// for a snapshot that was asked for.
    Stale,
}

/// Number of a node in the index, from [`PrefixIndex::add_node`] to [`PrefixIndex::remove_node`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeSlot(pub u16);

/// A node's stay in its slot, which another one may have after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Occupancy {
    slot: NodeSlot,
    number: u64,
}

#[derive(Debug)]
struct Slot {
    node: NodeId,
    generation: Generation,
    stay: Occupancy,
    next: Next,
    /// Blocks of this node in the index.
    entries: usize,
}

/// What a node is to send next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The event with this number.
    Event(u64),
    /// A snapshot that was not asked for yet.
    Snapshot,
    /// A snapshot, which was asked for.
    AskedSnapshot,
}

/// How many leading blocks of a chain each node holds; nodes that hold none are not in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixMatches(Vec<(NodeSlot, u32)>);

impl PrefixMatches {
    /// Nodes and blocks, ascending by blocks.
    pub fn by_slot(&self) -> &[(NodeSlot, u32)] {
        &self.0
    }
}

/// Events that are applied before lookups get their turn: a tenth of a millisecond at most. Lookups
/// take as long, and fewer events at a time would not keep up beside them.
const EVENTS_AT_ONCE: usize = 256;
/// Events that a message may be behind what is known. No snapshot is so far ahead of the changes
/// that were on their way: if one said so, it was false.
const MAX_OVERLAP: u64 = 1 << 32;
/// Each grows by itself, and nodes that leave are taken out of one at a time: lookups never wait
/// for the whole map.
const SHARDS: usize = 1024;

/// Block hashes are random already, so the hash is a cheap one. It has a seed, as the choice of the
/// shard has: a client that chooses prompts cannot choose where they lie.
type Shard = hashbrown::HashMap<BlockHash, Holders>;

/// Block hash to the nodes that hold the block. Lookups go on while events are applied: those take
/// the lock for a tenth of a millisecond at a time, however many come together.
///
/// **Invariant**: a node's entries are what its events said, in order and without a gap, or nothing
/// at all. More than `max_entries_per_node` are not kept: a node cannot fill the conductor's
/// memory, and what is missing costs a cache hit only.
#[derive(Debug)]
pub struct PrefixIndex {
    inner: RwLock<Inner>,
    max_entries_per_node: usize,
}

#[derive(Debug)]
struct Inner {
    shards: Box<[Shard]>,
    /// Of the shards.
    hasher: DefaultHashBuilder,
    slots: Vec<Option<Slot>>,
    by_name: HashMap<NodeId, NodeSlot>,
    stays: u64,
    /// Stays whose blocks are being taken out, once for each time: what is left does not count.
    clearing: Vec<Occupancy>,
    /// Nodes that left and whose blocks are still to be taken out.
    leaving: Vec<Occupancy>,
}

impl PrefixIndex {
    /// An empty index.
    pub fn new(max_entries_per_node: usize) -> Self {
        let inner = Inner {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            hasher: DefaultHashBuilder::default(),
            slots: Vec::new(),
            by_name: HashMap::new(),
            stays: 0,
            clearing: Vec::new(),
            leaving: Vec::new(),
        };
        Self { inner: RwLock::new(inner), max_entries_per_node }
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node is here, in this generation, and sends its events from the first one on; what an
    /// older one held is forgotten. `None` if a later one is known, or if there are 65,536 nodes.
    pub fn add_node(&self, node: &NodeId, generation: Generation) -> Option<NodeSlot> {
        let mut inner = self.write();
        match inner.known(node).map(|slot| (slot.stay.slot, slot.generation)) {
            Some((slot, known)) if known == generation => return Some(slot),
            Some((_, known)) if known > generation => return None,
            Some(_) => inner.leave(node),
            None => {}
        }
        inner.add(node, generation, Next::Event(0))
    }

    /// What is known of a node's blocks is too old to go by. The node holds nothing here until it
    /// sends a snapshot, which its next events ask for. Returns its new slot.
    pub fn expire(&self, node: &NodeId) -> Option<NodeSlot> {
        let mut inner = self.write();
        let generation = inner.known(node)?.generation;
        inner.leave(node);
        inner.add(node, generation, Next::Snapshot)
    }

    /// Forgets a node, at once as far as lookups go; its blocks are taken out by [`Self::sweep`],
    /// which the next events do.
    pub fn remove_node(&self, node: &NodeId) {
        self.write().leave(node);
    }

    /// A message of a node: changes ([`Self::apply`]), or all that it holds ([`Self::snapshot`]),
    /// as in [`crate::KvEventBatch`].
    pub fn on_events(
        &self,
        node: &NodeId,
        generation: Generation,
        sequence: u64,
        snapshot: bool,
        events: &[KvEvent],
    ) -> Applied {
        if snapshot {
            self.snapshot(node, generation, sequence, events)
        } else {
            self.apply(node, generation, sequence, events)
        }
    }

    /// Takes in events of a node, the first of which has the number `sequence`. Overlap with what
    /// is known is skipped. A node's events come from one thread at a time.
    pub fn apply(&self, node: &NodeId, generation: Generation, sequence: u64, events: &[KvEvent]) -> Applied {
        let mut applied = Applied::Stale;
        loop {
            let mut inner = self.write();
            if !inner.leaving.is_empty() {
                drop(inner);
                self.sweep();
                continue;
            }
            let Some((stay, next)) = inner.expects(node, generation) else { return Applied::Stale };
            let next = match next {
                Next::Event(next) if sequence <= next && next - sequence <= MAX_OVERLAP => next,
                Next::AskedSnapshot => return Applied::Stale,
                _ => {
                    drop(inner);
                    self.clear(stay, Next::AskedSnapshot);
                    return Applied::Gap;
                }
            };
            let known = usize::try_from(next - sequence).unwrap_or(usize::MAX);
            let Some(new) = events.get(known..).filter(|new| !new.is_empty()) else { return applied };
            let (changes, cleared) = first_changes(new);
            inner.change(stay, changes, self.max_entries_per_node);
            let next = Next::Event(next.saturating_add((changes.len() + usize::from(cleared)) as u64));
            if let Some(slot) = inner.slot_mut(stay) {
                slot.next = next;
            }
            drop(inner);
            if cleared {
                self.clear(stay, next);
            }
            applied = Applied::Applied;
            if changes.len() + usize::from(cleared) == new.len() {
                return applied;
            }
        }
    }

    /// Replaces everything known about a node. `sequence` is the number of the node's next event.
    pub fn snapshot(&self, node: &NodeId, generation: Generation, sequence: u64, events: &[KvEvent]) -> Applied {
        self.sweep();
        let expected = self.read().expects(node, generation);
        let Some((stay, next)) = expected else { return Applied::Stale };
        if matches!(next, Next::Event(next) if next > sequence) {
            return Applied::Stale;
        }
        self.clear(stay, Next::AskedSnapshot);
        self.change_all(stay, events, Next::AskedSnapshot);
        let mut inner = self.write();
        // It may have left in the meantime.
        let is_here = inner.expects(node, generation).is_some_and(|(now, _)| now == stay);
        match inner.slot_mut(stay).filter(|_| is_here) {
            Some(slot) => slot.next = Next::Event(sequence),
            None => return Applied::Stale,
        }
        Applied::Applied
    }

    /// More of a snapshot that was told in parts, with the number of its first part. The node's own
    /// changes have gone on from there, or not.
    pub fn more_of_snapshot(
        &self,
        node: &NodeId,
        generation: Generation,
        sequence: u64,
        events: &[KvEvent],
    ) -> Applied {
        self.sweep();
        let expected = self.read().expects(node, generation);
        match expected {
            // No part is told behind a change, so an index that expects another number has not
            // taken the first part.
            Some((stay, Next::Event(next))) if next == sequence => {
                self.change_all(stay, events, Next::Event(sequence));
                Applied::Applied
            }
            _ => Applied::Stale,
        }
    }

    /// Many changes, a few at a time: lookups go on between.
    fn change_all(&self, stay: Occupancy, events: &[KvEvent], next: Next) {
        let mut rest = events;
        while !rest.is_empty() {
            let (changes, cleared) = first_changes(rest);
            self.write().change(stay, changes, self.max_entries_per_node);
            rest = &rest[changes.len() + usize::from(cleared)..];
            if cleared {
                self.clear(stay, next);
            }
        }
    }

    /// Takes out the blocks of nodes that left, a shard at a time.
    pub fn sweep(&self) {
        if self.read().leaving.is_empty() {
            return;
        }
        loop {
            let Some(stay) = self.write().leaving.pop() else { return };
            self.clear_shards(stay);
            self.write().free(stay);
        }
    }

    /// How many leading blocks of a chain each node holds.
    pub fn matches(&self, hashes: &[BlockHash]) -> PrefixMatches {
        self.read().walk(hashes)
    }

    /// The same by name, in no order; nodes that hold none are left out.
    pub fn longest_prefix(&self, hashes: &[BlockHash]) -> Vec<(NodeId, u32)> {
        let inner = self.read();
        let matches = inner.walk(hashes);
        let name = |slot: NodeSlot| inner.slots[usize::from(slot.0)].as_ref().map(|slot| slot.node.clone());
        matches.by_slot().iter().filter_map(|(slot, blocks)| Some((name(*slot)?, *blocks))).collect()
    }

    /// Blocks known of a node.
    pub fn entries(&self, node: &NodeId) -> usize {
        let inner = self.read();
        inner.known(node).map_or(0, |slot| slot.entries)
    }

    /// Different blocks known.
    pub fn len(&self) -> usize {
        self.read().shards.iter().map(Shard::len).sum()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes everything out that a node has. Takes time in the size of the index: nodes clear
    /// rarely.
    fn clear(&self, stay: Occupancy, next: Next) {
        if self.write().begin_clear(stay, next) {
            self.clear_shards(stay);
            self.write().end_clear(stay);
        }
    }

    fn clear_shards(&self, stay: Occupancy) {
        (0..SHARDS).for_each(|shard| self.write().clear_shard(stay, shard));
    }
}

/// The first changes of these events, as many as are made at once, and whether [`KvEvent::Cleared`]
/// follows on them.
fn first_changes(events: &[KvEvent]) -> (&[KvEvent], bool) {
    let events = &events[..events.len().min(EVENTS_AT_ONCE)];
    match events.iter().position(|event| *event == KvEvent::Cleared) {
        Some(at) => (&events[..at], true),
        None => (events, false),
    }
}

impl Inner {
    /// A node's stay, and what it is to send next, if it is known in this generation.
    fn expects(&self, node: &NodeId, generation: Generation) -> Option<(Occupancy, Next)> {
        let slot = self.known(node).filter(|slot| slot.generation == generation)?;
        Some((slot.stay, slot.next))
    }

    fn known(&self, node: &NodeId) -> Option<&Slot> {
        self.by_name.get(node).and_then(|slot| self.slots[usize::from(slot.0)].as_ref())
    }

    /// The slot, while the same node has it.
    fn slot_mut(&mut self, stay: Occupancy) -> Option<&mut Slot> {
        self.slots[usize::from(stay.slot.0)].as_mut().filter(|slot| slot.stay == stay)
    }

    fn add(&mut self, node: &NodeId, generation: Generation, next: Next) -> Option<NodeSlot> {
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or(self.slots.len());
        let slot = NodeSlot(u16::try_from(index).ok()?);
        if index == self.slots.len() {
            self.slots.push(None);
        }
        self.stays += 1;
        let stay = Occupancy { slot, number: self.stays };
        let node = node.clone();
        self.by_name.insert(node.clone(), slot);
        self.slots[index] = Some(Slot { node, generation, stay, next, entries: 0 });
        Some(slot)
    }

    fn leave(&mut self, node: &NodeId) {
        let Some(slot) = self.by_name.remove(node) else { return };
        if let Some(slot) = &self.slots[usize::from(slot.0)] {
            self.clearing.push(slot.stay);
            self.leaving.push(slot.stay);
        }
    }

    /// The slot of a node that left has no blocks any more.
    fn free(&mut self, stay: Occupancy) {
        self.slots[usize::from(stay.slot.0)].take_if(|slot| slot.stay == stay);
        self.clearing.retain(|clearing| *clearing != stay);
    }

    /// Whether there is something to take out.
    fn begin_clear(&mut self, stay: Occupancy, next: Next) -> bool {
        let Some(slot) = self.slot_mut(stay) else { return false };
        slot.next = next;
        if slot.entries == 0 {
            return false;
        }
        self.clearing.push(stay);
        true
    }

    fn end_clear(&mut self, stay: Occupancy) {
        if let Some(at) = self.clearing.iter().position(|clearing| *clearing == stay) {
            self.clearing.swap_remove(at);
        }
    }

    fn clear_shard(&mut self, stay: Occupancy, shard: usize) {
        // If the node left in the meantime, another one may have its slot.
        let slot = self.slots[usize::from(stay.slot.0)].as_mut();
        let Some(slot) = slot.filter(|slot| slot.stay == stay && slot.entries > 0) else { return };
        let shard = &mut self.shards[shard];
        shard.retain(|_, holders| {
            slot.entries -= usize::from(holders.remove(stay.slot.0));
            !holders.is_empty()
        });
        if shard.len() < shard.capacity() / 4 {
            shard.shrink_to(2 * shard.len());
        }
    }

    /// Makes changes, of which none is [`KvEvent::Cleared`].
    fn change(&mut self, stay: Occupancy, events: &[KvEvent], max_entries: usize) {
        // The node left while its events were told: what came now would stay behind its shards'
        // clearing, for the next node in its slot.
        if self.clearing.contains(&stay) {
            return;
        }
        let Some(slot) = self.slots[usize::from(stay.slot.0)].as_mut().filter(|slot| slot.stay == stay) else { return };
        for event in events {
            match event {
                KvEvent::Stored { hash, .. } if slot.entries < max_entries => {
                    let holders = self.shards[shard_of(&self.hasher, hash)].entry(*hash).or_default();
                    slot.entries += usize::from(holders.insert(stay.slot.0));
                }
                KvEvent::Removed { hash } => {
                    if let Entry::Occupied(mut block) = self.shards[shard_of(&self.hasher, hash)].entry(*hash) {
                        slot.entries -= usize::from(block.get_mut().remove(stay.slot.0));
                        if block.get().is_empty() {
                            block.remove();
                        }
                    }
                }
                KvEvent::Stored { .. } | KvEvent::Cleared => {}
            }
        }
    }

    /// Slots of the nodes that hold a block, ascending.
    fn holders(&self, hash: &BlockHash) -> &[u16] {
        self.shards[shard_of(&self.hasher, hash)].get(hash).map_or(&[], |holders| holders)
    }

    /// Along a chain, until no node holds more.
    fn walk(&self, hashes: &[BlockHash]) -> PrefixMatches {
        let Some((first, rest)) = hashes.split_first() else { return PrefixMatches::default() };
        let mut found = Vec::new();
        let mut nodes = self.holders(first).to_vec();
        nodes.retain(|slot| self.clearing.iter().all(|stay| stay.slot.0 != *slot));
        let mut depth = 1;
        for hash in rest {
            let holders = self.holders(hash);
            // Blocks of one conversation are on the same nodes.
            if holders != nodes {
                let mut holders = holders.iter().peekable();
                nodes.retain(|slot| {
                    while holders.next_if(|holder| *holder < slot).is_some() {}
                    let is_left = holders.peek() == Some(&slot);
                    if !is_left {
                        found.push((NodeSlot(*slot), depth));
                    }
                    is_left
                });
            }
            if nodes.is_empty() {
                break;
            }
            depth += 1;
        }
        found.extend(nodes.iter().map(|slot| (NodeSlot(*slot), depth)));
        PrefixMatches(found)
    }
}

/// Where a block's holders are.
fn shard_of(hasher: &DefaultHashBuilder, hash: &BlockHash) -> usize {
    hasher.hash_one(hash) as usize % SHARDS
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
    fn kv_event_gap_empties_node_in_prefix_index_until_snapshot() {
        let index = PrefixIndex::new(100);
        assert_eq!(index.apply(&node(0), ONE, 0, &[stored(1)]), Applied::Stale, "no node said that it is here");
        index.add_node(&node(0), ONE);
        assert_eq!(index.apply(&node(0), ONE, 0, &[stored(1), stored(2)]), Applied::Applied);
        assert_eq!(index.longest_prefix(&[hash(1), hash(2), hash(3)]), [(node(0), 2)]);
        assert_eq!(index.apply(&node(0), ONE, 3, &[stored(4)]), Applied::Gap);
        assert!(index.is_empty());
        assert_eq!(index.apply(&node(0), ONE, 4, &[stored(5)]), Applied::Stale, "the snapshot was asked for");
        assert_eq!(index.snapshot(&node(0), ONE, 5, &[stored(1)]), Applied::Applied);
        assert_eq!(index.apply(&node(0), ONE, 4, &[stored(5), stored(2)]), Applied::Applied);
        assert_eq!(index.longest_prefix(&[hash(1), hash(2)]), [(node(0), 2)]);
        assert_eq!(index.longest_prefix(&[hash(5)]), [], "event 4 is older than the snapshot");
        assert_eq!(index.apply(&node(0), ONE, 5, &[stored(2)]), Applied::Stale);
        assert_eq!(index.snapshot(&node(0), ONE, 5, &[]), Applied::Stale);
    }

    #[test]
    fn prefix_index_applies_snapshot_in_parts_as_one() {
        let index = PrefixIndex::new(100);
        index.add_node(&node(0), ONE);
        index.apply(&node(0), ONE, 0, &[stored(9)]);
        let more = |sequence, n| index.more_of_snapshot(&node(0), ONE, sequence, &[stored(n)]);
        assert_eq!(more(7, 1), Applied::Stale, "its first part was not told");
        assert_eq!(index.snapshot(&node(0), ONE, 7, &[stored(1)]), Applied::Applied);
        assert_eq!((more(7, 2), more(7, 3), more(6, 4)), (Applied::Applied, Applied::Applied, Applied::Stale));
        assert_eq!(index.longest_prefix(&[hash(1), hash(2), hash(3), hash(4)]), [(node(0), 3)]);
        assert_eq!(index.longest_prefix(&[hash(9)]), []);
        assert_eq!(index.apply(&node(0), ONE, 7, &[stored(4)]), Applied::Applied, "the changes go on");
        assert_eq!(index.apply(&node(0), ONE, 9, &[stored(5)]), Applied::Gap);
        assert_eq!(more(8, 6), Applied::Stale, "a snapshot was asked for");
    }

    #[test]
    fn false_event_number_costs_a_snapshot_and_no_more() {
        let index = PrefixIndex::new(100);
        for (n, sequence) in [u64::MAX, u64::MAX - 1, 1 << 63].into_iter().enumerate() {
            let name = node(n);
            index.add_node(&name, ONE);
            assert_eq!(index.snapshot(&name, ONE, sequence, &[stored(1)]), Applied::Applied);
            index.apply(&name, ONE, sequence, &[stored(2), stored(3)]);
            index.more_of_snapshot(&name, ONE, sequence, &[stored(4)]);
            assert_eq!(index.apply(&name, ONE, 7, &[stored(5)]), Applied::Gap, "{sequence}");
            assert_eq!(index.entries(&name), 0);
            assert_eq!(index.snapshot(&name, ONE, 8, &[stored(1)]), Applied::Applied);
            assert_eq!(index.apply(&name, ONE, 8, &[stored(2)]), Applied::Applied);
            assert_eq!(index.entries(&name), 2);
        }
    }

    #[test]
    fn prefix_index_refuses_old_generation_after_a_new_one() {
        let index = PrefixIndex::new(100);
        let slot = index.add_node(&node(0), ONE);
        index.apply(&node(0), ONE, 0, &[stored(1)]);
        assert_eq!(index.add_node(&node(0), ONE), slot, "it is known");
        assert!(index.add_node(&node(0), Generation(2)).is_some());
        assert_eq!(index.apply(&node(0), Generation(2), 0, &[stored(2)]), Applied::Applied);
        assert_eq!(index.add_node(&node(0), ONE), None);
        assert_eq!(index.apply(&node(0), ONE, 1, &[stored(3)]), Applied::Stale);
        assert_eq!((index.len(), index.entries(&node(0))), (1, 1));
        index.remove_node(&node(0));
        assert_eq!(index.longest_prefix(&[hash(2)]), [], "at once");
        index.sweep();
        assert!(index.is_empty());
    }

    #[test]
    fn expired_node_has_no_prefix_match_until_snapshot() {
        let index = PrefixIndex::new(100);
        let before = index.add_node(&node(0), ONE);
        index.apply(&node(0), ONE, 0, &[stored(1)]);
        assert_ne!(index.expire(&node(0)), before);
        assert_eq!(index.longest_prefix(&[hash(1)]), []);
        assert_eq!(index.apply(&node(0), ONE, 1, &[stored(2)]), Applied::Gap);
        assert_eq!(index.apply(&node(0), ONE, 2, &[stored(3)]), Applied::Stale);
        assert_eq!(index.snapshot(&node(0), ONE, 3, &[stored(1), stored(2)]), Applied::Applied);
        assert_eq!((index.longest_prefix(&[hash(1), hash(2)]), index.len()), (vec![(node(0), 2)], 2));
    }

    #[test]
    fn prefix_index_lookups_and_removals_run_while_events_are_applied() {
        let index = PrefixIndex::new(1 << 20);
        let events: Vec<_> = (0..200).map(stored).collect();
        let chain: Vec<_> = (0..200).map(hash).collect();
        std::thread::scope(|scope| {
            for n in 0..2 {
                let index = &index;
                let events = &events;
                scope.spawn(move || {
                    for generation in 1..300 {
                        index.add_node(&node(n), Generation(generation));
                        index.apply(&node(n), Generation(generation), 0, events);
                        // In several batches, between which the node may leave.
                        let sequence = events.len() as u64;
                        index.snapshot(&node(n), Generation(generation), sequence, &events.repeat(4));
                        index.more_of_snapshot(&node(n), Generation(generation), sequence, &events.repeat(4));
                    }
                });
            }
            scope.spawn(|| (0..2000).for_each(|round| index.remove_node(&node(round % 2))));
            for _ in 0..2000 {
                for (_, blocks) in index.longest_prefix(&chain) {
                    assert!((1..=200).contains(&blocks));
                }
            }
        });
        (0..2).for_each(|n| index.remove_node(&node(n)));
        index.sweep();
        let inner = index.read();
        assert!(inner.shards.iter().all(Shard::is_empty) && inner.clearing.is_empty());
        assert!(inner.slots.iter().all(Option::is_none));
    }

    #[test]
    fn prefix_index_bounds_blocks_per_node_and_reuses_slots() {
        let index = PrefixIndex::new(2);
        for n in 0..130 {
            index.add_node(&node(n), ONE);
            index.apply(&node(n), ONE, 0, &[stored(1), stored(2), stored(3)]);
        }
        assert_eq!((index.len(), index.entries(&node(129))), (2, 2));
        assert_eq!(index.longest_prefix(&[hash(1), hash(2), hash(3)]).len(), 130);
        index.remove_node(&node(100));
        index.sweep();
        index.add_node(&node(500), ONE);
        index.apply(&node(500), ONE, 0, &[stored(1)]);
        assert_eq!(index.read().slots.len(), 130);
        assert!(index.longest_prefix(&[hash(1)]).contains(&(node(500), 1)));
    }

    /// What the index should know of a node, and everything that happened there.
    struct Naive {
        generation: u64,
        /// Number of the next event; `None` from a gap to the next snapshot.
        next: Option<u64>,
        log: Vec<KvEvent>,
        blocks: BTreeSet<u8>,
    }

    /// What is held after these events.
    fn state(log: &[KvEvent]) -> BTreeSet<u8> {
        let mut blocks = BTreeSet::new();
        for event in log {
            match event {
                KvEvent::Stored { hash, .. } => drop(blocks.insert(hash.0[0])),
                KvEvent::Removed { hash } => drop(blocks.remove(&hash.0[0])),
                KvEvent::Cleared => blocks.clear(),
            }
        }
        blocks
    }

    impl Naive {
        /// The events from `from` up to the last one came, in one message.
        fn apply(&mut self, from: u64) -> Applied {
            self.take(from, self.log.len() as u64)
        }

        /// The event `at` came alone.
        fn apply_one(&mut self, at: u64) -> Applied {
            self.take(at, at + 1)
        }

        fn take(&mut self, from: u64, to: u64) -> Applied {
            match self.next {
                None => Applied::Stale,
                Some(next) if from > next => {
                    self.next = None;
                    self.blocks = BTreeSet::new();
                    Applied::Gap
                }
                Some(next) if to <= next => Applied::Stale,
                Some(_) => {
                    (self.next, self.blocks) = (Some(to), state(&self.log[..to as usize]));
                    Applied::Applied
                }
            }
        }
    }

    proptest! {
        #[test]
        fn prefix_index_matches_model_with_lost_and_repeated_events(
            operations in prop::collection::vec((0usize..3, 0u8..10, 0u8..6, 0u64..4), 0..200),
            chain in prop::collection::vec(0u8..6, 0..6),
        ) {
            let index = PrefixIndex::new(100);
            let mut naive: BTreeMap<usize, Naive> = BTreeMap::new();
            for (n, operation, h, by) in operations {
                let known = naive.entry(n).or_insert_with(|| {
                    index.add_node(&node(n), Generation(1));
                    Naive { generation: 1, next: Some(0), log: Vec::new(), blocks: BTreeSet::new() }
                });
                match operation {
                    // The next event, or one that never came before it, or the last few once more
                    // with it.
                    0..=4 => known.log.push(match h % 4 { 0 => KvEvent::Cleared, 1 => KvEvent::Removed { hash: hash(h) }, _ => stored(h) }),
                    5 => known.log.extend([stored(h), stored(h + 1)]),
                    _ => {}
                }
                let told = known.log.len() as u64;
                let generation = Generation(known.generation);
                match operation {
                    0..=4 => {
                        let from = told - 1 - by.min(told - 1);
                        let events = &known.log[from as usize..];
                        let applied = index.apply(&node(n), generation, from, events);
                        prop_assert_eq!(applied, known.apply(from));
                    }
                    // Two events, of which the second one comes first.
                    5 => for from in [told - 1, told - 2] {
                        let applied = index.apply(&node(n), generation, from, &known.log[from as usize..=from as usize]);
                        prop_assert_eq!(applied, known.apply_one(from));
                    },
                    6 => {
                        let all: Vec<_> = state(&known.log).into_iter().map(stored).collect();
                        prop_assert_eq!(index.snapshot(&node(n), generation, told, &all), Applied::Applied);
                        (known.next, known.blocks) = (Some(told), state(&known.log));
                    }
                    // Of an earlier start of it.
                    7 if known.generation > 1 => {
                        let before = Generation(known.generation - 1);
                        prop_assert_eq!(index.apply(&node(n), before, told, &[stored(h)]), Applied::Stale);
                        prop_assert_eq!(index.add_node(&node(n), before), None);
                    }
                    8 => {
                        let generation = known.generation + 1;
                        index.add_node(&node(n), Generation(generation));
                        *known = Naive { generation, next: Some(0), log: Vec::new(), blocks: BTreeSet::new() };
                    }
                    9 => {
                        index.remove_node(&node(n));
                        naive.remove(&n);
                    }
                    _ => {}
                }
            }
            let hashes: Vec<_> = chain.iter().map(|h| hash(*h)).collect();
            let found: BTreeMap<_, _> = index.longest_prefix(&hashes).into_iter().collect();
            for (n, Naive { blocks, .. }) in &naive {
                let expected = chain.iter().take_while(|h| blocks.contains(h)).count() as u32;
                prop_assert_eq!(found.get(&node(*n)).copied().unwrap_or(0), expected);
                prop_assert_eq!(index.entries(&node(*n)), blocks.len());
            }
            index.sweep();
            let all: BTreeSet<_> = naive.values().flat_map(|known| &known.blocks).collect();
            prop_assert_eq!(index.len(), all.len());
        }

        /// However long the chain is.
        #[test]
        fn prefix_walk_finds_cached_length_of_each_node_in_long_chain(
            blocks in 1u64..3000,
            held in prop::collection::vec(0u64..3000, 1..8),
        ) {
            let index = PrefixIndex::new(1 << 20);
            let chain: Vec<_> = (1..=blocks).map(|block| BlockHash(u128::from(block).to_le_bytes())).collect();
            let mut expected = Vec::new();
            for (n, held) in held.into_iter().enumerate() {
                let held = held.min(blocks);
                let slot = index.add_node(&node(n), ONE).unwrap();
                let stored = chain[..held as usize].iter().map(|hash| KvEvent::Stored { hash: *hash, parent: None });
                index.apply(&node(n), ONE, 0, &stored.collect::<Vec<_>>());
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

    #[test]
    fn prefix_walk_stops_at_block_evicted_from_middle_of_chain() {
        let index = PrefixIndex::new(100);
        let chain: Vec<_> = (0..100).map(hash).collect();
        index.add_node(&node(0), ONE);
        index.apply(&node(0), ONE, 0, &(0..100).map(stored).collect::<Vec<_>>());
        index.apply(&node(0), ONE, 100, &[KvEvent::Removed { hash: hash(90) }]);
        assert_eq!(index.longest_prefix(&chain), [(node(0), 90)]);
    }
}
