//! A request whose decode node refuses it a grant, for want of room or because its steps are too long by now, is sent to another one while its prompt is computed.

use baton_proto::v1::node_command::Command;
use baton_types::{DecodeTarget, ErrorKind, NodeId, Redirect, Refused};

use crate::error::GenerateError;
use crate::front_door::{FrontDoor, decode_target};
use crate::relay::Relay;

impl Relay {
    /// Another decode node takes the request, where one has room; else the same one is asked again, and need not keep to the objective: a request that was taken in is served.
    ///
    /// # Errors
    /// The node that is to take it is gone.
    pub(crate) fn on_grant_refused(&mut self, door: &FrontDoor, refused: &Refused) -> Result<(), GenerateError> {
        let Some(node) = self.placement.decode.clone() else { return Ok(()) };
        let other = door.cluster().redirect(door.clock.now(), self.key());
        door.metrics.on_grant_refused(other.is_some());
        let to = other.as_ref().unwrap_or(&node);
        let lost = || {
            let refused = Refused { kind: ErrorKind::Unavailable, message: "the node was lost".to_owned() };
            GenerateError::Node { node: to.clone(), refused }
        };
        let decode = door.target(to).ok_or_else(lost)?;
        if *to != node {
            tracing::info!(request = %self.job.request, attempt = self.attempt.0, node = %to, reason = %refused, "another decode node takes the request");
            if let Some(record) = &self.job.record {
                record.turned(&format_args!("{to} instead of {node}: {refused}"));
            }
            self.placement.decode = Some(to.clone());
            // They were of the other node.
            self.placement.estimated_tbt = None;
            self.placement.estimated_exposed = None;
            self.entry.goes_to(&node, (to.clone(), decode.generation));
            // Had it left before that was entered, nobody would say so.
            if door.target(to).is_none_or(|known| known.generation != decode.generation) {
                return Err(lost());
            }
        }
        let redirect = Redirect { key: self.key(), decode };
        // Where the session ended, the loss of the prefill node is on its way here.
        door.nodes.send(&self.placement.prefill, Command::Redirect((&redirect).into()));
        Ok(())
    }
}

impl FrontDoor {
    /// A decode node that is here.
    fn target(&self, node: &NodeId) -> Option<DecodeTarget> {
        let cluster = self.cluster();
        let known = cluster.node(node).filter(|node| !node.state().is_gone())?;
        Some(decode_target(known.info(), None))
    }
}
