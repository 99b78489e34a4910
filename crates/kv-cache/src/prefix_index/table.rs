//! Block to holders: a hash table that never stops for long.
//!
//! Open addressing in 1,024 parts. Each grows by itself, so that no insertion copies more than some
//! thousand entries while lookups wait. A block takes 16 bytes: 96 bits of a mix of its hash, and
//! its holders. The 96 bits are enough to tell blocks apart: a collision would cost a wrong guess
//! of where a prefix is, and nothing else. Four of them share a line of the cache, in which a block
//! may have any place. Nearly every block is in its first line, so a lookup is one load and no
//! branch that could go wrong.

use std::hash::{BuildHasher, RandomState};
use std::hint::{black_box, select_unpredictable};

use baton_types::BlockHash;

use super::holders::Holders;

const PARTS: usize = 1 << PART_BITS;
const PART_BITS: u32 = 10;
/// Blocks that are looked up together.
pub(super) const MANY: usize = 32;
/// Entries of a line.
const LINE: usize = 4;

/// What a block is known by here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Key {
    mixed: u64,
    tag: u32,
}

impl Key {
    /// Of bits that look like chance.
    pub(super) const fn new(mixed: u64, tag: u32) -> Self {
        Self { mixed, tag }
    }

    fn part(self) -> usize {
        (self.mixed >> (u64::BITS - PART_BITS)) as usize
    }

    /// The line where to begin to look in a part of `1 << bits` lines.
    fn home(self, bits: u32) -> usize {
        // Shifted twice: a part of one line has 0 bits.
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

    fn is_free(&self) -> bool {
        self.holders.is_none()
    }
}

/// A cache line: what memory gives at once.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Line([Entry; LINE]);

/// Which entries of a line are the key's (one at most), and which are free, a bit each.
#[derive(Debug, Clone, Copy)]
struct Look {
    same: u32,
    free: u32,
}

impl Line {
    /// Compares all entries, without a branch. A guess which one it is would be wrong every other
    /// time, and the loads for the blocks after it would wait for that.
    fn look(&self, key: Key) -> Look {
        let mut same = 0;
        let mut free = 0;
        for (n, entry) in self.0.iter().enumerate() {
            let differs = (entry.mixed ^ key.mixed) | u64::from(entry.tag ^ key.tag);
            same |= u32::from(differs == 0) << n;
            free |= u32::from(entry.is_free()) << n;
        }
        // A free one looks like the key of zeros.
        Look { same: same & !free, free }
    }

    /// Holders of the key that was looked for, if it is here.
    fn holders(&self, look: Look) -> Option<Holders> {
        let entry = &self.0[look.same.trailing_zeros() as usize % LINE];
        select_unpredictable(look.same != 0, entry.holders, None)
    }
}

impl Look {
    /// Whether the key may be in the next line.
    fn goes_on(self) -> bool {
        self.same | self.free == 0
    }
}

/// Where an entry is: its line, and its place there.
type At = (usize, usize);

/// Linear probing by lines: all lines from an entry's home to the one before its own are full.
#[derive(Debug, Default)]
struct Part {
    /// None, or a power of two.
    lines: Box<[Line]>,
    used: usize,
}

impl Part {
    fn bits(&self) -> u32 {
        self.lines.len().trailing_zeros()
    }

    fn next(&self, line: usize) -> usize {
        (line + 1) & (self.lines.len() - 1)
    }

    /// Where the key's entry is, or the free one that it would get. Some entry is free.
    fn find(&self, key: Key) -> Result<At, At> {
        let mut line = key.home(self.bits());
        loop {
            let look = self.lines[line].look(key);
            if look.same != 0 {
                return Ok((line, look.same.trailing_zeros() as usize));
            }
            if look.free != 0 {
                return Err((line, look.free.trailing_zeros() as usize));
            }
            line = self.next(line);
        }
    }

    fn get(&self, key: Key) -> Option<Holders> {
        if self.lines.is_empty() {
            return None;
        }
        let (line, n) = self.find(key).ok()?;
        self.lines[line].0[n].holders
    }

    /// Gives the key other holders, or none.
    fn update(&mut self, key: Key, change: impl FnOnce(Option<Holders>) -> Option<Holders>) {
        // Full to three quarters at most: beyond, too many blocks are not in their first line, and
        // the next one is another wait for memory.
        if (self.used + 1) * 8 > self.lines.len() * LINE * 6 {
            self.resize((self.lines.len() * 2).max(1));
        }
        match self.find(key) {
            Ok((line, n)) => {
                let entry = &mut self.lines[line].0[n];
                match change(entry.holders) {
                    Some(holders) => entry.holders = Some(holders),
                    None => self.remove((line, n)),
                }
            }
            Err((line, n)) => {
                if let Some(holders) = change(None) {
                    self.lines[line].0[n] = Entry { mixed: key.mixed, tag: key.tag, holders: Some(holders) };
                    self.used += 1;
                }
            }
        }
    }

    /// Frees an entry, and moves one back that was pushed on by it, and so on.
    fn remove(&mut self, (mut line, mut n): At) {
        self.used -= 1;
        while let Some((from, m)) = self.pushed_on(line) {
            self.lines[line].0[n] = self.lines[from].0[m];
            line = from;
            n = m;
        }
        self.lines[line].0[n] = Entry::default();
        let lines = self.lines.len();
        if self.used * 8 < lines * LINE && lines > 1 {
            self.resize(lines / 2);
        }
    }

