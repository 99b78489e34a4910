//! Dequantization to `f32`, bit for bit as `gguf.quants.dequantize` of the PyPI package `gguf`: the same products in the same order, no fused multiply-add.
//!
//! The block layouts are those of `ggml-common.h` of llama.cpp. The loops are plain, over arrays of fixed size, so that the compiler vectorizes them.

mod float;
mod k_quant;
mod simple_quant;

use crate::{Dtype, FormatError};

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
    match dtype {
        Dtype::F32 => each_block(data, out, float::f32_block),
        Dtype::F16 => each_block(data, out, float::f16_block),
        Dtype::BF16 => each_block(data, out, float::bf16_block),
        Dtype::Q4_0 => each_block(data, out, simple_quant::q4_0),
        Dtype::Q4_1 => each_block(data, out, simple_quant::q4_1),
        Dtype::Q5_0 => each_block(data, out, simple_quant::q5_0),
        Dtype::Q5_1 => each_block(data, out, simple_quant::q5_1),
        Dtype::Q8_0 => each_block(data, out, simple_quant::q8_0),
        Dtype::Q4_K => each_block(data, out, k_quant::q4_k),
        Dtype::Q5_K => each_block(data, out, k_quant::q5_k),
        Dtype::Q6_K => each_block(data, out, k_quant::q6_k),
    }
    Ok(())
}

/// Calls `block` for each block of `BYTES` bytes and the `ELEMENTS` elements it becomes.
fn each_block<const BYTES: usize, const ELEMENTS: usize>(
    data: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
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
    fn whole_blocks_only() {
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
