//! Dot products without vector instructions.

use super::{Dots, QUADS};
use crate::kernels::lanes::{F32x16, LANES, Scalar};

#[derive(Clone, Copy)]
pub(crate) struct ScalarDots;

impl Dots for ScalarDots {
    type Floats = Scalar;
    type Quants = [u8; QUADS];
    type Sums = [i32; LANES];
    const TILE_ROWS: usize = 4;
    const REGISTER_TILES: usize = 1;

    #[inline(always)]
    unsafe fn nibbles(from: *const u8) -> [Self::Quants; 2] {
        // SAFETY: the caller's promise.
        let bytes = unsafe { Self::bytes(from) };
        [bytes.map(|byte| byte & 15), bytes.map(|byte| byte >> 4)]
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> Self::Quants {
        // SAFETY: the caller's promise; bytes have no alignment.
        unsafe { *from.cast() }
    }

    // As in `lanes::Scalar`.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn with_bit(mut quants: Self::Quants, plane: Self::Quants, from: u32, to: u32) -> Self::Quants {
        for (quant, plane) in quants.iter_mut().zip(plane) {
            *quant |= ((plane >> from) & 1) << to;
        }
        quants
    }

    #[inline(always)]
    fn splat(x: i32) -> Self::Sums {
        [x; LANES]
    }

    #[inline(always)]
    fn dot(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        Self::dot_wide(sums, quants, inputs)
    }

    // As in `lanes::Scalar`.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn dot_wide(mut sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums {
        let inputs = inputs.to_ne_bytes().map(|x| i32::from(x.cast_signed()));
        for (sum, quants) in sums.iter_mut().zip(quants.as_chunks::<4>().0) {
            for (&quant, input) in quants.iter().zip(inputs) {
                *sum += i32::from(quant) * input;
            }
        }
        sums
    }

    #[inline(always)]
    fn floats(sums: Self::Sums) -> Scalar {
        Scalar::read(&sums.map(|sum| sum as f32))
    }
}
