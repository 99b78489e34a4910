//! Pairs whose products are multiply-adds of single precision.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::{Number, PAIR, Pairs};
use crate::kernels::lanes::{F32x16, LANES};

/// Pairs of bfloat16 for instruction sets without such products.
#[derive(Clone, Copy)]
pub(crate) struct Widened<V>(PhantomData<V>);

impl<V: F32x16> Pairs for Widened<V> {
    type Floats = V;
    type Input = bf16;
    type Weight = bf16;
    type Weights = [V; 2];
    // Pairs, as bits.
    type Row = V;
    // Of two registers of weights, and two of inputs.
    const TILE_ROWS: usize = V::TILE_ROWS * 2 / 3;
    const TILE_VECTORS: usize = V::TILE_VECTORS;

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> [V; 2] {
        // SAFETY: the caller's promise: 32 halves are 16 floats.
        let bits = unsafe { V::load(from.cast()) };
        [bits.low_bf16(), bits.high_bf16()]
    }

    #[inline(always)]
    unsafe fn dot(sums: V, [even, odd]: [V; 2], inputs: *const bf16) -> V {
        // SAFETY: the caller's promise: two halves are one float, of any alignment.
        let bits = V::splat(unsafe { inputs.cast::<f32>().read_unaligned() });
        even.mul_add(bits.low_bf16(), odd.mul_add(bits.high_bf16(), sums))
    }

    #[inline(always)]
    unsafe fn dot_even(sums: V, [even, _]: [V; 2], input: *const bf16) -> V {
        // SAFETY: the caller's promise.
        even.mul_add(V::splat(f32::from_bits(u32::from(unsafe { *input }.to_bits()) << 16)), sums)
    }

    #[inline(always)]
    unsafe fn store_inputs(x: V, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { x.store_bf16(to.cast()) }
    }

    #[inline(always)]
    unsafe fn store_weights(even: V, odd: V, to: *mut bf16) {
        // SAFETY: the caller's promise: 32 halves are 16 floats.
        unsafe { V::bf16_pairs(even, odd).store(to.cast()) }
    }

    #[inline(always)]
    fn row(first: V, last: V) -> V {
        let mut halves = [0u16; PAIR];
        // SAFETY: 32 halves, which are 16 floats.
        unsafe {
            first.store_bf16(halves.as_mut_ptr());
            last.store_bf16(halves.as_mut_ptr().add(LANES));
            V::load(halves.as_ptr().cast())
        }
    }

    #[inline(always)]
    unsafe fn store_transposed(rows: &mut [V; LANES], count: usize, to: *mut bf16, stride: usize) {
        V::transpose(rows);
        for (i, pairs) in rows.iter().enumerate().take(count) {
            // SAFETY: the caller's promise: 32 halves are 16 floats.
            unsafe { pairs.store(to.add(i * stride).cast()) }
        }
    }
}

/// Inputs in single precision, and weights of any type that is single precision exactly.
#[derive(Clone, Copy)]
pub(crate) struct Single<V, W>(PhantomData<(V, W)>);

/// A weight that [`Single`] reads.
pub(crate) trait Exact: Number {
    /// 16 of them.
    ///
    /// # Safety
    /// They can be read at `from`.
    unsafe fn lanes<V: F32x16>(from: *const Self) -> V;

    /// Rounds 16 of them.
    ///
    /// # Safety
    /// They can be written at `to`.
    unsafe fn store<V: F32x16>(x: V, to: *mut Self);
}

impl Exact for f32 {
    #[inline(always)]
    unsafe fn lanes<V: F32x16>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn store<V: F32x16>(x: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { x.store(to) }
    }
}

impl Exact for f16 {
    #[inline(always)]
    unsafe fn lanes<V: F32x16>(from: *const Self) -> V {
        // SAFETY: the caller's promise; a half is its 16 bits.
        V::from_f16(unsafe { &*from.cast() })
    }

    #[inline(always)]
    unsafe fn store<V: F32x16>(x: V, to: *mut Self) {
        for (i, x) in x.to_array().into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *to.add(i) = Self::from_f32(x) }
        }
    }
}

impl<V: F32x16, W: Exact> Pairs for Single<V, W> {
    type Floats = V;
    type Input = f32;
    type Weight = W;
    type Weights = [V; 2];
    type Row = [V; 2];
    const TILE_ROWS: usize = V::TILE_ROWS;
    const TILE_VECTORS: usize = V::TILE_VECTORS;

    #[inline(always)]
    unsafe fn load(from: *const W) -> [V; 2] {
        // SAFETY: the caller's promise.
        unsafe { [W::lanes(from), W::lanes(from.add(LANES))] }
    }

    #[inline(always)]
    unsafe fn dot(sums: V, [even, odd]: [V; 2], inputs: *const f32) -> V {
        // SAFETY: the caller's promise.
        let (x_even, x_odd) = unsafe { (*inputs, *inputs.add(1)) };
        even.mul_add(V::splat(x_even), odd.mul_add(V::splat(x_odd), sums))
    }

    #[inline(always)]
    unsafe fn dot_even(sums: V, [even, _]: [V; 2], input: *const f32) -> V {
        // SAFETY: the caller's promise.
        even.mul_add(V::splat(unsafe { *input }), sums)
    }

    #[inline(always)]
    unsafe fn store_inputs(x: V, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { x.store(to) }
    }

    #[inline(always)]
    unsafe fn store_weights(even: V, odd: V, to: *mut W) {
        // SAFETY: the caller's promise of 32 weights.
        unsafe {
            W::store(even, to);
            W::store(odd, to.add(LANES));
        }
    }

    #[inline(always)]
    fn row(first: V, last: V) -> [V; 2] {
        [first, last]
    }

    #[inline(always)]
    unsafe fn store_transposed(rows: &mut [[V; 2]; LANES], count: usize, to: *mut W, stride: usize) {
        for half in 0..2 {
            let mut square = [V::splat(0.0); LANES];
            for (to, row) in square.iter_mut().zip(rows.iter()) {
                *to = row[half];
            }
            V::transpose(&mut square);
            for (i, [even, odd]) in square.as_chunks::<2>().0.iter().enumerate() {
                let pair = half * LANES / 2 + i;
                if pair < count {
                    // SAFETY: the caller's promise.
                    unsafe { Self::store_weights(*even, *odd, to.add(pair * stride)) }
                }
            }
        }
    }
}
