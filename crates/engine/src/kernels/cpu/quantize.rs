//! Activations as signed bytes with a scale per 32 inputs: what integer products take.
//!
//! ```text
//! scale = max |x| / 127,  code = x / scale, rounded to nearest even          of 32 inputs of a row
//! in memory   [rows / 16][inputs / 32] blocks of 16 rows: all that a register tile reads of a block lies side by side
//! ```
//!
//! What is no number makes the scale NaN or infinite, and so every output that it goes into.

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, ROUND_MAGIC};
use crate::kernels::{Isa, Rows, Threads};

/// Inputs that share a scale.
pub(super) const BLOCK: usize = 32;
/// Rows of a group.
pub(super) const GROUP: usize = 16;
/// Groups below which waking another thread does not pay.
const PARALLEL_GROUPS: usize = 2;

/// 32 inputs of 16 rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct QuantizedBlock {
    /// From -127 to 127.
    pub codes: [[i8; BLOCK]; GROUP],
    /// x is about scale * code.
    pub scales: [f32; GROUP],
    /// Scale times the sum of the codes.
    pub weighted_sums: [f32; GROUP],
    /// Sums of the codes, negated.
    pub sums: [i32; GROUP],
    /// The same of the first and of the last 16 inputs.
    pub half_sums: [[i32; GROUP]; 2],
}

/// Quantized activations of a step. Rows beyond the last, up to a whole group, are unspecified.
pub(crate) struct QuantizedRows {
    blocks: Vec<QuantizedBlock>,
    rows: usize,
    blocks_per_row: usize,
}

impl QuantizedRows {
    /// No rows yet.
    pub fn new() -> Self {
        Self { blocks: Vec::new(), rows: 0, blocks_per_row: 0 }
    }

    /// Takes the values of `x`, whose columns are a multiple of 32.
    pub fn quantize(&mut self, isa: Isa, threads: &Threads, x: &Rows) {
        assert!(x.columns().is_multiple_of(BLOCK), "{} columns", x.columns());
        (self.rows, self.blocks_per_row) = (x.rows(), x.columns() / BLOCK);
        let groups = self.rows.div_ceil(GROUP);
        let empty = QuantizedBlock {
            codes: [[0; BLOCK]; GROUP],
            scales: [0.0; GROUP],
            weighted_sums: [0.0; GROUP],
            sums: [0; GROUP],
            half_sums: [[0; GROUP]; 2],
        };
        let len = groups * self.blocks_per_row;
        if len > self.blocks.len() {
            self.blocks.resize(len, empty);
        }
        let parallel = groups >= PARALLEL_GROUPS;
        threads.for_each_chunk(&mut self.blocks[..len], self.blocks_per_row, parallel, |group, blocks| {
            quantize_group(isa, x, group * GROUP, blocks);
        });
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The blocks of 16 rows, `[inputs / 32]`.
    pub(super) fn group(&self, group: usize) -> &[QuantizedBlock] {
        &self.blocks[group * self.blocks_per_row..][..self.blocks_per_row]
    }
}

per_isa! {
    /// Up to 16 rows from `first` on.
    fn quantize_group(x: &Rows, first: usize, blocks: &mut [QuantizedBlock]) = quantize_group_of<Floats>
}

#[inline(always)]
fn quantize_group_of<V: F32x16>(x: &Rows, first: usize, blocks: &mut [QuantizedBlock]) {
    for (slot, row) in (first..x.rows().min(first + GROUP)).enumerate() {
        for (x, block) in x.row(row).as_chunks::<BLOCK>().0.iter().zip(blocks.iter_mut()) {
            quantize_block::<V>(x, slot, block);
        }
    }
}

#[inline(always)]
fn quantize_block<V: F32x16>(x: &[f32; BLOCK], slot: usize, block: &mut QuantizedBlock) {
    // As integers, the magnitudes of floats are in the same order, with NaN above infinity: it is not lost.
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let mut sums = [0; 2];
    for (half, (x, codes)) in x.chunks_exact(LANES).zip(block.codes[slot].chunks_exact_mut(LANES)).enumerate() {
        // The low byte of the rounded sum is the integer's.
        let rounded = V::read(x).mul(V::splat(inverse)).add(V::splat(ROUND_MAGIC)).to_array();
        for (code, rounded) in codes.iter_mut().zip(rounded) {
            *code = rounded.to_bits() as i8;
        }
        // Wrapping, though it never does: a check at each addition would keep the loop from being vectorized.
        sums[half] = codes.iter().fold(0i32, |sum, &code| sum.wrapping_add(i32::from(code)));
    }
    let sum = sums[0] + sums[1];
    block.scales[slot] = scale;
    block.weighted_sums[slot] = scale * sum as f32;
    block.sums[slot] = -sum;
    block.half_sums[0][slot] = -sums[0];
    block.half_sums[1][slot] = -sums[1];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::reference;

    fn rows(count: usize, columns: usize) -> Rows {
        let mut x = Rows::new(columns);
        x.resize(count);
        for row in 0..count {
            x.row_mut(row).copy_from_slice(&reference::random(row as u64, columns));
        }
        x
    }

    #[test]
    fn is_the_reference_on_all_sets_whatever_the_number_of_rows() {
        for count in [1, 15, 16, 17, 40] {
            let x = rows(count, 96);
            for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
                let mut quantized = QuantizedRows::new();
                quantized.quantize(isa, &Threads::new(threads).unwrap(), &x);
                for row in 0..count {
                    let expected = reference::quantize(x.row(row));
                    for (block, expected) in quantized.group(row / GROUP).iter().zip(expected) {
                        let slot = row % GROUP;
                        let sum: i32 = expected.codes.iter().map(|&code| i32::from(code)).sum();
                        assert_eq!(block.codes[slot], expected.codes, "{isa}, row {row}");
                        assert_eq!(block.scales[slot], expected.scale);
                        assert_eq!(block.weighted_sums[slot], expected.scale * sum as f32);
                        assert_eq!(block.sums[slot], -sum);
                        assert_eq!(block.half_sums[0][slot] + block.half_sums[1][slot], -sum);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_shows_and_nothing_else_does() {
        let threads = Threads::new(1).unwrap();
        for isa in Isa::available() {
            for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = rows(1, 64);
                x.row_mut(0)[37] = wrong;
                let mut quantized = QuantizedRows::new();
                quantized.quantize(isa, &threads, &x);
                assert!(quantized.group(0)[0].scales[0].is_finite() && !quantized.group(0)[1].scales[0].is_finite());
            }
            for tiny in [0.0, 1e-45, -1e-38] {
                let mut x = rows(1, 32);
                x.row_mut(0).fill(tiny);
                let mut quantized = QuantizedRows::new();
                quantized.quantize(isa, &threads, &x);
                assert!(quantized.group(0)[0].weighted_sums[0].abs() <= 1e-36, "{isa} {tiny}");
            }
        }
    }
}
