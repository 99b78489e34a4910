//! What other conductors say that they have.
//!
//! What a conductor declares, or asks for and does not end, is a claim. The reports of the nodes
//! say how many requests they have. A declared attempt is charged once the report of its node has
//! room for it. What was charged for another conductor and is shown by no report is given back.
//!
//! **Invariant**: claims that no report shows make no node full for longer than a few seconds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{ConductorId, Declared, ErrorKind, NodeRole, NodeStart, RequestKey};

use super::Cluster;
use super::table::NodeTable;
use crate::placement::Refusal;

/// A report shows what was at its node for so long: the job was on its way to it.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
/// More is charged than shown for so long before it is given back: what ended at the node may be on
/// its way here.
const MISSING_FOR: Duration = Duration::from_secs(1);
/// How long a declared attempt waits for a report that shows it.
const DECLARED_FOR: Duration = Duration::from_secs(2);
/// What is at no node, or between two, is given back after this.
const NOWHERE_FOR: Duration = Duration::from_secs(30);
/// How often reports are compared with claims.
const COMPARE: Duration = Duration::from_millis(250);
/// Declared attempts that wait for reports.
const MAX_DECLARED: usize = 65_536;

/// So many claims given back at once are no coincidence.
const MANY_MISSING: usize = 8;
/// How long other conductors' claims are limited after that.
const LIMITED_FOR: Duration = Duration::from_secs(60);
/// Part of the prefill nodes' queues that may be claimed within [`YOUNG`] then without proof, and
/// the least number of claims: by all conductors together, as ids are free.
const SHARE: usize = 16;
const LEAST_SHARE: usize = 4;
const YOUNG: Duration = Duration::from_secs(3);
/// Claims that a conductor may have beyond the share, for each that reports have shown at once.
const PER_PROVEN: usize = 16;
/// How soon a conductor that is refused for the share may ask again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// An attempt that was declared, and that no report has shown.
#[derive(Debug)]
struct Unshown {
    owner: ConductorId,
    declared: Declared,
    until: Instant,
}

impl Unshown {
    /// The node whose reports would show it.
    fn shown_at(&self) -> Option<&NodeStart> {
        let prefill = self.declared.prefill.as_ref().map(|prefill| &prefill.node);
        prefill.or(self.declared.decode.as_ref())
    }
}

/// What is known of claims beside the ledger.
#[derive(Debug, Default)]
pub(super) struct Claims {
    unshown: Vec<Unshown>,
    compared: Option<Instant>,
    /// Since when each node has more charged than it shows, and the least number since then.
    missing: BTreeMap<NodeStart, (Instant, usize)>,
    limited_until: Option<Instant>,
    /// The most of each conductor's that reports have shown at once, since it had some that none
    /// showed.
    proven: BTreeMap<ConductorId, usize>,
}

impl Claims {
    /// Young claims that a conductor may have whatever others have.
    fn allowance(&self, owner: ConductorId) -> usize {
        self.proven.get(&owner).map_or(0, |proven| proven.saturating_mul(PER_PROVEN))
    }
}

/// What is charged to a start of a node.
#[derive(Debug, Default)]
struct Tally {
    all: usize,
    /// Of all, those that its report must show.
    due: usize,
    /// Of those, other conductors', and since when each is there.
    claims: Vec<(ConductorId, Instant, RequestKey)>,
    /// Whose are those that were placed here, and may be in its report.
    placed: Vec<ConductorId>,
}

/// The first one of each conductor, then the second one of each.
fn in_turns(unshown: Vec<Unshown>) -> Vec<Unshown> {
    let mut counts = BTreeMap::<ConductorId, usize>::new();
    let mut ranked = Vec::with_capacity(unshown.len());
    for of in unshown {
        let count = counts.entry(of.owner).or_default();
        *count += 1;
        ranked.push((*count, of));
    }
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, of)| of).collect()
}

