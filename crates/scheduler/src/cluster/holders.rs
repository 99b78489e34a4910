//! Which node can give another one the prefix that it lacks.
//!
//! Only what a node of the same KV compatibility class computed is what the reader would compute. A
//! holder whose fetches fail is left alone for a while, longer with each failure. First by the
//! reader that it failed, since the fault may be the reader's or lie between the two. Once it has
//! failed two readers, by all of them: a node that stands still would otherwise hold up each of
//! them once.

use std::time::{Duration, Instant};

use baton_types::{BlockHash, ErrorKind, FetchReport, NodeId, NodeRole};

use super::candidates::Matches;
use super::predictor::MAX_CLASSES;
use super::table::NodeTable;
use super::{Cluster, ClusterNode};
use crate::backoff::Backoff;

/// After the first failure; the next fetch that fails there is paid for with the time that it took.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// A holder that is well again is found within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// Pairs of nodes that are remembered.
const MOST_PAIRS: usize = 256;
/// Readers that a holder has failed before no node asks it.
const FAILED_READERS: usize = 2;

/// Pairs of holder and reader whose fetches failed.
pub(super) type HolderPauses = Backoff<(NodeId, NodeId)>;

pub(super) fn no_pauses() -> HolderPauses {
    Backoff::new(FIRST_PAUSE, LONGEST_PAUSE, MOST_PAIRS)
}

/// Whether a failure says that the holder, or the way to it, is not well. That it has lost the
/// blocks, or serves as many readers as it may, it says at once and for good reason.
fn is_fault(kind: ErrorKind) -> bool {
    !matches!(kind, ErrorKind::NotFound | ErrorKind::Overloaded | ErrorKind::Cancelled | ErrorKind::Invalid)
}

impl Cluster {
    /// A node has read what another one had cached, or could not.
    pub fn on_fetched(&mut self, now: Instant, holder: &NodeId, reader: &NodeId, report: &FetchReport) {
        let pair = (holder.clone(), reader.clone());
        match &report.failure {
            None => {
                self.nodes.pauses.succeeded(&pair);
                self.on_transfer(holder, reader, report.bytes, report.elapsed.as_secs_f64());
            }
            Some(failure) if is_fault(failure.kind) => self.nodes.pauses.failed(now, pair),
            Some(_) => {}
        }
    }

    /// The node that `reader` would fetch a prefix from, and how many blocks that holds, if it is
    /// more than `own`.
    pub(super) fn holder_for<'a>(
        &'a self,
        now: Instant,
        matches: &'a Matches,
        reader: &ClusterNode,
        own: u32,
    ) -> Option<(&'a NodeId, u32)> {
        let (holder, blocks) = matches.longest(reader.kv_class).filter(|(_, blocks)| *blocks > own)?;
        if !self.nodes.is_paused(now, holder, &reader.info().node) {
            return Some((holder, blocks));
        }
        let may = |node: &ClusterNode| !self.nodes.is_paused(now, &node.info().node, &reader.info().node);
        let sending = |node: &NodeId| self.ledger.sending(node);
        let other = self.nodes.longest_holder(matches, reader.kv_class, sending, may);
        other.filter(|(_, blocks)| *blocks > own).map(|(node, blocks)| (&node.info().node, blocks))
    }

    /// Who holds what of a prefix.
    pub(super) fn matches_of(&self, hashes: &[BlockHash]) -> Matches {
        self.nodes.matches_of(hashes, |node| self.ledger.sending(node))
    }
}

impl NodeTable {
    /// Whether `reader` is not to ask `holder` now.
    fn is_paused(&self, now: Instant, holder: &NodeId, reader: &NodeId) -> bool {
        if self.pauses.is_empty() {
            return false;
        }
        let failed = self.pauses.paused(now).filter(|(from, _)| from == holder);
        let mut readers = 0;
        let mut is_own = false;
        for (_, to) in failed {
            readers += 1;
            is_own |= to == reader;
        }
        is_own || readers >= FAILED_READERS
    }

    /// Who holds what of a prefix. `sending` says how many bytes a node sends now.
    fn matches_of(&self, hashes: &[BlockHash], sending: impl Fn(&NodeId) -> u64) -> Matches {
        let found = self.index.matches(hashes);
        let found = found.by_slot();
        let Some(slots) = found.iter().map(|(slot, _)| usize::from(slot.0) + 1).max() else {
            return Matches::default();
        };
        let mut blocks = vec![0; slots];
        for (slot, held) in found {
            blocks[usize::from(slot.0)] = *held;
        }
        let matches = Matches { blocks, longest: Vec::new() };
        let named = |(node, blocks): (&ClusterNode, u32)| (node.info().node.clone(), blocks);
        let longest = |kv_class| self.longest_holder(&matches, kv_class, &sending, |_| true).map(named);
        Matches { longest: (0..self.kv_classes.len()).map(longest).collect(), ..matches }
    }

