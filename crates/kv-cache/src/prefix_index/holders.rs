//! Which nodes hold a block. Blocks of one conversation have the same holders, so that a set is kept once for all of them, and to see that nothing changes from one block of a chain to the next takes
//! one comparison.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU32;

/// Nodes by slot: one, or a set that [`HolderSets`] keeps. Two that are equal are the same nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holders(NonZeroU32);

/// Numbers below are 1 + a slot, others name sets.
const FIRST_SET: u32 = 1 << 16 | 1;

impl Holders {
    pub(super) fn one(slot: u16) -> Self {
        Self(NonZeroU32::MIN.saturating_add(slot.into()))
    }

    fn set(index: usize) -> Self {
        let number = u32::try_from(index).ok().and_then(|index| index.checked_add(FIRST_SET));
        Self(number.and_then(NonZeroU32::new).expect("fewer sets than blocks"))
    }

    /// The only one, or the index of the set.
    fn kind(self) -> Result<u16, usize> {
        match self.0.get().checked_sub(FIRST_SET) {
            None => Ok((self.0.get() - 1) as u16),
            Some(index) => Err(index as usize),
        }
    }
}

/// The sets of two nodes or more that some block has.
#[derive(Debug, Default)]
pub(super) struct HolderSets {
    sets: Vec<HolderSet>,
    free: Vec<usize>,
    /// By the sum of their members' marks.
    by_mark: HashMap<u128, usize, BuildHasherDefault<MarkHasher>>,
    /// The last change: the blocks of a chain are stored one after the other.
    last_with: Option<(Holders, u16, Holders)>,
}

#[derive(Debug, Default)]
struct HolderSet {
    /// Ascending.
    members: Box<[u16]>,
    mark: u128,
    /// Blocks that have it.
    blocks: usize,
}

/// A number for a slot, so that sums of them tell sets apart (Zobrist, 1970, with exclusive or). 128 bits of two rounds of SplitMix64: sets are not chosen by anybody who could look for a collision.
fn mark(slot: u16) -> u128 {
    let mix = |n: u64| {
        let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        n ^ (n >> 31)
    };
    let n = (u64::from(slot) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    u128::from(mix(n)) << 64 | u128::from(mix(!n))
}

/// Marks are random as they are.
#[derive(Debug, Default)]
struct MarkHasher(u64);

impl Hasher for MarkHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u128(&mut self, mark: u128) {
        self.0 = mark as u64;
    }
}

/// Members of some holders.
#[derive(Debug, Clone, Copy)]
pub(super) enum Members<'a> {
    One([u16; 1]),
    Many(&'a [u16]),
}

impl Members<'_> {
    /// Ascending.
    pub(super) fn as_slice(&self) -> &[u16] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }
}

impl HolderSets {
    pub(super) fn members(&self, holders: Holders) -> Members<'_> {
        match holders.kind() {
            Ok(slot) => Members::One([slot]),
            Err(index) => Members::Many(&self.sets[index].members),
        }
    }

    pub(super) fn contains(&self, holders: Holders, slot: u16) -> bool {
        self.members(holders).as_slice().binary_search(&slot).is_ok()
    }

    /// The holders with one more; `None` where it is among them. Whoever sets a block's holders says so with [`Self::changed`].
    pub(super) fn with(&mut self, holders: Option<Holders>, slot: u16) -> Option<Holders> {
        let Some(before) = holders else { return Some(Holders::one(slot)) };
        if let Some((from, joined, to)) = self.last_with
            && (from, joined) == (before, slot)
        {
            return Some(to);
        }
        let members = self.members(before);
        let members = members.as_slice();
        let at = members.binary_search(&slot).err()?;
        let mark = self.mark_of(before) ^ mark(slot);
        let after = match self.by_mark.get(&mark) {
            Some(index) => Holders::set(*index),
            None => {
                let members = [&members[..at], &[slot], &members[at..]].concat();
                self.add(members.into(), mark)
            }
        };
        self.last_with = Some((before, slot, after));
        Some(after)
    }

    /// The holders with one less, which is among them; `None` where nobody is left.
    pub(super) fn without(&mut self, holders: Holders, slot: u16) -> Option<Holders> {
        let index = holders.kind().err()?;
        let members = &self.sets[index].members;
        let mark = self.sets[index].mark ^ mark(slot);
        if let [a, b] = members[..] {
            return Some(Holders::one(if a == slot { b } else { a }));
        }
        match self.by_mark.get(&mark) {
            Some(index) => Some(Holders::set(*index)),
            None => {
                let members = members.iter().copied().filter(|member| *member != slot).collect();
                Some(self.add(members, mark))
            }
        }
    }

    fn mark_of(&self, holders: Holders) -> u128 {
        match holders.kind() {
            Ok(slot) => mark(slot),
            Err(index) => self.sets[index].mark,
        }
    }

    fn add(&mut self, members: Box<[u16]>, mark: u128) -> Holders {
        let set = HolderSet { members, mark, blocks: 0 };
        let index = match self.free.pop() {
            Some(index) => {
                self.sets[index] = set;
                index
            }
            None => {
                self.sets.push(set);
                self.sets.len() - 1
            }
        };
        self.by_mark.insert(mark, index);
        Holders::set(index)
    }

    /// A block has these holders now instead of those. Sets that no block has are forgotten.
    pub(super) fn changed(&mut self, before: Option<Holders>, after: Option<Holders>) {
        if let Some(Err(index)) = after.map(Holders::kind) {
            self.sets[index].blocks += 1;
        }
        let Some(Err(index)) = before.map(Holders::kind) else { return };
        self.sets[index].blocks -= 1;
        if self.sets[index].blocks == 0 {
            let unused = std::mem::take(&mut self.sets[index]);
            self.by_mark.remove(&unused.mark);
            self.free.push(index);
            self.last_with = None;
        }
    }

    /// Sets in use.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.sets.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sets_are_one_and_unused_ones_go() {
        let mut sets = HolderSets::default();
        let one = sets.with(None, 3).unwrap();
        assert_eq!((one, sets.with(Some(one), 3)), (Holders::one(3), None));
        let [a, b] = [[3, 1, 2], [2, 3, 1]].map(|slots| {
            slots.into_iter().fold(None, |holders, slot| {
                let next = sets.with(holders, slot).unwrap();
                sets.changed(holders, Some(next));
                Some(next)
            })
        });
        assert_eq!(a, b);
        assert_eq!((sets.members(a.unwrap()).as_slice(), sets.len()), (&[1, 2, 3][..], 1));
        let less = sets.without(a.unwrap(), 1);
        sets.changed(a, less);
        assert_eq!(sets.members(less.unwrap()).as_slice(), [2, 3]);
        let last = sets.without(less.unwrap(), 3);
        sets.changed(less, last);
        assert_eq!((last, sets.without(last.unwrap(), 2)), (Some(Holders::one(2)), None));
        sets.changed(b, None);
        assert_eq!((sets.len(), sets.by_mark.len()), (0, 0));
    }

    #[test]
    fn the_highest_slot_is_no_set() {
        assert_eq!(Holders::one(u16::MAX).kind(), Ok(u16::MAX));
        assert_eq!(Holders::set(0).kind(), Err(0));
    }
}
