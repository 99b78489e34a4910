//! Which nodes hold a block. Blocks of one conversation have the same holders, so that a set is
//! kept once for all of them. One comparison shows that nothing changes from one block of a chain
//! to the next.

use std::num::NonZeroU32;

use super::table::{BlockTable, Key};

/// Nodes by slot: one, two, or a set that [`HolderSets`] keeps. Two that are equal are the same
/// nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holders(NonZeroU32);

/// What a number says: 1 + a slot; two slots below 2^15, the lower one first, under the highest
/// bit; or the index of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    One(u16),
    Two([u16; 2]),
    Set(usize),
}

const FIRST_SET: u32 = 1 << 16 | 1;
const TWO: u32 = 1 << 31;
const TWO_SLOT_BITS: u32 = 15;

impl Holders {
    pub(super) fn one(slot: u16) -> Self {
        Self(NonZeroU32::MIN.saturating_add(slot.into()))
    }

    /// `None` if the slots are too high for a number.
    fn two(a: u16, b: u16) -> Option<Self> {
        let low = u32::from(a.min(b));
        let high = u32::from(a.max(b));
        let number = TWO | low << TWO_SLOT_BITS | high;
        (high >> TWO_SLOT_BITS == 0).then_some(number).and_then(NonZeroU32::new).map(Self)
    }

    fn set(index: usize) -> Self {
        let number = u32::try_from(index).ok().and_then(|index| index.checked_add(FIRST_SET));
        Self(number.filter(|number| *number < TWO).and_then(NonZeroU32::new).expect("fewer sets than blocks"))
    }

    fn kind(self) -> Kind {
        let number = self.0.get();
        if number >= TWO {
            let slot = |number: u32| (number & ((1 << TWO_SLOT_BITS) - 1)) as u16;
            return Kind::Two([slot(number >> TWO_SLOT_BITS), slot(number)]);
        }
        match number.checked_sub(FIRST_SET) {
            None => Kind::One((number - 1) as u16),
            Some(index) => Kind::Set(index as usize),
        }
    }
}

/// The sets that some block has and that are more than their numbers.
#[derive(Debug)]
pub(super) struct HolderSets {
    sets: Vec<HolderSet>,
    free: Vec<usize>,
    /// By the sum of their members' marks.
    by_mark: BlockTable,
    /// The last change of each kind: the blocks of a chain are stored one after the other, and
    /// removed.
    last_with: Option<(Holders, u16, Holders)>,
    last_without: Option<(Holders, u16, Option<Holders>)>,
}

#[derive(Debug, Default)]
struct HolderSet {
    members: SetMembers,
    mark: u128,
    /// Blocks that have it.
    blocks: usize,
}

/// Slots of so many members fit into the set itself, in the room that a pointer to them would need.
/// To see them is one wait for memory and not two.
const FEW: usize = 11;

/// Ascending.
#[derive(Debug)]
enum SetMembers {
    Few(u8, [u16; FEW]),
    Many(Box<[u16]>),
}

impl Default for SetMembers {
    fn default() -> Self {
        Self::Few(0, [0; FEW])
    }
}

impl SetMembers {
    /// Of slots in pieces, ascending.
    fn new(pieces: &[&[u16]]) -> Self {
        let len = pieces.iter().map(|piece| piece.len()).sum();
        let mut few = [0; FEW];
        let Some(mut rest) = few.get_mut(..len) else { return Self::Many(pieces.concat().into()) };
        for piece in pieces {
            let (begin, end) = rest.split_at_mut(piece.len());
            begin.copy_from_slice(piece);
            rest = end;
        }
        Self::Few(len as u8, few)
    }

    fn as_slice(&self) -> &[u16] {
        match self {
            Self::Few(len, few) => &few[..usize::from(*len)],
            Self::Many(many) => many,
        }
    }
}

