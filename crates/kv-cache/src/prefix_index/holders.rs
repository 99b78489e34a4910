//! Which nodes hold a block.

use std::ops::Deref;

/// Slots of so many nodes need no allocation: most blocks are on a node or two.
const FEW: usize = 3;

/// Slots of nodes, ascending. Takes 16 bytes.
#[derive(Debug)]
pub(super) enum Holders {
    Few(u8, [u16; FEW]),
    Many(Box<[u16]>),
}

impl Default for Holders {
    fn default() -> Self {
        Self::Few(0, [0; FEW])
    }
}

impl Deref for Holders {
    type Target = [u16];

    fn deref(&self) -> &[u16] {
        match self {
            Self::Few(len, few) => &few[..usize::from(*len)],
            Self::Many(many) => many,
        }
    }
}

impl Holders {
    /// Whether it was not among them.
    pub(super) fn insert(&mut self, slot: u16) -> bool {
        let Err(at) = self.binary_search(&slot) else { return false };
        *self = Self::of(&[&self[..at], &[slot], &self[at..]]);
        true
    }

    /// Whether it was among them.
    pub(super) fn remove(&mut self, slot: u16) -> bool {
        let Ok(at) = self.binary_search(&slot) else { return false };
        *self = Self::of(&[&self[..at], &self[at + 1..]]);
        true
    }

    /// Of slots in pieces, ascending.
    fn of(pieces: &[&[u16]]) -> Self {
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
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn holders_are_16_bytes() {
        assert_eq!(size_of::<Holders>(), 16);
    }

    proptest! {
        #[test]
        fn holders_match_btree_set(operations in prop::collection::vec((any::<bool>(), 0u16..9), 0..100)) {
            let mut holders = Holders::default();
            let mut naive = BTreeSet::new();
            for (join, slot) in operations {
                let slot = if slot % 3 == 0 { u16::MAX - slot } else { slot };
                if join { prop_assert_eq!(holders.insert(slot), naive.insert(slot)) } else { prop_assert_eq!(holders.remove(slot), naive.remove(&slot)) }
                prop_assert!(holders.iter().eq(&naive));
            }
        }
    }
}
