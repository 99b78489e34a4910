//! Dot products without vector instructions.

use super::{Dots, QUADS};
use crate::kernels::lanes::{F32x16, LANES, Scalar};

#[derive(Clone, Copy)]
pub(crate) struct ScalarDots;

impl Dots for ScalarDots {
    type Floats = Scalar;
    type Codes = [u8; QUADS];
    type Sums = [i32; LANES];
    const TILE_ROWS: usize = 4;
    const TILE_PANELS: usize = 1;

    #[inline(always)]
    unsafe fn nibbles(from: *const u8) -> [Self::Codes; 2] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { Self::bytes(from) };
        [bytes.map(|byte| byte & 15), bytes.map(|byte| byte >> 4)]
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> Self::Codes {
        // SAFETY: the caller's promise; bytes have no alignment.
        unsafe { *from.cast() }
    }

    // As in `lanes::Scalar`.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn with_bit(mut codes: Self::Codes, plane: Self::Codes, from: u32, to: u32) -> Self::Codes {
        for (code, plane) in codes.iter_mut().zip(plane) {
            *code |= ((plane >> from) & 1) << to;
        }
        codes
    }

    #[inline(always)]
    fn splat(x: i32) -> Self::Sums {
        [x; LANES]
    }

    #[inline(always)]
    fn dot(sums: Self::Sums, codes: Self::Codes, inputs: i32) -> Self::Sums {
        Self::dot_wide(sums, codes, inputs)
    }

    // As in `lanes::Scalar`.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn dot_wide(mut sums: Self::Sums, codes: Self::Codes, inputs: i32) -> Self::Sums {
        let inputs = inputs.to_ne_bytes().map(|x| i32::from(x.cast_signed()));
        for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (&code, input) in codes.iter().zip(inputs) {
                *sum += i32::from(code) * input;
            }
        }
        sums
    }

    #[inline(always)]
    fn floats(sums: Self::Sums) -> Scalar {
        Scalar::read(&sums.map(|sum| sum as f32))
    }
}
