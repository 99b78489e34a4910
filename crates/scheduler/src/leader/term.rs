//! Terms: which leader an order is of, and which leader was the last.

use baton_types::ConductorId;

/// The lower bits of a term are its leader's own, so that no other conductor makes the same one.
const OWN_BITS: u32 = 24;
/// What is left for the number.
const MAX_NUMBER: u64 = u64::MAX >> OWN_BITS;

/// A term for a leader that was elected at a revision of etcd, later than all that it has heard of.
///
/// Revisions alone do not do. If etcd loses its data they begin again, and an isolated leader may
/// still place in a term that has the same number. So a term has the lower bits of its leader's id,
/// which is drawn at its start.
pub(super) fn term_of(leader: ConductorId, revision: i64, latest: u64) -> u64 {
    let number = u64::try_from(revision).unwrap_or_default().max((latest >> OWN_BITS) + 1).min(MAX_NUMBER);
    number << OWN_BITS | leader.0 & (u64::MAX >> (u64::BITS - OWN_BITS))
}

/// An order of a leader that another one has followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("placed in term {term}, but a leader of term {latest} has placed since")]
pub struct StaleTerm {
    /// Of the order.
    pub term: u64,
    /// The latest that was heard of.
    pub latest: u64,
}

/// What a node knows of leaders. **Invariant**: what it admits is never of an earlier term than
/// what it admitted before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TermFence(u64);

impl TermFence {
    /// The latest term that was heard of; 0: none.
    pub fn latest(&self) -> u64 {
        self.0
    }

    /// An order came. Says whether its term is a later one than those before.
    pub fn admit(&mut self, term: u64) -> Result<bool, StaleTerm> {
        let latest = self.0;
        self.0 = latest.max(term);
        if term < latest { Err(StaleTerm { term, latest }) } else { Ok(term > latest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn term_is_later_than_all_heard_of_and_unique_to_its_leader() {
        let a = ConductorId(0xa0_0000_0001);
        let b = ConductorId(0xb0_0000_0002);
        assert_eq!(term_of(a, 7, 0), 7 << 24 | 1);
        assert_ne!(term_of(a, 7, 0), term_of(b, 7, 0), "etcd has lost its data, and one of them is cut off");
        for latest in [0, 6, 7 << 24, 7 << 24 | 2, 99 << 24 | 0xff_ffff, (1 << 24) - 1] {
            assert!(term_of(a, 7, latest) > latest, "{latest}");
        }
        assert!(term_of(a, -1, 0) > 0);
        assert_eq!(term_of(a, i64::MAX, u64::MAX) >> 24, MAX_NUMBER, "no panic, whatever a peer says");
    }

    #[test]
    fn orders_of_earlier_terms_are_refused() {
        let mut term_fence = TermFence::default();
        assert_eq!(term_fence.admit(0), Ok(false));
        assert_eq!(term_fence.admit(4), Ok(true));
        assert_eq!(term_fence.admit(4), Ok(false));
        assert_eq!(term_fence.admit(3), Err(StaleTerm { term: 3, latest: 4 }));
        assert_eq!(term_fence.latest(), 4);
    }
}
