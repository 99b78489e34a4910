//! The prefix caches on the wire.

use std::collections::HashMap;

use baton_proto::v1;
use baton_scheduler::{ClusterNode, HotPrefix};
use baton_types::NodeId;

use crate::error::GenerateError;
use crate::frontend::Frontend;

/// Prefixes told if the caller does not say how many, and at most.
const TOP: (u32, u32) = (10, 100);

pub(super) fn status(frontend: &Frontend, top: u32) -> v1::CacheStatusResponse {
    let top = if top == 0 { TOP.0 } else { top.min(TOP.1) };
    let hottest = frontend.hot_prefixes().hottest(frontend.clock.now(), top as usize);
    let cluster = frontend.cluster();
    let block_tokens = cluster.nodes().next().map_or(0, |node| node.info().layout.block_tokens);
    let nodes = cluster.nodes().map(|node| node_cache(frontend, node)).collect();
    drop(cluster);
    v1::CacheStatusResponse { nodes, prefixes: hottest.iter().map(|hot| prefix(frontend, hot, block_tokens)).collect() }
}

fn node_cache(frontend: &Frontend, node: &ClusterNode) -> v1::NodeCache {
    let info = node.info();
    v1::NodeCache {
        node: info.node.to_string(),
        role: info.role.as_str().into(),
        state: node.state().as_str().into(),
        load: Some(node.load().into()),
        block_tokens: info.layout.block_tokens,
        indexed_blocks: frontend.index.entries(&info.node) as u64,
    }
}

fn prefix(frontend: &Frontend, hot: &HotPrefix, block_tokens: u32) -> v1::HotPrefix {
    // Who holds its last block holds those before it, but for what was evicted from their middle.
    let mut nodes: Vec<_> =
        frontend.index.longest_prefix(&[hot.hash]).into_iter().map(|(node, _)| node.to_string()).collect();
    nodes.sort();
    v1::HotPrefix {
        hash: hot.hash.to_string(),
        tokens: hot.blocks.saturating_mul(block_tokens),
        requests: hot.requests,
        nodes,
    }
}

pub(super) async fn lookup(
    frontend: &Frontend,
    request: v1::GenerateRequest,
) -> Result<v1::CacheLookupResponse, GenerateError> {
    let (prompt_tokens, hashes) = frontend.prompt_hashes(request).await?;
    let held: HashMap<NodeId, u32> = frontend.index.longest_prefix(&hashes).into_iter().collect();
    let cluster = frontend.cluster();
    let mut matches: Vec<_> = cluster
        .nodes()
        .filter_map(|node| {
            let info = node.info();
            let tokens = held.get(&info.node)?.saturating_mul(info.layout.block_tokens);
            Some(v1::CacheMatch { node: info.node.to_string(), role: info.role.as_str().into(), tokens })
        })
        .collect();
    matches.sort_by(|a, b| b.tokens.cmp(&a.tokens).then_with(|| a.node.cmp(&b.node)));
    Ok(v1::CacheLookupResponse { prompt_tokens, matches })
}

/// Has one node, or with an empty name every node that has a session, clear its cache; names of
/// those that were told to, and what requests hold there.
pub(super) fn clear(frontend: &Frontend, name: &str) -> Result<v1::ClearCacheResponse, GenerateError> {
    let command = || v1::node_command::Command::ClearCache(v1::ClearCacheCommand {});
    if name.is_empty() {
        let nodes: Vec<NodeId> = frontend.cluster().nodes().map(|node| node.info().node.clone()).collect();
        let told: Vec<_> = nodes.into_iter().filter(|node| frontend.nodes.send(node, command())).collect();
        return Ok(cleared(frontend, &told));
    }
    let node = known_node(frontend, name)?;
    frontend.tell(&node, command())?;
    Ok(cleared(frontend, &[node]))
}

fn cleared(frontend: &Frontend, told: &[NodeId]) -> v1::ClearCacheResponse {
    let cluster = frontend.cluster();
    let held = |node: &NodeId| cluster.node(node).map_or(0, |node| node.load().blocks_used);
    v1::ClearCacheResponse {
        nodes: told.iter().map(ToString::to_string).collect(),
        held_blocks: told.iter().map(held).collect(),
    }
}

/// The node of that name, if the conductor knows one.
pub(super) fn known_node(frontend: &Frontend, name: &str) -> Result<NodeId, GenerateError> {
    let node = NodeId::new(name).map_err(|error| GenerateError::invalid("node", error.to_string()))?;
    if frontend.cluster().node(&node).is_none() {
        let problem = format!("this conductor knows no node '{node}'");
        return Err(GenerateError::NotFound { field: "node", problem });
    }
    Ok(node)
}
