//! What a node says of itself: its registration and its load.

use baton_types as d;

use super::{InvalidMessage, generation, node_id, parse, required, seconds};
use crate::v1 as w;

impl From<&d::KvLayout> for w::KvLayout {
    fn from(layout: &d::KvLayout) -> Self {
        Self {
            model_fingerprint: layout.fingerprint().to_string(),
            num_layers: layout.num_layers,
            num_kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            block_tokens: layout.block_tokens,
            dtype: layout.dtype.as_str().into(),
            num_blocks: layout.num_blocks,
        }
    }
}

/// Largest of any extent of a layout that is believed.
const MAX_EXTENT: u32 = 1 << 28;

impl TryFrom<w::KvLayout> for d::KvLayout {
    type Error = InvalidMessage;

    fn try_from(layout: w::KvLayout) -> Result<Self, Self::Error> {
        let extent = |field, value: u32| {
            let found = || format!("{value}, but must be from 1 to {MAX_EXTENT}");
            if (1..=MAX_EXTENT).contains(&value) { Ok(value) } else { Err(InvalidMessage { field, found: found() }) }
        };
        Ok(Self {
            model: parse::<d::ModelFingerprint>("layout.model_fingerprint", &layout.model_fingerprint)?.0,
            num_layers: extent("layout.num_layers", layout.num_layers)?,
            num_kv_heads: extent("layout.num_kv_heads", layout.num_kv_heads)?,
            head_dim: extent("layout.head_dim", layout.head_dim)?,
            block_tokens: extent("layout.block_tokens", layout.block_tokens)?,
            dtype: layout.dtype.parse().map_err(|error: d::UnknownKvDtype| InvalidMessage {
                field: "layout.dtype",
                found: error.to_string(),
            })?,
            num_blocks: extent("layout.num_blocks", layout.num_blocks)?,
        })
    }
}

impl From<&d::NodeProfile> for w::NodeProfile {
    fn from(p: &d::NodeProfile) -> Self {
        Self {
            prefill_base: p.prefill_base,
            prefill_per_token: p.prefill_per_token,
            prefill_per_token_pair: p.prefill_per_token_pair,
            decode_base: p.decode_base,
            decode_per_sequence: p.decode_per_sequence,
            decode_per_kv_token: p.decode_per_kv_token,
            max_waiting: p.max_waiting,
            max_running: p.max_running,
            chunk_tokens: p.chunk_tokens,
            transfer_bytes_per_s: p.transfer_bytes_per_s,
        }
    }
}

impl From<w::NodeProfile> for d::NodeProfile {
    /// Costs that are negative or not finite become 0: the models are fitted online anyway.
    fn from(p: w::NodeProfile) -> Self {
        let cost = |value: f64| if value.is_finite() && value > 0.0 { value } else { 0.0 };
        Self {
            prefill_base: cost(p.prefill_base),
            prefill_per_token: cost(p.prefill_per_token),
            prefill_per_token_pair: cost(p.prefill_per_token_pair),
            decode_base: cost(p.decode_base),
            decode_per_sequence: cost(p.decode_per_sequence),
            decode_per_kv_token: cost(p.decode_per_kv_token),
            max_waiting: p.max_waiting,
            max_running: p.max_running,
            chunk_tokens: p.chunk_tokens,
            transfer_bytes_per_s: cost(p.transfer_bytes_per_s),
        }
    }
}

impl From<&d::NodeInfo> for w::NodeInfo {
    fn from(info: &d::NodeInfo) -> Self {
        Self {
            name: info.node.to_string(),
            role: info.role.as_str().into(),
            generation: info.generation.to_string(),
            address: info.address.clone(),
            model: info.model.clone(),
            vocab_size: info.vocab_size,
            context_length: info.context_length,
            numerics: info.numerics.clone(),
            layout: Some((&info.layout).into()),
            profile: Some((&info.profile).into()),
            copies_prefixes: info.copies_prefixes,
            splits_prompts: info.splits_prompts,
            vocabulary: info.vocabulary.clone(),
        }
    }
}

impl TryFrom<w::NodeInfo> for d::NodeInfo {
    type Error = InvalidMessage;

    fn try_from(info: w::NodeInfo) -> Result<Self, Self::Error> {
        let role = match info.role.as_str() {
            "prefill" => d::NodeRole::Prefill,
            "decode" => d::NodeRole::Decode,
            other => return Err(InvalidMessage { field: "role", found: format!("'{other}'") }),
        };
        Ok(Self {
            node: node_id("name", &info.name)?,
            role,
            generation: generation("generation", &info.generation)?,
            address: info.address,
            model: info.model,
            vocab_size: info.vocab_size,
            context_length: info.context_length,
            numerics: info.numerics,
            layout: required("layout", info.layout)?.try_into()?,
            profile: info.profile.unwrap_or_default().into(),
            copies_prefixes: info.copies_prefixes,
            splits_prompts: info.splits_prompts,
            vocabulary: info.vocabulary,
        })
    }
}

impl From<&d::Load> for w::Load {
    fn from(load: &d::Load) -> Self {
        Self {
            running: load.running,
            waiting: load.waiting,
            queued_tokens: load.queued_tokens,
            kv_tokens: load.kv_tokens,
            blocks_total: load.blocks_total,
            blocks_used: load.blocks_used,
            blocks_cached: load.blocks_cached,
            blocks_reserved: load.blocks_reserved,
            prefix_queries: load.prefix_queries,
            prefix_hits: load.prefix_hits,
            prefix_hits_ssd: load.prefix_hits_ssd,
            prefix_hits_fetched: load.prefix_hits_fetched,
            preemptions: load.preemptions,
            takes_sequences: load.takes_sequences,
            blocks_ssd: load.blocks_ssd,
            step: load
                .step
                .map(|step| w::StepProgress { elapsed_s: step.elapsed.as_secs_f64(), left_s: step.left.as_secs_f64() }),
            blocks_cold: load.blocks_cold,
            draining: load.draining,
        }
    }
}

impl TryFrom<w::Load> for d::Load {
    type Error = InvalidMessage;

    fn try_from(load: w::Load) -> Result<Self, Self::Error> {
        let progress = |step: w::StepProgress| -> Result<_, Self::Error> {
            let elapsed = seconds("step.elapsed_s", step.elapsed_s)?;
            Ok(d::StepProgress { elapsed, left: seconds("step.left_s", step.left_s)? })
        };
        Ok(Self {
            running: load.running,
            waiting: load.waiting,
            queued_tokens: load.queued_tokens,
            kv_tokens: load.kv_tokens,
            blocks_total: load.blocks_total,
            blocks_used: load.blocks_used,
            blocks_cached: load.blocks_cached,
            blocks_reserved: load.blocks_reserved,
            prefix_queries: load.prefix_queries,
            prefix_hits: load.prefix_hits,
            prefix_hits_ssd: load.prefix_hits_ssd,
            prefix_hits_fetched: load.prefix_hits_fetched,
            preemptions: load.preemptions,
            takes_sequences: load.takes_sequences,
            blocks_ssd: load.blocks_ssd,
            step: load.step.map(progress).transpose()?,
            blocks_cold: load.blocks_cold,
            draining: load.draining,
        })
    }
}
