//! Sixteen 32-bit floats, whatever the registers: one AVX-512 register, two of AVX2, or an array.
//!
//! Each operation is exact as IEEE 754 says, so the three give the same bits. Operations that need
//! more than one rounding (sums over lanes, `exp`) are built here from those, once for all.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use scalar::Scalar;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen f32. The types of this trait are named only inside functions compiled for their
/// instruction set (`per_isa!`), which run only if the CPU has it.
pub(crate) trait F32x16: Copy {
    /// Rows of the largest register tile, with `TILE_VECTORS` vectors each: as many accumulators as
    /// fit beside the operands.
    const TILE_ROWS: usize;
    /// Vectors of a tile's row, 1 or 2.
    const TILE_VECTORS: usize;

    fn splat(x: f32) -> Self;

    /// # Safety
    /// 16 elements can be read at `from`, of any alignment.
    unsafe fn load(from: *const f32) -> Self;

    /// # Safety
    /// 16 elements can be written at `to`, of any alignment.
    unsafe fn store(self, to: *mut f32);

    /// IEEE half to single.
    fn from_f16(bits: &[u16; LANES]) -> Self;

    /// bfloat16 to single.
    fn from_bf16(bits: &[u16; LANES]) -> Self;

    /// Signed bytes to single.
    fn from_i8(bytes: &[i8; LANES]) -> Self;

    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;

    fn abs(self) -> Self;

    /// `self` if it is larger, else `other`; so `other` if either is NaN.
    fn max(self, other: Self) -> Self;

    /// `self` if it is smaller, else `other`; so `other` if either is NaN.
    fn min(self, other: Self) -> Self;

    /// 0 if `x` is below `limit`, else `self`.
    fn zero_where_below(self, x: Self, limit: Self) -> Self;

    /// For `t = n + ROUND_MAGIC` with an integer n in -126..=127: 2^n.
    fn pow2_of_rounded(self) -> Self;

    /// For lanes that are pairs of bfloat16, as bits: the low ones.
    fn low_bf16(self) -> Self;

    /// For lanes that are pairs of bfloat16, as bits: the high ones.
    fn high_bf16(self) -> Self;

    /// Lanes that are pairs of bfloat16, as bits, rounded as by [`Self::store_bf16`].
    fn bf16_pairs(low: Self, high: Self) -> Self;

    /// Rounds to bfloat16: to nearest even, and to 0 what is below the smallest normal number, as
    /// the instruction for it does.
    ///
    /// # Safety
    /// 16 elements can be written at `to`.
    unsafe fn store_bf16(self, to: *mut u16);

    /// Rounds to IEEE half, to nearest even.
    ///
    /// # Safety
    /// 16 elements can be written at `to`.
    unsafe fn store_f16(self, to: *mut u16);

    /// For `t = n + ROUND_MAGIC` with an integer n in -128..=127: n.
    fn bytes_of_rounded(self) -> [i8; LANES];

    /// The sum of signed bytes.
    fn sum_of_bytes(bytes: [i8; LANES]) -> i32;

    /// Transposes 16 vectors of 16.
    #[inline(always)]
    fn transpose(rows: &mut [Self; LANES]) {
        let old = rows.map(Self::to_array);
        for (i, row) in rows.iter_mut().enumerate() {
            *row = Self::read(&old.map(|column| column[i]));
        }
    }

    /// Up to 16 elements; the other lanes are 0.
    #[inline(always)]
    fn read(x: &[f32]) -> Self {
        let mut padded = [0.0; LANES];
        let from = if x.len() == LANES {
            x.as_ptr()
        } else {
            padded[..x.len()].copy_from_slice(x);
            padded.as_ptr()
        };
        // SAFETY: 16 elements either way; a longer slice has panicked above.
        unsafe { Self::load(from) }
    }

    /// The first lanes, as many as `to` has elements, at most 16.
    #[inline(always)]
    fn write(self, to: &mut [f32]) {
        if to.len() == LANES {
            // SAFETY: just checked.
            unsafe { self.store(to.as_mut_ptr()) }
        } else {
            to.copy_from_slice(&self.to_array()[..to.len()]);
        }
    }

    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: 16 elements.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// Sum of the lanes, as a tree: lane i + lane i+8, then +4, +2, +1.
    fn sum(self) -> f32;