    /// An entry after this line that could be in it.
    fn pushed_on(&self, line: usize) -> Option<At> {
        let last = self.lines.len() - 1;
        let bits = self.bits();
        let mut at = line;
        while !self.lines[at].0.iter().any(Entry::is_free) {
            at = self.next(at);
            let distance = |from: usize| at.wrapping_sub(from) & last;
            let fits = |entry: &Entry| !entry.is_free() && distance(entry.key().home(bits)) >= distance(line);
            if let Some(n) = self.lines[at].0.iter().position(fits) {
                return Some((at, n));
            }
        }
        None
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.lines.iter().flat_map(|line| &line.0).filter(|entry| !entry.is_free())
    }

    fn resize(&mut self, lines: usize) {
        let mut other = Self { lines: vec![Line::default(); lines].into(), used: self.used };
        let bits = other.bits();
        for entry in self.entries() {
            // None of them is there yet: the first free one is its place.
            let mut line = entry.key().home(bits);
            let n = loop {
                match other.lines[line].0.iter().position(Entry::is_free) {
                    Some(n) => break n,
                    None => line = other.next(line),
                }
            };
            other.lines[line].0[n] = *entry;
        }
        *self = other;
    }
}

/// The table.
#[derive(Debug)]
pub(super) struct BlockTable {
    parts: Box<[Part]>,
    blocks: usize,
    /// Mixed into every hash: a client that chooses hashes cannot choose where they go.
    seeds: [u64; 2],
}

impl BlockTable {
    pub(super) fn new() -> Self {
        #[allow(clippy::disallowed_methods)] // decides nothing but where entries lie
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
        let low = bits as u64;
        let high = (bits >> 64) as u64;
        let product = u128::from(low ^ self.seeds[0]) * u128::from(high ^ self.seeds[1]);
        let folded = low ^ high.rotate_left(32);
        Key { mixed: product as u64 ^ (product >> 64) as u64, tag: (folded ^ (folded >> 32)) as u32 }
    }

    pub(super) fn get(&self, key: Key) -> Option<Holders> {
        self.parts[key.part()].get(key)
    }

    /// Keys of up to `MANY` blocks, in their order, and the lines where to begin to look for them.
    /// All lines are on their way from memory before anything depends on one. There is nothing
    /// between the loads, so that the core has begun all of them before it waits for the first.
    fn load<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) -> ([Key; MANY], [Option<&Line>; MANY]) {
        let mut keys = [Key::default(); MANY];
        let mut homes = [None; MANY];
        for ((key, home), hash) in keys.iter_mut().zip(&mut homes).zip(hashes) {
            *key = self.key(hash);
            let part = &self.parts[key.part()];
            *home = part.lines.get(key.home(part.bits()));
        }
        black_box(homes.iter().flatten().fold(0, |touched, line| touched ^ line.0[0].mixed));
        (keys, homes)
    }

    /// Keys of up to `MANY` blocks, in their order, which are about to be updated.
    pub(super) fn keys<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) -> [Key; MANY] {
        self.load(hashes).0
    }

    /// The holders of up to `MANY` blocks, in their order.
    pub(super) fn get_many<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) -> [Option<Holders>; MANY] {
        let (keys, homes) = self.load(hashes);
        let mut holders = [None; MANY];
        let mut elsewhere = 0_u32;
        for n in 0..MANY {
            if let Some(line) = homes[n] {
                let look = line.look(keys[n]);
                holders[n] = line.holders(look);
                elsewhere |= u32::from(look.goes_on()) << n;
            }
        }
        while elsewhere != 0 {
            let n = elsewhere.trailing_zeros() as usize;
            holders[n] = self.parts[keys[n].part()].get(keys[n]);
            elsewhere &= elsewhere - 1;
        }
        holders
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
        self.parts[part].entries().filter_map(|entry| Some((entry.key(), entry.holders?))).collect()
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
    fn block_table_entry_is_16_bytes_and_four_fill_a_cache_line() {
        assert_eq!((size_of::<Entry>(), size_of::<Line>()), (16, 64));
    }

    proptest! {
        /// In one part, with homes that collide, growing and shrinking.
        #[test]
        fn block_table_part_matches_hash_map(operations in prop::collection::vec((0u64..60, prop::option::of(0u16..9)), 0..400)) {
            let mut part = Part::default();
            let mut map = HashMap::new();
            for (n, value) in operations {
                let key = Key { mixed: (n % 7) << 45 | n, tag: n as u32 };
                match value {
                    Some(slot) => map.insert(n, slot),
                    None => map.remove(&n),
                };
                part.update(key, |_| value.map(holders));
                prop_assert_eq!((part.used, part.entries().count()), (map.len(), map.len()));
                for n in 0..60 {
                    let key = Key { mixed: (n % 7) << 45 | n, tag: n as u32 };
                    prop_assert_eq!(part.get(key), map.get(&n).map(|slot| holders(*slot)));
                }
            }
        }
    }

    #[test]
    fn block_hashes_differing_in_any_byte_have_distinct_keys() {
        let table = BlockTable::new();
        let base = [7; 16];
        for byte in 0..16 {
            let mut other = base;
            other[byte] ^= 1;
            assert_ne!(table.key(&BlockHash(base)), table.key(&BlockHash(other)));
        }
    }
}
