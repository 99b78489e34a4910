//! One conductor's part in the election: what follows from what etcd says.
//!
//! A key in etcd names the leader. A conductor that wants to lead puts it under a lease, if it is
//! absent. What etcd does not say changes nothing: while it is unreachable, the leader goes on.
//!
//! **Invariant**: a conductor leads in terms that are its own alone. A term is a function of the
//! leader's key: no message of another process changes it.

use baton_types::ConductorId;

use super::term::term_of;

/// A conductor that may lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its id, another one after each start.
    pub id: ConductorId,
    /// Where other conductors reach it, `host:port`.
    pub address: String,
}

/// Whether a conductor can place well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Eligibility {
    /// It reaches nodes.
    #[default]
    Ready,
    /// It reaches no node.
    NoNodes,
    /// It is about to end.
    Drains,
}

/// Looks at the leader's key, two per second, for which one that is not ready lets others go first.
const OTHERS_FIRST: u32 = 10;
/// Looks for which a leader that reaches no node any more waits for one.
const PATIENCE: u32 = 6;
/// Looks for which a conductor waits that has led for want of another: another one may have nodes
/// by then.
const FIRST_PATIENCE: u32 = 40;

/// Who leads, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Leadership {
    /// No conductor, so far.
    #[default]
    Unknown,
    /// This conductor, in this term.
    Own {
        /// Larger than those before, if etcd has not lost its data.
        term: u64,
    },
    /// Another conductor.
    Other {
        /// Where it is.
        address: String,
        /// Its term, by its key.
        term: u64,
    },
}

impl Leadership {
    /// The leader's term.
    pub fn term(&self) -> Option<u64> {
        match self {
            Self::Unknown => None,
            Self::Own { term } | Self::Other { term, .. } => Some(*term),
        }
    }
}

/// The leader's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderKey {
    /// Who has put it.
    pub leader: Candidate,
    /// The lease that it is under.
    pub lease: i64,
    /// The revision at which it was made.
    pub create_revision: i64,
}

impl LeaderKey {
    /// The term of the leader whose key it is.
    pub fn term(&self) -> u64 {
        term_of(self.leader.id, self.create_revision)
    }
}

/// What a look at the leader's key gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaderKeyState {
    /// No conductor led, and the key was put.
    Put,
    /// No conductor leads, and this one lets others go first.
    Absent,
    /// Another conductor leads.
    Found(LeaderKey),
}

/// The key that made this conductor the leader, and the term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Own {
    lease: i64,
    create_revision: i64,
    /// It could place well, at some time.
    was_ready: bool,
}

/// See the module's text.
#[derive(Debug, Clone)]
pub struct Candidacy {
    candidate: Candidate,
    standing: Eligibility,
    /// Looks in a row since it has reached no node.
    without_nodes: u32,
    /// Looks in a row that found no leader.
    vacant: u32,
    lease: Option<i64>,
    own: Option<Own>,
    /// The revision of the last look: what happened before is in it.
    looked: i64,
    leadership: Leadership,
}

impl Candidacy {
    /// Of a conductor that may lead.
    pub fn new(candidate: Candidate) -> Self {
        Self {
            candidate,
            standing: Eligibility::Ready,
            without_nodes: 0,
            vacant: 0,
            lease: None,
            own: None,
            looked: 0,
            leadership: Leadership::Unknown,
        }
    }

    /// Whose it is: what the key says if it is put.
    pub fn candidate(&self) -> &Candidate {
        &self.candidate
    }

    /// Who leads.
    pub fn leadership(&self) -> &Leadership {
        &self.leadership
    }

    /// Whether it can place well. Others lead rather than one that cannot, if there are others.
    pub fn on_standing(&mut self, standing: Eligibility) {
        self.standing = standing;
        if standing != Eligibility::NoNodes {
            self.without_nodes = 0;
        }
        if let (Eligibility::Ready, Some(own)) = (standing, &mut self.own) {
            own.was_ready = true;
        }
    }

    /// Whether the key is to be put if it is not there.
    pub fn campaigns(&self) -> bool {
        self.standing == Eligibility::Ready || self.vacant >= OTHERS_FIRST
    }

    /// Whether it leads and is to let others lead. One that drains, and leads because no other
    /// conductor does, goes on.
    pub fn is_to_resign(&self) -> bool {
        let Some(own) = self.own else { return false };
        match self.standing {
            Eligibility::Ready => false,
            Eligibility::NoNodes => self.without_nodes >= if own.was_ready { PATIENCE } else { FIRST_PATIENCE },
            Eligibility::Drains => own.was_ready,
        }
    }

    /// The lease under which the key is put; `None`: another one is needed.
    pub fn lease(&self) -> Option<i64> {
        self.lease
    }

    /// A lease was granted.
    pub fn on_lease(&mut self, lease: i64) {
        self.lease = Some(lease);
        // Etcd was away, and others may look only now.
        self.vacant = 0;
    }

