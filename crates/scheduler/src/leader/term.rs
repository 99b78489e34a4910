//! Terms: which leader an order is of, and which orders a node carries out.

use std::collections::{BTreeMap, BTreeSet};

use baton_types::ConductorId;

/// The lower bits of a term are its leader's own, so that no other conductor makes the same one.
const OWN_BITS: u32 = 24;
/// What is left for the revision.
const MAX_REVISION: u64 = u64::MAX >> OWN_BITS;

/// The term of the leader that made its key at a revision of etcd. A conductor that reads the key
/// knows the term. No message of another process has a part in it.
///
/// Revisions alone do not do. If etcd loses its data they begin again, and an isolated leader may
/// still place at the same one. So a term has the lower bits of its leader's id, which is drawn at
/// its start.
pub(super) fn term_of(leader: ConductorId, create_revision: i64) -> u64 {
    let revision = u64::try_from(create_revision).unwrap_or_default().clamp(1, MAX_REVISION);
    revision << OWN_BITS | leader.0 & (u64::MAX >> (u64::BITS - OWN_BITS))
}

/// An order that is not of the leader that its conductor, or another one, has named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("placed in term {term}, but a conductor has named a leader of term {named}")]
pub struct StaleTerm {
    /// Of the order.
    pub term: u64,
    /// What was named, and not denied.
    pub named: u64,
}

/// What a conductor says of the leader.
#[derive(Debug, Clone, Default)]
struct Named {
    term: u64,
    /// Conductors that have asked etcd, and deny it.
    denied_by: BTreeSet<ConductorId>,
}

/// What a node knows of leaders, from the conductors that have a session with it. A node cannot ask
/// etcd, so each conductor answers for itself: what another one names stands in its way until it
/// takes the term, or has asked etcd and denies it. A conductor that is cut off from etcd can do
/// neither.
///
/// **Invariant**: nothing is left of what a conductor said once its session is over. An order is
/// carried out only if its conductor has named its term, and no other conductor names a later one
/// that this one has not denied.
#[derive(Debug, Clone, Default)]
pub struct TermFence(BTreeMap<ConductorId, Named>);

impl TermFence {
    /// A conductor names the leader's term. Says whether it named another one before.
    pub fn on_named(&mut self, who: ConductorId, term: u64) -> bool {
        let known = self.0.entry(who).or_default();
        let is_new = known.term != term;
        if is_new {
            *known = Named { term, ..Named::default() };
        }
        is_new
    }

    /// A conductor says that this is not the leader's term.
    pub fn on_denied(&mut self, who: ConductorId, term: u64) {
        for named in self.0.values_mut().filter(|named| named.term == term) {
            named.denied_by.insert(who);
        }
    }

    /// A conductor's session is over.
    pub fn on_gone(&mut self, who: ConductorId) {
        self.0.remove(&who);
        for named in self.0.values_mut() {
            named.denied_by.remove(&who);
        }
    }

    /// The term that a conductor has named; 0: none.
    pub fn named_by(&self, who: ConductorId) -> u64 {
        self.0.get(&who).map_or(0, |named| named.term)
    }

    /// The latest term that stands in a conductor's way.
    pub fn later_than_named_by(&self, who: ConductorId) -> Option<u64> {
        let own = self.named_by(who);
        let undenied = self.0.values().filter(|named| named.term > own && !named.denied_by.contains(&who));
        undenied.map(|named| named.term).max()
    }

