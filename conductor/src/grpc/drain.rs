//! Nodes that operators have drain, or take requests again.

use baton_proto::v1::{self, node_command::Command};

use super::cache::known_node;
use crate::error::GenerateError;
use crate::frontend::Frontend;

/// Has a node drain, or take requests again. From now on nothing is placed on one that drains.
pub(super) fn order(frontend: &Frontend, name: &str, draining: bool) -> Result<(), GenerateError> {
    let node = known_node(frontend, name)?;
    {
        let mut cluster = frontend.cluster();
        if draining { cluster.on_drain_ordered(&node) } else { cluster.on_undrain_ordered(&node) }
    }
    frontend.tell(&node, Command::Drain(v1::DrainCommand { draining }))?;
    tracing::info!(%node, draining, "an operator asked a node");
    Ok(())
}