    /// Of the nodes of a class that hold most and can send it, the one that sends least now: a hot
    /// prefix has many holders.
    fn longest_holder(
        &self,
        matches: &Matches,
        kv_class: usize,
        sending: impl Fn(&NodeId) -> u64,
        may: impl Fn(&ClusterNode) -> bool,
    ) -> Option<(&ClusterNode, u32)> {
        let mut longest: Option<(&ClusterNode, u32)> = None;
        let sending = |node: &ClusterNode| sending(&node.info().node);
        for node in self.values().filter(|node| node.kv_class == kv_class) {
            let held = matches.of(node);
            let is_longer =
                longest.is_none_or(|(other, most)| held > most || held == most && sending(node) < sending(other));
            if held > 0 && is_longer && node.is_ready() && may(node) {
                longest = Some((node, held));
            }
        }
        longest
    }

    /// Whether what a decode node holds of a prompt need not be pushed to it: a prefill node of its
    /// class may compute the prompt.
    pub(super) fn holds_for_prefill(&self) -> impl Fn(&ClusterNode) -> bool + use<> {
        let computing: Option<Vec<usize>> = (self.kv_classes.len() > 1).then(|| {
            let mut classes: Vec<_> = self.of_role(NodeRole::Prefill).map(|node| node.kv_class).collect();
            classes.sort_unstable();
            classes.dedup();
            classes
        });
        move |node| computing.as_ref().is_none_or(|classes| classes.contains(&node.kv_class))
    }

    /// Number of a KV compatibility class.
    pub(super) fn kv_class(&mut self, name: &str) -> usize {
        let known = self.kv_classes.iter().position(|other| other == name);
        if let Some(known) = known {
            return known;
        }
        let is_used = |class: &usize| self.values().any(|node| node.kv_class == *class);
        let unused = (0..self.kv_classes.len()).find(|class| !is_used(class));
        if let Some(unused) = unused.filter(|_| self.kv_classes.len() >= MAX_CLASSES) {
            name.clone_into(&mut self.kv_classes[unused]);
            return unused;
        }
        self.kv_classes.push(name.to_owned());
        self.kv_classes.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Generation, KvEvent, NodeInfo, Refused};

    use super::super::tests::{SECOND, id, info, key, place, request};
    use super::super::{ClusterConfig, Policies, PromptsAtDecode};
    use super::*;

    fn hashes() -> Vec<BlockHash> {
        (0..10).map(|n| BlockHash([n; 16])).collect()
    }

    /// Two prefill nodes that hold nothing, and three decode nodes, of which each next one holds a
    /// block less; `d0` computes differently.
    fn cluster(now: Instant) -> Cluster {
        let config = ClusterConfig {
            slow_start: Duration::ZERO,
            prompts_at_decode: PromptsAtDecode::Fallback,
            ..ClusterConfig::default()
        };
        let mut cluster = Cluster::new(config, Policies::default());
        for name in ["p0", "p1"] {
            cluster.on_node_joined(now, info(name, NodeRole::Prefill, 1));
        }
        for (name, kv_class, blocks) in [("d0", "other", 9), ("d1", "test", 8), ("d2", "test", 7)] {
            let node = NodeInfo { kv_class: kv_class.to_owned(), ..info(name, NodeRole::Decode, 1) };
            cluster.on_node_joined(now, node);
            let stored = hashes().into_iter().take(blocks).map(|hash| KvEvent::Stored { hash, parent: None });
            cluster.on_kv_events(&id(name), Generation(1), 0, false, &stored.collect::<Vec<_>>());
        }
        cluster
    }

    fn failed(kind: ErrorKind) -> FetchReport {
        FetchReport { failure: Some(Refused { kind, message: "no".to_owned() }), ..FetchReport::default() }
    }

    /// Whom each of the readers would ask now.
    fn holders(cluster: &Cluster, now: Instant) -> [Option<String>; 2] {
        let matches = cluster.matches_of(&hashes());
        let of = |reader: &str| cluster.holder_for(now, &matches, cluster.node(&id(reader)).unwrap(), 0);
        ["p0", "p1"].map(|reader| of(reader).map(|(node, _)| node.to_string()))
    }

