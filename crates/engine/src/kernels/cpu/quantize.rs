//! Activations as signed bytes with a scale per 32 inputs: what integer products take.
//!
//! ```text
//! scale = max |x| * (1 / 127),  quant = x * min(127 / max |x|, f32::MAX), rounded to nearest even          of 32 inputs of a row
//! in memory   [rows / 16][inputs / 32] blocks of 16 rows: all that a register tile reads of a block lies side by side
//! ```
//!
//! What is no number, or infinite, makes the scale NaN, and so every output that it goes into.

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, ROUND_MAGIC};
use crate::kernels::{AlignedBytes, Compute, RowShape, Rows, SharedRows};

use super::row_buffers::{GROUP, Groups, RowBuffers, take_groups};

/// Inputs that share a scale.
pub(super) const BLOCK: usize = 32;

const _: () = assert!(size_of::<QuantizedBlock>() == GROUP * (BLOCK + 5 * 4), "a block without padding");

/// What the zeros of all types are multiples of.
pub(super) const ZERO: i32 = 8;

/// 32 inputs of 16 rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct QuantizedBlock {
    /// From -127 to 127.
    pub quants: [[i8; BLOCK]; GROUP],
    /// x is about scale * quant.
    pub scales: [f32; GROUP],
    /// Scale times the sum of the quants.
    pub weighted_sums: [f32; GROUP],
    /// Sums of the quants, times -8: what a zero of 8 takes off.
    pub zeros: [i32; GROUP],
    /// The same of the first and of the last 16 inputs.
    pub half_zeros: [[i32; GROUP]; 2],
}

/// Quantized activations of a step. Rows beyond the last, up to a whole group, are unspecified.
pub(crate) struct QuantizedRows {
    /// [`QuantizedBlock`]s.
    blocks: AlignedBytes,
    rows: usize,
    blocks_per_row: usize,
}

impl QuantizedRows {
    /// No rows yet.
    pub fn new() -> Self {
        Self { blocks: AlignedBytes::zeroed(0), rows: 0, blocks_per_row: 0 }
    }

    /// Takes rows that `make` writes, of a multiple of 32 columns.
    pub fn fill(
        &mut self,
        compute: &Compute,
        shape: RowShape,
        buffers: &RowBuffers,
        make: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let groups = Groups { to: self.resize(shape), len: shape.columns / BLOCK };
        let isa = compute.isa;
        buffers.pass(&compute.threads, shape, make, groups, |x, slot, group| {
            quantize_row(isa, x, slot, group);
        });
    }

    /// Makes it of this shape, of a multiple of 32 columns. The contents are unspecified; memory is
    /// only ever added.
    fn resize(&mut self, shape: RowShape) -> &mut [QuantizedBlock] {
        let RowShape { rows, columns } = shape;
        assert!(columns.is_multiple_of(BLOCK), "{columns} columns");
        self.rows = rows;
        self.blocks_per_row = columns / BLOCK;
        let bytes = rows.div_ceil(GROUP) * self.blocks_per_row * size_of::<QuantizedBlock>();
        if bytes > self.blocks.len() {
            self.blocks = AlignedBytes::zeroed(bytes);
        }
        // SAFETY: a block is plain numbers without padding, of which any bits are a value.
        let (before, blocks, _) = unsafe { self.blocks[..bytes].align_to_mut::<QuantizedBlock>() };
        assert!(before.is_empty(), "blocks begin on cache lines");
        blocks
    }

    /// Makes it of this shape, of a multiple of 32 columns and unspecified contents. Returns a
    /// handle through which several threads write different parts, `[rows / 16][columns / 32]`.
    pub fn share(&mut self, shape: RowShape) -> SharedRows<'_, QuantizedBlock> {
        let groups = RowShape { rows: shape.rows.div_ceil(GROUP), columns: shape.columns / BLOCK };
        SharedRows::new(self.resize(shape), groups, groups.columns)
    }

    /// Takes the rows of `x`, of a multiple of 32 columns.
    pub fn fill_from(&mut self, compute: &Compute, x: &Rows) {
        let groups = Groups { to: self.resize(x.shape()), len: x.columns() / BLOCK };
        let isa = compute.isa;
        take_groups(&compute.threads, x, groups, |x, slot, group| quantize_row(isa, x, slot, group));
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The blocks of 16 rows, `[inputs / 32]`.
    pub(super) fn group(&self, group: usize) -> &[QuantizedBlock] {
        // SAFETY: as in `resize`.
        let (_, blocks, _) = unsafe { self.blocks.align_to::<QuantizedBlock>() };
        &blocks[group * self.blocks_per_row..][..self.blocks_per_row]
    }
}

per_isa! {
    /// One row, as row `slot` of its group.
    fn quantize_row(x: &[f32], slot: usize, blocks: &mut [QuantizedBlock]) = quantize_row_of<Floats>
}

