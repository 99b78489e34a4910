//! Who is here, and what they hold.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::PrefixIndex;
use baton_types::{DecodeTarget, FetchSource, Generation, NodeId, NodeInfo, NodeRole};

use super::holders::{HolderPauses, no_pauses};
use super::predictor::Introduced;
use super::{ClusterNode, NodeState};
use crate::ledger::NodeStart;
use crate::placement::PrefixFetch;

/// Nodes by name, those of a role apart: a placement looks at all of one role. A name has one node,
/// whatever its role.
#[derive(Debug)]
pub(super) struct NodeTable {
    prefill: BTreeMap<NodeId, ClusterNode>,
    decode: BTreeMap<NodeId, ClusterNode>,
    pub(super) index: Arc<PrefixIndex>,
    /// Names of the KV compatibility classes; a node knows the number of its own.
    pub(super) kv_classes: Vec<String>,
    /// When the last node joined.
    joined: Option<Instant>,
    pub(super) pauses: HolderPauses,
}

impl NodeTable {
    /// No nodes; the index is to hold so many blocks of each.
    pub(super) fn new(max_index_entries: usize) -> Self {
        Self {
            prefill: BTreeMap::new(),
            decode: BTreeMap::new(),
            index: Arc::new(PrefixIndex::new(max_index_entries)),
            kv_classes: Vec::new(),
            joined: None,
            pauses: no_pauses(),
        }
    }

    /// When the last node joined.
    pub(super) fn joined(&self) -> Option<Instant> {
        self.joined
    }

    /// Whether this start of a node is here.
    pub(super) fn is_here(&self, start: &NodeStart) -> bool {
        self.get(&start.node).is_some_and(|node| node.info().generation == start.generation && !node.state().is_gone())
    }

    /// The start of a node that is known.
    pub(super) fn start_of(&self, node: &NodeId) -> Option<NodeStart> {
        self.get(node).map(|node| node.info().start())
    }

    /// A node joins, in place of the one that had its name, if there was one.
    pub(super) fn enter(&mut self, now: Instant, info: NodeInfo, introduced: Introduced) {
        let slot = self.index.add_node(&info.node, info.generation);
        self.joined = self.joined.max(Some(now));
        let kv_class = self.kv_class(&info.kv_class);
        self.insert(ClusterNode::new(now, info, introduced, kv_class, slot));
    }

    /// A start of a node leaves. What it had cached is forgotten, and of those that left all but
    /// the last `most_lost`. `false` if it is not known.
    pub(super) fn leave(
        &mut self,
        now: Instant,
        node: &NodeId,
        generation: Generation,
        state: NodeState,
        most_lost: usize,
    ) -> bool {
        let Some(left) = self.get_mut(node).filter(|left| left.info().generation == generation) else { return false };
        left.on_left(now, state);
        self.index.remove_node(node);
        self.pauses.retain(|(holder, reader)| holder != node && reader != node);
        let mut by_age: Vec<_> =
            self.values().filter_map(|node| Some((node.left()?, node.info().node.clone()))).collect();
        by_age.sort();
        let surplus = by_age.len().saturating_sub(most_lost);
        for (_, node) in by_age.into_iter().take(surplus) {
            self.remove(&node);
        }
        true
    }

    /// Time has passed: nodes that do not report are suspected, and then what they hold is
    /// forgotten.
    pub(super) fn on_tick(&mut self, now: Instant, suspect_after: Duration, index_ttl: Duration) {
        for node in self.prefill.values_mut().chain(self.decode.values_mut()) {
            let silent = now.saturating_duration_since(node.reported());
            if silent > suspect_after {
                node.on_suspect();
            }
            if silent > index_ttl && !std::mem::replace(&mut node.is_expired, true) {
                node.slot = self.index.expire(&node.info().node);
            }
        }
    }

    /// A decode node that is here, as a prefill node is told of it, to be asked for room whatever
    /// its steps take.
    pub(super) fn decode_target(&self, node: &NodeId) -> Option<DecodeTarget> {
        let info = self.get(node).filter(|node| node.takes_grants())?.info();
        let node = info.node.clone();
        let generation = info.generation;
        let address = info.address.clone();
        Some(DecodeTarget { node, generation, address, tbt: None })
    }

    /// The holder of a prefix, as its reader is told of it.
    pub(super) fn fetch_source(&self, fetch: &PrefixFetch) -> Option<FetchSource> {
        let info = self.get(&fetch.from)?.info();
        let node = info.node.clone();
        let generation = info.generation;
        let address = info.address.clone();
        Some(FetchSource { node, generation, address, tokens: fetch.tokens })
    }

    fn map_mut(&mut self, role: NodeRole) -> &mut BTreeMap<NodeId, ClusterNode> {
        match role {
            NodeRole::Prefill => &mut self.prefill,
            NodeRole::Decode => &mut self.decode,
        }
    }

    pub(super) fn get(&self, node: &NodeId) -> Option<&ClusterNode> {
        self.prefill.get(node).or_else(|| self.decode.get(node))
    }

    pub(super) fn get_mut(&mut self, node: &NodeId) -> Option<&mut ClusterNode> {
        match self.prefill.get_mut(node) {
            Some(found) => Some(found),
            None => self.decode.get_mut(node),
        }
    }

    /// This start of a node, if it has not left or restarted since.
    pub(super) fn start_mut(&mut self, start: &NodeStart) -> Option<&mut ClusterNode> {
        let is_here = |node: &&mut ClusterNode| node.info().generation == start.generation && !node.state().is_gone();
        self.get_mut(&start.node).filter(is_here)
    }

    /// In place of the one that had its name, if there was one.
    fn insert(&mut self, node: ClusterNode) {
        let name = node.info().node.clone();
        let role = node.info().role;
        self.remove(&name);
        self.map_mut(role).insert(name, node);
    }

    fn remove(&mut self, node: &NodeId) {
        self.prefill.remove(node);
        self.decode.remove(node);
    }

    /// Those of a role, ascending by name.
    pub(super) fn of_role(&self, role: NodeRole) -> impl Iterator<Item = &ClusterNode> {
        match role {
            NodeRole::Prefill => self.prefill.values(),
            NodeRole::Decode => self.decode.values(),
        }
    }

    /// How many of a role there are.
    pub(super) fn count(&self, role: NodeRole) -> usize {
        match role {
            NodeRole::Prefill => self.prefill.len(),
            NodeRole::Decode => self.decode.len(),
        }
    }

    /// All of them, the prefill nodes first.
    pub(super) fn values(&self) -> impl Iterator<Item = &ClusterNode> {
        self.prefill.values().chain(self.decode.values())
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut ClusterNode> {
        self.prefill.values_mut().chain(self.decode.values_mut())
    }
}
