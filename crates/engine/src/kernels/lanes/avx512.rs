//! Sixteen lanes as one AVX-512 register.

use std::arch::x86_64::*;

use super::{F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

impl From<__m512> for Avx512 {
    #[inline(always)]
    fn from(lanes: __m512) -> Self {
        Self(lanes)
    }
}

impl Avx512 {
    #[inline(always)]
    pub(crate) fn register(self) -> __m512 {
        self.0
    }
}

/// A method that applies an intrinsic to `self` and another.
macro_rules! binary {
    ($name:ident, $intrinsic:ident) => {
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: the type exists only if the CPU has AVX-512 F (see the trait).
            unsafe { Self($intrinsic(self.0, other.0)) }
        }
    };
}

impl F32x16 for Avx512 {
    // 12 x 2 accumulators, 2 weights and a broadcast: 27 of 32 registers, and 24 independent chains
    // for 2 ports of latency 4.
    const TILE_ROWS: usize = 12;
    const TILE_VECTORS: usize = 2;

    binary!(add, _mm512_add_ps);
    binary!(sub, _mm512_sub_ps);
    binary!(mul, _mm512_mul_ps);
    binary!(div, _mm512_div_ps);
    binary!(max, _mm512_max_ps);
    binary!(min, _mm512_min_ps);

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the type exists only if the CPU has AVX-512 F (see the trait).
        unsafe { Self(_mm512_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise of 16 elements; AVX-512 F as above.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise of 16 elements; AVX-512 F as above.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; LANES]) -> Self {
        // SAFETY: 32 bytes of the array; AVX-512 F as above.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn from_bf16(bits: &[u16; LANES]) -> Self {
        // SAFETY: 32 bytes of the array; AVX-512 F as above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bits.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    fn from_i8(bytes: &[i8; LANES]) -> Self {
        // SAFETY: 16 bytes of the array; AVX-512 F as above.
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().cast())))) }
    }

    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe { Self(_mm512_abs_ps(self.0)) }
    }

    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    fn zero_where_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x.0, limit.0);
            Self(_mm512_mask_mov_ps(self.0, below, _mm512_setzero_ps()))
        }
    }

    #[inline(always)]
    fn pow2_of_rounded(self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe {
            let one = _mm512_castps_si512(_mm512_set1_ps(1.0));
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(exponent, one)))
        }
    }

    #[inline(always)]
    fn low_bf16(self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(self.0)))) }
    }

    #[inline(always)]
    fn high_bf16(self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe {
            let mask = _mm512_set1_epi32(-0x1_0000);
            Self(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self.0), mask)))
        }
    }

    #[inline(always)]
    fn bf16_pairs(low: Self, high: Self) -> Self {
        // SAFETY: AVX-512 F as above.
        unsafe {
            let high = _mm512_slli_epi32::<16>(bf16_bits(high.0));
            Self(_mm512_castsi512_ps(_mm512_or_si512(bf16_bits(low.0), high)))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller's promise of 32 bytes; AVX-512 F as above.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(bf16_bits(self.0))) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: the caller's promise of 32 bytes; AVX-512 F as above.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }

    #[inline(always)]
    fn bytes_of_rounded(self) -> [i8; LANES] {
        // SAFETY: AVX-512 F as above; 16 bytes are 16 bytes.
        unsafe { std::mem::transmute(_mm512_cvtepi32_epi8(_mm512_castps_si512(self.0))) }
    }

    #[inline(always)]
    fn sum_of_bytes(bytes: [i8; LANES]) -> i32 {
        super::Avx2::sum_of_bytes(bytes)
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: AVX-512 F as above.
        unsafe { super::avx2::sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(self.0), high_half(self.0))) }
    }

    #[inline(always)]
    fn all_finite(self) -> bool {
        // SAFETY: AVX-512 F as above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_abs_ps(self.0), _mm512_set1_ps(f32::MAX)) == u16::MAX }
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: AVX-512 F as above.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }

    /// 16 x 16 in four rounds of 16 shuffles: pairs, then quads within 128 bits, then the 128-bit
    /// parts.
    #[inline(always)]
    fn transpose(rows: &mut [Self; LANES]) {
        // SAFETY: AVX-512 F as above.
        unsafe {
            let mut a = [_mm512_setzero_ps(); LANES];
            for (a, row) in a.iter_mut().zip(rows.iter()) {
                *a = row.0;
            }
            for i in (0..LANES).step_by(2) {
                (a[i], a[i + 1]) = (_mm512_unpacklo_ps(a[i], a[i + 1]), _mm512_unpackhi_ps(a[i], a[i + 1]));
            }
            let mut b = a;
            for i in (0..LANES).step_by(4) {
                for j in 0..2 {
                    let low = _mm512_castps_pd(a[i + j]);
                    let high = _mm512_castps_pd(a[i + j + 2]);
                    b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                    b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
                }
            }
            // b[4 g + j], 128-bit part q = column 4 q + j of rows 4 g .. 4 g + 3.
            for j in 0..4 {
                let low0 = shuffle::<0x44>(b[j], b[j + 4]);
                let high0 = shuffle::<0xee>(b[j], b[j + 4]);
                let low1 = shuffle::<0x44>(b[j + 8], b[j + 12]);
                let high1 = shuffle::<0xee>(b[j + 8], b[j + 12]);
                rows[j].0 = shuffle::<0x88>(low0, low1);
                rows[j + 4].0 = shuffle::<0xdd>(low0, low1);
                rows[j + 8].0 = shuffle::<0x88>(high0, high1);
                rows[j + 12].0 = shuffle::<0xdd>(high0, high1);
            }
        }
    }
}

/// Lanes 8 to 15.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn high_half(x: __m512) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x))) }
}

/// Picks 128-bit parts: two of `a`, then two of `b`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn shuffle<const PARTS: i32>(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_shuffle_f32x4::<PARTS>(a, b) }
}

/// To bfloat16, in the low halves of the lanes.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn bf16_bits(x: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f80_0000));
        let rounded = _mm512_mask_and_epi32(rounded, small, bits, _mm512_set1_epi32(i32::MIN));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
        _mm512_srli_epi32::<16>(rounded)
    }
}
