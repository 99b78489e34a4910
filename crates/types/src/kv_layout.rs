//! How a node's KV arena is laid out.
//!
//! ```text
//! arena  = [layer][block] records of block_bytes each
//! record = [kv_head][K|V][token] rows
//! row    = [head_dim] elements of dtype, and behind bytes their scale: f32
//! ```
//!
//! One layer of one block is one contiguous span, so it is one write on the wire; neighbouring
//! blocks of a layer coalesce.

use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{BlockId, ModelFingerprint};

/// Element type of stored keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Signed bytes, with a scale for each row of a head.
    Int8,
}

impl KvDtype {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Bytes of one head's K or V at one position, with the scale if there is one.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        let scale = match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Int8 => size_of::<f32>(),
        };
        head_dim * self.element_bytes() + scale
    }

    /// `f32`, `f16`, `bf16` or `int8`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

/// No type of KV has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}', but must be f32, f16, bf16 or int8")]
pub struct UnknownKvDtype(String);

impl FromStr for KvDtype {
    type Err = UnknownKvDtype;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.as_str() == name);
        found.ok_or_else(|| UnknownKvDtype(name.chars().take(80).collect()))
    }
}

/// Layout of one node's arena: exchanged when nodes meet, and compared field by field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Hash of the model; blocks of another model mean something else.
    pub model: u64,
    /// Layers that keep K and V.
    pub num_layers: u32,
    /// K/V heads of a layer that this node holds.
    pub num_kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Element type.
    pub dtype: KvDtype,
    /// Blocks of the arena. The one field in which two nodes may differ.
    pub num_blocks: u32,
}

/// Two nodes cannot exchange blocks: the first field in which they differ, and both values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("KV layouts differ in {field}: {ours} here, {theirs} there")]
pub struct LayoutMismatch {
    /// Name of the field.
    pub field: &'static str,
    /// Our value.
    pub ours: String,
    /// Their value.
    pub theirs: String,
}

impl KvLayout {
    /// The model whose blocks these are.
    pub const fn fingerprint(&self) -> ModelFingerprint {
        ModelFingerprint(self.model)
    }

    /// Bytes of one head's K or V at one position.
    pub const fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.head_dim as usize)
    }

    /// Bytes of one head's K or V of a block.
    pub const fn plane_bytes(&self) -> usize {
        self.block_tokens as usize * self.row_bytes()
    }

    /// Bytes of one layer of one block.
    pub const fn block_bytes(&self) -> usize {
        self.num_kv_heads as usize * 2 * self.plane_bytes()
    }

    /// Bytes of all layers of one block.
    pub const fn block_bytes_all_layers(&self) -> usize {
        self.block_bytes() * self.num_layers as usize
    }

    /// Bytes of the arena.
    pub const fn arena_bytes(&self) -> usize {
        self.block_bytes_all_layers() * self.num_blocks as usize
    }

    /// Byte offset of one layer of one block in the arena.
    ///
    /// # Panics
    /// If the layer or the block lies outside the arena: the block table is corrupt.
    pub fn offset(&self, layer: u32, block: BlockId) -> usize {
        assert!(layer < self.num_layers, "layer {layer} of {}", self.num_layers);
        assert!(block.0 < self.num_blocks, "block {} of {}", block.0, self.num_blocks);
        (layer as usize * self.num_blocks as usize + block.index()) * self.block_bytes()
    }

    /// Where blocks lie in the arena, in every layer.
    ///
    /// # Panics
    /// As [`Self::offset`].
    pub fn ranges(&self, blocks: &[BlockId]) -> Vec<Range<u64>> {
        let range = |layer, block| {
            let start = self.offset(layer, block) as u64;
            start..start + self.block_bytes() as u64
        };
        (0..self.num_layers).flat_map(|layer| blocks.iter().map(move |&block| range(layer, block))).collect()
    }

    /// Blocks that `tokens` tokens occupy.
    pub const fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens as usize)
    }

    /// Tokens that the arena holds.
    pub const fn capacity_tokens(&self) -> u64 {
        self.num_blocks as u64 * self.block_tokens as u64
    }

    /// Most tokens of one sequence, prompt and output together. The KV of its last token is never
    /// computed.
    pub fn max_sequence_tokens(&self, context_length: u32) -> u32 {
        u32::try_from(self.capacity_tokens() + 1).map_or(context_length, |tokens| tokens.min(context_length))
    }

    /// Most tokens of a prompt: its output has one token at least.
    pub fn max_prompt_tokens(&self, context_length: u32) -> u32 {
        self.max_sequence_tokens(context_length).saturating_sub(1)
    }

    /// Checks that blocks can move between this layout and `other`.
    pub fn check_compatible(&self, other: &Self) -> Result<(), LayoutMismatch> {
        let differ = |field, ours: String, theirs: String| {
            if ours == theirs { Ok(()) } else { Err(LayoutMismatch { field, ours, theirs }) }
        };
        differ("model", self.fingerprint().to_string(), other.fingerprint().to_string())?;
        differ("num_layers", self.num_layers.to_string(), other.num_layers.to_string())?;
        differ("num_kv_heads", self.num_kv_heads.to_string(), other.num_kv_heads.to_string())?;
        differ("head_dim", self.head_dim.to_string(), other.head_dim.to_string())?;
        differ("block_tokens", self.block_tokens.to_string(), other.block_tokens.to_string())?;
        differ("dtype", self.dtype.as_str().into(), other.dtype.as_str().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        KvLayout {
            model: 7,
            num_layers: 30,
            num_kv_heads: 3,
            head_dim: 64,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 100,
        }
    }

    #[test]
    fn kv_layout_sizes_and_offsets_are_as_documented() {
        let l = layout();
        assert_eq!(l.block_bytes(), 3 * 2 * 16 * 64 * 2);
        assert_eq!(KvLayout { dtype: KvDtype::Int8, ..layout() }.block_bytes(), 3 * 2 * 16 * (64 + 4));
        assert_eq!(l.offset(0, BlockId(1)), l.block_bytes());
        assert_eq!(l.offset(1, BlockId(0)), 100 * l.block_bytes());
        assert_eq!(l.offset(29, BlockId(99)) + l.block_bytes(), l.arena_bytes());
        assert_eq!((l.blocks_for(0), l.blocks_for(1), l.blocks_for(16), l.blocks_for(17)), (0, 1, 1, 2));
    }

    #[test]
    fn kv_dtype_names_parse_and_error_lists_them() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.as_str().parse(), Ok(dtype));
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.as_str());
        }
        let error = "f8".parse::<KvDtype>().unwrap_err().to_string();
        assert_eq!(error, "'f8', but must be f32, f16, bf16 or int8");
    }

    #[test]
    #[should_panic(expected = "block 100 of 100")]
    fn offset_of_block_outside_the_arena_panics() {
        layout().offset(0, BlockId(100));
    }

    #[test]
    fn kv_layout_mismatch_names_the_field() {
        let other = KvLayout { dtype: KvDtype::F32, num_blocks: 5, ..layout() };
        let error = layout().check_compatible(&other).unwrap_err();
        assert_eq!(error.to_string(), "KV layouts differ in dtype: f16 here, f32 there");
        assert!(layout().check_compatible(&KvLayout { num_blocks: 5, ..layout() }).is_ok());
    }
}
