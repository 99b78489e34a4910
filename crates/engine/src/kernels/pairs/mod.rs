//! Products of pairs of numbers, for sixteen outputs at once: what matrix products and attention
//! are made of.
//!
//! ```text
//! sum[n] = fma(w[n][odd], x[odd], sum[n]);   sum[n] = fma(w[n][even], x[even], sum[n])      for inputs (even, odd) and outputs n
//!
//! 32 weights of a pair     bfloat16            [16 outputs][even, odd]       one register of AVX-512 BF16
//!                          f32, half           [even, odd][16 outputs]
//! ```
//!
//! The odd one first, for so the BF16 instruction does it. The product of two bfloat16 is exact in
//! single precision, so that it is two fused multiply-adds. All sets give the same bits, unless a
//! sum falls below the smallest normal f32, which the instruction takes for 0. Matrix tiles sum in
//! another order ([`super::amx`]).

#[cfg(target_arch = "x86_64")]
mod native;
mod widened;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub(crate) use native::Native;
pub(crate) use widened::{Single, Widened};

use super::lanes::{F32x16, LANES};

/// Weights of a pair of inputs and 16 outputs.
pub(crate) const PAIR: usize = 2 * LANES;

/// Pairs of one type of number. The types of this trait are named only inside functions compiled
/// for their instruction set (`per_isa!`), which run only if the CPU has it.
pub(crate) trait Pairs: Copy {
    /// Floats of the same set.
    type Floats: F32x16;
    /// An input as it lies in memory.
    type Input: Number;
    /// A weight as it lies in memory.
    type Weight: Number;
    /// 32 weights of a pair, in registers.
    type Weights: Copy;
    /// 32 numbers of a row: 16 pairs.
    type Row: Copy;
    /// Rows of the largest register tile, with `TILE_VECTORS` vectors each: as many accumulators as
    /// fit beside the operands.
    const TILE_ROWS: usize;
    /// Vectors of a tile's row, 1 or 2.
    const TILE_VECTORS: usize;
    /// Whether products go by matrix tiles ([`super::amx`]): inputs and weights are bfloat16, and
    /// sums are in another order.
    const TILES: bool = false;

    /// # Safety
    /// 32 weights can be read at `from`.
    unsafe fn load(from: *const Self::Weight) -> Self::Weights;

    /// `sums` and the products with two inputs.
    ///
    /// # Safety
    /// Two inputs can be read at `inputs`.
    unsafe fn dot(sums: Self::Floats, weights: Self::Weights, inputs: *const Self::Input) -> Self::Floats;

    /// `sums` and the products of the even weights with a last input.
    ///
    /// # Safety
    /// One input can be read at `input`.
    unsafe fn dot_even(sums: Self::Floats, weights: Self::Weights, input: *const Self::Input) -> Self::Floats;

    /// Rounds 16 inputs.
    ///
    /// # Safety
    /// They can be written at `to`.
    unsafe fn store_inputs(x: Self::Floats, to: *mut Self::Input);

    /// Rounds the weights of a pair.
    ///
    /// # Safety
    /// 32 weights can be written at `to`.
    unsafe fn store_weights(even: Self::Floats, odd: Self::Floats, to: *mut Self::Weight);

    /// Rounds 32 numbers that follow one another.
    fn row(first: Self::Floats, last: Self::Floats) -> Self::Row;

    /// Rows become outputs: `count` of their 16 pairs are stored as weights, `stride` apart.
    ///
    /// # Safety
    /// 32 weights can be written at each place.
    unsafe fn store_transposed(rows: &mut [Self::Row; LANES], count: usize, to: *mut Self::Weight, stride: usize);
}

/// A number in memory. Every one is an f32 exactly.
///
/// # Safety
/// Any bits are a value of the type, and it has no padding.
pub(crate) unsafe trait Number: Copy {
    /// Nearest to x; x itself if it is a number of this type.
    fn of(x: f32) -> Self;

    fn to_f32(self) -> f32;

    /// Where the weight of an output, and of the even or the odd input, lies among the 32 of a
    /// pair.
    fn place(output: usize, odd: usize) -> usize;
}

/// Memory that begins on a cache line, as the numbers that it holds.
#[inline(always)]
pub(crate) fn numbers<N: Number>(bytes: &[u8]) -> &[N] {
    // SAFETY: the trait's promise.
    let (before, numbers, after) = unsafe { bytes.align_to() };
    assert!(before.is_empty() && after.is_empty(), "whole numbers from a cache line on");
    numbers
}

/// As [`numbers`], for writing.
#[inline(always)]
pub(crate) fn numbers_mut<N: Number>(bytes: &mut [u8]) -> &mut [N] {
    // SAFETY: the trait's promise.
    let (before, numbers, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "whole numbers from a cache line on");
    numbers
}

// SAFETY: plain bits, any of which are a value.
unsafe impl Number for f32 {
    fn of(x: f32) -> Self {
        x
    }

    fn to_f32(self) -> f32 {
        self
    }

    fn place(output: usize, odd: usize) -> usize {
        odd * LANES + output
    }
}

// SAFETY: plain bits, any of which are a value.
unsafe impl Number for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }

    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    fn place(output: usize, odd: usize) -> usize {
        f32::place(output, odd)
    }
}

// SAFETY: plain bits, any of which are a value.
unsafe impl Number for bf16 {
    fn of(x: f32) -> Self {
        // As the instruction takes it.
        Self::from_f32(if x.is_subnormal() { 0.0 } else { x })
    }

    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    fn place(output: usize, odd: usize) -> usize {
        2 * output + odd
    }
}
