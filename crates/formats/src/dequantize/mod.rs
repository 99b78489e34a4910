//! Dequantization to `f32`, bit for bit as `gguf.quants.dequantize` of the PyPI package `gguf`: the
//! same products in the same order, no fused multiply-add.
//!
//! The block layouts are those of `ggml-common.h` of llama.cpp. The loops are plain, over arrays of
//! fixed size, so that the compiler vectorizes them.

mod float;
mod k_quant;
mod quants;
mod simple_quant;

use crate::{Dtype, FormatError};

pub use quants::{QUANTS, QuantBlock, QuantFormat, quants};

/// Dequantizes `data`, whole blocks of `dtype`, to `out`, which holds exactly as many elements.
///
/// # Errors
///
/// [`FormatError::Buffer`] if `data` is not the bytes of `out.len()` elements.
pub fn dequantize(dtype: Dtype, data: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    if dtype.bytes_of(out.len()) != Some(data.len()) {
        let expected = out.len() / dtype.block_elements() * dtype.block_bytes();
        return Err(FormatError::buffer(dtype, "bytes to dequantize", data.len(), expected));
    }
    if let Some(form) = dtype.quant_format() {
        return quants::elements(dtype, form, data, out);
    }
    match dtype {
        Dtype::F16 => each_block(data, out, float::f16_block),
        Dtype::BF16 => each_block(data, out, float::bf16_block),
        _ => each_block(data, out, float::f32_block),
    }
    Ok(())
}

/// Calls `block` for each block of `BYTES` bytes and the `COUNT` elements, or blocks of quants,
/// that it becomes.
fn each_block<T, const BYTES: usize, const COUNT: usize>(
    data: &[u8],
    out: &mut [T],
    block: impl Fn(&[u8; BYTES], &mut [T; COUNT]),
) {
    for (data, out) in data.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(data, out);
    }
}

/// The `N` bytes at `at` of a block. The bounds are constants of the block's layout.
fn field<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("a field lies inside its block")
}

/// The f16 at `at` of a block.
fn f16_at(block: &[u8], at: usize) -> f32 {
    float::f16_to_f32(u16::from_le_bytes(*field(block, at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dequantize_takes_whole_blocks_only() {
        for dtype in Dtype::ALL {
            let data = vec![0; dtype.block_bytes() * 2];
            let mut out = vec![1.0; dtype.block_elements() * 2 + 1];
            let elements = out.len() - 1;
            dequantize(dtype, &data, &mut out[..elements]).unwrap();
            assert!(out[..elements].iter().all(|&x| x == 0.0), "{dtype}: zero blocks are zeros");
            assert!(dequantize(dtype, &data, &mut out).is_err(), "{dtype}: one element too many");
            assert!(dequantize(dtype, &data[1..], &mut out[..elements]).is_err(), "{dtype}: one byte too few");
            dequantize(dtype, &[], &mut []).unwrap();
        }
    }
}
