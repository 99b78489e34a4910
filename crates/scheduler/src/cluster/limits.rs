//! How many tokens the nodes hold of one request.

use std::time::{Duration, Instant};

use baton_types::NodeRole;

use super::{Cluster, ClusterNode, PromptsAtDecode};

/// A node that left may be started again within this time: what only it holds is refused for now,
/// and not for good.
const RETURN_TIME: Duration = Duration::from_secs(60);

/// The largest prompt that ready nodes held, and when they last did. A node that takes another's
/// place and claims less makes no request the client's to mend, however long it stays.
#[derive(Debug, Clone, Copy)]
pub(super) struct LargestPrompt {
    tokens: u32,
    at: Instant,
}

/// Tokens that the nodes hold of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceLimits {
    /// Most tokens of prompt and output together, at the largest ready node.
    pub sequence: u32,
    /// Most tokens of a prompt that is to be answered, at the largest ready nodes.
    pub prompt: u32,
    /// Most tokens of a prompt, also at nodes that are not ready and may be soon.
    pub prompt_soon: u32,
    /// Most tokens of prompt and output together that the model takes.
    pub context_length: u32,
    /// Token ids are below it.
    pub vocab_size: u32,
}

impl ClusterNode {
    /// Whether the node is here, or may be soon.
    pub(super) fn may_return(&self, now: Instant) -> bool {
        self.left().is_none_or(|left| now.saturating_duration_since(left) < RETURN_TIME)
    }
}

impl Cluster {
    /// What the nodes hold of one request; `None` if no node is ready.
    pub fn sequence_limits(&self, now: Instant) -> Option<SequenceLimits> {
        let ready = || self.nodes().filter(|node| node.is_ready()).map(ClusterNode::info);
        let context_length = ready().map(|info| info.context_length).max()?;
        // Nodes have the vocabulary of one model: one that claims less must not narrow it for all.
        let vocab_size = ready().map(|info| info.vocab_size).max()?;
        let (prompt, sequence) = self.largest(ClusterNode::is_ready);
        let (prompt_soon, _) = self.largest(|node| node.may_return(now));
        let prompt_soon = prompt_soon.max(self.held_lately(now));
        Some(SequenceLimits { sequence, prompt, prompt_soon, context_length, vocab_size })
    }

    /// Time has passed: what ready nodes hold is remembered for a while.
    pub(super) fn remember_limits(&mut self, now: Instant) {
        let (tokens, _) = self.largest(ClusterNode::is_ready);
        if tokens >= self.held_lately(now) {
            self.largest_prompt = Some(LargestPrompt { tokens, at: now });
        }
    }

    /// The largest prompt that ready nodes held lately, or before those that are here came.
    pub(super) fn held_lately(&self, now: Instant) -> u32 {
        let Some(held) = self.largest_prompt else { return 0 };
        let is_later = |node: &ClusterNode| node.is_ready() && node.joined() > held.at;
        let counts = now.saturating_duration_since(held.at) < RETURN_TIME || self.nodes().any(is_later);
        if counts { held.tokens } else { 0 }
    }

    /// Tokens of the largest prompt, and of the largest sequence, that these nodes hold.
    fn largest(&self, counts: impl Fn(&ClusterNode) -> bool) -> (u32, u32) {
        let decodes = self.nodes.of_role(NodeRole::Decode).filter(|node| counts(node));
        let sequence = decodes.map(|node| node.info().max_sequence_tokens()).max();
        let computed = self.largest_computed(counts);
        match sequence {
            Some(sequence) => (computed.min(sequence.saturating_sub(1)), sequence),
            // Without a decode node there is one token of output.
            None => (computed, computed.saturating_add(1)),
        }
    }