    /// The lease is over, as etcd says: others may lead. Until one is known to, this conductor goes
    /// on.
    pub fn on_lease_ended(&mut self) {
        self.lease = None;
    }

    /// The lease was renewed, for so many seconds. `false`: it is over.
    pub fn on_renewed(&mut self, ttl: i64) -> bool {
        if ttl <= 0 {
            self.on_lease_ended();
        }
        ttl > 0
    }

    /// The leader's key was looked at, and put if it was absent. Gives the term of the leader that
    /// it names.
    pub fn on_looked(&mut self, revision: i64, look: LeaderKeyState) -> Option<u64> {
        self.looked = revision;
        if self.standing == Eligibility::NoNodes {
            self.without_nodes = self.without_nodes.saturating_add(1);
        }
        match (look, self.lease) {
            (LeaderKeyState::Put, Some(lease)) => self.lead(lease, revision),
            (LeaderKeyState::Put, None) => return None,
            (LeaderKeyState::Absent, _) => {
                self.vacant = self.vacant.saturating_add(1);
                // One that led may still be taken for the leader.
                return None;
            }
            (LeaderKeyState::Found(key), _) => self.learn(key),
        }
        self.leadership.term()
    }

    /// The watch says that the key was put.
    pub fn on_put(&mut self, revision: i64, key: LeaderKey) {
        if revision > self.looked {
            self.learn(key);
        }
    }

    /// The watch says that the key is gone. `true`: it is to be looked at.
    pub fn on_deleted(&mut self, revision: i64) -> bool {
        if revision <= self.looked {
            return false;
        }
        self.own = None;
        true
    }

    /// It leads no more. Gives the lease that is to be revoked.
    pub fn on_resigned(&mut self) -> Option<i64> {
        self.own = None;
        self.without_nodes = 0;
        self.leadership = Leadership::Unknown;
        self.lease.take()
    }

    fn lead(&mut self, lease: i64, create_revision: i64) {
        self.vacant = 0;
        let is_same = |own: &Own| (own.lease, own.create_revision) == (lease, create_revision);
        if self.own.as_ref().is_some_and(is_same) {
            // As before: etcd was away.
            return;
        }
        self.without_nodes = 0;
        self.own = Some(Own { lease, create_revision, was_ready: self.standing == Eligibility::Ready });
        self.leadership = Leadership::Own { term: term_of(self.candidate.id, create_revision) };
    }

