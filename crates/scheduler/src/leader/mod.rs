//! One conductor places for all. What the others ask of it, and what it knows of them.
//!
//! The one that places has the ledger ([`Cluster`]). A request is its conductor's, wherever it is
//! placed. A conductor asks in the order in which things happen to its requests, and says what came
//! of each in that same order. So the ledger is as exact as if it were its own. When another
//! conductor becomes the one that places, each declares what it has ([`Placed`]), and the ledger is
//! made of that.

mod candidacy;
mod desk;
mod placed;
mod term;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_types::{ConductorId, Declared, RequestKey};

use crate::cluster::Cluster;

pub use candidacy::{Candidacy, Candidate, Eligibility, LeaderKey, LeaderKeyState, Leadership};
pub use desk::{Answer, Decided, DecisionReasons, Desk, DeskEffect, Following, LinkId, OtherTerm, StreamId};
pub use placed::Placed;
pub use term::{StaleTerm, TermFence};

/// How long what a conductor had stays charged after it went away: it may be back, and declare it.
const KEPT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Follower {
    /// Its attempts that are charged, or wait in the admission queue.
    keys: BTreeSet<RequestKey>,
    gone: Option<Instant>,
}

/// The conductors whose requests are placed here. **Invariant**: what is charged for one that stays
/// away is given back.
#[derive(Debug, Default)]
pub struct Followers {
    followers: BTreeMap<ConductorId, Follower>,
}

impl Followers {
    /// A conductor is here, or back, and has this. What else was charged for it is over.
    pub fn on_greeted(&mut self, now: Instant, cluster: &mut Cluster, who: ConductorId, declared: &[Declared]) {
        let before = self.followers.remove(&who).unwrap_or_default();
        let keys: BTreeSet<_> = declared.iter().map(|declared| declared.key).collect();
        before.keys.difference(&keys).for_each(|key| cluster.on_ended(now, *key));
        declared.iter().for_each(|declared| cluster.declare(now, declared));
        self.followers.insert(who, Follower { keys, gone: None });
    }

    /// An attempt of a conductor was charged, or waits.
    pub fn on_charged(&mut self, who: ConductorId, key: RequestKey) {
        if let Some(follower) = self.followers.get_mut(&who) {
            follower.keys.insert(key);
        }
    }

    /// An attempt of a conductor is over.
    pub fn on_ended(&mut self, who: ConductorId, key: RequestKey) {
        if let Some(follower) = self.followers.get_mut(&who) {
            follower.keys.remove(&key);
        }
    }

    /// A conductor went away.
    pub fn on_gone(&mut self, now: Instant, who: ConductorId) {
        if let Some(follower) = self.followers.get_mut(&who) {
            follower.gone.get_or_insert(now);
        }
    }

    /// Gives back what was charged for those that stay away.
    pub fn on_tick(&mut self, now: Instant, cluster: &mut Cluster) {
        let over = |follower: &Follower| follower.gone.is_some_and(|gone| now >= gone + KEPT);
        for (_, follower) in self.followers.extract_if(.., |_, follower| over(follower)) {
            follower.keys.iter().for_each(|key| cluster.on_ended(now, *key));
        }
    }

    /// Conductors that are here.
    pub fn len(&self) -> usize {
        self.followers.values().filter(|follower| follower.gone.is_none()).count()
    }

    /// Whether no conductor is here.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::tests::{cluster, key, place, request};
    use crate::placement::PlacementKind;

    const WHO: ConductorId = ConductorId(5);

    #[test]
    fn charges_of_absent_follower_are_released_after_a_delay() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        let mut followers = Followers::default();
        followers.on_greeted(now, &mut cluster, WHO, &[]);
        for n in 1..4 {
            place(&mut cluster, now, &request(n, &[])).unwrap();
            followers.on_charged(WHO, key(n));
        }
        cluster.on_ended(now, key(3));
        followers.on_ended(WHO, key(3));
        followers.on_gone(now, WHO);
        assert!(followers.is_empty());
        followers.on_tick(now + KEPT - Duration::from_millis(1), &mut cluster);
        assert_eq!(cluster.placed(), 2, "it may be back");
        followers.on_gone(now + KEPT, WHO);
        followers.on_tick(now + KEPT, &mut cluster);
        assert!(cluster.placed() == 0 && cluster.nodes().all(|node| node.charges.is_zero()));
    }

    #[test]
    fn returning_follower_is_charged_what_it_declares() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        let mut followers = Followers::default();
        followers.on_greeted(now, &mut cluster, WHO, &[]);
        let mut placed = Placed::default();
        for n in 1..4 {
            let request = request(n, &[]);
            let placement = place(&mut cluster, now, &request).unwrap();
            placed.on_placed(now, &request, &cluster.assign(placement, None));
            followers.on_charged(WHO, key(n));
        }
        followers.on_gone(now, WHO);
        placed.on_ended(key(2));
        followers.on_greeted(now, &mut cluster, WHO, &placed.declared(now));
        followers.on_tick(now + 2 * KEPT, &mut cluster);
        assert_eq!((cluster.placed(), followers.len()), (2, 1));
        cluster.forget_charges(now);
        assert!(cluster.placed() == 0 && cluster.nodes().all(|node| node.charges.is_zero()));
    }
}