/// A number for a slot, so that sums of them tell sets apart (Zobrist, 1970, with exclusive or).
/// 128 bits of two rounds of SplitMix64: sets are not chosen by an attacker who could look for a
/// collision.
fn mark(slot: u16) -> u128 {
    let mix = |n: u64| {
        let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        n ^ (n >> 31)
    };
    let n = (u64::from(slot) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    u128::from(mix(n)) << 64 | u128::from(mix(!n))
}

/// What a set is found by. Marks are random as they are.
fn key(mark: u128) -> Key {
    Key::new(mark as u64, (mark >> 64) as u32)
}

/// Members of some holders.
#[derive(Debug, Clone, Copy)]
pub(super) enum Members<'a> {
    One([u16; 1]),
    Two([u16; 2]),
    Many(&'a [u16]),
}

impl Members<'_> {
    /// Ascending.
    pub(super) fn as_slice(&self) -> &[u16] {
        match self {
            Self::One(one) => one,
            Self::Two(two) => two,
            Self::Many(many) => many,
        }
    }
}

impl HolderSets {
    pub(super) fn new() -> Self {
        Self { sets: Vec::new(), free: Vec::new(), by_mark: BlockTable::new(), last_with: None, last_without: None }
    }

    pub(super) fn members(&self, holders: Holders) -> Members<'_> {
        match holders.kind() {
            Kind::One(slot) => Members::One([slot]),
            Kind::Two(slots) => Members::Two(slots),
            Kind::Set(index) => Members::Many(self.sets[index].members.as_slice()),
        }
    }

    #[cfg(test)]
    fn contains(&self, holders: Holders, slot: u16) -> bool {
        self.members(holders).as_slice().binary_search(&slot).is_ok()
    }

    /// The holders with one more: the same if it is among them. The caller that sets a block's
    /// holders says so with [`Self::changed`].
    pub(super) fn with(&mut self, holders: Option<Holders>, slot: u16) -> Holders {
        let Some(before) = holders else { return Holders::one(slot) };
        if let Some((from, joined, to)) = self.last_with
            && (from, joined) == (before, slot)
        {
            return to;
        }
        let members = self.members(before);
        let members = members.as_slice();
        let Err(at) = members.binary_search(&slot) else { return before };
        if let [other] = members
            && let Some(two) = Holders::two(*other, slot)
        {
            return two;
        }
        let mark = self.mark_of(before) ^ mark(slot);
        let after = match self.by_mark.get(key(mark)) {
            Some(known) => known,
            None => {
                let members = SetMembers::new(&[&members[..at], &[slot], &members[at..]]);
                self.add(members, mark)
            }
        };
        self.last_with = Some((before, slot, after));
        after
    }

    /// The holders with one less: the same if it is not among them, and `None` if none is left.
    pub(super) fn without(&mut self, before: Holders, slot: u16) -> Option<Holders> {
        if let Some((from, left, to)) = self.last_without
            && (from, left) == (before, slot)
        {
            return to;
        }
        let members = self.members(before);
        let members = members.as_slice();
        let Ok(at) = members.binary_search(&slot) else { return Some(before) };
        let after = match [&members[..at], &members[at + 1..]] {
            [[], []] => None,
            [[one], []] | [[], [one]] => Some(Holders::one(*one)),
            [[a, b], []] | [[a], [b]] | [[], [a, b]] if let Some(two) = Holders::two(*a, *b) => Some(two),
            left => {
                let mark = self.mark_of(before) ^ mark(slot);
                Some(match self.by_mark.get(key(mark)) {
                    Some(known) => known,
                    None => {
                        let members = SetMembers::new(&left);
                        self.add(members, mark)
                    }
                })
            }
        };
        self.last_without = Some((before, slot, after));
        after
    }

    fn mark_of(&self, holders: Holders) -> u128 {
        match holders.kind() {
            Kind::One(slot) => mark(slot),
            Kind::Two([a, b]) => mark(a) ^ mark(b),
            Kind::Set(index) => self.sets[index].mark,
        }
    }

    fn add(&mut self, members: SetMembers, mark: u128) -> Holders {
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
        let holders = Holders::set(index);
        self.by_mark.update(key(mark), |_| Some(holders));
        holders
    }

    /// A block has these holders now instead of those. Sets that no block has are forgotten.
    pub(super) fn changed(&mut self, before: Option<Holders>, after: Option<Holders>) {
        if let Some(Kind::Set(index)) = after.map(Holders::kind) {
            self.sets[index].blocks += 1;
        }
        let Some(Kind::Set(index)) = before.map(Holders::kind) else { return };
        self.sets[index].blocks -= 1;
        if self.sets[index].blocks == 0 {
            let unused = std::mem::take(&mut self.sets[index]);
            self.by_mark.update(key(unused.mark), |_| None);
            self.free.push(index);
            self.last_with = None;
            self.last_without = None;
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
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_holder_sets_are_shared_and_unused_ones_are_dropped() {
        let mut sets = HolderSets::new();
        let one = sets.with(None, 3);
        assert_eq!((one, sets.with(Some(one), 3)), (Holders::one(3), one), "it is among them");
        assert_eq!(sets.without(one, 4), Some(one), "it is not among them");
        let [a, b] = [[3, 1, 2], [2, 3, 1]].map(|slots| {
            slots.into_iter().fold(None, |holders, slot| {
                let next = sets.with(holders, slot);
                sets.changed(holders, Some(next));
                Some(next)
            })
        });
        assert_eq!(a, b);
        assert_eq!((sets.members(a.unwrap()).as_slice(), sets.len()), (&[1, 2, 3][..], 1));
        let less = sets.without(a.unwrap(), 1);
        assert_eq!(less, sets.without(a.unwrap(), 1));
        sets.changed(a, less);
        assert_eq!(sets.members(less.unwrap()).as_slice(), [2, 3]);
        let last = sets.without(less.unwrap(), 3);
        sets.changed(less, last);
        assert_eq!((last, sets.without(last.unwrap(), 2)), (Some(Holders::one(2)), None), "none is left");
        sets.changed(b, None);
        assert_eq!((sets.len(), sets.by_mark.len()), (0, 0));
    }

    #[test]
    fn holders_encode_one_node_two_nodes_or_a_set() {
        assert_eq!(Holders::one(u16::MAX).kind(), Kind::One(u16::MAX));
        assert_eq!(Holders::two(0x7fff, 3).unwrap().kind(), Kind::Two([3, 0x7fff]));
        assert_eq!(Holders::two(0, 1).unwrap().kind(), Kind::Two([0, 1]));
        assert_eq!(Holders::two(1, 0x8000), None);
        assert_eq!(Holders::set(0).kind(), Kind::Set(0));
    }

    #[test]
    fn holder_set_is_48_bytes() {
        assert_eq!(size_of::<HolderSet>(), 48);
    }

    proptest! {
        /// With slots that two fit into a number of, and with slots that do not.
        #[test]
        fn holder_sets_match_btree_sets(operations in prop::collection::vec((any::<bool>(), 0usize..3, 0u16..30), 0..200)) {
            let mut sets = HolderSets::new();
            let mut blocks: [(Option<Holders>, BTreeSet<u16>); 3] = Default::default();
            for (join, block, slot) in operations {
                let slot = if slot % 3 == 0 { u16::MAX - slot } else { slot };
                let (holders, naive) = &mut blocks[block];
                let had = holders.is_some_and(|holders| sets.contains(holders, slot));
                prop_assert_eq!(had, naive.contains(&slot));
                let after = match (join, *holders) {
                    (true, holders) => Some(sets.with(holders, slot)),
                    (false, None) => None,
                    (false, Some(holders)) => sets.without(holders, slot),
                };
                prop_assert_eq!(after != *holders, join != had);
                if join != had {
                    sets.changed(*holders, after);
                    *holders = after;
                    if join { naive.insert(slot) } else { naive.remove(&slot) };
                }
                for (holders, naive) in &blocks {
                    let members = holders.map(|holders| sets.members(holders));
                    let members = members.as_ref().map_or(&[][..], Members::as_slice);
                    prop_assert!(members.iter().eq(naive));
                    prop_assert!(blocks.iter().all(|other| (other.0 == *holders) == (other.1 == *naive)));
                }
            }
            for (holders, _) in &blocks {
                sets.changed(*holders, None);
            }
            prop_assert_eq!((sets.len(), sets.by_mark.len()), (0, 0));
        }
    }
}
