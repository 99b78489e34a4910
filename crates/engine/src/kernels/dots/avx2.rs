//! Dot products on two AVX2 registers.

use std::arch::x86_64::*;

use super::Dots;
use crate::kernels::lanes::Avx2;

#[derive(Clone, Copy)]
pub(crate) struct Avx2Dots;

impl Dots for Avx2Dots {
    type Floats = Avx2;
    type Quants = [__m256i; 2];
    type Sums = [__m256i; 2];
    // Of 16 registers: 2 x 2 dot products, 2 x 2 sums, 4 quants.
    const TILE_ROWS: usize = 2;
    const REGISTER_TILES: usize = 1;

    #[inline(always)]
    unsafe fn nibbles(from: *const u8) -> [Self::Quants; 2] {
        // SAFETY: the caller's promise of 64 bytes; the type is used only if the CPU has AVX2 (see
        // the trait).
        unsafe {
            let [a, b] = Self::bytes(from);
            let mask = _mm256_set1_epi8(15);
            let high_a = _mm256_srli_epi16::<4>(a);
            let high_b = _mm256_srli_epi16::<4>(b);
            let low = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            [low, [_mm256_and_si256(high_a, mask), _mm256_and_si256(high_b, mask)]]
        }
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> Self::Quants {
        // SAFETY: the caller's promise of 64 bytes; AVX2 as above.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }

    #[inline(always)]
    fn with_bit(quants: Self::Quants, plane: Self::Quants, from: u32, to: u32) -> Self::Quants {
        // SAFETY: AVX2 as above.
        unsafe { [with_bit(quants[0], plane[0], from, to), with_bit(quants[1], plane[1], from, to)] }
    }

    #[inline(always)]
    fn splat(x: i32) -> Self::Sums {
        // SAFETY: AVX2 as above.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }

    #[inline(always)]
    fn dot(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: AVX2 as above.
        unsafe {
            let inputs = _mm256_set1_epi32(inputs);
            [narrow(sums[0], quants[0], inputs), narrow(sums[1], quants[1], inputs)]
        }
    }

    #[inline(always)]
    fn begin_nibbles(_: i32) -> Self::Sums {
        Self::splat(0)
    }

    #[inline(always)]
    fn dot_nibbles(sums: Self::Sums, nibbles: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: AVX2 as above. A block fits 16 bits (see the trait).
        unsafe {
            let inputs = _mm256_set1_epi32(inputs);
            let low = _mm256_maddubs_epi16(nibbles[0], inputs);
            let high = _mm256_maddubs_epi16(nibbles[1], inputs);
            [_mm256_add_epi16(sums[0], low), _mm256_add_epi16(sums[1], high)]
        }
    }

    #[inline(always)]
    fn end_nibbles(sums: Self::Sums, x: i32) -> Self::Sums {
        // SAFETY: AVX2 as above.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let [low, high] = [_mm256_madd_epi16(sums[0], ones), _mm256_madd_epi16(sums[1], ones)];
            let x = _mm256_set1_epi32(x);
            [_mm256_add_epi32(low, x), _mm256_add_epi32(high, x)]
        }
    }

    #[inline(always)]
    fn dot_wide(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        // SAFETY: AVX2 as above.
        unsafe {
            let inputs = _mm256_set1_epi32(inputs);
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(inputs));
            let odd = _mm256_srai_epi16::<8>(inputs);
            [wide(sums[0], quants[0], even, odd), wide(sums[1], quants[1], even, odd)]
        }
    }

    #[inline(always)]
    fn floats(sums: Self::Sums) -> Avx2 {
        // SAFETY: AVX2 as above.
        Avx2::from(unsafe { [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])] })
    }
}

/// `quants` with a bit of `plane`; what a shift of 16 bits moves in from the neighbour is masked
/// off.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn with_bit(quants: __m256i, plane: __m256i, from: u32, to: u32) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let left = _mm256_sll_epi16(plane, _mm_cvtsi32_si128(to.saturating_sub(from) as i32));
        let moved = _mm256_srl_epi16(left, _mm_cvtsi32_si128(from.saturating_sub(to) as i32));
        _mm256_or_si256(quants, _mm256_and_si256(moved, _mm256_set1_epi8(1 << to)))
    }
}

/// Sums of pairs fit 16 bits: 2 x 127 x 128.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn narrow(sum: __m256i, quants: __m256i, inputs: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = _mm256_maddubs_epi16(quants, inputs);
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// Quants of even and of odd inputs as 16 bits, since sums of pairs of bytes would saturate.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn wide(sum: __m256i, quants: __m256i, even: __m256i, odd: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let even_quants = _mm256_and_si256(quants, _mm256_set1_epi16(255));
        let odd_quants = _mm256_srli_epi16::<8>(quants);
        let sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even_quants, even));
        _mm256_add_epi32(sum, _mm256_madd_epi16(odd_quants, odd))
    }
}