/// Requests that a node's last report shows.
fn shown(nodes: &NodeTable, start: &NodeStart) -> usize {
    let load = nodes.get(&start.node).map(|node| node.load());
    load.map_or(0, |load| load.running as usize + load.waiting as usize)
}

impl Cluster {
    /// Another conductor follows and has this. What else was charged for it is over.
    pub fn on_declared(&mut self, now: Instant, owner: ConductorId, declared: &[Declared]) {
        self.give_back_all(now, owner);
        let own = declared.iter().filter(|declared| !self.is_of_other(owner, declared.key));
        let unshown = own.map(|declared| Unshown { owner, declared: declared.clone(), until: now + DECLARED_FOR });
        let here = unshown.filter(|of| of.shown_at().is_some_and(|start| self.nodes.is_here(start)));
        let room = MAX_DECLARED.saturating_sub(self.claims.unshown.len());
        let here: Vec<_> = here.take(room).collect();
        self.claims.unshown.extend(here);
        self.charge_shown(now);
    }

    /// Whether an attempt is charged, or waits, for another conductor than this one.
    pub fn is_of_other(&self, owner: ConductorId, key: RequestKey) -> bool {
        self.ledger.owner(key).is_some_and(|known| known != Some(owner))
    }

    /// An attempt that was placed, or waits, is another conductor's.
    pub fn claim(&mut self, owner: ConductorId, key: RequestKey) {
        self.ledger.set_owner(key, owner);
    }

    /// A conductor is gone, and what it had is over.
    pub fn end_claims(&mut self, now: Instant, owner: ConductorId) {
        self.give_back_all(now, owner);
        self.claims.proven.remove(&owner);
    }

    fn give_back_all(&mut self, now: Instant, owner: ConductorId) {
        self.claims.unshown.retain(|unshown| unshown.owner != owner);
        for key in self.ledger.keys_of(owner) {
            self.on_ended(now, key);
        }
    }

    /// Whether reports have shown what a conductor placed.
    pub fn is_proven(&self, owner: ConductorId) -> bool {
        self.claims.proven.contains_key(&owner)
    }

    /// Why another conductor's question waits: claims were given back lately, it has many more than
    /// reports have shown of it, and all such conductors together have their share.
    pub fn claims_refused(&self, now: Instant, owner: ConductorId) -> Option<Refusal> {
        self.claims.limited_until.filter(|until| now < *until)?;
        let mut young = BTreeMap::<ConductorId, usize>::new();
        for (_, charge) in self.ledger.charges() {
            if let Some(of) = charge.owner
                && now < charge.placed + YOUNG
            {
                *young.entry(of).or_default() += 1;
            }
        }
        if young.get(&owner).copied().unwrap_or(0) < self.claims.allowance(owner) {
            return None;
        }
        let beyond = young.iter().map(|(of, count)| count.saturating_sub(self.claims.allowance(*of)));
        let claims: usize = beyond.sum();
        let queues = self.nodes.of_role(NodeRole::Prefill).map(|node| node.info().profile.max_waiting as usize);
        let share = (queues.sum::<usize>() / SHARE).max(LEAST_SHARE);
        (claims >= share).then(|| Refusal {
            kind: ErrorKind::Overloaded,
            message: format!("{claims} requests of other conductors are at no node yet, and at most {share} may be"),
            retry_after: Some(ASK_AGAIN),
            hold: Some(ASK_AGAIN),
            objective: None,
        })
    }

    /// Compares what is charged for others with what the nodes report.
    pub(super) fn compare_claims(&mut self, now: Instant) {
        let is_due = |compared: Instant| now.saturating_duration_since(compared) >= COMPARE;
        if !self.claims.compared.is_none_or(is_due) {
            return;
        }
        self.claims.compared = Some(now);
        self.ledger.forget_late(now);
        if self.ledger.charges().any(|(_, charge)| charge.owner.is_some()) {
            self.give_back_missing(now);
        } else {
            self.claims.missing.clear();
        }
        self.charge_shown(now);
        self.claims.unshown.retain(|unshown| now < unshown.until);
    }

