//! The conductor's picture of the cluster: who is here, what they hold, what they were charged.
//!
//! **Invariant**: what a request was charged is given back exactly once, to the very start of the node that was charged.

mod node;
mod place;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_kv_cache::{Applied, BlockHasher, PrefixIndex};
use baton_types::{BlockHash, Generation, KvEvent, Load, NodeId, NodeInfo, NodeRole, RequestKey, TokenId};

use crate::cost::{ClassCost, SpeedFactor};
use crate::ledger::Charge;
use crate::placement::{PlacementPolicy, PolicyKind};

pub use node::{ClusterNode, NodeState};

/// Bounds and choices of a [`Cluster`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterConfig {
    /// How nodes are chosen.
    pub policy: PolicyKind,
    /// A node that has not reported for this long takes requests only where no other can.
    pub suspect_after: Duration,
    /// Bytes per second from a prefill to a decode node, until it is measured.
    pub bandwidth: f64,
    /// Blocks of one node in the prefix index.
    pub max_index_entries_per_node: usize,
    /// Nodes that left and are still shown.
    pub max_lost_nodes: usize,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            suspect_after: Duration::from_secs(5),
            bandwidth: 1e9,
            max_index_entries_per_node: 1 << 20,
            max_lost_nodes: 16,
        }
    }
}

/// The conductor's picture of the cluster: membership, prefix index, cost models and the ledger of charges. Placement is [`Cluster::place`].
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    policy: Box<dyn PlacementPolicy>,
    nodes: BTreeMap<NodeId, ClusterNode>,
    index: PrefixIndex,
    /// Cost models by class.
    costs: BTreeMap<CostClass, ClassCost>,
    charges: BTreeMap<RequestKey, Charge>,
}

/// Nodes of one class cost the same, up to a factor: role, model and numerics.
type CostClass = (NodeRole, u64, String);

fn cost_class(info: &NodeInfo) -> CostClass {
    (info.role, info.layout.model, info.numerics.clone())
}

impl Cluster {
    /// A cluster without nodes.
    pub fn new(config: ClusterConfig) -> Self {
        Self {
            config,
            policy: config.policy.policy(),
            nodes: BTreeMap::new(),
            index: PrefixIndex::new(config.max_index_entries_per_node),
            costs: BTreeMap::new(),
            charges: BTreeMap::new(),
        }
    }

