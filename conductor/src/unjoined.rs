//! Nodes that asked to join and have no session. Operators see them beside those that have one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::{NodeInfo, NodeRole, NodeStart};

/// Most that are kept: who registers is not known to be a node.
const MAX_UNJOINED: usize = 64;
/// Nodes ask again every few seconds. One that has not asked for this long is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(30);
/// Longest reason and address that are kept, in characters.
const MAX_TEXT: usize = 400;

/// Why a node has no session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotJoined {
    /// It cannot serve with the others.
    Refused,
    /// It registers, but no session begins.
    Unreachable,
}

impl NotJoined {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Refused, Self::Unreachable];

    /// `refused` or `unreachable`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
        }
    }
}

/// A node without a session.
#[derive(Debug, Clone, PartialEq)]
pub struct UnjoinedNode {
    /// Its role.
    pub role: NodeRole,
    /// Where it says that it is.
    pub address: String,
    /// Why it has no session.
    pub why: NotJoined,
    /// The same for people, with what differs or what the connection says.
    pub reason: String,
    /// When it asked last.
    pub asked: Instant,
}

/// Those of one conductor.
#[derive(Default)]
pub struct UnjoinedNodes(Mutex<BTreeMap<NodeStart, UnjoinedNode>>);

impl UnjoinedNodes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeStart, UnjoinedNode>> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node asked and got no session. Beyond the bound it is not kept.
    pub fn on_not_joined(&self, now: Instant, info: &NodeInfo, why: NotJoined, reason: &str) {
        let mut nodes = self.lock();
        nodes.retain(|_, node| now.saturating_duration_since(node.asked) < FORGET_AFTER);
        let start = info.start();
        if nodes.len() >= MAX_UNJOINED && !nodes.contains_key(&start) {
            return;
        }
        let short = |text: &str| text.chars().take(MAX_TEXT).collect();
        let node =
            UnjoinedNode { role: info.role, address: short(&info.address), why, reason: short(reason), asked: now };
        nodes.insert(start, node);
    }

    /// A node has a session: it and its earlier starts ask no more.
    pub fn on_joined(&self, info: &NodeInfo) {
        self.lock().retain(|start, _| start.node != info.node || start.generation > info.generation);
    }

    /// Why no session with a start of a node began, if one was tried.
    pub fn reason(&self, info: &NodeInfo) -> Option<String> {
        let nodes = self.lock();
        let node = nodes.get(&info.start());
        node.filter(|node| node.why == NotJoined::Unreachable).map(|node| node.reason.clone())
    }

    /// Those that asked lately, by name.
    pub fn lately(&self, now: Instant) -> Vec<(NodeStart, UnjoinedNode)> {
        let nodes = self.lock();
        let lately = nodes.iter().filter(|(_, node)| now.saturating_duration_since(node.asked) < FORGET_AFTER);
        lately.map(|(start, unjoined)| (start.clone(), unjoined.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::tests::info;

    #[test]
    fn unjoined_nodes_are_bounded_and_forgotten() {
        let nodes = UnjoinedNodes::default();
        let start = Instant::now();
        for n in 0..100 {
            nodes.on_not_joined(start, &info(&format!("n{n:02}"), 1), NotJoined::Refused, &"x".repeat(10_000));
        }
        let lately = nodes.lately(start);
        assert_eq!((lately.len(), lately[0].1.reason.len()), (MAX_UNJOINED, MAX_TEXT));
        let later = start + Duration::from_secs(20);
        nodes.on_not_joined(later, &info("n00", 1), NotJoined::Unreachable, "no route");
        nodes.on_not_joined(later, &info("n01", 2), NotJoined::Unreachable, "no route");
        assert_eq!(nodes.reason(&info("n00", 1)).as_deref(), Some("no route"));
        let names = |now| nodes.lately(now).iter().map(|(start, _)| start.node.to_string()).collect::<Vec<_>>();
        assert_eq!(names(start + Duration::from_secs(31)), ["n00"], "the other one found no room");
        nodes.on_joined(&info("n00", 0));
        assert_eq!(names(later), names(start), "an earlier start has joined");
        nodes.on_joined(&info("n00", 2));
        assert!(!names(later).contains(&"n00".to_owned()));
    }
}