    fn largest_computed(&self, counts: impl Fn(&ClusterNode) -> bool) -> u32 {
        let computes = |node: &&ClusterNode| {
            let at_decode = self.config.prompts_at_decode != PromptsAtDecode::Never;
            at_decode || node.info().role == NodeRole::Prefill
        };
        let nodes = self.nodes().filter(computes).filter(|node| counts(node));
        nodes.map(|node| node.info().max_prompt_tokens()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{info, refusal, request};
    use super::super::{ClusterConfig, Policies};
    use super::*;
    use crate::placement::PlacementRequest;
    use baton_types::{ErrorKind, Generation, NodeInfo};

    fn sized(name: &str, role: NodeRole, num_blocks: u32) -> NodeInfo {
        let mut info = info(name, role, 1);
        info.layout.num_blocks = num_blocks;
        info
    }

    #[test]
    fn largest_ready_nodes_limit_prompt_and_sequence() {
        let now = Instant::now();
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        assert_eq!(cluster.sequence_limits(now), None);
        cluster.on_node_joined(now, sized("p0", NodeRole::Prefill, 4));
        let limits = cluster.sequence_limits(now).unwrap();
        assert_eq!((limits.prompt, limits.sequence), (64, 65), "one token of output");
        for (name, blocks) in [("d0", 20), ("d1", 50)] {
            cluster.on_node_joined(now, sized(name, NodeRole::Decode, blocks));
        }
        let limits = cluster.sequence_limits(now).unwrap();
        assert_eq!((limits.prompt, limits.sequence, limits.context_length), (800, 801, 2048));
        cluster.on_node_joined(now, sized("d2", NodeRole::Decode, 1000));
        let limits = cluster.sequence_limits(now).unwrap();
        assert_eq!((limits.prompt, limits.sequence), (2047, 2048), "the context is less than the arena");
        let never = ClusterConfig { prompts_at_decode: PromptsAtDecode::Never, ..ClusterConfig::default() };
        cluster.set_rules(never, Policies::default());
        assert_eq!(cluster.sequence_limits(now).unwrap().prompt, 64, "decode nodes compute no prompts");
    }

    #[test]
    fn node_that_claims_less_or_more_narrows_no_limit_for_others() {
        let now = Instant::now();
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        for (name, role) in [("p0", NodeRole::Prefill), ("d0", NodeRole::Decode)] {
            cluster.on_node_joined(now, info(name, role, 1));
        }
        cluster.on_tick(now);
        let before = cluster.sequence_limits(now).unwrap();
        for role in [NodeRole::Prefill, NodeRole::Decode] {
            let tiny = NodeInfo { context_length: 17, vocab_size: 1, ..sized("liar", role, 1) };
            cluster.on_node_joined(now, tiny);
            assert_eq!(cluster.sequence_limits(now), Some(before), "{role}");
            cluster.on_node_left(now, &super::super::tests::id("liar"), Generation(1));
        }
        // In the place of others, under their names.
        let now = now + Duration::from_millis(1);
        for (name, role) in [("p0", NodeRole::Prefill), ("d0", NodeRole::Decode)] {
            let mut later = NodeInfo { context_length: 17, ..info(name, role, 2) };
            later.profile.chunk_tokens = 1;
            cluster.on_node_joined(now, later);
        }
        let limits = cluster.sequence_limits(now).unwrap();
        assert_eq!((limits.prompt, limits.prompt_soon), (16, before.prompt), "for now, and not for good");
        assert_eq!(refusal(&mut cluster, now, &request(0, &[])).0, ErrorKind::Unavailable, "not the client's to mend");
        for later in [now + RETURN_TIME, now + 100 * RETURN_TIME] {
            for node in ["p0", "d0"] {
                cluster.on_load(later, &super::super::tests::id(node), baton_types::Load::default());
            }
            cluster.on_tick(later);
            assert_eq!(cluster.sequence_limits(later).unwrap().prompt_soon, before.prompt, "as long as they stay");
            assert_eq!(refusal(&mut cluster, later, &request(0, &[])).0, ErrorKind::Unavailable);
        }
    }

    #[test]
    fn prompt_of_a_node_that_may_return_is_refused_for_now_only() {
        let now = Instant::now();
        let mut cluster = Cluster::new(ClusterConfig::default(), Policies::default());
        for (name, blocks) in [("d0", 20), ("d1", 50)] {
            cluster.on_node_joined(now, sized(name, NodeRole::Decode, blocks));
        }
        cluster.on_node_left(now, &super::super::tests::id("d1"), Generation(1));
        let long = PlacementRequest { prompt_tokens: 500, ..request(0, &[]) };
        let limits = cluster.sequence_limits(now).unwrap();
        assert_eq!((limits.prompt, limits.prompt_soon, limits.sequence), (320, 800, 321));
        assert_eq!(refusal(&mut cluster, now, &long).0, ErrorKind::Unavailable);
        let later = now + RETURN_TIME;
        assert_eq!(cluster.sequence_limits(later).unwrap().prompt_soon, 320);
    }
}
