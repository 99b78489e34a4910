//! The conductor's picture of which node holds which block.

mod holders;
mod table;
mod walk;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use baton_types::{BlockHash, Generation, KvEvent, NodeId};

use holders::HolderSets;
use table::{BlockTable, Key};

pub use walk::PrefixMatches;

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
struct Stay {
    slot: NodeSlot,
    number: u64,
}

#[derive(Debug)]
struct Slot {
    node: NodeId,
    generation: Generation,
    stay: Stay,
    next: Next,
    /// Blocks of this node in the index.
    entries: usize,
    /// More than 0 while its blocks are being taken out: what is left of them does not count.
    clearing: u32,
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

/// Events that are applied before lookups get their turn: a few microseconds.
const EVENTS_AT_ONCE: usize = table::MANY;
/// Looks at the lock before a thread sleeps: about as long as it is held.
const SPINS: u32 = 1000;
/// Parts of the table that are gone through before lookups get their turn.
const PARTS_AT_ONCE: usize = 4;

/// Block hash to the nodes that hold the block. Lookups go on while events are applied: those take
/// the lock for a few microseconds at a time, however many come together.
///
/// **Invariant**: a node's entries are what its events said, in order and without a gap, or nothing
/// at all. More than `max_entries_per_node` are not kept: a node cannot fill the conductor's
/// memory, and what is missing costs a cache hit only.
#[derive(Debug)]
pub struct PrefixIndex {
    inner: RwLock<Inner>,
    /// Lookups that wait for a writer.
    waiting: AtomicU32,
    max_entries_per_node: usize,
}

#[derive(Debug)]
struct Inner {
    table: BlockTable,
    sets: HolderSets,
    slots: Vec<Option<Slot>>,
    by_name: HashMap<NodeId, NodeSlot>,
    stays: u64,
    /// Of all slots.
    clearing: u32,
    /// Nodes that left and whose blocks are still to be taken out.
    leaving: Vec<Stay>,
}

impl PrefixIndex {
    /// An empty index.
    pub fn new(max_entries_per_node: usize) -> Self {
        let inner = Inner {
            table: BlockTable::new(),
            sets: HolderSets::new(),
            slots: Vec::new(),
            by_name: HashMap::new(),
            stays: 0,
            clearing: 0,
            leaving: Vec::new(),
        };
        Self { inner: RwLock::new(inner), waiting: AtomicU32::new(0), max_entries_per_node }
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        if let Ok(inner) = self.inner.try_read() {
            return inner;
        }
        // A thread has it for microseconds; to sleep and be woken takes many times as long.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let soon = (0..SPINS).find_map(|_| {
            std::hint::spin_loop();
            self.inner.try_read().ok()
        });
        let inner = soon.unwrap_or_else(|| self.inner.read().unwrap_or_else(PoisonError::into_inner));
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        inner
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        // A thread that writes again and again would not let those in that wait for a moment
        // between.
        let mut spins = 0;
        while self.waiting.load(Ordering::Relaxed) > 0 && spins < SPINS {
            std::hint::spin_loop();
            spins += 1;
        }
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
        match snapshot {
            true => self.snapshot(node, generation, sequence, events),
            false => self.apply(node, generation, sequence, events),
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
                Next::Event(next) if sequence <= next => next,
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
        match self.write().slot_mut(stay) {
            Some(slot) => slot.next = Next::Event(sequence),
            // It left in the meantime.
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
    fn change_all(&self, stay: Stay, events: &[KvEvent], next: Next) {
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

    /// Takes out the blocks of nodes that left, a few parts of the table at once.
    pub fn sweep(&self) {
        if self.read().leaving.is_empty() {
            return;
        }
        loop {
            let Some(stay) = self.write().leaving.pop() else { return };
            self.clear_parts(stay);
            self.write().free(stay);
        }
    }

    /// How many leading blocks of a chain each node holds. Of long chains not every block is looked
    /// at, see [`PrefixMatches`].
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
        self.read().table.len()
    }

    /// Whether no block is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes everything out that a node has. Takes time in the size of the index: nodes clear
    /// rarely.
    fn clear(&self, stay: Stay, next: Next) {
        if self.write().begin_clear(stay, next) {
            self.clear_parts(stay);
            self.write().end_clear(stay);
        }
    }

    fn clear_parts(&self, stay: Stay) {
        for begin in (0..BlockTable::parts()).step_by(PARTS_AT_ONCE) {
            let mut inner = self.write();
            (begin..(begin + PARTS_AT_ONCE).min(BlockTable::parts())).for_each(|part| inner.clear_part(stay, part));
        }
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
    fn expects(&self, node: &NodeId, generation: Generation) -> Option<(Stay, Next)> {
        let slot = self.known(node).filter(|slot| slot.generation == generation)?;
        Some((slot.stay, slot.next))
    }

    fn known(&self, node: &NodeId) -> Option<&Slot> {
        self.by_name.get(node).and_then(|slot| self.slots[usize::from(slot.0)].as_ref())
    }

    /// The slot, while the same node has it.
    fn slot_mut(&mut self, stay: Stay) -> Option<&mut Slot> {
        self.slots[usize::from(stay.slot.0)].as_mut().filter(|slot| slot.stay == stay)
    }

    fn is_clearing(&self, slot: NodeSlot) -> bool {
        self.slots[usize::from(slot.0)].as_ref().is_none_or(|slot| slot.clearing > 0)
    }

    fn add(&mut self, node: &NodeId, generation: Generation, next: Next) -> Option<NodeSlot> {
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or(self.slots.len());
        let slot = NodeSlot(u16::try_from(index).ok()?);
        if index == self.slots.len() {
            self.slots.push(None);
        }
        self.stays += 1;
        let stay = Stay { slot, number: self.stays };
        let node = node.clone();
        self.by_name.insert(node.clone(), slot);
        self.slots[index] = Some(Slot { node, generation, stay, next, entries: 0, clearing: 0 });
        Some(slot)
    }

    fn leave(&mut self, node: &NodeId) {
        let Some(slot) = self.by_name.remove(node) else { return };
        if let Some(slot) = &mut self.slots[usize::from(slot.0)] {
            slot.clearing += 1;
            self.clearing += 1;
            self.leaving.push(slot.stay);
        }
    }

    /// The slot of a node that left has no blocks any more.
    fn free(&mut self, stay: Stay) {
        let slot = &mut self.slots[usize::from(stay.slot.0)];
        if let Some(left) = slot.take_if(|slot| slot.stay == stay) {
            self.clearing -= left.clearing;
        }
    }

    /// Whether there is something to take out.
    fn begin_clear(&mut self, stay: Stay, next: Next) -> bool {
        let Some(slot) = self.slot_mut(stay) else { return false };
        slot.next = next;
        if slot.entries == 0 {
            return false;
        }
        slot.clearing += 1;
        self.clearing += 1;
        true
    }

    fn end_clear(&mut self, stay: Stay) {
        if let Some(slot) = self.slot_mut(stay) {
            slot.clearing -= 1;
            self.clearing -= 1;
        }
    }

    fn clear_part(&mut self, stay: Stay, part: usize) {
        let mut taken = 0;
        for (key, _) in self.table.part(part) {
            taken += usize::from(self.take_out(stay.slot, key));
        }
        if let Some(slot) = self.slot_mut(stay) {
            slot.entries -= taken;
        }
    }

    /// Makes changes, of which none is [`KvEvent::Cleared`].
    fn change(&mut self, stay: Stay, events: &[KvEvent], max_entries: usize) {
        let Some(mut entries) = self.slot_mut(stay).map(|slot| slot.entries) else { return };
        let hashes = events.iter().filter_map(|event| match event {
            KvEvent::Stored { hash, .. } | KvEvent::Removed { hash } => Some(hash),
            KvEvent::Cleared => None,
        });
        let keys = self.table.keys(hashes);
        for (event, key) in events.iter().zip(keys) {
            match event {
                KvEvent::Stored { .. } if entries < max_entries => {
                    entries += usize::from(self.store(stay.slot, key));
                }
                KvEvent::Removed { .. } => {
                    entries -= usize::from(self.take_out(stay.slot, key));
                }
                KvEvent::Stored { .. } | KvEvent::Cleared => {}
            }
        }
        if let Some(slot) = self.slot_mut(stay) {
            slot.entries = entries;
        }
    }

    /// Whether the node did not have it.
    fn store(&mut self, slot: NodeSlot, key: Key) -> bool {
        let sets = &mut self.sets;
        let mut is_new = false;
        self.table.update(key, |before| {
            let after = Some(sets.with(before, slot.0));
            is_new = after != before;
            if is_new {
                sets.changed(before, after);
            }
            after
        });
        is_new
    }

    /// Whether the node had it.
    fn take_out(&mut self, slot: NodeSlot, key: Key) -> bool {
        let sets = &mut self.sets;
        let mut had = false;
        self.table.update(key, |before| {
            let after = before.and_then(|holders| sets.without(holders, slot.0));
            had = after != before;
            if had {
                sets.changed(before, after);
            }
            after
        });
        had
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
        assert_eq!((inner.table.len(), inner.sets.len(), inner.clearing), (0, 0, 0));
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

        #[test]
        fn prefix_index_matches_map_of_sets(
            operations in prop::collection::vec((0usize..3, 0u8..5, 0u8..6), 0..150),
            chain in prop::collection::vec(0u8..6, 0..6),
        ) {
            let index = PrefixIndex::new(100);
            let mut naive: BTreeMap<usize, (u64, BTreeSet<u8>)> = BTreeMap::new();
            for (n, operation, h) in operations {
                let (next, blocks) = naive.entry(n).or_default();
                index.add_node(&node(n), ONE);
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
            index.sweep();
            let all: BTreeSet<_> = naive.values().flat_map(|(_, blocks)| blocks).collect();
            prop_assert_eq!(index.len(), all.len());
        }
    }
}