    /// Whether no lane is infinite or NaN.
    fn all_finite(self) -> bool;

    /// The largest lane; unspecified if one is NaN.
    fn largest(self) -> f32;
}

/// Bytes that come from memory together.
pub(crate) const CACHE_LINE: usize = 64;

/// Asks the processor to prefetch a line into its second-level cache, at any address; nothing on
/// other architectures.
#[inline(always)]
pub(crate) fn prefetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, of an instruction that every x86-64 has; an address that cannot be read is
    // left alone.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// 1.5 x 2^23: adding it rounds a small float to an integer, which then stands in the low bits.
pub(crate) const ROUND_MAGIC: f32 = 12_582_912.0;
/// Below this, e^x is smaller than the smallest normal float, and is taken as 0.
const EXP_MIN: f32 = -87.33;
/// Above this, e^x is taken as e^88.
const EXP_MAX: f32 = 88.0;

/// e^x to 2 units in the last place on [-87.33, 88]; 0 below, e^88 above, NaN for NaN; e^0 is 1
/// exactly.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes `expf` (Moshier, 1989); ln
/// 2 in two parts (Cody and Waite).
#[inline(always)]
pub(crate) fn exp<V: F32x16>(x: V) -> V {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let clamped = V::splat(EXP_MAX).min(V::splat(EXP_MIN).max(x));
    let rounded = clamped.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(ROUND_MAGIC));
    let n = rounded.sub(V::splat(ROUND_MAGIC));
    let r = n.mul_add(V::splat(-LN2_LOW), n.mul_add(V::splat(-LN2_HIGH), clamped));
    let mut p = V::splat(POLYNOMIAL[0]);
    for &coefficient in &POLYNOMIAL[1..] {
        p = p.mul_add(r, V::splat(coefficient));
    }
    let y = p.mul_add(r.mul(r), r).add(V::splat(1.0));
    y.mul(rounded.pow2_of_rounded()).zero_where_below(x, V::splat(EXP_MIN))
}

