//! Pairs of bfloat16 on AVX-512 BF16: one instruction for 32 products. With `TILES`, products go by
//! matrix tiles, 32 inputs at a time.

use std::arch::x86_64::*;

use half::bf16;

use super::Pairs;
use crate::kernels::lanes::{Avx512, F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Native<const TILES: bool>;

impl<const TILES: bool> Pairs for Native<TILES> {
    type Floats = Avx512;
    type Input = bf16;
    type Weight = bf16;
    type Weights = __m512i;
    // Pairs, as bits.
    type Row = Avx512;
    const TILE_ROWS: usize = Avx512::TILE_ROWS;
    const TILE_VECTORS: usize = Avx512::TILE_VECTORS;
    const TILES: bool = TILES;

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> __m512i {
        // SAFETY: the caller's promise of 64 bytes; the type is used only if the CPU has AVX-512
        // BF16 (see the trait).
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn dot(sums: Avx512, weights: __m512i, inputs: *const bf16) -> Avx512 {
        // SAFETY: the caller's promise of two inputs, which are 32 bits; AVX-512 BF16 as above.
        unsafe { dot(sums, weights, inputs.cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn dot_even(sums: Avx512, weights: __m512i, input: *const bf16) -> Avx512 {
        // SAFETY: the caller's promise; AVX-512 BF16 as above.
        unsafe { dot(sums, weights, i32::from((*input).to_bits())) }
    }

    #[inline(always)]
    unsafe fn store_inputs(x: Avx512, to: *mut bf16) {
        // SAFETY: the caller's promise of 32 bytes; AVX-512 BF16 as above.
        unsafe { _mm256_storeu_si256(to.cast(), bits256(_mm512_cvtneps_pbh(x.register()))) }
    }

    #[inline(always)]
    unsafe fn store_weights(even: Avx512, odd: Avx512, to: *mut bf16) {
        const INTERLEAVED: [u16; 32] = {
            let mut order = [0; 32];
            let mut i = 0;
            while i < LANES {
                (order[2 * i], order[2 * i + 1]) = (i as u16, (LANES + i) as u16);
                i += 1;
            }
            order
        };
        // SAFETY: the caller's promise of 64 bytes; AVX-512 BW comes with BF16 (see `Isa`).
        unsafe {
            let order = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
            let halves = bits512(_mm512_cvtne2ps_pbh(odd.register(), even.register()));
            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, halves));
        }
    }

    #[inline(always)]
    fn row(first: Avx512, last: Avx512) -> Avx512 {
        // SAFETY: AVX-512 BF16 as above.
        unsafe { Avx512::from(_mm512_castsi512_ps(bits512(_mm512_cvtne2ps_pbh(last.register(), first.register())))) }
    }

    #[inline(always)]
    unsafe fn store_transposed(rows: &mut [Avx512; LANES], count: usize, to: *mut bf16, stride: usize) {
        Avx512::transpose(rows);
        for (i, pairs) in rows.iter().enumerate().take(count) {
            // SAFETY: the caller's promise: 32 halves are 16 floats.
            unsafe { pairs.store(to.add(i * stride).cast()) }
        }
    }
}

/// # Safety
/// The CPU has AVX-512 BF16.
#[inline(always)]
unsafe fn dot(sums: Avx512, weights: __m512i, inputs: i32) -> Avx512 {
    // SAFETY: the caller's promise; a vector of bfloat16 is 512 bits of any value.
    unsafe {
        let inputs = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(inputs));
        let weights = std::mem::transmute::<__m512i, __m512bh>(weights);
        Avx512::from(_mm512_dpbf16_ps(sums.register(), weights, inputs))
    }
}

/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn bits512(halves: __m512bh) -> __m512i {
    // SAFETY: 512 bits of any value.
    unsafe { std::mem::transmute(halves) }
}

/// # Safety
/// The CPU has AVX.
#[inline(always)]
unsafe fn bits256(halves: __m256bh) -> __m256i {
    // SAFETY: 256 bits of any value.
    unsafe { std::mem::transmute(halves) }
}
