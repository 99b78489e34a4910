//! What a node has shown of what it says that it can do: it earns load by answering.
//!
//! **Invariant**: a node that never answers has a small part of the requests, whatever it says of
//! itself, while nodes that have answered have room.

use std::time::{Duration, Instant};

use super::ClusterNode;

/// A node's answers so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Trust {
    /// First tokens that it gave, up to [`Trust::ENOUGH`].
    answers: u32,
    /// When the last one came.
    answered: Option<Instant>,
    /// When the first request was placed there.
    tried: Option<Instant>,
    /// Whether it owes an answer for long.
    is_in_doubt: bool,
}

impl Trust {
    /// After so many answers a node has as much as others.
    const ENOUGH: u32 = 6;

    /// It gave a first token.
    pub(super) fn on_answer(&mut self, now: Instant) {
        self.answers = (self.answers + 1).min(Self::ENOUGH);
        self.answered = Some(now);
        self.is_in_doubt = false;
    }

    /// A request was placed there.
    pub(super) fn on_placed(&mut self, now: Instant) {
        self.tried.get_or_insert(now);
    }

    /// Time has passed: `owes_since` is when the last request came that should have an answer.
    pub(super) fn on_tick(&mut self, owes_since: Option<Instant>) {
        self.is_in_doubt = owes_since.is_some_and(|since| self.answered.is_none_or(|answered| answered < since));
    }

    /// Whether it has answered, and owes no answer for long.
    pub(super) fn has_answered(&self) -> bool {
        self.answers > 0 && !self.is_in_doubt
    }

    /// Requests that it may have at once while others have room; `None`: as many as others. One,
    /// and twice as many with each answer.
    pub(super) fn limit(&self) -> Option<usize> {
        match self.answers {
            _ if self.is_in_doubt => Some(1),
            Self::ENOUGH => None,
            answers => Some(1 << answers),
        }
    }

    /// Whether it was tried for the first time so shortly ago that it may answer yet.
    pub(super) fn is_being_tried(&self, now: Instant, patience: Duration) -> bool {
        !self.has_answered() && self.tried.is_some_and(|tried| now.saturating_duration_since(tried) < patience)
    }
}

/// How long a node that is tried for the first time counts as one that is.
const TRIED_FOR: Duration = Duration::from_secs(10);
/// Part of what the busiest node that has answered has, and of what all such nodes have, that
/// others may have.
const UNPROVEN_SHARE: usize = 4;

/// Nodes that join within this time of the first one are a cluster that starts.
const TOGETHER: Duration = Duration::from_secs(5);

/// Leaves out nodes that have more than they have earned, while others have not. If no node has
/// answered those that began together are equal.
/// `all` are those of their role, also if they are left out already.
pub(super) fn keep_trusted<'a>(
    now: Instant,
    all: impl Iterator<Item = &'a ClusterNode>,
    nodes: &mut Vec<&ClusterNode>,
    load: impl Fn(&ClusterNode) -> usize,
) {
    if nodes.iter().all(|node| node.trust.limit().is_none()) {
        return;
    }
    let has_answered = |node: &&&ClusterNode| node.trust.has_answered();
    let proven: Vec<_> = nodes.iter().filter(has_answered).map(|node| load(node)).collect();
    let Some(busiest) = proven.iter().max() else { return keep_first(nodes, load) };
    let limit = |node: &ClusterNode| node.trust.limit().map(|limit| limit.max(busiest / UNPROVEN_SHARE));
    // However many join at once, few requests are at nodes that have never answered.
    let tried: usize = all.filter(|node| node.trust.is_being_tried(now, TRIED_FOR)).map(&load).sum();
    let may_try = tried < proven.len().max(proven.iter().sum::<usize>() / UNPROVEN_SHARE);
    let is_within = |node: &&ClusterNode| {
        let limit = limit(node);
        limit.is_none_or(|limit| load(node) < limit) && (may_try || node.trust.has_answered())
    };
    if nodes.iter().any(is_within) {
        return nodes.retain(is_within);
    }
    // Each has as much more as it has earned more.
    let share = |node: &ClusterNode| (load(node) + 1) as f64 / limit(node).unwrap_or(1) as f64;
    let least = nodes.iter().map(|node| share(node)).fold(f64::INFINITY, f64::min);
    nodes.retain(|node| share(node) <= least);
}

