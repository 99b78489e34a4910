//! Block to holders: a hash table that never stops for long.
//!
//! Open addressing in 1,024 parts that grow each by itself, so that no insertion copies more than some thousand entries while lookups wait. 16 bytes for a block: 96 bits of a mix of its hash,
//! which is enough to tell blocks apart (a collision would cost a wrong guess of where a prefix is, and nothing else), and its holders.

use std::hash::{BuildHasher, RandomState};

use baton_types::BlockHash;

use super::holders::Holders;

const PARTS: usize = 1 << PART_BITS;
const PART_BITS: u32 = 10;
/// Blocks that are looked up together.
pub(super) const MANY: usize = 16;
/// Entries of a part that has any.
const SMALLEST_PART: usize = 8;

/// What a block is known by here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Key {
    mixed: u64,
    tag: u32,
}

impl Key {
    fn part(self) -> usize {
        (self.mixed >> (u64::BITS - PART_BITS)) as usize
    }

    /// Where to begin to look in a part of `1 << bits` entries.
    fn home(self, bits: u32) -> usize {
        // Shifted twice: a part without entries has 0 bits.
        ((self.mixed << PART_BITS) >> 1 >> (u64::BITS - 1 - bits.min(u64::BITS - 1))) as usize
    }
}

/// A key, taken apart so that it needs 16 bytes, and the block's holders.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    mixed: u64,
    tag: u32,
    /// `None`: free.
    holders: Option<Holders>,
}

impl Entry {
    fn key(&self) -> Key {
        Key { mixed: self.mixed, tag: self.tag }
    }
}

/// Linear probing; an entry lies between its home and the first free one after it.
#[derive(Debug, Default)]
struct Part {
    /// None, or a power of two.
    entries: Box<[Entry]>,
    used: usize,
}

impl Part {
    fn bits(&self) -> u32 {
        self.entries.len().trailing_zeros()
    }

    /// Index of the key's entry, or of the free one where it would be.
    fn find(&self, key: Key) -> Result<usize, usize> {
        let last = self.entries.len() - 1;
        let mut at = key.home(self.bits());
        loop {
            let entry = &self.entries[at];
            match entry.holders {
                None => return Err(at),
                Some(_) if entry.key() == key => return Ok(at),
                Some(_) => at = (at + 1) & last,
            }
        }
    }

    fn get(&self, key: Key) -> Option<Holders> {
        if self.entries.is_empty() {
            return None;
        }
        self.find(key).ok().and_then(|at| self.entries[at].holders)
    }

    /// Gives the key other holders, or none.
    fn update(&mut self, key: Key, change: impl FnOnce(Option<Holders>) -> Option<Holders>) {
        // Full to seven eighths at most: beyond, probes get long.
        if (self.used + 1) * 8 > self.entries.len() * 7 {
            self.resize((self.entries.len() * 2).max(SMALLEST_PART));
        }
        match self.find(key) {
            Ok(at) => match change(self.entries[at].holders) {
                Some(holders) => self.entries[at].holders = Some(holders),
                None => self.remove_at(at),
            },
            Err(at) => {
                if let Some(holders) = change(None) {
                    self.entries[at] = Entry { mixed: key.mixed, tag: key.tag, holders: Some(holders) };
                    self.used += 1;
                }
            }
        }
    }

    /// Frees an entry, and moves those back that were pushed on by it.
    fn remove_at(&mut self, mut free: usize) {
        let (last, bits) = (self.entries.len() - 1, self.bits());
        self.used -= 1;
        let mut at = free;
        loop {
            at = (at + 1) & last;
            let entry = self.entries[at];
            if entry.holders.is_none() {
                break;
            }
            // It may go to the free place if its home is not after that.
            let distance = |from: usize| at.wrapping_sub(from) & last;
            if distance(entry.key().home(bits)) >= distance(free) {
                self.entries[free] = entry;
                free = at;
            }
        }
        self.entries[free] = Entry::default();
        if self.used * 8 < self.entries.len() && self.entries.len() > SMALLEST_PART {
            self.resize(self.entries.len() / 2);
        }
    }

    fn resize(&mut self, entries: usize) {
        let old = std::mem::replace(&mut self.entries, vec![Entry::default(); entries].into());
        for entry in old.iter().filter(|entry| entry.holders.is_some()) {
            let (Ok(at) | Err(at)) = self.find(entry.key());
            self.entries[at] = *entry;
        }
    }
}

