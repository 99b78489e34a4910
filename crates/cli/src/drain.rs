//! `baton drain` and `baton undrain`.

use std::time::Duration;

use baton_proto::v1;
use serde_json::json;

use crate::args::{DrainArgs, UndrainArgs};
use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::{Waiting, line};

/// How often the conductor is asked how far it is. Nodes report as often.
const LOOK: Duration = Duration::from_millis(200);

/// Has a node drain, and waits until nothing is left there.
pub async fn drain(args: &DrainArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    conductor.cluster().drain(v1::DrainRequest { node: args.node.clone() }).await?;
    if args.no_wait {
        return say(&args.node, "draining", json);
    }
    let is_over = |node: &v1::NodeStatus| node.state == "drained" || node.state == "draining" && left(node) == 0;
    let node = wait_for(&conductor, &args.node, args.timeout, json, is_over).await?;
    match node.state.as_str() {
        _ if is_over(&node) => say(&args.node, "drained", json),
        "draining" => Err(CliError::Cluster(format!(
            "{}: {} requests and {} blocks are left after {} s; it goes on draining",
            args.node,
            left(&node),
            node.load.unwrap_or_default().blocks_used,
            args.timeout
        ))),
        state => Err(CliError::Cluster(format!("{}: it is {state}", args.node))),
    }
}

/// Has a node take requests again, and waits until it does.
pub async fn undrain(args: &UndrainArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    conductor.cluster().undrain(v1::UndrainRequest { node: args.node.clone() }).await?;
    let node = wait_for(&conductor, &args.node, args.timeout, json, |node| node.state == "ready").await?;
    match node.state.as_str() {
        "ready" => say(&args.node, "ready", json),
        state => Err(CliError::Cluster(format!(
            "{}: it is {state} after {} s; a node that is going down stays away",
            args.node, args.timeout
        ))),
    }
}

/// What keeps the node from being done: requests, by its own report and the conductor's ledger, or
/// blocks that others still read.
fn left(node: &v1::NodeStatus) -> u32 {
    let load = node.load.unwrap_or_default();
    // Its report may be from before it was asked.
    let told = u32::from(!load.draining);
    let requests = node.placed.max(load.running.saturating_add(load.waiting)).max(told);
    if requests == 0 { u32::from(load.blocks_used > 0) } else { requests }
}

/// Looks until it is so, the node is gone, or time is up; how it is then.
async fn wait_for(
    conductor: &Conductor,
    name: &str,
    timeout: f64,
    json: bool,
    is_so: impl Fn(&v1::NodeStatus) -> bool,
) -> Result<v1::NodeStatus, CliError> {
    let until = baton_runtime::now() + Duration::from_secs_f64(timeout);
    let mut waiting = Waiting::new("waiting for the node", json);
    loop {
        let nodes = conductor.cluster().list_nodes(v1::ListNodesRequest {}).await?.into_inner().nodes;
        let is_it = |node: &v1::NodeStatus| node.info.as_ref().is_some_and(|info| info.name == name);
        let Some(node) = nodes.into_iter().find(is_it) else {
            return Err(CliError::Cluster(format!("{name}: the conductor does not know it any more")));
        };
        if is_so(&node) || node.state == "lost" || baton_runtime::now() >= until {
            waiting.clear();
            return Ok(node);
        }
        baton_runtime::sleep(LOOK).await;
    }
}

fn say(node: &str, state: &str, json: bool) -> Result<(), CliError> {
    let text = if json { json!({ "node": node, "state": state }).to_string() } else { format!("{node}: {state}") };
    Ok(line(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drain_is_done_when_node_and_conductor_report_nothing_left() {
        let status = |placed, load| v1::NodeStatus { placed, load: Some(load), ..v1::NodeStatus::default() };
        let draining = v1::Load { draining: true, ..v1::Load::default() };
        assert_eq!(left(&status(0, v1::Load::default())), 1, "that report is from before");
        assert_eq!(left(&status(0, draining)), 0);
        assert_eq!(left(&status(2, draining)), 2);
        assert_eq!(left(&status(0, v1::Load { running: 3, waiting: 1, ..draining })), 4);
        assert_eq!(left(&status(0, v1::Load { blocks_used: 7, ..draining })), 1, "another node reads there");
    }
}
