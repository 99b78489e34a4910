//! Sixteen lanes as an array.
//!
//! On x86-64, where it is the last resort, its operations are not inlined. With sixteen lanes
//! unrolled in every kernel, they would take most of the crate's compile time.

use half::{bf16, f16};

use super::{F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

macro_rules! per_lane {
    ($(fn $name:ident($($args:tt)*) -> $ret:ty $body:block)+) => {
        $(
            #[cfg_attr(target_arch = "x86_64", inline(never))]
            #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
            fn $name($($args)*) -> $ret $body
        )+
    };
}

impl F32x16 for Scalar {
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 1;

    per_lane! {
        fn from_f16(bits: &[u16; LANES]) -> Self {
            Self(bits.map(|b| f16::from_bits(b).to_f32()))
        }

        fn from_bf16(bits: &[u16; LANES]) -> Self {
            Self(bits.map(|b| bf16::from_bits(b).to_f32()))
        }

        fn from_i8(bytes: &[i8; LANES]) -> Self {
            Self(bytes.map(f32::from))
        }

        fn mul_add(self, b: Self, c: Self) -> Self {
            Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
        }

        fn add(self, other: Self) -> Self {
            self.zip(other, |a, b| a + b)
        }

        fn sub(self, other: Self) -> Self {
            self.zip(other, |a, b| a - b)
        }

        fn mul(self, other: Self) -> Self {
            self.zip(other, |a, b| a * b)
        }

        fn div(self, other: Self) -> Self {
            self.zip(other, |a, b| a / b)
        }

        fn abs(self) -> Self {
            Self(self.0.map(f32::abs))
        }

        fn max(self, other: Self) -> Self {
            self.zip(other, |a, b| if a > b { a } else { b })
        }

        fn min(self, other: Self) -> Self {
            self.zip(other, |a, b| if a < b { a } else { b })
        }

        fn zero_where_below(self, x: Self, limit: Self) -> Self {
            Self(std::array::from_fn(|i| if x.0[i] < limit.0[i] { 0.0 } else { self.0[i] }))
        }

        fn pow2_of_rounded(self) -> Self {
            Self(self.0.map(|t| f32::from_bits((t.to_bits() << 23).wrapping_add(1.0f32.to_bits()))))
        }

        fn low_bf16(self) -> Self {
            Self(self.0.map(|x| f32::from_bits(x.to_bits() << 16)))
        }

        fn high_bf16(self) -> Self {
            Self(self.0.map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)))
        }

        fn bf16_pairs(low: Self, high: Self) -> Self {
            low.zip(high, |low, high| f32::from_bits(u32::from(bf16_bits(low)) | u32::from(bf16_bits(high)) << 16))
        }

        fn bytes_of_rounded(self) -> [i8; LANES] {
            self.0.map(|t| t.to_bits() as i8)
        }
    }

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise; of any alignment.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise; of any alignment.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(never)]
    unsafe fn store_bf16(self, to: *mut u16) {
        for (i, x) in self.0.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *to.add(i) = bf16_bits(x) }
        }
    }

    #[inline(never)]
    unsafe fn store_f16(self, to: *mut u16) {
        for (i, x) in self.0.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *to.add(i) = f16::from_f32(x).to_bits() }
        }
    }

    #[inline(always)]
    fn sum_of_bytes(bytes: [i8; LANES]) -> i32 {
        bytes.map(i32::from).iter().sum()
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.0;
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }

    #[inline(always)]
    fn all_finite(self) -> bool {
        self.0.iter().all(|x| x.is_finite())
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

fn bf16_bits(x: f32) -> u16 {
    if x.is_subnormal() { bf16::from_f32(0.0f32.copysign(x)).to_bits() } else { bf16::from_f32(x).to_bits() }
}
