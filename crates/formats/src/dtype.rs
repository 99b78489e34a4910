//! Element types of tensors.

use std::fmt;

/// Declares the types: name, ggml's number, bytes and elements of a block.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $bytes:literal bytes for $elements:literal;)+) => {
        /// Element type of a tensor. Quantized types store blocks of elements that share their
        /// scales.
        #[allow(non_camel_case_types)] // the names are ggml's
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Dtype {
            $($(#[$doc])* $name,)+
        }

        impl Dtype {
            /// Every type that Baton reads. Kernels find a type by its place in the enum.
            pub const ALL: [Self; [$($id),+].len()] = [$(Self::$name),+];

            /// Elements of one block: 1, 32 or 256.
            pub const fn block_elements(self) -> usize {
                match self {
                    $(Self::$name => $elements,)+
                }
            }

            /// Bytes of one block (`ggml-common.h` of llama.cpp has the layouts).
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)+
                }
            }

            /// ggml's name of the type.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// The type with this number in a GGUF file (`enum ggml_type`).
            pub const fn from_ggml(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$name),)+
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    /// IEEE single precision.
    F32 = 0, 4 bytes for 1;
    /// IEEE half precision.
    F16 = 1, 2 bytes for 1;
    /// The upper half of an IEEE single.
    BF16 = 30, 2 bytes for 1;
    /// 32 x 4 bits, one f16 scale, offset 8.
    Q4_0 = 2, 18 bytes for 32;
    /// 32 x 4 bits, f16 scale and minimum.
    Q4_1 = 3, 20 bytes for 32;
    /// 32 x 5 bits, one f16 scale, offset 16.
    Q5_0 = 6, 22 bytes for 32;
    /// 32 x 5 bits, f16 scale and minimum.
    Q5_1 = 7, 24 bytes for 32;
    /// 32 x 8 bits, one f16 scale.
    Q8_0 = 8, 34 bytes for 32;
    /// 256 x 4 bits; 8 groups with 6-bit scales and minima.
    Q4_K = 12, 144 bytes for 256;
    /// 256 x 5 bits; 8 groups with 6-bit scales and minima.
    Q5_K = 13, 176 bytes for 256;
    /// 256 x 6 bits; 16 groups with 8-bit scales, offset 32.
    Q6_K = 14, 210 bytes for 256;
}

impl Dtype {
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