/// Leaves out nodes that joined after the first ones and have their share, if none has answered.
fn keep_first(nodes: &mut Vec<&ClusterNode>, load: impl Fn(&ClusterNode) -> usize) {
    let Some(first) = nodes.iter().map(|node| node.joined()).min() else { return };
    let is_first = |node: &&ClusterNode| node.joined() < first + TOGETHER;
    let busiest = nodes.iter().copied().filter(is_first).map(&load).max().unwrap_or(0);
    nodes.retain(|node| is_first(node) || load(node) < (busiest / UNPROVEN_SHARE).max(1));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use baton_types::{Load, NodeInfo, NodeProfile, NodeRole};

    use super::super::tests::{SECOND, cluster, id, info, key, place, request};
    use super::super::{Cluster, ClusterConfig, Policies, PromptsAtDecode};
    use super::*;
    use crate::placement::PlacementKind;

    /// The best of all nodes, as it says.
    fn best(name: &str, role: NodeRole) -> NodeInfo {
        let mut info = info(name, role, 1);
        info.layout.num_blocks = 100_000;
        let profile = NodeProfile { prefill_base: 1e-6, decode_base: 1e-6, ..NodeProfile::default() };
        NodeInfo { profile, ..info }
    }

    /// Two prefill and two decode nodes with large queues.
    fn roomy(now: Instant) -> Cluster {
        let prompts_at_decode = PromptsAtDecode::Never;
        let config = ClusterConfig { prompts_at_decode, takes_partial_prefills: false, ..ClusterConfig::default() };
        let mut cluster = Cluster::new(config, Policies::default());
        for (name, role) in
            [("p0", NodeRole::Prefill), ("p1", NodeRole::Prefill), ("d0", NodeRole::Decode), ("d1", NodeRole::Decode)]
        {
            let mut info = info(name, role, 1);
            info.profile.max_waiting = 64;
            info.layout.num_blocks = 10_000;
            cluster.on_node_joined(now, info);
        }
        cluster
    }

    fn answer(cluster: &mut Cluster, now: Instant, n: u128) {
        cluster.on_first_token(now, key(n));
        cluster.on_decodes(now, key(n));
        cluster.on_ended(now, key(n));
    }

    /// All nodes have answered as often as is enough.
    fn proven(cluster: &mut Cluster, now: Instant) {
        for node in cluster.nodes.values_mut() {
            (0..Trust::ENOUGH).for_each(|_| node.trust.on_answer(now));
        }
    }

    /// Places requests of these numbers. Counts those at nodes whose name begins with `liar`: they
    /// have no answer. The others have one before the next comes, if they come in turn.
    fn placed(cluster: &mut Cluster, now: &mut Instant, numbers: std::ops::Range<u128>, in_turn: bool) -> usize {
        let mut at_liars = 0;
        for n in numbers {
            let nodes = place(cluster, *now, &request(n, &[])).unwrap().nodes();
            let is_at_liar = nodes.iter().any(|node| node.as_str().starts_with("liar"));
            at_liars += usize::from(is_at_liar);
            if in_turn {
                *now += SECOND / 10;
                if !is_at_liar {
                    answer(cluster, *now, n);
                }
            }
        }
        at_liars
    }

    #[test]
    fn node_that_never_answers_gets_few_requests_whatever_it_says_of_itself() {
        for role in [NodeRole::Prefill, NodeRole::Decode] {
            for in_turn in [false, true] {
                let mut now = Instant::now();
                let mut cluster = roomy(now);
                cluster.on_node_joined(now, best("liar", role));
                let believed = placed(&mut cluster, &mut now, 0..12, in_turn);
                assert!(believed >= 8 || in_turn, "{role} {believed}: in a fresh cluster all are equal");

                let mut cluster = roomy(now);
                proven(&mut cluster, now);
                cluster.on_node_joined(now, best("liar", role));
                let at_liar = placed(&mut cluster, &mut now, 0..12, in_turn);
                assert!(at_liar <= 1, "{role} {in_turn}: {at_liar} of 12");
                // Nor later.
                now += 60 * SECOND;
                cluster.on_tick(now);
                assert!(!in_turn || placed(&mut cluster, &mut now, 12..24, in_turn) == 0);
            }
        }
    }

    #[test]
    fn node_that_joins_later_is_no_equal_of_those_that_have_not_been_asked() {
        let mut now = Instant::now();
        let mut cluster = roomy(now);
        now += 60 * SECOND;
        cluster.on_node_joined(now, best("liar", NodeRole::Prefill));
        now += 60 * SECOND;
        let at_liar = placed(&mut cluster, &mut now, 0..12, false);
        assert!(at_liar <= 3, "{at_liar} of 12");
    }

    #[test]
    fn steps_of_a_node_that_never_answers_teach_its_class_nothing() {
        let now = Instant::now();
        let mut cluster = roomy(now);
        proven(&mut cluster, now);
        cluster.on_node_joined(now, info("liar", NodeRole::Prefill, 1));
        let before = place(&mut cluster, now, &request(1, &[])).unwrap().predicted_ttft;
        cluster.on_ended(now, key(1));
        (0..1000).for_each(|_| cluster.on_step(now, &id("liar"), 160, 12_880, 1e6));
        let exclude = [id("liar")];
        let wanted = crate::placement::PlacementRequest { exclude: &exclude, ..request(2, &[]) };
        let after = place(&mut cluster, now, &wanted).unwrap().predicted_ttft;
        assert!(after.0 < 2 * before.0, "{after:?}, {before:?}");
    }

    #[test]
    fn many_nodes_that_never_answer_get_few_requests_together() {
        let mut now = Instant::now();
        let mut cluster = roomy(now);
        proven(&mut cluster, now);
        (0..20).for_each(|n| cluster.on_node_joined(now, best(&format!("liar{n}"), NodeRole::Prefill)));
        assert!(placed(&mut cluster, &mut now, 0..12, true) <= 2);
        let at_liars = placed(&mut cluster, &mut now, 12..52, false);
        assert!(at_liars <= 10, "{at_liars} of 40");
    }

    #[test]
    fn node_that_answers_has_its_full_share_after_a_few() {
        let mut now = Instant::now();
        let mut cluster = roomy(now);
        proven(&mut cluster, now);
        let mut joined = info("p2", NodeRole::Prefill, 1);
        joined.profile.max_waiting = 64;
        now += SECOND;
        cluster.on_node_joined(now, joined);
        now += SECOND * 20;
        // Thirty requests at once, each of which takes a tenth of a second.
        let mut at = BTreeMap::<String, usize>::new();
        let mut open = Vec::new();
        for round in 0..10 {
            for n in round * 30..(round + 1) * 30 {
                let node = place(&mut cluster, now, &request(n, &[])).unwrap().prefill;
                *at.entry(node.to_string()).or_default() += 1;
                open.push(n);
            }
            now += SECOND / 10;
            open.drain(..).for_each(|n| answer(&mut cluster, now, n));
        }
        assert!(cluster.node(&id("p2")).unwrap().trust.limit().is_none());
        assert!(at["p2"] > 300 / 5, "{at:?}: within a second it is one of three");
    }

    #[test]
    fn fresh_cluster_spreads_requests_evenly() {
        let now = Instant::now();
        let mut cluster = roomy(now);
        let mut at = BTreeMap::<String, usize>::new();
        for n in 0..24 {
            place(&mut cluster, now, &request(n, &[])).unwrap().nodes().iter().for_each(|node| {
                *at.entry(node.to_string()).or_default() += 1;
            });
        }
        assert!(at.values().all(|placed| (10..=14).contains(placed)), "{at:?}");
    }

    #[test]
    fn unproven_nodes_are_taken_if_no_other_has_room() {
        let now = Instant::now();
        let mut cluster = cluster(now, PlacementKind::MinTotalDelay);
        proven(&mut cluster, now);
        cluster.on_node_joined(now, info("p2", NodeRole::Prefill, 1));
        // Queues of four.
        assert!((0..12).all(|n| place(&mut cluster, now, &request(n, &[])).is_ok()));
        assert_eq!(cluster.node(&id("p2")).unwrap().charges.pending(), 4);
    }

    #[test]
    fn node_that_stops_answering_loses_what_it_has_earned() {
        let mut now = Instant::now();
        let mut cluster = roomy(now);
        cluster.on_node_joined(now, best("liar", NodeRole::Prefill));
        proven(&mut cluster, now);
        now += 20 * SECOND;
        let first = placed(&mut cluster, &mut now, 0..12, true);
        assert!(first > 6, "{first}: it has earned them");
        for _ in 0..60 {
            now += SECOND / 4;
            for name in ["p0", "p1", "liar"] {
                cluster.on_load(now, &id(name), Load::default());
            }
            cluster.on_tick(now);
        }
        assert!(placed(&mut cluster, &mut now, 100..112, true) <= 1);
    }
}
