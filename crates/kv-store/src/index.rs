//! Which records are stored, and in which order they were used.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use baton_types::BlockHash;

/// Where a record lies and what its parts must be. A reader that holds it keeps the slot from being
/// reused.
#[derive(Debug)]
pub(crate) struct SlotRecord {
    pub(crate) slot: u32,
    /// CRC-32C of each part.
    pub(crate) checksums: Box<[u32]>,
}

/// A stored record.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) record: Arc<SlotRecord>,
    pub(crate) parent: Option<BlockHash>,
    /// Key of `Index::by_use`.
    used: u64,
}

/// Stored records by hash and by last use.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: HashMap<BlockHash, Entry>,
    by_use: BTreeMap<u64, BlockHash>,
    /// Uses so far.
    uses: u64,
}

impl Index {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Only looks.
    pub(crate) fn find(&self, hash: BlockHash) -> Option<&Entry> {
        self.entries.get(&hash)
    }

    /// Moves a record to the recent end.
    pub(crate) fn touch(&mut self, hash: BlockHash) -> Option<&Entry> {
        let entry = self.entries.get_mut(&hash)?;
        self.by_use.remove(&entry.used);
        self.uses += 1;
        entry.used = self.uses;
        self.by_use.insert(entry.used, hash);
        Some(entry)
    }

    /// At the recent end. Returns what had the same hash.
    pub(crate) fn insert(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        record: SlotRecord,
    ) -> Option<Arc<SlotRecord>> {
        let replaced = self.remove(hash);
        self.uses += 1;
        self.by_use.insert(self.uses, hash);
        self.entries.insert(hash, Entry { record: Arc::new(record), parent, used: self.uses });
        replaced
    }

    pub(crate) fn remove(&mut self, hash: BlockHash) -> Option<Arc<SlotRecord>> {
        let entry = self.entries.remove(&hash)?;
        self.by_use.remove(&entry.used);
        Some(entry.record)
    }

    /// Removes the least recently used record that no reader holds. Those that are held were used
    /// just now, so that hardly any is passed over.
    pub(crate) fn evict(&mut self) -> Option<(BlockHash, u32)> {
        let entries = &mut self.entries;
        // `get_mut` of a shared pointer, unlike its count, also waits for what the last holder did
        // before it released it.
        let mut idle = |hash: &BlockHash| entries.get_mut(hash).is_some_and(|e| Arc::get_mut(&mut e.record).is_some());
        let hash = self.by_use.values().copied().find(|hash| idle(hash))?;
        self.remove(hash).map(|record| (hash, record.slot))
    }

    pub(crate) fn into_records(self) -> impl Iterator<Item = Arc<SlotRecord>> {
        self.entries.into_values().map(|entry| entry.record)
    }

    /// From the least to the most recently used.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, &Entry)> {
        self.by_use.values().filter_map(|hash| self.entries.get(hash).map(|entry| (*hash, entry)))
    }
}
