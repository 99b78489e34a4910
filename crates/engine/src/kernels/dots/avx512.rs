//! Dot products on AVX-512 BW, for processors without VNNI.

use std::arch::x86_64::*;

use super::Dots;
use crate::kernels::lanes::Avx512;

#[derive(Clone, Copy)]
pub(crate) struct Avx512Dots;

impl Dots for Avx512Dots {
    type Floats = Avx512;
    type Quants = __m512i;
    type Sums = __m512i;
    // Of 32 registers: 8 dot products, 8 sums, 4 quants.
    const TILE_ROWS: usize = 4;
    const REGISTER_TILES: usize = 2;

    #[inline(always)]
    unsafe fn nibbles(from: *const u8) -> [Self::Quants; 2] {
        // SAFETY: the caller's promise of 64 bytes; the type is used only if the CPU has AVX-512 BW
        // (see the trait).
        unsafe {
            let bytes = Self::bytes(from);
            let mask = _mm512_set1_epi8(15);
            [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
        }
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> Self::Quants {
        // SAFETY: the caller's promise of 64 bytes; AVX-512 F as above.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    fn with_bit(quants: Self::Quants, plane: Self::Quants, from: u32, to: u32) -> Self::Quants {
        // SAFETY: AVX-512 BW as above. What a shift of 16 bits moves in from the neighbour is
        // masked off.
        unsafe {
            let left = _mm512_sll_epi16(plane, _mm_cvtsi32_si128(to.saturating_sub(from) as i32));
            let moved = _mm512_srl_epi16(left, _mm_cvtsi32_si128(from.saturating_sub(to) as i32));
            _mm512_or_si512(quants, _mm512_and_si512(moved, _mm512_set1_epi8(1 << to)))
        }
    }

    #[inline(always)]
    fn splat(x: i32) -> Self::Sums {
        // SAFETY: AVX-512 F as above.
        unsafe { _mm512_set1_epi32(x) }
    }

    #[inline(always)]
    fn dot(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: AVX-512 BW as above. Sums of pairs fit 16 bits: 2 x 127 x 128.
        unsafe {
            let pairs = _mm512_maddubs_epi16(quants, _mm512_set1_epi32(inputs));
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn begin_nibbles(_: i32) -> Self::Sums {
        Self::splat(0)
    }

    #[inline(always)]
    fn dot_nibbles(sums: Self::Sums, nibbles: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: AVX-512 BW as above. A block fits 16 bits (see the trait).
        unsafe { _mm512_add_epi16(sums, _mm512_maddubs_epi16(nibbles, _mm512_set1_epi32(inputs))) }
    }

    #[inline(always)]
    fn end_nibbles(sums: Self::Sums, x: i32) -> Self::Sums {
        // SAFETY: AVX-512 BW as above.
        unsafe { _mm512_add_epi32(Self::splat(x), _mm512_madd_epi16(sums, _mm512_set1_epi16(1))) }
    }

    #[inline(always)]
    fn dot_wide(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: AVX-512 BW as above. Quants of even and of odd inputs as 16 bits, since sums of
        // pairs of bytes would saturate.
        unsafe {
            let inputs = _mm512_set1_epi32(inputs);
            let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(inputs));
            let even_quants = _mm512_and_si512(quants, _mm512_set1_epi16(255));
            let sums = _mm512_add_epi32(sums, _mm512_madd_epi16(even_quants, even));
            let odd_quants = _mm512_srli_epi16::<8>(quants);
            _mm512_add_epi32(sums, _mm512_madd_epi16(odd_quants, _mm512_srai_epi16::<8>(inputs)))
        }
    }

    #[inline(always)]
    fn floats(sums: Self::Sums) -> Avx512 {
        // SAFETY: AVX-512 F as above.
        Avx512::from(unsafe { _mm512_cvtepi32_ps(sums) })
    }
}