/// The table.
#[derive(Debug)]
pub(super) struct BlockTable {
    parts: Box<[Part]>,
    blocks: usize,
    /// Mixed into every hash: whoever chooses hashes cannot choose where they go.
    seeds: [u64; 2],
}

impl BlockTable {
    pub(super) fn new() -> Self {
        let random = RandomState::new();
        Self {
            parts: (0..PARTS).map(|_| Part::default()).collect(),
            blocks: 0,
            seeds: [random.hash_one(0), random.hash_one(1)],
        }
    }

    pub(super) const fn parts() -> usize {
        PARTS
    }

    /// Different blocks in it.
    pub(super) fn len(&self) -> usize {
        self.blocks
    }

    pub(super) fn key(&self, hash: &BlockHash) -> Key {
        let bits = u128::from_le_bytes(hash.0);
        let (low, high) = (bits as u64, (bits >> 64) as u64);
        let product = u128::from(low ^ self.seeds[0]) * u128::from(high ^ self.seeds[1]);
        let folded = low ^ high.rotate_left(32);
        Key { mixed: product as u64 ^ (product >> 64) as u64, tag: (folded ^ (folded >> 32)) as u32 }
    }

    pub(super) fn get(&self, hash: &BlockHash) -> Option<Holders> {
        let key = self.key(hash);
        self.parts[key.part()].get(key)
    }

    /// The holders of up to 16 blocks, in their order.
    pub(super) fn get_many<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) -> [Option<Holders>; MANY] {
        let mut looks = [(Key::default(), 0); MANY];
        for (look, hash) in looks.iter_mut().zip(hashes) {
            let key = self.key(hash);
            *look = (key, key.home(self.parts[key.part()].bits()));
        }
        // All first entries, and nothing else, before anything depends on one of them: memory is waited for once, and not sixteen times.
        let mut entries = [Entry::default(); MANY];
        for (entry, (key, home)) in entries.iter_mut().zip(&looks) {
            if let Some(first) = self.parts[key.part()].entries.get(*home) {
                *entry = *first;
            }
        }
        std::array::from_fn(|n| {
            let (entry, (key, _)) = (&entries[n], looks[n]);
            match entry.holders {
                Some(_) if entry.key() != key => self.parts[key.part()].get(key),
                holders => holders,
            }
        })
    }

    /// Gives a block other holders, or none.
    pub(super) fn update(&mut self, key: Key, change: impl FnOnce(Option<Holders>) -> Option<Holders>) {
        let part = &mut self.parts[key.part()];
        let before = part.used;
        part.update(key, change);
        self.blocks = self.blocks - before + part.used;
    }

    /// The blocks of one part.
    pub(super) fn part(&self, part: usize) -> Vec<(Key, Holders)> {
        self.parts[part].entries.iter().filter_map(|entry| Some((entry.key(), entry.holders?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn holders(slot: u16) -> Holders {
        Holders::one(slot)
    }

    #[test]
    fn an_entry_is_16_bytes() {
        assert_eq!(size_of::<Entry>(), 16);
    }

    proptest! {
        /// In one part, with homes that collide, growing and shrinking.
        #[test]
        fn a_part_equals_a_map(operations in prop::collection::vec((0u64..60, prop::option::of(0u16..9)), 0..400)) {
            let (mut part, mut map) = (Part::default(), HashMap::new());
            for (n, value) in operations {
                let key = Key { mixed: (n % 7) << 45 | n, tag: n as u32 };
                match value {
                    Some(slot) => map.insert(n, slot),
                    None => map.remove(&n),
                };
                part.update(key, |_| value.map(holders));
                prop_assert_eq!(part.used, map.len());
                for n in 0..60 {
                    let key = Key { mixed: (n % 7) << 45 | n, tag: n as u32 };
                    prop_assert_eq!(part.get(key), map.get(&n).map(|slot| holders(*slot)));
                }
            }
        }
    }

    #[test]
    fn hashes_that_differ_anywhere_are_told_apart() {
        let table = BlockTable::new();
        let base = [7; 16];
        for byte in 0..16 {
            let mut other = base;
            other[byte] ^= 1;
            assert_ne!(table.key(&BlockHash(base)), table.key(&BlockHash(other)));
        }
    }
}
