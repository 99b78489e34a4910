//! A request whose decode node refuses it a grant, for want of room or because its steps are too long by now, is sent to another one while its prompt is computed.

use baton_proto::v1;
use baton_types::{DecodeTarget, Generation, NodeId, Redirect, Refused};

use crate::front_door::{FrontDoor, decode_target};
use crate::relay::Relay;

impl Relay {
    /// Another decode node takes the request, where one has room; else the same one is asked again, and need not keep to the objective: a request that was taken in is served.
    pub(crate) fn on_grant_refused(&mut self, door: &FrontDoor, refused: &Refused) {
        let Some(node) = self.placement.decode.clone() else { return };
        let other = door.cluster().redirect(door.clock.now(), self.key());
        door.metrics.on_grant_refused(other.is_some());
        if let Some(other) = &other {
            tracing::info!(request = %self.job.request, attempt = self.attempt.0, node = %other, reason = %refused, "another decode node takes the request");
            if let Some(record) = &self.job.record {
                record.turned(&format_args!("{other} instead of {node}: {refused}"));
            }
            self.placement.decode = Some(other.clone());
            // They were of the other node.
            self.placement.estimated_tbt = None;
            self.placement.estimated_exposed = None;
            self.entry.placed(self.attempt, door.starts(&self.placement.nodes()));
        }
        // Where the node is gone, its loss is on its way here.
        let Some(decode) = door.decode_target(other.as_ref().unwrap_or(&node)) else { return };
        let redirect = Redirect { key: self.key(), decode };
        // Where the session ended, the loss of the prefill node is.
        door.nodes.send(&self.placement.prefill, v1::node_command::Command::Redirect((&redirect).into()));
    }
}

impl FrontDoor {
    fn starts(&self, nodes: &[NodeId]) -> Vec<(NodeId, Generation)> {
        nodes.iter().filter_map(|node| self.start_of(node)).collect()
    }

    fn decode_target(&self, node: &NodeId) -> Option<DecodeTarget> {
        self.cluster().node(node).map(|node| decode_target(node.info(), None))
    }
}