    fn learn(&mut self, key: LeaderKey) {
        if self.lease == Some(key.lease) {
            return self.lead(key.lease, key.create_revision);
        }
        self.own = None;
        self.vacant = 0;
        self.leadership = if key.leader.id == self.candidate.id {
            // Of a lease that it had before, which is about to end.
            Leadership::Unknown
        } else {
            Leadership::Other { term: key.term(), address: key.leader.address }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u64) -> Candidate {
        Candidate { id: ConductorId(id), address: format!("10.0.0.{id}:7070") }
    }

    fn key(id: u64, lease: i64, create_revision: i64) -> LeaderKey {
        LeaderKey { leader: candidate(id), lease, create_revision }
    }

    fn other(id: u64, create_revision: i64) -> Leadership {
        Leadership::Other { address: candidate(id).address, term: term_of(ConductorId(id), create_revision) }
    }

    fn look_often(candidacy: &mut Candidacy, times: std::ops::Range<u32>, revision: i64, look: &LeaderKeyState) {
        for _ in times {
            candidacy.on_looked(revision, look.clone());
        }
    }

    /// One that leads, under lease 9, by a key that was made at revision 5.
    fn leader() -> (Candidacy, u64) {
        let mut candidacy = Candidacy::new(candidate(1));
        candidacy.on_lease(9);
        candidacy.on_looked(5, LeaderKeyState::Put);
        let Leadership::Own { term } = *candidacy.leadership() else { panic!("{candidacy:?}") };
        (candidacy, term)
    }

    #[test]
    fn candidate_that_puts_the_key_leads_until_another_does() {
        let (mut candidacy, term) = leader();
        assert!(candidacy.on_renewed(2));
        candidacy.on_looked(6, LeaderKeyState::Found(key(1, 9, 5)));
        assert_eq!(*candidacy.leadership(), Leadership::Own { term }, "etcd was away");
        candidacy.on_put(6, key(2, 8, 6));
        assert_eq!(*candidacy.leadership(), Leadership::Own { term }, "the look knew of it");
        candidacy.on_put(7, key(2, 8, 7));
        assert_eq!(*candidacy.leadership(), other(2, 7), "its key says its term");
        candidacy.on_looked(8, LeaderKeyState::Put);
        let Leadership::Own { term: later } = *candidacy.leadership() else { panic!("{candidacy:?}") };
        assert!(later > term);
    }

    #[test]
    fn candidate_waits_out_the_key_of_its_earlier_lease() {
        let (mut candidacy, _) = leader();
        assert!(!candidacy.on_renewed(0) && candidacy.lease().is_none());
        candidacy.on_lease(10);
        candidacy.on_looked(6, LeaderKeyState::Found(key(1, 9, 5)));
        assert_eq!(*candidacy.leadership(), Leadership::Unknown);
        assert!(candidacy.on_deleted(7) && !candidacy.on_deleted(6));
    }

    #[test]
    fn look_that_finds_no_key_names_no_leader() {
        let (mut candidacy, term) = leader();
        assert_eq!(candidacy.on_looked(6, LeaderKeyState::Found(key(1, 9, 5))), Some(term));
        assert_eq!(candidacy.on_looked(7, LeaderKeyState::Absent), None);
        assert_eq!(*candidacy.leadership(), Leadership::Own { term }, "what etcd does not say changes nothing");
        let next = candidacy.on_looked(8, LeaderKeyState::Found(key(2, 8, 8)));
        assert_eq!(next, candidacy.leadership().term());
        assert_eq!(candidacy.on_looked(9, LeaderKeyState::Found(key(1, 3, 4))), None, "its own, of an earlier lease");
    }

    #[test]
    fn extreme_keys_neither_panic_nor_outlast_their_end() {
        for revision in [i64::MIN, -1, 0, i64::MAX] {
            let (mut candidacy, _) = leader();
            candidacy.on_put(i64::MAX, key(u64::MAX, revision, revision));
            assert_eq!(*candidacy.leadership(), other(u64::MAX, revision));
            candidacy.on_looked(revision, LeaderKeyState::Found(key(u64::MAX, 0, revision)));
            candidacy.on_lease(10);
            // Etcd has lost its data since, or what was put there is overwritten.
            let term = candidacy.on_looked(2, LeaderKeyState::Put);
            assert_eq!(*candidacy.leadership(), Leadership::Own { term: term.unwrap() });
            assert_eq!(candidacy.on_looked(3, LeaderKeyState::Found(key(2, 8, 3))), other(2, 3).term());
            assert!(candidacy.on_deleted(4));
        }
    }

    #[test]
    fn resigned_conductor_leads_again_only_if_no_other_does() {
        let (mut candidacy, term) = leader();
        assert!(!candidacy.is_to_resign());
        candidacy.on_standing(Eligibility::Drains);
        assert!(candidacy.is_to_resign() && !candidacy.campaigns());
        assert_eq!(candidacy.on_resigned(), Some(9));
        assert!(!candidacy.is_to_resign() && candidacy.on_resigned().is_none());
        assert_eq!(*candidacy.leadership(), Leadership::Unknown);
        candidacy.on_lease(11);
        candidacy.on_looked(8, LeaderKeyState::Found(key(2, 8, 7)));
        assert_eq!(*candidacy.leadership(), other(2, 7));
        for _ in 0..OTHERS_FIRST {
            assert!(!candidacy.campaigns());
            candidacy.on_looked(9, LeaderKeyState::Absent);
        }
        assert!(candidacy.campaigns());
        candidacy.on_looked(10, LeaderKeyState::Put);
        assert!(matches!(candidacy.leadership(), Leadership::Own { term: later } if *later > term));
        assert!(!candidacy.is_to_resign(), "no other conductor wanted to");
    }

    #[test]
    fn leader_that_reaches_no_node_resigns_after_a_wait() {
        let (mut candidacy, _) = leader();
        for looks in [PATIENCE - 1, PATIENCE] {
            candidacy.on_standing(Eligibility::NoNodes);
            look_often(&mut candidacy, 0..looks, 6, &LeaderKeyState::Found(key(1, 9, 5)));
            assert_eq!(candidacy.is_to_resign(), looks == PATIENCE);
            candidacy.on_standing(Eligibility::Ready);
            assert!(!candidacy.is_to_resign());
        }
    }

    #[test]
    fn leader_that_never_reached_a_node_waits_longer_to_resign() {
        let mut candidacy = Candidacy::new(candidate(1));
        candidacy.on_standing(Eligibility::NoNodes);
        candidacy.on_lease(9);
        look_often(&mut candidacy, 0..OTHERS_FIRST, 4, &LeaderKeyState::Absent);
        assert!(candidacy.campaigns());
        candidacy.on_lease(10);
        assert!(!candidacy.campaigns(), "others may look only now");
        look_often(&mut candidacy, 0..OTHERS_FIRST, 4, &LeaderKeyState::Absent);
        candidacy.on_looked(5, LeaderKeyState::Put);
        look_often(&mut candidacy, 1..FIRST_PATIENCE, 6, &LeaderKeyState::Found(key(1, 10, 5)));
        assert!(!candidacy.is_to_resign());
        let mut other = candidacy.clone();
        other.on_looked(6, LeaderKeyState::Found(key(1, 10, 5)));
        assert!(other.is_to_resign(), "another conductor may have nodes by now");
        // This one has.
        candidacy.on_standing(Eligibility::Ready);
        candidacy.on_standing(Eligibility::NoNodes);
        look_often(&mut candidacy, 0..PATIENCE, 6, &LeaderKeyState::Found(key(1, 10, 5)));
        assert!(candidacy.is_to_resign());
    }
}