    fn named(names: [&str; 2]) -> [Option<String>; 2] {
        names.map(|name| Some(name.to_owned()))
    }

    #[test]
    fn prefix_of_other_kv_class_does_not_count_as_cached() {
        let now = Instant::now();
        let mut cluster = cluster(now);
        assert_eq!(holders(&cluster, now), named(["d1", "d1"]));
        let hashes = hashes();
        let placement = place(&mut cluster, now, &request(1, &hashes)).unwrap();
        assert_eq!(placement.fetch.map(|fetch| (fetch.from, fetch.tokens)), Some((id("d1"), 128)));
        // Nor does it spare a decode node the push.
        let sized = request(2, &hashes);
        let matches = cluster.matches_of(&hashes);
        let candidates = cluster.decode_candidates(now, cluster.predictor.sized(&sized), &matches).unwrap();
        let push: Vec<_> = candidates.iter().map(|candidate| candidate.push).collect();
        assert!(push[0] > push[2] && push[2] > push[1], "{push:?}");
        let third = NodeInfo { kv_class: "third".to_owned(), ..info("p2", NodeRole::Prefill, 1) };
        cluster.on_node_joined(now, third);
        assert_eq!(cluster.holder_for(now, &matches, cluster.node(&id("p2")).unwrap(), 0), None);
        let other = NodeInfo { kv_class: "other".to_owned(), ..info("p3", NodeRole::Prefill, 1) };
        cluster.on_node_joined(now, other);
        let candidates = cluster.decode_candidates(now, cluster.predictor.sized(&sized), &matches).unwrap();
        assert!(candidates[0].push < candidates[1].push, "a node that computes alike may send it");
    }

    #[test]
    fn failed_prefix_holder_is_avoided_by_its_reader_for_a_while() {
        let start = Instant::now();
        let mut cluster = cluster(start);
        let fail = |cluster: &mut Cluster, now| {
            cluster.on_fetched(now, &id("d1"), &id("p0"), &failed(ErrorKind::DeadlineExceeded));
        };
        fail(&mut cluster, start);
        assert_eq!(holders(&cluster, start), named(["d2", "d1"]));
        let hashes = hashes();
        let only_p0 = [id("p1")];
        let sized = crate::placement::PlacementRequest { exclude: &only_p0, ..request(1, &hashes) };
        let placement = place(&mut cluster, start, &sized).unwrap();
        assert_eq!(placement.fetch.map(|fetch| (fetch.from, fetch.tokens)), Some((id("d2"), 112)));
        cluster.on_ended(start, key(1));
        let later = start + FIRST_PAUSE;
        assert_eq!(holders(&cluster, later), named(["d1", "d1"]));
        fail(&mut cluster, later);
        assert_eq!(holders(&cluster, later + FIRST_PAUSE), named(["d2", "d1"]), "longer than the first time");
        assert_eq!(holders(&cluster, later + FIRST_PAUSE * 2), named(["d1", "d1"]));
        // One that works is as good as new.
        cluster.on_fetched(later + FIRST_PAUSE * 2, &id("d1"), &id("p0"), &FetchReport::default());
        fail(&mut cluster, later + 60 * SECOND);
        assert_eq!(holders(&cluster, later + 60 * SECOND + FIRST_PAUSE), named(["d1", "d1"]));
    }

    #[test]
    fn prefix_holder_that_failed_two_readers_is_used_by_none() {
        let now = Instant::now();
        let mut cluster = cluster(now);
        cluster.on_node_joined(now, info("p2", NodeRole::Prefill, 1));
        for reader in ["p1", "p2"] {
            assert_eq!(holders(&cluster, now)[0].as_deref(), Some("d1"));
            cluster.on_fetched(now, &id("d1"), &id(reader), &failed(ErrorKind::Unavailable));
        }
        assert_eq!(holders(&cluster, now), named(["d2", "d2"]));
        // Of a later start nothing is known.
        cluster.on_node_left(now, &id("d1"), Generation(1));
        assert!(cluster.nodes.pauses.is_empty());
    }

    #[test]
    fn refusal_by_prefix_holder_does_not_count_as_failure() {
        let now = Instant::now();
        let mut cluster = cluster(now);
        for kind in [ErrorKind::NotFound, ErrorKind::Overloaded, ErrorKind::Cancelled, ErrorKind::Invalid] {
            cluster.on_fetched(now, &id("d1"), &id("p0"), &failed(kind));
        }
        assert_eq!(holders(&cluster, now), named(["d1", "d1"]));
    }
}
