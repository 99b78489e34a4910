//! The nodes by role: a placement looks at all of one role.

use std::collections::BTreeMap;

use baton_types::{NodeId, NodeRole};

use super::ClusterNode;
use crate::ledger::NodeStart;

/// Nodes by name. A name has one node, whatever its role.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    prefill: BTreeMap<NodeId, ClusterNode>,
    decode: BTreeMap<NodeId, ClusterNode>,
}

impl NodeTable {
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
    pub(super) fn start_mut(&mut self, (node, generation): &NodeStart) -> Option<&mut ClusterNode> {
        let is_here = |node: &&mut ClusterNode| node.info().generation == *generation && !node.state().is_gone();
        self.get_mut(node).filter(is_here)
    }

    /// In place of the one that had its name, if there was one.
    pub(super) fn insert(&mut self, node: ClusterNode) {
        let name = node.info().node.clone();
        let role = node.info().role;
        self.remove(&name);
        self.map_mut(role).insert(name, node);
    }

    pub(super) fn remove(&mut self, node: &NodeId) {
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
