//! How the nodes of a simulated cluster are set up: production's settings, and the sizes of the
//! profile.

use std::time::Duration;

use baton_profile::{CONTEXT_TOKENS, LAYER_GROUPS, ModelProfile};
use baton_scheduler::{
    ClusterConfig, DecodeConfig, DecodeCore, EvictionKind, MAX_STORES, MAX_WAITING, ModelConfig, PrefillConfig,
    PrefillCore, PromptsAtDecode,
};
use baton_types::{Generation, KvDtype, KvLayout, NodeId, NodeInfo, NodeProfile, NodeRole};

use super::engine::VOCABULARY;
use crate::Random;
use crate::options::{Feature, SimOptions};

/// One node.
#[derive(Debug, Clone)]
pub(super) struct NodeConfig {
    pub name: NodeId,
    role: NodeRole,
    layout: KvLayout,
    model: String,
    profile: NodeProfile,
    eviction: EvictionKind,
    /// Blocks of the tier below the arena; 0 for none.
    pub ssd_blocks: u32,
    /// Whether sequences that wait for room are offered to other decode nodes.
    pub migrates: bool,
    /// Of its bounds, if they are small.
    cramped: Option<Random>,
}

impl NodeConfig {
    /// Node `number` of its role.
    pub(super) fn new(role: NodeRole, number: usize, profile: &ModelProfile, options: &SimOptions) -> Self {
        let (letter, tokens, blocks, ssd_blocks) = match role {
            NodeRole::Prefill => ('p', profile.cache_tokens, options.cache_blocks, options.ssd_blocks),
            NodeRole::Decode => ('d', profile.decode_kv_tokens, options.decode_blocks, 0),
        };
        let blocks = blocks.unwrap_or((tokens / u64::from(options.block_tokens)) as u32);
        // K and V of two bytes a number.
        let head_dim = (profile.kv_bytes_per_token / (4 * u64::from(LAYER_GROUPS))).max(1) as u32;
        let layout = KvLayout {
            model: 1,
            num_layers: LAYER_GROUPS,
            num_kv_heads: 1,
            head_dim,
            block_tokens: options.block_tokens,
            dtype: KvDtype::F16,
            num_blocks: blocks,
        };
        let node_profile = NodeProfile {
            max_waiting: MAX_WAITING,
            transfer_bytes_per_s: profile.network_bytes_per_s,
            ..profile.node_profile()
        };
        let mut config = Self {
            name: NodeId::new(&format!("{letter}{number:04}")).expect("letters and digits are a name"),
            role,
            layout,
            model: profile.name.clone(),
            profile: node_profile,
            eviction: if options.has(Feature::Lhd) { EvictionKind::Lhd } else { EvictionKind::Lru },
            ssd_blocks,
            migrates: options.has(Feature::Migration),
            cramped: options.is_cramped.then(|| Random::new(options.seed << 32 | (number as u64) << 1 | role as u64)),
        };
        if role == NodeRole::Decode {
            // What it takes of prompts into a step of its batch.
            config.profile.chunk_tokens = DecodeConfig::new(config.model()).prompt_budget as u32;
        }
        config
    }

    /// How a start of it introduces itself.
    pub(super) fn info(&self, generation: Generation) -> NodeInfo {
        NodeInfo {
            node: self.name.clone(),
            role: self.role,
            generation,
            address: self.name.to_string(),
            model: self.model.clone(),
            vocab_size: VOCABULARY,
            context_length: CONTEXT_TOKENS,
            kv_class: "simulated".to_owned(),
            layout: self.layout.clone(),
            profile: self.profile,
            vocabulary: String::new(),
        }
    }

    fn model(&self) -> ModelConfig {
        ModelConfig { layout: self.layout.clone(), context_length: CONTEXT_TOKENS, vocab_size: VOCABULARY }
    }

    const fn max_stores(&self) -> usize {
        if self.ssd_blocks > 0 { MAX_STORES } else { 0 }
    }

    /// # Panics
    /// If the profile's sizes make no node.
    pub(super) fn prefill_core(&self, info: &NodeInfo) -> PrefillCore {
        let config = PrefillConfig::new(info.node.clone(), info.generation, self.model());
        let mut config = config.with_chunk_tokens(self.profile.chunk_tokens);
        config.max_sequences_per_chunk = self.profile.max_running as usize;
        config.eviction = self.eviction;
        config.max_stores = self.max_stores();
        if let Some(mut random) = self.cramped.clone() {
            config.token_budget = (1 + random.below(8) as usize) * 2 * self.layout.block_tokens as usize;
            config.max_inflight_pushes = 1 + random.below(3) as usize;
            config.max_spans_per_push = 1 + random.below(40) as usize;
            config.max_active = 6 + random.below(20) as usize;
            config.max_kv_events = 100;
        }
        PrefillCore::new(config).expect("the profile was checked")
    }

    /// # Panics
    /// If the profile's sizes make no node.
    pub(super) fn decode_core(&self) -> DecodeCore {
        let mut config = DecodeConfig::new(self.model());
        config.max_running = self.profile.max_running as usize;
        config.eviction = self.eviction;
        config.max_stores = self.max_stores();
        if let Some(mut random) = self.cramped.clone() {
            config.max_running = 4 + random.below(30) as usize;
            config.growth_blocks = [0, 1, 4, usize::MAX][random.below(4) as usize];
            config.grant_wait = Duration::from_millis(random.below(2) * random.below(4000));
            config.max_tombstones = 30;
            config.max_kv_events = 100;
        }
        DecodeCore::new(config).expect("the profile was checked")
    }
}

/// The conductor's settings.
pub(super) fn cluster_config(options: &SimOptions, bandwidth: f64) -> ClusterConfig {
    let defaults = ClusterConfig::default();
    ClusterConfig {
        max_overtaken: options.max_overtaken,
        queue_timeout: options.queue_timeout,
        max_wait: options.max_wait,
        max_queued: if options.has(Feature::AdmissionQueue) { defaults.max_queued } else { 0 },
        takes_partial_prefills: options.has(Feature::PartialPrefill),
        prompts_at_decode: if options.has(Feature::PromptsAtDecode) {
            defaults.prompts_at_decode
        } else {
            PromptsAtDecode::Fallback
        },
        bandwidth,
        ..defaults
    }
}
