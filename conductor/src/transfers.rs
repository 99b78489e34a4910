//! What the nodes last said of their transfers.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_types::{Generation, NodeId, TransferReport};

/// The last report of each node that has a session.
#[derive(Default)]
pub struct Transfers(Mutex<HashMap<NodeId, (Generation, TransferReport)>>);

impl Transfers {
    fn lock(&self) -> MutexGuard<'_, HashMap<NodeId, (Generation, TransferReport)>> {
        // Every critical section leaves the map whole, so a panic elsewhere does not spoil it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a node's report in place of its last.
    pub fn keep(&self, node: &NodeId, generation: Generation, report: TransferReport) {
        self.lock().insert(node.clone(), (generation, report));
    }

    /// Forgets a start of a node, unless a later one has reported.
    pub fn forget(&self, node: &NodeId, generation: Generation) {
        let mut reports = self.lock();
        if reports.get(node).is_some_and(|(reported, _)| *reported == generation) {
            reports.remove(node);
        }
    }

    /// A node's last report.
    pub fn of(&self, node: &NodeId) -> Option<TransferReport> {
        self.lock().get(node).map(|(_, report)| report.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_report_survives_end_of_earlier_generation() {
        let transfers = Transfers::default();
        let node = NodeId::new("n").unwrap();
        assert_eq!(transfers.of(&node), None);
        transfers.keep(&node, Generation(1), TransferReport::default());
        transfers.keep(&node, Generation(2), TransferReport::default());
        transfers.forget(&node, Generation(1));
        assert!(transfers.of(&node).is_some());
        transfers.forget(&node, Generation(2));
        assert_eq!(transfers.of(&node), None);
    }
}