    /// Gives back what nodes should show, and have not shown for a while.
    fn give_back_missing(&mut self, now: Instant) {
        let mut over = Vec::new();
        let tallies = self.tallies(now, &mut over);
        self.prove(&tallies);
        let before = std::mem::take(&mut self.claims.missing);
        let mut missing_in_all = 0;
        for (start, mut tally) in tallies {
            let missing = tally.due.saturating_sub(shown(&self.nodes, &start)).min(tally.claims.len());
            if missing == 0 {
                continue;
            }
            let (since, least) = before.get(&start).copied().unwrap_or((now, missing));
            let least = least.min(missing);
            if now.saturating_duration_since(since) < MISSING_FOR {
                self.claims.missing.insert(start, (since, least));
                continue;
            }
            // What came last was not there when reports showed the others.
            tally.claims.sort_by_key(|(owner, since, _)| (self.is_proven(*owner), std::cmp::Reverse(*since)));
            for (owner, _, key) in tally.claims.into_iter().take(least) {
                over.push(key);
                self.claims.proven.remove(&owner);
            }
            missing_in_all += least;
        }
        if missing_in_all >= MANY_MISSING {
            self.claims.limited_until = Some(now + LIMITED_FOR);
        }
        for key in over {
            self.on_ended(now, key);
        }
    }

    /// Where a report shows all that is charged, it shows what each conductor placed there.
    fn prove(&mut self, tallies: &BTreeMap<NodeStart, Tally>) {
        let mut counts = BTreeMap::<ConductorId, usize>::new();
        for (start, tally) in tallies {
            if tally.all <= shown(&self.nodes, start) {
                tally.placed.iter().for_each(|owner| *counts.entry(*owner).or_default() += 1);
            }
        }
        for (owner, count) in counts {
            let proven = self.claims.proven.entry(owner).or_default();
            *proven = count.max(*proven);
        }
    }

    fn tallies(&self, now: Instant, nowhere: &mut Vec<RequestKey>) -> BTreeMap<NodeStart, Tally> {
        let mut tallies = BTreeMap::<NodeStart, Tally>::new();
        for (key, charge) in self.ledger.charges() {
            let node = charge.shown_at().filter(|start| self.nodes.is_here(start));
            let Some((start, node)) = node.and_then(|start| Some((start, self.nodes.get(&start.node)?))) else {
                if charge.owner.is_some() && now >= charge.since + NOWHERE_FOR {
                    nowhere.push(key);
                }
                continue;
            };
            let tally = tallies.entry(start.clone()).or_default();
            tally.all += 1;
            // A partial prefill is at the one node and then at the other, and who is told when is
            // not told.
            let after = if charge.tail.is_some() && !charge.prefilled { NOWHERE_FOR } else { SHOWN_AFTER };
            if charge.since + after <= node.reported() {
                tally.due += 1;
                tally.claims.extend(charge.owner.map(|owner| (owner, charge.since, key)));
            }
            // What was declared is charged only where reports show more than is charged.
            if charge.ttft.is_some() && charge.since <= node.reported() {
                tally.placed.extend(charge.owner);
            }
        }
        tallies
    }

