//! Dot products on AVX-512 VNNI: one instruction for 64 products.

use std::arch::x86_64::*;

use super::{Avx512Dots, Dots};
use crate::kernels::lanes::Avx512;

#[derive(Clone, Copy)]
pub(crate) struct VnniDots;

impl Dots for VnniDots {
    type Floats = Avx512;
    type Quants = __m512i;
    type Sums = __m512i;
    // Of 32 registers: 8 dot products, enough that none is waited for, 8 sums, 4 quants.
    const TILE_ROWS: usize = 4;
    const REGISTER_TILES: usize = 2;

    #[inline(always)]
    unsafe fn nibbles(from: *const u8) -> [Self::Quants; 2] {
        // SAFETY: the caller's promise.
        unsafe { Avx512Dots::nibbles(from) }
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> Self::Quants {
        // SAFETY: the caller's promise.
        unsafe { Avx512Dots::bytes(from) }
    }

    #[inline(always)]
    fn with_bit(quants: Self::Quants, plane: Self::Quants, from: u32, to: u32) -> Self::Quants {
        Avx512Dots::with_bit(quants, plane, from, to)
    }

    #[inline(always)]
    fn splat(x: i32) -> Self::Sums {
        Avx512Dots::splat(x)
    }

    #[inline(always)]
    fn dot(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: the type is used only if the CPU has AVX-512 VNNI (see the trait).
        unsafe { _mm512_dpbusd_epi32(sums, quants, _mm512_set1_epi32(inputs)) }
    }

    #[inline(always)]
    fn dot_wide(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        // 4 products of at most 255 x 128 are summed in 32 bits.
        Self::dot(sums, quants, inputs)
    }

    #[inline(always)]
    fn floats(sums: Self::Sums) -> Avx512 {
        Avx512Dots::floats(sums)
    }
}
