//! Quants on their way to products of bfloat16. A part of a quantized matrix becomes pairs
//! ([`Pairs`]) in a cache, right before its products with many rows.
//!
//! ```text
//! w[n][k] = code x scale + minimum, rounded to bfloat16; where the type has a zero, minimum is -zero x scale
//! ```
//!
//! Before it is rounded it is exactly what the file's type says: a product of a quant and a scale
//! has at most 24 bits.

use std::ops::Range;

use baton_formats::QuantFormat;
use half::bf16;

use crate::kernels::dots::QUADS;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::pairs::{PAIR, Pairs};

use super::quantize::BLOCK;
use super::quantized_matrix::{
    QuantizedMatrix, TILE_OUTPUTS, code_bytes, form_of, groups, lanes, per_type, scale_bytes,
};
use super::unrolled::unrolled;

/// Outputs that are unpacked side by side.
const WIDE: usize = 2 * TILE_OUTPUTS;

per_isa! {
    /// Unpacks some inputs, whole blocks of them, of the `wide`th 32 outputs: `to` becomes `[depth
    /// / 2][2 x 16 outputs, pairs of inputs]`. Of outputs that there are not, the second 16 are
    /// left as they are.
    pub(super) fn unpack(w: &QuantizedMatrix, wide: usize, depth: Range<usize>, to: &mut [bf16]) = unpack_of<Pairs>
}

#[inline(always)]
fn unpack_of<P: Pairs<Weight = bf16>>(w: &QuantizedMatrix, wide: usize, depth: Range<usize>, to: &mut [bf16]) {
    assert!(depth.start.is_multiple_of(BLOCK) && depth.end.is_multiple_of(BLOCK), "inputs {depth:?}");
    assert_eq!(to.len(), depth.len() * WIDE, "room");
    let to = to.as_mut_ptr();
    // SAFETY: it was checked that as many pairs can be written there.
    per_type!(w.dtype(), TYPE => unsafe { unpack_typed::<P, TYPE>(w, wide, depth, to) });
}

/// # Safety
/// Pairs of 32 outputs for each two inputs can be written at `to`.
#[inline(always)]
unsafe fn unpack_typed<P: Pairs<Weight = bf16>, const TYPE: usize>(
    w: &QuantizedMatrix,
    wide: usize,
    depth: Range<usize>,
    to: *mut bf16,
) {
    let form = form_of::<TYPE>();
    let packed_tiles = 2 * wide..w.packed_tiles().min(2 * wide + 2);
    for (half, packed_tile) in packed_tiles.enumerate() {
        let (quants, scales) = w.packed_tile(packed_tile, depth.start / BLOCK..depth.end / BLOCK);
        let blocks = quants.chunks_exact(code_bytes(form)).zip(scales.chunks_exact(scale_bytes(form)));
        for (block, (quants, scales)) in blocks.enumerate() {
            // SAFETY: a block's quants and scales; the caller's promise.
            unsafe {
                let to = to.add(block * BLOCK * WIDE + half * PAIR);
                unpack_block::<P, TYPE>(quants.as_ptr(), scales.as_ptr(), to);
            }
        }
    }
}

/// # Safety
/// A block's quants and scales can be read, and the pairs of 16 outputs written at `to`.
#[inline(always)]
unsafe fn unpack_block<P: Pairs<Weight = bf16>, const TYPE: usize>(
    quants: *const u8,
    scales: *const u8,
    to: *mut bf16,
) {
    let form = form_of::<TYPE>();
    // SAFETY: the caller's promise.
    unsafe {
        let mut scale = P::Floats::splat(0.0);
        let mut minimum = scale;
        unrolled!(quad in 0 1 2 3 4 5 6 7 => {
            if (4 * quad).is_multiple_of(form.group) {
                let group = 4 * quad / form.group;
                scale = lanes::<P::Floats, TYPE>(scales, group);
                minimum = match form.zero {
                    Some(zero) => scale.mul(P::Floats::splat(-f32::from(zero))),
                    None => lanes::<P::Floats, TYPE>(scales, groups(form) + group),
                };
            }
            unrolled!(pair in 0 1 => {
                let even = code::<P::Floats>(form, quants, quad, 2 * pair).mul_add(scale, minimum);
                let odd = code::<P::Floats>(form, quants, quad, 2 * pair + 1).mul_add(scale, minimum);
                P::store_weights(even, odd, to.add((2 * quad + pair) * 2 * WIDE));
            });
        });
    }
}

/// Quants of 16 outputs and one input of a block: byte `byte` of a quad.
///
/// # Safety
/// A block's quants can be read.
#[inline(always)]
unsafe fn code<V: F32x16>(form: QuantFormat, quants: *const u8, quad: usize, byte: usize) -> V {
    let (line, shift) = match form.bits {
        8 => (quad, 8 * byte),
        _ => (quad / 2, 8 * byte + 4 * (quad % 2)),
    };
    // SAFETY: the caller's promise; any bits are floats.
    unsafe {
        let low =
            V::load(quants.add(line * QUADS).cast()).integers(shift as u32, if form.bits == 8 { 255 } else { 15 });
        let mut code = low;
        unrolled!(plane in 4 5 6 7 => if form.bits < 8 && plane < form.bits as usize {
            let bit = V::load(quants.add(plane * QUADS).cast()).integers((8 * byte + quad) as u32, 1);
            code = bit.mul_add(V::splat((1 << plane) as f32), code);
        });
        code
    }
}

const _: () = assert!(TILE_OUTPUTS == LANES);
