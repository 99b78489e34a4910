//! What a node says of itself: its registration and its load.

use baton_types as d;

use super::{InvalidMessage, MAX_ADDRESS, MAX_NAME, MAX_TOTAL};
use super::{at_most, count, generation, node_id, parse, required, seconds, short, total};
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

/// A number of which there is at least one.
fn some(field: &'static str, value: u32) -> Result<u32, InvalidMessage> {
    if value == 0 {
        return Err(InvalidMessage { field, found: "0, but must be at least 1".to_owned() });
    }
    count(field, value)
}

impl TryFrom<w::KvLayout> for d::KvLayout {
    type Error = InvalidMessage;

    fn try_from(layout: w::KvLayout) -> Result<Self, Self::Error> {
        let layout = Self {
            model: parse::<d::ModelFingerprint>("layout.model_fingerprint", &layout.model_fingerprint)?.0,
            num_layers: some("layout.num_layers", layout.num_layers)?,
            num_kv_heads: some("layout.num_kv_heads", layout.num_kv_heads)?,
            head_dim: some("layout.head_dim", layout.head_dim)?,
            block_tokens: some("layout.block_tokens", layout.block_tokens)?,
            dtype: layout.dtype.parse().map_err(|error: d::UnknownKvDtype| InvalidMessage {
                field: "layout.dtype",
                found: error.to_string(),
            })?,
            num_blocks: some("layout.num_blocks", layout.num_blocks)?,
        };
        // Offsets into the arena fit then, whatever the type of its elements.
        let d::KvLayout { num_layers, num_kv_heads, head_dim, block_tokens, num_blocks, .. } = layout;
        let extents = [num_layers, num_kv_heads, head_dim, block_tokens, num_blocks];
        let elements = extents.into_iter().try_fold(1u64, |product, extent| product.checked_mul(extent.into()));
        if elements.is_none_or(|elements| elements > MAX_TOTAL) {
            let found = format!("{extents:?} elements, but must be at most {MAX_TOTAL} in all");
            return Err(InvalidMessage { field: "layout", found });
        }
        Ok(layout)
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

/// Most seconds of a step, or of a part of one, that are believed.
const MAX_COST: f64 = 1e6;
/// Fastest link that is believed, bytes per second.
const MAX_BANDWIDTH: f64 = 1e15;

impl TryFrom<w::NodeProfile> for d::NodeProfile {
    type Error = InvalidMessage;

    /// Costs that are negative or no numbers become 0: the models are fitted online anyway.
    fn try_from(p: w::NodeProfile) -> Result<Self, Self::Error> {
        let positive = |value: f64| if value > 0.0 { value } else { 0.0 };
        let cost = |field, value: f64| at_most(field, positive(value), MAX_COST);
        Ok(Self {
            prefill_base: cost("profile.prefill_base", p.prefill_base)?,
            prefill_per_token: cost("profile.prefill_per_token", p.prefill_per_token)?,
            prefill_per_token_pair: cost("profile.prefill_per_token_pair", p.prefill_per_token_pair)?,
            decode_base: cost("profile.decode_base", p.decode_base)?,
            decode_per_sequence: cost("profile.decode_per_sequence", p.decode_per_sequence)?,
            decode_per_kv_token: cost("profile.decode_per_kv_token", p.decode_per_kv_token)?,
            max_waiting: count("profile.max_waiting", p.max_waiting)?,
            max_running: count("profile.max_running", p.max_running)?,
            chunk_tokens: count("profile.chunk_tokens", p.chunk_tokens)?,
            transfer_bytes_per_s: at_most(
                "profile.transfer_bytes_per_s",
                positive(p.transfer_bytes_per_s),
                MAX_BANDWIDTH,
            )?,
        })
    }
}

/// A step of a node, for the cost models.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// As in [`w::StepReport`].
    pub rows: u32,
    /// The same.
    pub attended_tokens: u64,
    /// The same.
    pub seconds: f64,
}

impl Step {
    /// Of a step's report, or of its slice's.
    ///
    /// # Errors
    /// No step is like that.
    pub fn of(rows: u32, attended_tokens: u64, seconds: f64) -> Result<Self, InvalidMessage> {
        let rows = count("step.rows", rows)?;
        let attended_tokens = total("step.attended_tokens", attended_tokens)?;
        if !(0.0..=MAX_COST).contains(&seconds) {
            let found = format!("{seconds}, but must be from 0 to {MAX_COST}");
            return Err(InvalidMessage { field: "step.seconds", found });
        }
        Ok(Self { rows, attended_tokens, seconds })
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
            kv_class: info.kv_class.clone(),
            layout: Some((&info.layout).into()),
            profile: Some((&info.profile).into()),
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
            address: short("address", info.address, MAX_ADDRESS)?,
            model: short("model", info.model, MAX_NAME)?,
            vocab_size: some("vocab_size", info.vocab_size)?,
            context_length: some("context_length", info.context_length)?,
            kv_class: short("kv_class", info.kv_class, MAX_NAME)?,
            layout: required("layout", info.layout)?.try_into()?,
            profile: required("profile", info.profile)?.try_into()?,
            vocabulary: short("vocabulary", info.vocabulary, MAX_NAME)?,
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
            accepts_migrations: load.accepts_migrations,
            blocks_ssd: load.blocks_ssd,
            step: load
                .step
                .map(|step| w::StepProgress { elapsed_s: step.elapsed.as_secs_f64(), left_s: step.left.as_secs_f64() }),
            draining: load.draining,
            stalled: load.stalled,
            ssd_write_failures: load.ssd_write_failures,
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
            running: count("running", load.running)?,
            waiting: count("waiting", load.waiting)?,
            queued_tokens: total("queued_tokens", load.queued_tokens)?,
            kv_tokens: total("kv_tokens", load.kv_tokens)?,
            blocks_total: count("blocks_total", load.blocks_total)?,
            blocks_used: count("blocks_used", load.blocks_used)?,
            blocks_cached: count("blocks_cached", load.blocks_cached)?,
            blocks_reserved: count("blocks_reserved", load.blocks_reserved)?,
            prefix_queries: total("prefix_queries", load.prefix_queries)?,
            prefix_hits: total("prefix_hits", load.prefix_hits)?,
            prefix_hits_ssd: total("prefix_hits_ssd", load.prefix_hits_ssd)?,
            prefix_hits_fetched: total("prefix_hits_fetched", load.prefix_hits_fetched)?,
            preemptions: total("preemptions", load.preemptions)?,
            accepts_migrations: load.accepts_migrations,
            blocks_ssd: count("blocks_ssd", load.blocks_ssd)?,
            step: load.step.map(progress).transpose()?,
            draining: load.draining,
            stalled: load.stalled,
            ssd_write_failures: load.ssd_write_failures,
        })
    }
}