    /// Charges declared attempts as far as reports show more than is charged.
    fn charge_shown(&mut self, now: Instant) {
        if self.claims.unshown.is_empty() {
            return;
        }
        let charged = self.tallies(now, &mut Vec::new());
        let mut room = BTreeMap::<NodeStart, usize>::new();
        for of in in_turns(std::mem::take(&mut self.claims.unshown)) {
            let Some(start) = of.shown_at().filter(|start| self.nodes.is_here(start)) else { continue };
            let room = room.entry(start.clone()).or_insert_with(|| {
                let charged = charged.get(start).map_or(0, |tally| tally.all);
                shown(&self.nodes, start).saturating_sub(charged)
            });
            if *room == 0 {
                self.claims.unshown.push(of);
                continue;
            }
            *room -= 1;
            self.declare(now, &of.declared);
            self.ledger.set_owner(of.declared.key, of.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{DeclaredPrefill, Generation, Load, QueueOrdering};

    use super::super::tests::{SECOND, cluster, id, key, place, request};
    use super::*;
    use crate::placement::{PlacementKind, PlacementRequest};
    use crate::request::LedgerEntry;

    const LIAR: ConductorId = ConductorId(666);
    const HONEST: ConductorId = ConductorId(7);

    fn start(name: &str) -> NodeStart {
        NodeStart { node: id(name), generation: Generation(1) }
    }

    /// One of 160 tokens, that waits at `p0`, or `p1` if its number is odd, to decode at `d0` or
    /// `d1`.
    fn declared(n: u128) -> Declared {
        let [prefill, decode] = if n.is_multiple_of(2) { ["p0", "d0"] } else { ["p1", "d1"] };
        let terms = QueueOrdering { compute: SECOND, ..QueueOrdering::default() };
        Declared {
            key: key(n),
            placed_ago: SECOND / 2,
            ttft: SECOND,
            prefill: Some(DeclaredPrefill { node: start(prefill), terms, tokens: 160 }),
            decode: Some(start(decode)),
            prompt_tokens: 160,
            max_tokens: 16,
            tbt: None,
            first_token_ago: None,
        }
    }

    fn at_decode(n: u128) -> Declared {
        Declared { prefill: None, first_token_ago: Some(SECOND), ..declared(n) }
    }

    /// All nodes report so many requests.
    fn report(cluster: &mut Cluster, now: Instant, running: u32) {
        for node in ["p0", "p1", "d0", "d1"] {
            cluster.on_load(now, &id(node), Load { running, ..Load::default() });
        }
    }

    /// Time passes, with reports of so many requests at each node.
    fn pass(cluster: &mut Cluster, now: &mut Instant, time: Duration, running: u32) {
        let until = *now + time;
        while *now < until {
            *now += Duration::from_millis(200);
            report(cluster, *now, running);
            cluster.on_tick(*now);
        }
    }

    fn is_full(cluster: &mut Cluster, now: Instant) -> bool {
        let placed = place(cluster, now, &request(1 << 100, &[]));
        cluster.on_ended(now, key(1 << 100));
        placed.is_err_and(|refusal| refusal.kind == ErrorKind::Overloaded)
    }

    fn claimed(cluster: &Cluster, owner: ConductorId) -> usize {
        cluster.ledger.keys_of(owner).len()
    }

    #[test]
    fn declared_attempts_that_no_report_shows_make_no_node_full() {
        let now = Instant::now();
        let all: Vec<_> = (0..3000).map(declared).collect();
        let mut believed = cluster(now, PlacementKind::MinTotalDelay);
        all.iter().for_each(|declared| believed.declare(now, declared));
        assert!(is_full(&mut believed, now), "what this conductor has itself is believed");

        let unknown = Declared { prefill: None, decode: Some(start("d9")), ..declared(1) };
        let endless = Declared { prompt_tokens: 1 << 28, max_tokens: 1 << 28, ..declared(2) };
        let decoding = (0..3000).map(at_decode).collect();
        let attacks: [Vec<Declared>; 4] = [all, decoding, vec![unknown; 3000], vec![endless; 3000]];
        for attack in attacks {
            let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
            let mut now = now;
            report(&mut cluster, now, 0);
            // Again and again, by one conductor and by many.
            for round in 0..50 {
                cluster.on_declared(now, LIAR, &attack);
                let other = ConductorId(1000 + round);
                cluster.on_declared(now, other, &attack[round as usize..=round as usize]);
                assert!(!is_full(&mut cluster, now), "{round}");
                pass(&mut cluster, &mut now, SECOND / 5, 0);
            }
            assert_eq!(cluster.placed(), 0);
            pass(&mut cluster, &mut now, 3 * SECOND, 0);
            assert!(cluster.claims.unshown.is_empty());
        }
    }

    #[test]
    fn declared_attempts_are_charged_as_far_as_reports_show_them() {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        report(&mut cluster, now, 3);
        cluster.on_declared(now, LIAR, &(1000..4000).map(declared).collect::<Vec<_>>());
        assert_eq!(claimed(&cluster, LIAR), 6, "nodes show three each, and no conductor says more of them");
        cluster.end_claims(now, LIAR);
        // Beside them those of a conductor that tells the truth, and has four in all.
        report(&mut cluster, now, 2);
        cluster.claims.unshown.clear();
        let lies = (1000..4000).map(declared).map(|declared| Unshown { owner: LIAR, declared, until: now + SECOND });
        cluster.claims.unshown.extend(lies);
        cluster.on_declared(now, HONEST, &(0..4).map(declared).collect::<Vec<_>>());
        assert_eq!((claimed(&cluster, HONEST), claimed(&cluster, LIAR)), (2, 2), "each has its share");
        // A report that comes later shows the others, as they are there.
        pass(&mut cluster, &mut now, SECOND, 4);
        assert_eq!(claimed(&cluster, HONEST), 4);
        // What nodes do not show any more is given back, and first that of who has more.
        pass(&mut cluster, &mut now, 4 * SECOND, 2);
        assert_eq!((claimed(&cluster, HONEST), claimed(&cluster, LIAR)), (2, 2));
        pass(&mut cluster, &mut now, 4 * SECOND, 0);
        assert!(cluster.placed() == 0 && cluster.nodes().all(|node| node.charges.is_zero()));
    }

    /// A conductor asks for nodes and sends them nothing. `says` is what it says of each.
    fn asks_and_sends_nothing(says: Option<LedgerEntry>, wants_decode: bool) {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        report(&mut cluster, now, 0);
        let ask = |cluster: &mut Cluster, now: Instant, n: u128| {
            if cluster.claims_refused(now, LIAR).is_some() {
                return false;
            }
            let wanted = PlacementRequest { wants_decode, ..request(n, &[]) };
            let placed = place(cluster, now, &wanted).is_ok();
            cluster.claim(LIAR, key(n));
            if let Some(entry) = &says {
                cluster.update_ledger(now, key(n), entry);
            }
            placed
        };
        let first = (0..16).filter(|n| ask(&mut cluster, now, *n)).count();
        assert!(first >= 8, "{first}");
        pass(&mut cluster, &mut now, 3 * SECOND, 0);
        if wants_decode {
            assert_eq!(cluster.placed(), 0, "given back within three seconds");
            let next = (100..116).filter(|n| ask(&mut cluster, now, *n)).count();
            assert!(next <= LEAST_SHARE && !is_full(&mut cluster, now), "{next}: it was found out");
        }
        pass(&mut cluster, &mut now, NOWHERE_FOR + SECOND, 0);
        assert!(cluster.placed() == 0 && cluster.nodes().all(|node| node.charges.is_zero()));
    }

    #[test]
    fn attempts_that_were_asked_for_and_never_sent_are_given_back() {
        asks_and_sends_nothing(None, true);
        asks_and_sends_nothing(Some(LedgerEntry::FirstToken), true);
        asks_and_sends_nothing(Some(LedgerEntry::FirstToken), false);
    }

    #[test]
    fn attempts_that_reports_show_stay_charged() {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        for n in 0..4 {
            place(&mut cluster, now, &request(n, &[])).unwrap();
            cluster.claim(HONEST, key(n));
        }
        pass(&mut cluster, &mut now, 10 * SECOND, 2);
        (0..4).for_each(|n| cluster.on_first_token(now, key(n)));
        pass(&mut cluster, &mut now, 10 * SECOND, 2);
        assert_eq!(claimed(&cluster, HONEST), 4);
        // One report that is behind takes nothing away.
        report(&mut cluster, now, 0);
        cluster.on_tick(now + SECOND / 4);
        pass(&mut cluster, &mut now, 2 * SECOND, 2);
        assert_eq!(claimed(&cluster, HONEST), 4);
    }

    /// Asks for so many nodes for a conductor, as its follower does. How many are placed.
    fn ask(cluster: &mut Cluster, now: Instant, owner: ConductorId, keys: std::ops::Range<u128>) -> usize {
        let mut placed = 0;
        for n in keys {
            if cluster.claims_refused(now, owner).is_none() {
                placed += usize::from(place(cluster, now, &request(n, &[])).is_ok());
                cluster.claim(owner, key(n));
            }
        }
        placed
    }

    #[test]
    fn claims_that_no_report_shows_limit_none_of_those_that_reports_show() {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        report(&mut cluster, now, 0);
        ask(&mut cluster, now, LIAR, 5000..5016);
        pass(&mut cluster, &mut now, 3 * SECOND, 0);
        assert!(cluster.claims.limited_until.is_some_and(|until| until > now + 30 * SECOND));
        assert_eq!(ask(&mut cluster, now, HONEST, 0..2), 2);
        // The honest one has one at each prefill node. The others ask and send nothing, for ever.
        pass(&mut cluster, &mut now, SECOND, 1);
        for round in 1..6 {
            let liar = ConductorId(1000 + round as u64);
            ask(&mut cluster, now, liar, 1000 * round..1000 * round + 16);
            pass(&mut cluster, &mut now, 3 * SECOND, 1);
            assert_eq!((claimed(&cluster, HONEST), claimed(&cluster, liar)), (2, 0), "{round}: who is given back");
            assert!(cluster.is_proven(HONEST) && !cluster.is_proven(liar));
            let more = 100 * round..100 * round + 6;
            assert_eq!(ask(&mut cluster, now, HONEST, more.clone()), 6, "{round}: more than the share of others");
            more.for_each(|n| cluster.on_ended(now, key(n)));
        }
    }

    #[test]
    fn conductors_of_which_no_report_shows_anything_have_one_share() {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        report(&mut cluster, now, 0);
        ask(&mut cluster, now, LIAR, 0..16);
        pass(&mut cluster, &mut now, 3 * SECOND, 0);
        for round in 1..4 {
            let many = (0..64).map(|n| {
                ask(&mut cluster, now, ConductorId(1000 + n), {
                    let first = u128::from(n) * 100 + 10_000 * round;
                    first..first + 16
                })
            });
            assert_eq!(many.sum::<usize>(), LEAST_SHARE, "{round}");
            assert!(!is_full(&mut cluster, now));
            pass(&mut cluster, &mut now, 4 * SECOND, 0);
            assert_eq!(cluster.placed(), 0);
        }
    }

    #[test]
    fn what_a_report_showed_stays_if_later_claims_are_not_shown() {
        let mut now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        report(&mut cluster, now, 0);
        ask(&mut cluster, now, HONEST, 100..106);
        pass(&mut cluster, &mut now, 2 * SECOND, 3);
        // Fewer than the honest one has, with keys before and after; some say that they decode.
        ask(&mut cluster, now, LIAR, 0..2);
        ask(&mut cluster, now, LIAR, 200..202);
        cluster.update_ledger(now, key(0), &LedgerEntry::FirstToken);
        pass(&mut cluster, &mut now, SECOND, 3);
        cluster.update_ledger(now, key(200), &LedgerEntry::FirstToken);
        pass(&mut cluster, &mut now, 3 * SECOND, 3);
        assert_eq!(claimed(&cluster, HONEST), 6);
        assert!(claimed(&cluster, LIAR) <= 2, "{}: decode nodes show three each", claimed(&cluster, LIAR));
    }

    #[test]
    fn numbers_of_declared_attempt_are_those_that_its_node_can_have() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        report(&mut cluster, now, 1);
        let year = Duration::from_secs(365 * 24 * 3600);
        let terms =
            QueueOrdering { compute: year, patience: year, max_overtaken: year, timeout: year, ..Default::default() };
        let prefill = Some(DeclaredPrefill { node: start("p0"), terms, tokens: 1 << 28 });
        let most = Declared {
            prefill,
            prompt_tokens: 1 << 28,
            max_tokens: 1 << 28,
            placed_ago: year,
            ttft: year,
            first_token_ago: Some(year),
            ..declared(0)
        };
        cluster.on_declared(now, LIAR, &[most]);
        assert_eq!(claimed(&cluster, LIAR), 1);
        let [prefill, decode] = ["p0", "d0"].map(|name| &cluster.node(&id(name)).unwrap().charges);
        assert!(prefill.backlog.total(now) < 3.0, "{} s for 1,600 tokens", prefill.backlog.total(now));
        assert!(decode.blocks <= 100 && decode.kv_tokens <= 2048, "{} {}", decode.blocks, decode.kv_tokens);
        cluster.on_first_token(now, key(0));
        assert_eq!(cluster.predictor.ttft_margin(), 0.0, "nothing is learnt from it");
    }

    #[test]
    fn updates_that_cannot_be_true_teach_nothing() {
        use baton_types::{FetchReport, KvTransfer};
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        let placed = place(&mut cluster, now, &request(1, &[])).unwrap();
        let to = placed.decode.unwrap();
        let before = cluster.predictor.output_lengths.mean(1 << 17);
        let push = cluster.predictor.transfers.push_seconds(&to, 1e9, 4);
        let transfer = |bytes, seconds| KvTransfer {
            bytes,
            exposed: Duration::from_secs(seconds),
            elapsed: Duration::from_secs(seconds),
            ..KvTransfer::default()
        };
        let pushed = |to: &str, transfer| LedgerEntry::Pushed { to: id(to), transfer };
        let way = Some((id("d0"), id("p0")));
        let report = FetchReport { bytes: 1 << 50, elapsed: Duration::from_nanos(1), ..FetchReport::default() };
        for (n, entry) in [
            (1, pushed(to.as_str(), transfer(1 << 50, 1))),
            (1, pushed(to.as_str(), transfer(1 << 20, 100_000))),
            (1, pushed("p0", transfer(1 << 20, 1))),
            (2, pushed(to.as_str(), transfer(1 << 20, 1))),
            (1, LedgerEntry::Fetched { way: way.clone(), report }),
            (2, LedgerEntry::Finished { output_tokens: 1 << 28 }),
        ] {
            (0..100).for_each(|_| cluster.update_ledger(now, key(n), &entry));
        }
        assert_eq!(cluster.predictor.output_lengths.mean(1 << 17), before);
        assert_eq!(cluster.predictor.transfers.push_seconds(&to, 1e9, 4), push);
        assert_eq!(cluster.predictor.transfers.seconds(&id("d0"), &id("p0"), 0, 1 << 30).round(), 1.0);
        cluster.update_ledger(now, key(1), &LedgerEntry::Finished { output_tokens: 1 << 28 });
        assert!(cluster.predictor.output_lengths.mean(1 << 17) < before, "16 tokens, as it may have");
    }

    #[test]
    fn admission_queue_forgets_who_does_not_ask_again() {
        use crate::placement::Refusal;
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        let hold = Some(SECOND);
        let refusal = || Refusal {
            kind: ErrorKind::Overloaded,
            message: String::new(),
            retry_after: None,
            hold,
            objective: None,
        };
        for n in 0..3 {
            cluster.ledger.keep_retryable(now, key(n), refusal(), 2);
            cluster.claim(LIAR, key(n));
        }
        assert_eq!(cluster.requests_queued(), 2, "as many as may be");
        let later = now + 6 * SECOND;
        cluster.ledger.keep_retryable(later, key(1), refusal(), 2);
        cluster.on_tick(now + 12 * SECOND);
        assert_eq!(cluster.requests_queued(), 1, "one asks again");
        cluster.end_claims(now, LIAR);
        cluster.on_tick(later + 12 * SECOND);
        assert_eq!(cluster.requests_queued(), 0);
    }
}
