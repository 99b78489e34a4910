//! Terms: which leader an order is of, and which orders a node carries out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_types::ConductorId;

/// A conductor that denies another term within this time of the last one hears of many.
const DENIES_AGAIN: Duration = Duration::from_secs(5);
/// How long it is sure then: no longer than the lease of the leader that etcd has just named.
const SURE_FOR: Duration = Duration::from_secs(2);

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

/// What a conductor has denied, having asked etcd. False terms may come faster than etcd can be
/// asked, and ids of those that tell of them are free. One that denies again and again is sure of
/// the leader for a while, whatever else it hears.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Denials {
    last: Option<Instant>,
    sure_until: Option<Instant>,
}

impl Denials {
    /// It denies a term.
    pub(super) fn on_denied(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now < last + DENIES_AGAIN) {
            self.sure_until = Some(now + SURE_FOR);
        }
        self.last = Some(now);
    }

    /// Whether what it hears is in no doubt.
    pub(super) fn is_sure(&self, now: Instant) -> bool {
        self.sure_until.is_some_and(|until| now < until)
    }
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
    /// What the one that names it has denied.
    denials: Denials,
}

/// What a node knows of leaders, from the conductors that have a session with it. A node cannot ask
/// etcd, so each conductor answers for itself: what another one names stands in its way until it
/// takes the term, or has asked etcd and denies it. A conductor that is cut off from etcd can do
/// neither.
///
/// **Invariant**: nothing is left of what a conductor said once its session is over. An order is
/// carried out only if its conductor has named its term, and no other conductor names a later one
/// that this one has not denied, or could not deny fast enough.
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
    pub fn on_denied(&mut self, now: Instant, who: ConductorId, term: u64) {
        if let Some(known) = self.0.get_mut(&who) {
            known.denials.on_denied(now);
        }
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

    /// Whether a conductor has denied so many terms that none stands in its way for now.
    pub fn is_sure(&self, now: Instant, who: ConductorId) -> bool {
        self.0.get(&who).is_some_and(|known| known.denials.is_sure(now))
    }

    /// The latest term that stands in a conductor's way.
    pub fn later_than_named_by(&self, now: Instant, who: ConductorId) -> Option<u64> {
        if self.is_sure(now, who) {
            return None;
        }
        let own = self.named_by(who);
        let undenied = self.0.values().filter(|named| named.term > own && !named.denied_by.contains(&who));
        undenied.map(|named| named.term).max()
    }

    /// Whether an order of a conductor is to be carried out. One of term 0 is of a conductor that
    /// knows no elections.
    pub fn admit(&self, now: Instant, who: ConductorId, term: u64) -> Result<(), StaleTerm> {
        let own = self.named_by(who);
        match self.later_than_named_by(now, who) {
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
        let now = Instant::now();
        let mut fence = TermFence::default();
        assert!(fence.on_named(A, 4) && !fence.on_named(A, 4));
        assert_eq!(fence.admit(now, A, 4), Ok(()));
        assert!(fence.on_named(B, 7));
        assert_eq!((fence.later_than_named_by(now, A), fence.later_than_named_by(now, B)), (Some(7), None));
        assert_eq!(fence.admit(now, A, 4), Err(StaleTerm { term: 4, named: 7 }), "it was paused");
        assert_eq!(fence.admit(now, B, 7), Ok(()));
        fence.on_named(A, 7);
        assert_eq!(fence.admit(now, A, 7), Ok(()), "it follows");
        assert_eq!(fence.admit(now, A, 4), Err(StaleTerm { term: 4, named: 7 }), "it was on its way");
    }

    #[test]
    fn order_of_a_term_that_its_conductor_has_not_named_changes_nothing() {
        let now = Instant::now();
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        for term in [u64::MAX, u64::MAX - 1, 5, 3] {
            assert_eq!(fence.admit(now, LIAR, term), Err(StaleTerm { term, named: 4 }));
            assert_eq!(fence.admit(now, A, term), Err(StaleTerm { term, named: 4 }));
        }
        assert_eq!(fence.admit(now, A, 4), Ok(()));
    }

    #[test]
    fn false_terms_stand_in_the_way_only_of_conductors_that_have_not_denied_them() {
        let mut now = Instant::now();
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        fence.on_named(B, 4);
        fence.on_named(LIAR, 9);
        assert!(fence.admit(now, A, 4).is_err() && fence.admit(now, B, 4).is_err());
        fence.on_denied(now, A, 9);
        assert_eq!(fence.admit(now, A, 4), Ok(()));
        assert!(fence.admit(now, B, 4).is_err(), "it may be cut off from etcd");
        // What was denied is what that one said, and none else: a true leader may have that term.
        now += DENIES_AGAIN;
        fence.on_named(B, 9);
        assert!(fence.admit(now, A, 4).is_err());
        fence.on_gone(B);
        assert_eq!(fence.admit(now, A, 4), Ok(()));
    }

    #[test]
    fn false_terms_in_series_stand_in_the_way_of_no_conductor_that_denies_some() {
        let began = Instant::now();
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        fence.on_named(B, 4);
        // A thousand a second, each of a conductor of its own and higher than the last one.
        let mut stopped = Duration::ZERO;
        let step = Duration::from_millis(1);
        for n in 0..10_000_u32 {
            let now = began + step * n;
            fence.on_gone(ConductorId(100 + u64::from(n) - 31));
            fence.on_named(ConductorId(100 + u64::from(n)), 1000 + u64::from(n));
            // It asks etcd as often as it may, and hears too late of what was said since.
            if n % 100 == 0 && !fence.is_sure(now, A) {
                fence.on_denied(now, A, 1000 + u64::from(n.saturating_sub(50)));
            }
            if fence.admit(now, A, 4).is_err() {
                stopped += step;
            }
            assert!(fence.admit(now, B, 4).is_err(), "it has not asked etcd");
        }
        assert!(stopped < Duration::from_secs(1), "{stopped:?} of 10 s");
        let later = began + step * 10_000 + SURE_FOR;
        assert!(fence.admit(later, A, 4).is_err(), "it was paused");
    }

    #[test]
    fn what_a_conductor_named_and_denied_ends_with_its_session() {
        let now = Instant::now();
        let mut fence = TermFence::default();
        fence.on_named(A, 4);
        fence.on_named(LIAR, u64::MAX);
        fence.on_denied(now, A, u64::MAX);
        fence.on_gone(A);
        fence.on_named(A, 4);
        assert!(fence.admit(now, A, 4).is_err(), "what it denied before");
        fence.on_gone(LIAR);
        assert_eq!((fence.later_than_named_by(now, A), fence.admit(now, A, 4)), (None, Ok(())));
    }

    #[test]
    fn conductor_without_elections_is_never_in_anothers_way() {
        let now = Instant::now();
        let mut fence = TermFence::default();
        fence.on_named(A, 0);
        fence.on_named(LIAR, u64::MAX);
        assert_eq!((fence.admit(now, A, 0), fence.admit(now, B, 0)), (Ok(()), Ok(())));
        fence.on_named(B, 4);
        fence.on_denied(now, B, u64::MAX);
        assert_eq!(fence.admit(now, B, 4), Ok(()));
    }
}