#[inline(always)]
fn quantize_row_of<V: F32x16>(x: &[f32], slot: usize, blocks: &mut [QuantizedBlock]) {
    for (x, block) in x.as_chunks::<BLOCK>().0.iter().zip(blocks.iter_mut()) {
        quantize_block::<V>(x, slot, block);
    }
}

/// 32 inputs of row `slot`.
#[inline(always)]
pub(super) fn quantize_block<V: F32x16>(x: &[f32; BLOCK], slot: usize, block: &mut QuantizedBlock) {
    let halves = [V::read(&x[..LANES]), V::read(&x[LANES..])];
    let largest = halves[0].abs().max(halves[1].abs()).largest();
    let (scale, inverse) = scale_of(largest, halves[0].all_finite() && halves[1].all_finite());
    let inverse = V::splat(inverse);
    let magic = V::splat(ROUND_MAGIC);
    let rounded = [halves[0].mul(inverse).add(magic), halves[1].mul(inverse).add(magic)];
    let quants = [rounded[0].bytes_of_rounded(), rounded[1].bytes_of_rounded()];
    let (first, last) = block.quants[slot].split_at_mut(LANES);
    first.copy_from_slice(&quants[0]);
    last.copy_from_slice(&quants[1]);
    let sums = [V::sum_of_bytes(quants[0]), V::sum_of_bytes(quants[1])];
    let sum = sums[0] + sums[1];
    block.scales[slot] = scale;
    block.weighted_sums[slot] = scale * sum as f32;
    block.zeros[slot] = -ZERO * sum;
    block.half_zeros[0][slot] = -ZERO * sums[0];
    block.half_zeros[1][slot] = -ZERO * sums[1];
}

/// The scale of some numbers, and what they are multiplied by to be quants; `finite` is whether all
/// of them are.
#[inline(always)]
pub(super) fn scale_of(largest: f32, finite: bool) -> (f32, f32) {
    // The largest of some numbers need not show that one of them is none.
    let scale = if finite { largest * (1.0 / 127.0) } else { f32::NAN };
    // Bounded, so that quants of numbers near 0 are, too.
    (scale, if largest > 0.0 { (127.0 / largest).min(f32::MAX) } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::guarded::on_both_sides;
    use crate::kernels::{Isa, Threads, reference};

    fn rows(count: usize, columns: usize) -> Rows {
        let mut x = Rows::new(columns);
        x.resize(count);
        for row in 0..count {
            x.row_mut(row).copy_from_slice(&reference::random(row as u64, columns));
        }
        x
    }

    #[test]
    fn quantized_activations_equal_the_reference_on_all_isas() {
        on_both_sides(compare);
    }

    fn compare() {
        for count in [1, 15, 16, 17, 40] {
            let x = rows(count, 96);
            for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
                let mut quantized = QuantizedRows::new();
                let compute = Compute { isa, threads: Threads::new(threads).unwrap() };
                match threads {
                    1 => quantized.fill_from(&compute, &x),
                    _ => {
                        let buffers = RowBuffers::new(&compute.threads, x.columns());
                        let copy = |row: usize, to: &mut [f32]| to.copy_from_slice(x.row(row));
                        quantized.fill(&compute, x.shape(), &buffers, copy);
                    }
                }
                for row in 0..count {
                    let expected = reference::quantize(x.row(row));
                    for (block, expected) in quantized.group(row / GROUP).iter().zip(expected) {
                        let slot = row % GROUP;
                        let sum: i32 = expected.quants.iter().map(|&quant| i32::from(quant)).sum();
                        assert_eq!(block.quants[slot], expected.quants, "{isa}, row {row}");
                        assert_eq!(block.scales[slot], expected.scale);
                        assert_eq!(block.weighted_sums[slot], expected.scale * sum as f32);
                        assert_eq!(block.zeros[slot], -8 * sum);
                        assert_eq!(block.half_zeros[0][slot] + block.half_zeros[1][slot], -8 * sum);
                    }
                }
            }
        }
    }

    #[test]
    fn quantized_activations_show_non_finite_and_tiny_values() {
        on_both_sides(look_for_what_is_no_number);
    }

    fn look_for_what_is_no_number() {
        for isa in Isa::available() {
            let compute = Compute { isa, threads: Threads::new(1).unwrap() };
            for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = rows(1, 64);
                x.row_mut(0)[37] = wrong;
                let mut quantized = QuantizedRows::new();
                quantized.fill_from(&compute, &x);
                assert!(quantized.group(0)[0].scales[0].is_finite() && !quantized.group(0)[1].scales[0].is_finite());
            }
            for tiny in [0.0, 1e-45, -1e-38, 1e-37, -3e-37] {
                let mut x = rows(1, 32);
                x.row_mut(0).fill(tiny);
                let mut quantized = QuantizedRows::new();
                quantized.fill_from(&compute, &x);
                let block = &quantized.group(0)[0];
                assert!(block.weighted_sums[0].abs() <= 1e-35 && block.zeros[0].abs() <= 8 * 127 * 32, "{isa} {tiny}");
            }
        }
    }
}