    /// Whether an order of a conductor is to be carried out. One of term 0 is of a conductor that
    /// knows no elections.
    pub fn admit(&self, who: ConductorId, term: u64) -> Result<(), StaleTerm> {
        let own = self.named_by(who);
        match self.later_than_named_by(who) {
            _ if term == 0 => Ok(()),
            Some(named) => Err(StaleTerm { term, named }),
            None if term == own => Ok(()),
            None => Err(StaleTerm { term, named: own }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ConductorId = ConductorId(0xa0_0000_0001);
    const B: ConductorId = ConductorId(0xb0_0000_0002);
    const LIAR: ConductorId = ConductorId(0xc0_0000_0003);

    #[test]
    fn term_is_made_of_its_leaders_key_and_of_nothing_else() {
        assert_eq!(term_of(A, 7), 7 << 24 | 1);
        assert_ne!(term_of(A, 7), term_of(B, 7), "etcd has lost its data, and one of them is cut off");
        assert!(term_of(B, 7) < term_of(A, 8));
        for (revision, expected) in [(i64::MIN, 1), (-1, 1), (0, 1), (1 << 40, MAX_REVISION), (i64::MAX, MAX_REVISION)]
        {
            assert_eq!(term_of(A, revision), expected << 24 | 1, "{revision}: no panic, and never 0");
        }
    }

    #[test]
    fn order_of_an_earlier_term_than_another_conductor_names_is_refused() {
        let mut fence = TermFence::default();
        assert!(fence.on_named(A, 4) && !fence.on_named(A, 4));
        assert_eq!(fence.admit(A, 4), Ok(()));
        assert!(fence.on_named(B, 7));
        assert_eq!((fence.later_than_named_by(A), fence.later_than_named_by(B)), (Some(7), None));
        assert_eq!(fence.admit(A, 4), Err(StaleTerm { term: 4, named: 7 }), "it was paused");
        assert_eq!(fence.admit(B, 7), Ok(()));
        fence.on_named(A, 7);
        assert_eq!(fence.admit(A, 7), Ok(()), "it follows");
        assert_eq!(fence.admit(A, 4), Err(StaleTerm { term: 4, named: 7 }), "it was on its way");
    }

    #[test]
    fn order_of_a_term_that_its_conductor_has_not_named_changes_nothing() {
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        for term in [u64::MAX, u64::MAX - 1, 5, 3] {
            assert_eq!(fence.admit(LIAR, term), Err(StaleTerm { term, named: 4 }));
            assert_eq!(fence.admit(A, term), Err(StaleTerm { term, named: 4 }));
        }
        assert_eq!(fence.admit(A, 4), Ok(()));
    }

    #[test]
    fn false_terms_stand_in_the_way_only_of_conductors_that_have_not_denied_them() {
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        fence.on_named(B, 4);
        let liars = (0..30).map(|n| ConductorId(100 + n)).collect::<Vec<_>>();
        for (n, liar) in liars.iter().enumerate() {
            fence.on_named(*liar, u64::MAX - n as u64);
        }
        for _ in &liars {
            let told = fence.later_than_named_by(A).expect("one more of them");
            assert!(fence.admit(A, 4).is_err());
            fence.on_denied(A, told);
        }
        assert_eq!(fence.admit(A, 4), Ok(()), "however many say it");
        assert!(fence.admit(B, 4).is_err(), "it may be cut off from etcd");
        // What was denied is what those said, and none else: a true leader may have that term.
        fence.on_named(B, u64::MAX);
        assert!(fence.admit(A, 4).is_err());
        fence.on_gone(B);
        assert_eq!(fence.admit(A, 4), Ok(()));
    }

    #[test]
    fn what_a_conductor_named_and_denied_ends_with_its_session() {
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        fence.on_named(LIAR, u64::MAX);
        fence.on_denied(A, u64::MAX);
        fence.on_gone(A);
        fence.on_named(A, 4);
        assert!(fence.admit(A, 4).is_err(), "what it denied before");
        fence.on_gone(LIAR);
        assert_eq!((fence.later_than_named_by(A), fence.admit(A, 4)), (None, Ok(())));
    }

    #[test]
    fn conductor_without_elections_is_never_in_anothers_way() {
        let mut fence = TermFence::default();
        fence.on_named(A, 0);
        fence.on_named(LIAR, u64::MAX);
        assert_eq!((fence.admit(A, 0), fence.admit(B, 0)), (Ok(()), Ok(())));
        fence.on_named(B, 4);
        fence.on_denied(B, u64::MAX);
        assert_eq!(fence.admit(B, 4), Ok(()));
    }
}
