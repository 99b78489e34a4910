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

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{ConductorId, Declared};

use crate::cluster::Cluster;

pub use candidacy::{Candidacy, Candidate, Eligibility, LeaderKey, LeaderKeyState, Leadership};
pub use desk::{Answer, Decided, DecisionReasons, Desk, DeskEffect, Following, LinkId, OtherTerm, StreamId};
pub use placed::Placed;
pub use term::{StaleTerm, TermFence};

/// How long what a conductor had stays charged after it went away: it may be back, and declare it.
const KEPT: Duration = Duration::from_secs(10);
/// Conductors at once: more than a node has sessions with.
const MAX_FOLLOWERS: usize = 64;

/// The conductors whose requests are placed here. **Invariant**: what is charged for one that stays
/// away is given back.
#[derive(Debug, Default)]
pub struct Followers(BTreeMap<ConductorId, Follower>);

#[derive(Debug)]
struct Follower {
    greeted: Instant,
    /// When it went away; `None` while it is here.
    gone: Option<Instant>,
}

impl Followers {
    /// A conductor is here, or back, and declares what it has. If there are as many as may be,
    /// another one is forgotten. `false`: reports show what each of them placed.
    pub fn on_greeted(&mut self, now: Instant, cluster: &mut Cluster, who: ConductorId, declared: &[Declared]) -> bool {
        if self.0.len() >= MAX_FOLLOWERS && !self.knows(who) && !self.forget_one(now, cluster) {
            return false;
        }
        cluster.on_declared(now, who, declared);
        self.0.insert(who, Follower { greeted: now, gone: None });
        true
    }

    /// Forgets the one that has been away for longest, or the first one here that has placed
    /// nothing that a report has shown: ids are free, and must not keep others out.
    fn forget_one(&mut self, now: Instant, cluster: &mut Cluster) -> bool {
        let gone = self.0.iter().filter_map(|(who, of)| Some((of.gone?, *who))).min();
        let unproven = self.0.iter().filter(|(who, _)| !cluster.is_proven(**who));
        let Some((_, who)) = gone.or_else(|| unproven.map(|(who, of)| (of.greeted, *who)).min()) else { return false };
        cluster.end_claims(now, who);
        self.0.remove(&who);
        true
    }

    /// Whether a conductor is here, or may be back.
    pub fn knows(&self, who: ConductorId) -> bool {
        self.0.contains_key(&who)
    }

    /// A conductor went away.
    pub fn on_gone(&mut self, now: Instant, who: ConductorId) {
        if let Some(of) = self.0.get_mut(&who) {
            of.gone.get_or_insert(now);
        }
    }

    /// Gives back what was charged for those that stay away.
    pub fn on_tick(&mut self, now: Instant, cluster: &mut Cluster) {
        let over = |of: &Follower| of.gone.is_some_and(|gone| now >= gone + KEPT);
        for (who, _) in self.0.extract_if(.., |_, of| over(of)) {
            cluster.end_claims(now, who);
        }
    }

    /// Conductors that are here.
    pub fn len(&self) -> usize {
        self.0.values().filter(|of| of.gone.is_none()).count()
    }

    /// Whether no conductor is here.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use baton_types::Load;

    use super::*;
    use crate::cluster::tests::{cluster, id, key, place, request};
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
            cluster.claim(WHO, key(n));
        }
        cluster.on_ended(now, key(3));
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
            cluster.claim(WHO, key(n));
        }
        followers.on_gone(now, WHO);
        placed.on_ended(key(2));
        for node in ["p0", "p1", "d0", "d1"] {
            cluster.on_load(now, &id(node), Load { running: 2, ..Load::default() });
        }
        followers.on_greeted(now, &mut cluster, WHO, &placed.declared(now));
        followers.on_tick(now + 2 * KEPT, &mut cluster);
        assert_eq!((cluster.placed(), followers.len()), (2, 1));
        cluster.forget_charges(now);
        assert!(cluster.placed() == 0 && cluster.nodes().all(|node| node.charges.is_zero()));
    }
}
