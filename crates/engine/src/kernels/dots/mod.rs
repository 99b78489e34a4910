//! Dot products of unsigned weight quants and signed activations, for sixteen outputs at once,
//! beside the floats of the same instruction set.
//!
//! Sums are exact integers, so all instruction sets give the same bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod vnni;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2Dots;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512Dots;
pub(crate) use scalar::ScalarDots;
#[cfg(target_arch = "x86_64")]
pub(crate) use vnni::VnniDots;

use super::lanes::F32x16;

/// Bytes of the quants of 4 inputs of 16 outputs: `[output][input]`.
pub(crate) const QUADS: usize = 64;

/// Integer dot products. The types of this trait are named only inside functions compiled for their
/// instruction set (`per_isa!`), which run only if the CPU has it.
pub(crate) trait Dots: Copy {
    /// Floats of the same set.
    type Floats: F32x16;
    /// Quants of 4 inputs of 16 outputs.
    type Quants: Copy;
    /// Sums of 16 outputs.
    type Sums: Copy;
    /// Rows of the largest register tile: 1, 2 or 4.
    const TILE_ROWS: usize;
    /// Packed tiles of 16 outputs of the largest register tile: 1 or 2.
    const REGISTER_TILES: usize;

    /// The low and the high nibbles of 64 bytes.
    ///
    /// # Safety
    /// 64 bytes can be read at `from`.
    unsafe fn nibbles(from: *const u8) -> [Self::Quants; 2];

    /// 64 bytes.
    ///
    /// # Safety
    /// 64 bytes can be read at `from`.
    unsafe fn bytes(from: *const u8) -> Self::Quants;

    /// `quants`, each with its byte's bit number `from` of `plane` as bit number `to`, which is 0
    /// in `quants`.
    fn with_bit(quants: Self::Quants, plane: Self::Quants, from: u32, to: u32) -> Self::Quants;

    fn splat(x: i32) -> Self::Sums;

    /// `sums` and, for each output, the products of its 4 quants, below 128, with the 4 signed
    /// bytes of `inputs`.
    fn dot(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums;

    /// The beginning of the sums of a block of nibbles, which begin with `x`. Sets that multiply to
    /// 16 bits keep these sums in 16 bits: the products of a block are 32 x 15 x 128 at most for an
    /// output, which two sums of 16 bits have.
    #[inline(always)]
    fn begin_nibbles(x: i32) -> Self::Sums {
        Self::splat(x)
    }

    /// As [`Self::dot`], for nibbles. A block has 8 of them.
    #[inline(always)]
    fn dot_nibbles(sums: Self::Sums, nibbles: Self::Quants, inputs: i32) -> Self::Sums {
        Self::dot(sums, nibbles, inputs)
    }

    /// The sums of a block of nibbles that began with `x`.
    #[inline(always)]
    fn end_nibbles(sums: Self::Sums, _: i32) -> Self::Sums {
        sums
    }

    /// As [`Self::dot`], for any quants.
    fn dot_wide(sums: Self::Sums, quants: Self::Quants, inputs: i32) -> Self::Sums;

    /// The sums, which are below 2^24 and therefore exact.
    fn floats(sums: Self::Sums) -> Self::Floats;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;
    use crate::kernels::isa::per_isa;
    use crate::kernels::lanes::LANES;

    per_isa! {
        fn operations(quants: &[u8; QUADS], inputs: i32) -> Vec<[f32; LANES]> = all_operations<Dots>
    }

    fn all_operations<D: Dots>(quants: &[u8; QUADS], inputs: i32) -> Vec<[f32; LANES]> {
        // SAFETY: 64 bytes.
        let ([low, high], bytes) = unsafe { (D::nibbles(quants.as_ptr()), D::bytes(quants.as_ptr())) };
        let start = D::splat(-77_000);
        let mut all = vec![D::dot(start, low, inputs), D::dot(start, high, inputs), D::dot_wide(start, bytes, inputs)];
        let block = (0..4)
            .fold(D::begin_nibbles(-77_000), |sums, _| D::dot_nibbles(D::dot_nibbles(sums, low, inputs), high, inputs));
        all.push(D::end_nibbles(block, -77_000));
        for from in 0..8 {
            all.push(D::dot(start, D::with_bit(low, bytes, from, 4), inputs));
            all.push(D::dot(start, D::with_bit(high, bytes, from, 5), inputs));
        }
        all.into_iter().map(|sums| D::floats(sums).to_array()).collect()
    }

    #[test]
    fn integer_dot_products_are_exact_on_all_isas() {
        for signs in [[127, 127, 127, 127], [-127, -127, -127, -127], [-128, 127, -1, 0], [3, -90, 127, 55i8]] {
            let quants: [u8; QUADS] = std::array::from_fn(|i| if i < 8 { 255 } else { (i * 37 + 11) as u8 });
            let inputs = i32::from_ne_bytes(signs.map(|x| x as u8));
            let expected = |quant: &dyn Fn(u8) -> u8| -> [f32; LANES] {
                let products =
                    |lane: usize| (0..4).map(move |i| i32::from(quant(quants[4 * lane + i])) * i32::from(signs[i]));
                std::array::from_fn(|lane| (products(lane).sum::<i32>() - 77_000) as f32)
            };
            let nibbles = expected(&|quant| quant & 15).map(|sum| sum + 77_000.0);
            let high = expected(&|quant| quant >> 4).map(|sum| sum + 77_000.0);
            let block = std::array::from_fn(|lane| 4.0 * (nibbles[lane] + high[lane]) - 77_000.0);
            let bit = |quant: u8, from: u32, to: u32| ((quant >> from) & 1) << to;
            let mut all = vec![expected(&|quant| quant & 15), expected(&|quant| quant >> 4), expected(&|quant| quant)];
            all.push(block);
            for from in 0..8 {
                all.push(expected(&|quant| (quant & 15) | bit(quant, from, 4)));
                all.push(expected(&|quant| (quant >> 4) | bit(quant, from, 5)));
            }
            for isa in Isa::available() {
                assert_eq!(operations(isa, &quants, inputs), all, "{isa} {signs:?}");
            }
        }
    }
}
