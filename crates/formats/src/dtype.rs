//! Element types of tensors.

use std::fmt;

/// Element type of a tensor. Quantized types store blocks of elements that share their scales.
#[allow(non_camel_case_types)] // the names are ggml's
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// 32 x 4 bits, one f16 scale, offset 8.
    Q4_0,
    /// 32 x 4 bits, f16 scale and minimum.
    Q4_1,
    /// 32 x 5 bits, one f16 scale, offset 16.
    Q5_0,
    /// 32 x 5 bits, f16 scale and minimum.
    Q5_1,
    /// 32 x 8 bits, one f16 scale.
    Q8_0,
    /// 256 x 4 bits; 8 groups with 6-bit scales and minima.
    Q4_K,
    /// 256 x 5 bits; 8 groups with 6-bit scales and minima.
    Q5_K,
    /// 256 x 6 bits; 16 groups with 8-bit scales, offset 32.
    Q6_K,
}

impl Dtype {
    /// Every type that Baton reads.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// Elements of one block: 1, 32 or 256.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block (`ggml-common.h` of llama.cpp has the layouts).
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// ggml's name of the type.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// The type with this number in a GGUF file (`enum ggml_type`).
    pub const fn from_ggml(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::BF16,
            _ => return None,
        })
    }

    /// Bytes of `elements` elements; `None` if they are no whole number of blocks or the product
    /// overflows.
    pub const fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// The names of all types, for error messages.
    pub(crate) fn names() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

// Kernels find a type in `ALL` by its place in the enum.
const _: () = {
    let mut place = 0;
    while place < Dtype::ALL.len() {
        assert!(Dtype::ALL[place] as usize == place, "the enum and ALL have the same order");
        place += 1;
    }
};

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// ggml's names of types that Baton does not read, so that a refusal says which one it was.
pub(crate) const fn unsupported_ggml_name(id: u32) -> &'static str {
    match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_bytes_of_needs_whole_blocks_and_no_overflow() {
        assert_eq!(Dtype::Q4_1.bytes_of(64), Some(40));
        assert_eq!(Dtype::Q4_1.bytes_of(33), None);
        assert_eq!(Dtype::Q6_K.bytes_of(0), Some(0));
        assert_eq!(Dtype::F32.bytes_of(usize::MAX / 2), None);
    }

    #[test]
    fn readme_and_quickstart_name_every_dtype() {
        for page in [include_str!("../../../README.md"), include_str!("../../../docs/quickstart.md")] {
            let line = page.lines().find(|line| line.contains("GGUF") && line.contains("Q8_0")).unwrap();
            let words: Vec<_> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            let missing = Dtype::ALL.into_iter().find(|dtype| !words.contains(&dtype.as_str()));
            assert_eq!(missing, None, "{line}");
        }
    }

    #[test]
    fn ggml_type_id_is_either_known_or_unsupported() {
        let known = (0..64).filter_map(Dtype::from_ggml).count();
        assert_eq!(known, Dtype::ALL.len());
        assert!((0..64).filter(|&id| unsupported_ggml_name(id) != "unknown").all(|id| Dtype::from_ggml(id).is_none()));
    }
}