/// 2^x for x of at most 0, within 3e-6 of it; 0 below -126, 2^0 is 1 exactly.
///
/// x = n + r with |r| <= 1/2, and a polynomial for 2^r, of least relative error among those that
/// are 1 at 0. Attention rounds the result to bfloat16.
#[inline(always)]
pub(crate) fn exp2_of_negative<V: F32x16>(x: V) -> V {
    const MIN: f32 = -126.0;
    const POLYNOMIAL: [f32; 5] = [9.582_853e-3, 5.590_642_5e-2, 0.240_240_99, 0.693_124_2, 1.0];
    let clamped = V::splat(MIN).max(x);
    let rounded = clamped.add(V::splat(ROUND_MAGIC));
    let r = clamped.sub(rounded.sub(V::splat(ROUND_MAGIC)));
    let mut p = V::splat(POLYNOMIAL[0]);
    for &coefficient in &POLYNOMIAL[1..] {
        p = p.mul_add(r, V::splat(coefficient));
    }
    p.mul(rounded.pow2_of_rounded()).zero_where_below(x, V::splat(MIN))
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::Isa;
    use crate::kernels::isa::per_isa;

    per_isa! {
        fn exps(x: &[f32; LANES]) -> [f32; LANES] = exps_of<Floats>
    }

    fn exps_of<V: F32x16>(x: &[f32; LANES]) -> [f32; LANES] {
        exp(V::read(x)).to_array()
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for isa in Isa::available() {
            let mut worst = 0.0f64;
            for step in 0..40_000 {
                let x = [-87.3 + 175.3 * (step as f32 / 40_000.0); LANES];
                let found = f64::from(exps(isa, &x)[3]);
                let expected = f64::from(x[0]).exp();
                let unit = f64::from(f32::from_bits((expected as f32).to_bits() + 1)) - f64::from(expected as f32);
                worst = worst.max((found - expected).abs() / unit);
            }
            assert!(worst < 2.0, "{isa}: {worst} units");
        }
    }

    #[test]
    fn exp_is_exact_where_attention_relies_on_it() {
        for isa in Isa::available() {
            let x = [0.0, -0.0, -88.0, f32::NEG_INFINITY, f32::MIN, f32::NAN, 1000.0, 1.0].repeat(2);
            let y = exps(isa, x.as_slice().try_into().unwrap());
            assert_eq!(y[..5], [1.0, 1.0, 0.0, 0.0, 0.0], "{isa}");
            assert!(y[5].is_nan() && y[6] > 1e38 && y[6].is_finite(), "{isa}");
        }
    }

    per_isa! {
        fn exp2s(x: &[f32; LANES]) -> [f32; LANES] = exp2s_of<Floats>
    }

    fn exp2s_of<V: F32x16>(x: &[f32; LANES]) -> [f32; LANES] {
        exp2_of_negative(V::read(x)).to_array()
    }

    #[test]
    fn exp2_is_close_and_exact_where_attention_relies_on_it() {
        for isa in Isa::available() {
            for step in 0..40_000 {
                let x = [-126.0 * (step as f32 / 40_000.0); LANES];
                let found = f64::from(exp2s(isa, &x)[5]);
                let expected = f64::from(x[0]).exp2();
                assert!((found - expected).abs() < 3e-6 * expected, "{isa}: 2^{} is {expected}, not {found}", x[0]);
            }
            let mut x = [f32::NEG_INFINITY; LANES];
            (x[0], x[1], x[2], x[3], x[4]) = (0.0, -0.0, f32::MIN, -126.5, f32::NAN);
            let y = exp2s(isa, &x);
            assert_eq!((&y[..4], &y[5..]), (&[1.0, 1.0, 0.0, 0.0][..], &[0.0; 11][..]), "{isa}");
        }
    }

    per_isa! {
        fn bf16s(a: &[f32; LANES], b: &[f32; LANES]) -> ([u16; LANES], Vec<[u32; LANES]>) = bf16s_of<Floats>
    }

    fn bf16s_of<V: F32x16>(a: &[f32; LANES], b: &[f32; LANES]) -> ([u16; LANES], Vec<[u32; LANES]>) {
        let a = V::read(a);
        let b = V::read(b);
        let mut halves = [0; LANES];
        // SAFETY: 16 elements.
        unsafe { a.store_bf16(halves.as_mut_ptr()) };
        let pairs = V::bf16_pairs(a, b);
        let bits = [pairs, pairs.low_bf16(), pairs.high_bf16()].map(|x| x.to_array().map(f32::to_bits));
        (halves, bits.to_vec())
    }

    #[test]
    fn bf16_is_rounded_to_nearest_even_on_all_isas() {
        let mut a: [f32; LANES] = std::array::from_fn(|i| (i as f32 - 7.3) * 1.7);
        // Halfway cases, the largest number, infinity, and one that is too small.
        (a[0], a[1], a[2], a[3]) =
            (f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000), f32::MAX, f32::NEG_INFINITY);
        (a[4], a[5]) = (f32::from_bits(0x0040_0000), -0.0);
        let b: [f32; LANES] = std::array::from_fn(|i| if i == 9 { a[i] + 0.1 } else { a[i] - 0.1 });
        let expected =
            |x: f32| if x.is_normal() { bf16::from_f32(x).to_bits() } else { (x.to_bits() >> 16) as u16 & 0xff80 };
        let halves = a.map(expected);
        let pairs: [u32; LANES] = std::array::from_fn(|i| u32::from(halves[i]) | u32::from(expected(b[i])) << 16);
        let bits = vec![pairs, pairs.map(|x| x << 16), pairs.map(|x| x & 0xffff_0000)];
        for isa in Isa::available() {
            assert_eq!(bf16s(isa, &a, &b), (halves, bits.clone()), "{isa}");
            a[8] = f32::from_bits(0x7fff_ffff);
            assert!(bf16::from_bits(bf16s(isa, &a, &b).0[8]).is_nan(), "{isa}");
            a[8] = (8.0 - 7.3) * 1.7;
        }
    }

    per_isa! {
        fn operations(a: &[f32; LANES], b: &[f32; LANES], bits: &[u16; LANES]) -> Vec<[f32; LANES]> = all_operations<Floats>
    }

    const QUANTS: [i8; LANES] = [-128, -127, -100, -64, -17, -2, -1, 0, 1, 2, 3, 16, 63, 64, 126, 127];

    fn all_operations<V: F32x16>(a: &[f32; LANES], b: &[f32; LANES], bits: &[u16; LANES]) -> Vec<[f32; LANES]> {
        let x = V::read(a);
        let y = V::read(b);
        let mut rows: [V; LANES] = std::array::from_fn(|i| x.add(V::splat(i as f32)));
        V::transpose(&mut rows);
        let short = V::read(&a[..5]);
        let sums = V::splat(x.sum() + x.largest());
        let mut out = vec![V::from_f16(bits), V::from_bf16(bits), x.mul_add(y, x), x.add(y), x.sub(y), x.mul(y)];
        let mut halves = [0; LANES];
        // SAFETY: 16 elements.
        unsafe { x.store_f16(halves.as_mut_ptr()) };
        let bytes = x.add(V::splat(ROUND_MAGIC)).bytes_of_rounded().map(f32::from);
        out.extend([x.abs(), V::from_f16(&halves), V::read(&bytes)]);
        out.push(V::from_i8(&QUANTS));
        out.push(V::splat(
            (V::sum_of_bytes(QUANTS) + V::sum_of_bytes([-128; LANES]) + V::sum_of_bytes([127; LANES])) as f32,
        ));
        out.extend([x.div(y), x.max(y), x.min(y), x.zero_where_below(y, x), short, sums]);
        out.extend(rows);
        out.into_iter().map(V::to_array).collect()
    }

    #[test]
    fn lane_operations_give_same_bits_on_all_isas() {
        let a: [f32; LANES] = std::array::from_fn(|i| (i as f32 - 7.3) * 1.7);
        let b: [f32; LANES] = std::array::from_fn(|i| (8.1 - i as f32) / 3.3);
        let patterns =
            [0, 1, 0x3ff, 0x400, 0x3c00, 0x7bff, 0x7c00, 0x8001, 0xbc00, 0xfbff, 0xfc00, 0x3555, 0x8000, 0x7f80, 2, 3];
        let bits = |x: Vec<[f32; LANES]>| x.into_iter().map(|v| v.map(f32::to_bits)).collect::<Vec<_>>();
        let expected = operations(Isa::SCALAR, &a, &b, &patterns);
        assert_eq!(expected[0][..13], patterns.map(|p| f16::from_bits(p).to_f32())[..13]);
        assert_eq!(expected[1], patterns.map(|p| bf16::from_bits(p).to_f32()));
        assert_eq!(expected[6], a.map(f32::abs));
        assert_eq!(expected[7], a.map(|a| f16::from_f32(a).to_f32()));
        assert_eq!(expected[8], a.map(f32::round_ties_even));
        assert_eq!(expected[9], QUANTS.map(f32::from));
        assert_eq!(expected[10], [(QUANTS.map(i32::from).iter().sum::<i32>() - 16) as f32; LANES]);
        for row in 0..LANES {
            assert_eq!(expected[17 + row], std::array::from_fn(|i| a[row] + i as f32));
        }
        let numbers = 0x7c00;
        let rest = 13..14; // a NaN's payload may differ: 0x7f80 as a half
        assert!(f16::from_bits(patterns[rest.start]).is_nan() && f16::from_bits(numbers).is_infinite());
        for isa in Isa::available() {
            let mut found = bits(operations(isa, &a, &b, &patterns));
            let mut expected = bits(expected.clone());
            (found[0][13], expected[0][13]) = (0, 0);
            assert_eq!(found, expected, "{isa}");
        }
    }
}
