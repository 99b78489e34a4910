//! A small cluster, as conductors know it: what messages are played against.

use std::time::Instant;

use baton_scheduler::{
    AdmissionKind, Cluster, ClusterConfig, PlacementKind, PlacementRequest, Policies, PromptsAtDecode,
};
use baton_types as d;

/// Two nodes of each role.
pub(super) const NODES: [(&str, d::NodeRole); 4] = [
    ("p0", d::NodeRole::Prefill),
    ("p1", d::NodeRole::Prefill),
    ("d0", d::NodeRole::Decode),
    ("d1", d::NodeRole::Decode),
];
/// Blocks of one node that are remembered.
pub(super) const INDEX_ENTRIES: usize = 64;

pub(super) fn id(name: &str) -> d::NodeId {
    d::NodeId::new(name).expect("a name")
}

pub(super) fn key(n: u128) -> d::RequestKey {
    d::RequestKey { request: d::RequestId(n), attempt: d::Attempt(0) }
}

pub(super) fn info(name: &str, role: d::NodeRole) -> d::NodeInfo {
    let layout = d::KvLayout {
        model: 7,
        num_layers: 2,
        num_kv_heads: 1,
        head_dim: 8,
        block_tokens: 4,
        dtype: d::KvDtype::F16,
        num_blocks: 64,
    };
    let profile = d::NodeProfile {
        prefill_base: 0.01,
        prefill_per_token: 0.001,
        decode_base: 0.01,
        decode_per_sequence: 0.001,
        max_waiting: 16,
        max_running: 16,
        chunk_tokens: 64,
        ..d::NodeProfile::default()
    };
    d::NodeInfo {
        node: id(name),
        role,
        generation: d::Generation(9),
        address: "http://127.0.0.1:1".into(),
        model: "m".into(),
        vocab_size: 512,
        context_length: 256,
        kv_class: "test".into(),
        layout,
        profile,
        vocabulary: String::new(),
    }
}

pub(super) fn cluster(now: Instant) -> Cluster {
    let config = ClusterConfig {
        prompts_at_decode: PromptsAtDecode::Never,
        max_index_entries_per_node: INDEX_ENTRIES,
        ..ClusterConfig::default()
    };
    let policies = Policies::new(PlacementKind::default(), AdmissionKind::default());
    let mut cluster = Cluster::new(config, policies);
    for (name, role) in NODES {
        cluster.on_node_joined(now, info(name, role));
    }
    cluster
}

/// A request of 40 tokens of prompt and 8 of output.
pub(super) fn request(n: u128) -> PlacementRequest<'static> {
    PlacementRequest {
        key: key(n),
        prompt_tokens: 40,
        max_tokens: 8,
        wants_decode: true,
        ..PlacementRequest::default()
    }
}