    /// Every node, those that left lately included, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &ClusterNode> {
        self.nodes.values()
    }

    /// One node.
    pub fn node(&self, node: &NodeId) -> Option<&ClusterNode> {
        self.nodes.get(node)
    }

    /// Requests that are charged.
    pub fn placed(&self) -> usize {
        self.charges.len()
    }

    /// Chained hashes of a prompt's full blocks as the nodes compute them; `None` while no node says how.
    pub fn block_hashes(&self, tokens: &[TokenId], salt: &[u8]) -> Option<Vec<BlockHash>> {
        let layout = &self.nodes.values().find(|node| node.state() != NodeState::Lost)?.info().layout;
        Some(BlockHasher::new(layout.fingerprint(), salt).chain(tokens, layout.block_tokens))
    }

    /// A node is here, or here again in a later generation. An older one is ignored.
    pub fn on_node_joined(&mut self, now: Instant, info: NodeInfo) {
        let known = self.nodes.get(&info.node).filter(|node| node.state() != NodeState::Lost);
        if known.is_some_and(|node| node.info().generation >= info.generation) {
            return;
        }
        self.index.remove_node(&info.node);
        let class = cost_class(&info);
        let cost = self.costs.entry(class).or_insert_with(|| ClassCost::new(&info.profile));
        let own = ClassCost::new(&info.profile);
        let (own, class) = match info.role {
            NodeRole::Prefill => (own.prefill.prompt(512, 0), cost.prefill.prompt(512, 0)),
            NodeRole::Decode => (own.decode.step(8, 4096), cost.decode.step(8, 4096)),
        };
        self.nodes.insert(info.node.clone(), ClusterNode::new(now, info, SpeedFactor::from_profiles(own, class)));
    }

    /// A node is gone. What it held and was charged is forgotten; the requests on it are their owners' to end.
    pub fn on_node_left(&mut self, now: Instant, node: &NodeId, generation: Generation) {
        let Some(lost) = self.nodes.get_mut(node).filter(|lost| lost.info().generation == generation) else { return };
        lost.on_left(now);
        self.index.remove_node(node);
        // The node may come back as the same start (its session broke, not the process): what was forgotten must not be given back to it then.
        let gone = (node.clone(), generation);
        for charge in self.charges.values_mut() {
            charge.prefill.take_if(|prefill| *prefill == gone);
            charge.decode.take_if(|decode| decode.node == gone);
        }
        let lost = self.nodes.values().filter(|node| node.state() == NodeState::Lost);
        let mut by_age: Vec<_> = lost.map(|node| (node.reported(), node.info().node.clone())).collect();
        by_age.sort();
        let surplus = by_age.len().saturating_sub(self.config.max_lost_nodes);
        for (_, node) in by_age.into_iter().take(surplus) {
            self.nodes.remove(&node);
        }
    }

    /// A node missed reports.
    pub fn on_node_suspect(&mut self, node: &NodeId) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.on_suspect();
        }
    }

    /// A node that was suspected is well.
    pub fn on_node_ok(&mut self, now: Instant, node: &NodeId) {
        if let Some(node) = self.nodes.get_mut(node) {
            let load = node.load().clone();
            node.on_load(now, load);
        }
    }

    /// A node takes nothing new.
    pub fn on_node_draining(&mut self, node: &NodeId) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.on_draining();
        }
    }

    /// A node's report.
    pub fn on_load(&mut self, now: Instant, node: &NodeId, load: Load) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.on_load(now, load);
        }
    }

    /// Time has passed: nodes that do not report are suspected.
    pub fn on_tick(&mut self, now: Instant) {
        for node in self.nodes.values_mut() {
            if now.saturating_duration_since(node.reported()) > self.config.suspect_after {
                node.on_suspect();
            }
        }
    }

    /// Changes of a node's prefix cache, or (`snapshot`) all of it, as in [`baton_kv_cache::KvEventBatch`]. [`Applied::Gap`] is said once per gap: ask for a snapshot.
    pub fn on_kv_events(
        &mut self,
        node: &NodeId,
        generation: Generation,
        sequence: u64,
        snapshot: bool,
        events: &[KvEvent],
    ) -> Applied {
        let Some(known) = self.nodes.get_mut(node) else { return Applied::Stale };
        if known.info().generation != generation || known.state() == NodeState::Lost {
            return Applied::Stale;
        }
        let applied = match snapshot {
            true => self.index.snapshot(node, generation, sequence, events),
            false => self.index.apply(node, generation, sequence, events),
        };
        let already_asked = std::mem::replace(&mut known.awaits_snapshot, applied == Applied::Gap);
        if applied == Applied::Gap && already_asked { Applied::Stale } else { applied }
    }

    /// A node's step took `seconds`: rows and attended tokens as in [`crate::StepPlan::rows`] and [`crate::StepPlan::attended_tokens`].
    pub fn on_step(&mut self, node: &NodeId, rows: u32, attended_tokens: u64, seconds: f64) {
        let Some(node) = self.nodes.get_mut(node) else { return };
        let Some(cost) = self.costs.get_mut(&cost_class(node.info())) else { return };
        match node.info().role {
            NodeRole::Prefill => cost.on_prefill_step(&mut node.speed, rows, attended_tokens, seconds),
            NodeRole::Decode => cost.on_decode_step(&mut node.speed, rows, attended_tokens, seconds),
        }
    }

    /// The request's first token is here: its prefill node has done its part.
    pub fn on_first_token(&mut self, now: Instant, key: RequestKey) {
        let Some(charge) = self.charges.get(&key) else { return };
        if let Some(node) = charge.prefill.as_ref().and_then(|prefill| charged(&mut self.nodes, prefill)) {
            node.charges.finish_prefill(now, key);
        }
    }

    /// The attempt is over, one way or the other: everything that it was charged is given back. Unknown ones are ignored.
    pub fn on_ended(&mut self, now: Instant, key: RequestKey) {
        let Some(charge) = self.charges.remove(&key) else { return };
        if let Some(node) = charge.prefill.as_ref().and_then(|prefill| charged(&mut self.nodes, prefill)) {
            node.charges.finish_prefill(now, key);
            node.charges.requests -= 1;
        }
        if let Some(decode) = &charge.decode
            && let Some(node) = charged(&mut self.nodes, &decode.node)
        {
            node.charges.end_decode(decode);
        }
    }
}

/// The node that was charged, if it has not left or restarted since.
fn charged<'a>(
    nodes: &'a mut BTreeMap<NodeId, ClusterNode>,
    (node, generation): &(NodeId, Generation),
) -> Option<&'a mut ClusterNode> {
    let alive = |node: &&mut ClusterNode| node.info().generation == *generation && node.state() != NodeState::Lost;
    nodes.get_mut(node).filter(alive)
}
