//! Sixteen lanes as two AVX2 registers.

use std::arch::x86_64::*;

use super::{F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

impl From<[__m256; 2]> for Avx2 {
    #[inline(always)]
    fn from([low, high]: [__m256; 2]) -> Self {
        Self(low, high)
    }
}

/// A method that applies an intrinsic to both halves of `self` and another.
macro_rules! both {
    ($name:ident, $intrinsic:ident) => {
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: the type exists only if the CPU has AVX2 (see the trait).
            unsafe { Self($intrinsic(self.0, other.0), $intrinsic(self.1, other.1)) }
        }
    };
}

impl F32x16 for Avx2 {
    // 6 x 1 x 2 accumulators, 2 weights and a broadcast: 15 of 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 1;

    both!(add, _mm256_add_ps);
    both!(sub, _mm256_sub_ps);
    both!(mul, _mm256_mul_ps);
    both!(div, _mm256_div_ps);
    both!(max, _mm256_max_ps);
    both!(min, _mm256_min_ps);

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the type exists only if the CPU has AVX2 (see the trait).
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise of 16 elements; AVX2 as above.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise of 16 elements; AVX2 as above.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; LANES]) -> Self {
        let from = bits.as_ptr().cast::<__m128i>();
        // SAFETY: two times 16 bytes of the array; F16C comes with the type (see `Isa`).
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))) }
    }

    #[inline(always)]
    fn from_bf16(bits: &[u16; LANES]) -> Self {
        let from = bits.as_ptr().cast::<__m128i>();
        // SAFETY: two times 16 bytes of the array; AVX2 as above.
        unsafe { Self(widen(_mm_loadu_si128(from)), widen(_mm_loadu_si128(from.add(1)))) }
    }

    #[inline(always)]
    fn from_i8(bytes: &[i8; LANES]) -> Self {
        // SAFETY: 16 bytes of the array; AVX2 as above.
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            let wide = [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))];
            Self(_mm256_cvtepi32_ps(wide[0]), _mm256_cvtepi32_ps(wide[1]))
        }
    }

    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: AVX2 as above.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Self(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
        }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: FMA comes with the type (see `Isa`).
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: AVX2 as above.
        unsafe { Self(zero_where_below(self.0, x.0, limit.0), zero_where_below(self.1, x.1, limit.1)) }
    }

    #[inline(always)]
    fn pow2_of_rounded(self) -> Self {
        // SAFETY: AVX2 as above.
        unsafe { Self(pow2(self.0), pow2(self.1)) }
    }

    #[inline(always)]
    fn low_bf16(self) -> Self {
        // SAFETY: AVX2 as above.
        unsafe { Self(low_bf16(self.0), low_bf16(self.1)) }
    }

    #[inline(always)]
    fn high_bf16(self) -> Self {
        // SAFETY: AVX2 as above.
        unsafe { Self(high_bf16(self.0), high_bf16(self.1)) }
    }

    #[inline(always)]
    fn bf16_pairs(low: Self, high: Self) -> Self {
        // SAFETY: AVX2 as above.
        unsafe { Self(bf16_pairs(low.0, high.0), bf16_pairs(low.1, high.1)) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller's promise of 32 bytes; AVX2 as above. Packing goes by 128-bit parts,
        // which the permutation puts in order.
        unsafe {
            let packed = _mm256_packus_epi32(bf16_bits(self.0), bf16_bits(self.1));
            _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        let to = to.cast::<__m128i>();
        // SAFETY: the caller's promise of 32 bytes; F16C comes with the type (see `Isa`).
        unsafe {
            _mm_storeu_si128(to, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
            _mm_storeu_si128(to.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
        }
    }

    #[inline(always)]
    fn bytes_of_rounded(self) -> [i8; LANES] {
        self.to_array().map(|t| t.to_bits() as i8)
    }

    #[inline(always)]
    fn sum_of_bytes(bytes: [i8; LANES]) -> i32 {
        // SAFETY: SSE2, which every x86-64 has; 16 bytes of the array.
        unsafe {
            // As unsigned bytes, each 128 more, which are added up by eights.
            let raised = _mm_xor_si128(_mm_loadu_si128(bytes.as_ptr().cast()), _mm_set1_epi8(-128));
            let sums = _mm_sad_epu8(raised, _mm_setzero_si128());
            _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_srli_si128::<8>(sums))) - 128 * LANES as i32
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: AVX2 as above.
        unsafe { sum_of_eight(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    fn all_finite(self) -> bool {
        let magnitudes = self.abs();
        // SAFETY: AVX2 as above.
        unsafe {
            let most = _mm256_set1_ps(f32::MAX);
            let low = _mm256_cmp_ps::<_CMP_LE_OQ>(magnitudes.0, most);
            let high = _mm256_cmp_ps::<_CMP_LE_OQ>(magnitudes.1, most);
            _mm256_movemask_ps(_mm256_and_ps(low, high)) == 255
        }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: AVX2 as above.
        unsafe {
            let all = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

// Functions rather than closures: a closure does not inherit the caller's instruction set, and what
// it calls stays a call.

/// Lane i + lane i+4, then +2, +1.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(x: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// bfloat16 to single.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn widen(half: __m128i) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half))) }
}

/// 0 if `x` is below `limit`, else `y`.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn zero_where_below(y: __m256, x: __m256, limit: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, limit), y) }
}

/// For `t = n + ROUND_MAGIC`: 2^n.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn pow2(t: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
        _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_castps_si256(_mm256_set1_ps(1.0))))
    }
}

/// The low bfloat16 of pairs.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn low_bf16(pairs: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs))) }
}

/// The high bfloat16 of pairs.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn high_bf16(pairs: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(-0x1_0000))) }
}

/// Rounds to pairs.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn bf16_pairs(low: __m256, high: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_castsi256_ps(_mm256_or_si256(bf16_bits(low), _mm256_slli_epi32::<16>(bf16_bits(high)))) }
}

/// To bfloat16, in the low halves of the lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn bf16_bits(x: __m256) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f80_0000));
        let small = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
        let sign = _mm256_and_si256(bits, _mm256_set1_epi32(i32::MIN));
        let rounded = _mm256_blendv_epi8(rounded, sign, small);
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}
