//! Hyperparameters of a Llama-like model, whatever file they came from.

use std::fmt::Display;

use baton_formats::ModelFile;

use super::{gguf_config, hf_config};
use crate::error::EngineError;

/// Hyperparameters: RMSNorm, RoPE, grouped-query attention, SwiGLU. Checked: every size is positive
/// and bounded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelConfig {
    pub name: String,
    /// `llama`, `mistral` or `qwen2`.
    pub architecture: String,
    /// Elements of a row between layers.
    pub hidden: usize,
    pub num_layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Elements of the gated layer.
    pub feed_forward: usize,
    pub vocab_size: usize,
    pub context_length: u32,
    pub norm_eps: f32,
    /// RoPE angle per position of each pair, `[head_dim / 2]`.
    pub rope_frequencies: Vec<f64>,
    /// The file orders rows of Q and K so that the pairs of RoPE are neighbours (GGUF's `llama`),
    /// not halves of a head apart.
    pub interleaved_rope: bool,
    /// Of each layer: how many positions a row sees, itself included; `None` is all.
    pub windows: Vec<Option<u32>>,
    /// Whether the embedding is the head, too; `None` if the file does not say.
    pub tied_head: Option<bool>,
}

impl ModelConfig {
    /// Reads and checks the hyperparameters of a file.
    ///
    /// # Errors
    /// A key is missing, of the wrong type or out of range, or asks for what this engine does not
    /// do. The error names key and value.
    pub fn read(file: &ModelFile) -> Result<Self, EngineError> {
        let config = match file {
            ModelFile::Gguf(file) => gguf_config::read(file)?,
            ModelFile::Safetensors(file) => hf_config::read(file)?,
        };
        config.check()?;
        Ok(config)
    }

    /// Columns of Q.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of K, and of V.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn check(&self) -> Result<(), EngineError> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(wrong("attention heads", self.heads, format!("a multiple of the {} kv heads", self.kv_heads)));
        }
        if !self.norm_eps.is_finite() || self.norm_eps < 0.0 {
            return Err(wrong("norm epsilon", self.norm_eps, "at least 0"));
        }
        if let Some(frequency) = self.rope_frequencies.iter().find(|f| !f.is_finite() || **f < 0.0) {
            return Err(wrong("a RoPE frequency", frequency, "at least 0"));
        }
        Ok(())
    }
}

/// Sizes as a file gives them, checked one by one, since allocations follow from them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub at_most: u32,
}

impl Limit {
    pub const LAYERS: Self = Self { at_most: 1024 };
    pub const HEADS: Self = Self { at_most: 1024 };
    pub const HEAD_DIM: Self = Self { at_most: 1024 };
    pub const WIDTH: Self = Self { at_most: 1 << 18 };
    pub const VOCABULARY: Self = Self { at_most: 1 << 21 };
    pub const CONTEXT: Self = Self { at_most: 1 << 24 };

    /// The size, if it is from 1 to the limit.
    pub fn check(self, key: &str, found: u32) -> Result<usize, EngineError> {
        if (1..=self.at_most).contains(&found) {
            Ok(found as usize)
        } else {
            Err(wrong(key, found, format!("from 1 to {}", self.at_most)))
        }
    }
}

/// The size of a head: given, or an equal share of the hidden size. RoPE turns pairs, so it is
/// even.
pub(super) fn head_dim(key: &str, given: Option<u32>, hidden: usize, heads: usize) -> Result<usize, EngineError> {
    let dim = match given {
        Some(dim) => Limit::HEAD_DIM.check(key, dim)?,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(EngineError::Model(format!("{key} is not given, and {heads} heads do not divide {hidden}")));
        }
    };
    if dim.is_multiple_of(2) && dim <= Limit::HEAD_DIM.at_most as usize {
        Ok(dim)
    } else {
        Err(wrong(key, dim, format!("even and at most {}", Limit::HEAD_DIM.at_most)))
    }
}

/// A value that this engine does not take.
pub(super) fn wrong(key: &str, found: impl Display, expected: impl Display) -> EngineError {
    EngineError::Model(format!("{key} is {found}, but must be {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_config_sizes_out_of_bounds_are_named() {
        assert_eq!(Limit::HEADS.check("n_head", 9).unwrap(), 9);
        for found in [0, 1025] {
            let error = Limit::HEADS.check("n_head", found).unwrap_err().to_string();
            assert_eq!(error, format!("n_head is {found}, but must be from 1 to 1024"));
        }
        assert_eq!(head_dim("d", None, 576, 9).unwrap(), 64);
        assert_eq!(head_dim("d", Some(32), 576, 9).unwrap(), 32);
        for (given, hidden) in [(Some(7), 64), (Some(2048), 64), (None, 65), (None, 9)] {
            assert!(head_dim("d", given, hidden, 9).unwrap_err().to_string().contains("d is"));
        }
    }
}
