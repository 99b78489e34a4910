//! Hyperparameters from the metadata of a GGUF file.

use baton_formats::{FormatError, FromValue, Gguf};

use super::config::{Limit, ModelConfig, head_dim, wrong};
use super::rope_scaling::{RopeScaling, frequencies};
use crate::error::EngineError;

/// Keys of `<architecture>.` that are read, or say nothing that this engine would have to know. Any
/// other might change what the model computes.
const KNOWN_KEYS: [&str; 21] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
];

/// Metadata under the architecture's prefix.
struct Keys<'a> {
    file: &'a Gguf,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn typed<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, FormatError> {
        self.file.metadata().typed(&self.name(key))
    }

    fn size(&self, key: &str, limit: Limit) -> Result<usize, EngineError> {
        limit.check(&self.name(key), self.file.metadata().require(&self.name(key))?)
    }

    /// A value that, if it is given, must be this one.
    fn only(&self, key: &str, expected: usize) -> Result<(), EngineError> {
        match self.typed::<u32>(key)? {
            Some(found) if found as usize != expected => Err(wrong(&self.name(key), found, expected)),
            _ => Ok(()),
        }
    }

    fn refuse_unknown(&self) -> Result<(), EngineError> {
        let prefix = self.name("");
        for (key, value) in self.file.metadata().iter() {
            if key.strip_prefix(&prefix).is_some_and(|rest| !KNOWN_KEYS.contains(&rest)) {
                return Err(EngineError::Model(format!("{key} is {value}, but this engine does not know the key")));
            }
        }
        Ok(())
    }
}

pub(super) fn read(file: &Gguf) -> Result<ModelConfig, EngineError> {
    let metadata = file.metadata();
    let architecture: &str = metadata.require("general.architecture")?;
    if !["llama", "qwen2"].contains(&architecture) {
        return Err(wrong("general.architecture", architecture, "llama or qwen2"));
    }
    let keys = Keys { file, architecture };
    keys.refuse_unknown()?;
    keys.only("expert_count", 0)?;
    let hidden = keys.size("embedding_length", Limit::WIDTH)?;
    let num_layers = keys.size("block_count", Limit::LAYERS)?;
    let heads = keys.size("attention.head_count", Limit::HEADS)?;
    let kv_key = "attention.head_count_kv";
    let kv_heads = keys.typed(kv_key)?.map_or(Ok(heads), |n| Limit::HEADS.check(&keys.name(kv_key), n))?;
    let key_length = keys.typed("attention.key_length")?;
    let head_dim = head_dim(&keys.name("attention.key_length"), key_length, hidden, heads)?;
    keys.only("attention.value_length", head_dim)?;
    keys.only("rope.dimension_count", head_dim)?;
    let window = keys.typed("attention.sliding_window")?.filter(|&window: &u32| window > 0);
    let vocab_size = vocabulary(&keys)?;
    Ok(ModelConfig {
        name: metadata.str("general.name")?.map_or_else(|| file_name(file), str::to_owned),
        architecture: architecture.to_owned(),
        hidden,
        num_layers,
        heads,
        kv_heads,
        head_dim,
        feed_forward: keys.size("feed_forward_length", Limit::WIDTH)?,
        vocab_size,
        context_length: keys.size("context_length", Limit::CONTEXT)? as u32,
        norm_eps: metadata.require(&keys.name("attention.layer_norm_rms_epsilon"))?,
        rope_frequencies: rope(&keys, head_dim)?,
        interleaved_rope: architecture == "llama",
        windows: vec![window; num_layers],
        tied_head: None,
    })
}

/// The vocabulary is as large as the embedding.
fn vocabulary(keys: &Keys<'_>) -> Result<usize, EngineError> {
    let rows = keys.file.tensor("token_embd.weight")?.rows();
    keys.only("vocab_size", rows)?;
    Limit::VOCABULARY.check("token_embd.weight's rows", u32::try_from(rows).unwrap_or(u32::MAX))
}

fn rope(keys: &Keys<'_>, head_dim: usize) -> Result<Vec<f64>, EngineError> {
    let base = keys.typed::<f32>("rope.freq_base")?.unwrap_or(10_000.0);
    let factor = match keys.typed("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.typed("rope.scale_linear")?, // the older name
    };
    let scaling = match (keys.typed("rope.scaling.type")?, factor) {
        (Some("none"), _) | (None, None | Some(1.0)) => RopeScaling::None,
        (Some("linear") | None, Some(factor)) => RopeScaling::Linear(f64::from(positive(keys, factor)?)),
        (Some("linear"), None) => return Err(wrong(&keys.name("rope.scaling.factor"), "missing", "above 0")),
        (Some(found), _) => return Err(wrong(&keys.name("rope.scaling.type"), found, "none or linear")),
    };
    let scaling = match factors(keys.file, head_dim)? {
        Some(_) if scaling != RopeScaling::None => {
            return Err(EngineError::Model("both rope_freqs.weight and a linear scaling are given".into()));
        }
        Some(factors) => RopeScaling::Factors(factors),
        None => scaling,
    };
    Ok(frequencies(f64::from(base), head_dim, &scaling))
}

fn positive(keys: &Keys<'_>, factor: f32) -> Result<f32, EngineError> {
    let ok = factor.is_finite() && factor > 0.0;
    if ok { Ok(factor) } else { Err(wrong(&keys.name("rope.scaling.factor"), factor, "above 0")) }
}

/// Llama 3's scaling, as the converter of llama.cpp writes it.
fn factors(file: &Gguf, head_dim: usize) -> Result<Option<Vec<f32>>, EngineError> {
    if !file.contains("rope_freqs.weight") {
        return Ok(None);
    }
    let tensor = file.tensor("rope_freqs.weight")?;
    if tensor.elements() != head_dim / 2 {
        return Err(wrong("rope_freqs.weight's size", tensor.elements(), head_dim / 2));
    }
    let mut factors = vec![0.0; head_dim / 2];
    tensor.dequantize(&mut factors)?;
    match factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
        Some(factor) => Err(wrong("a factor of rope_freqs.weight", factor, "above 0")),
        None => Ok(Some(factors)),
    }
}

fn file_name(file: &Gguf) -> String {
    file.path().file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
