//! Y = X W^T, with W packed at load.
//!
//! ```text
//! W of the file     [n][k]
//! packed            [n / 32][k / 2][2 x 16 outputs, pairs of inputs (see `Pairs`)]     the last panel is padded with zero columns, and so is an odd k. Halves stay halves
//! ```
//!
//! Vectors run over outputs, so that each output is one chain of fused multiply-adds in the order of k: the same bits whatever the width of a register, the number of rows
//! or the thread. bfloat16 weights take activations that are rounded to bfloat16; the others take them as they are.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_formats::Dtype;
use half::{bf16, f16};

use crate::error::EngineError;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::pairs::{Number, PAIR, Pairs, Single, numbers, numbers_mut};
use crate::kernels::{Isa, Rows, Threads, WeightBytes, WeightMemory};

use super::linear::{Destination, Target};
use super::rounded::RoundedRows;
use super::tile::{Ahead, Extent, Operand, TILE_BLOCK, product, shape};

/// Outputs of one panel.
const PANEL: usize = 2 * LANES;
/// Weights of a panel and a pair of inputs.
const PANEL_PAIR: usize = 2 * PAIR;
/// Rows computed against a panel before the next panel: their activations (some 400 KB in single precision) stay in the second-level cache.
const ROW_BLOCK: usize = 96;
/// Inputs computed for all rows of a block before the next inputs: the panel's part (32 KB of single precision) stays in the first-level cache.
const DEPTH_BLOCK: usize = 256;
/// The same with matrix tiles, which are slow to fill and to empty (32 KB of bfloat16).
const TILE_DEPTH_BLOCK: usize = 512;
/// Multiply-adds below which waking another thread does not pay (some 10 us of work).
const PARALLEL_WORK: usize = 200_000;

/// A weight matrix, `outputs x inputs`.
pub(crate) struct PackedMatrix {
    /// F32, F16 or BF16.
    element: Dtype,
    panels: WeightBytes,
    outputs: usize,
    inputs: usize,
}

impl PackedMatrix {
    /// Packs a matrix of the type `element`, F32, F16 or BF16, whose rows `read` gives: it fills `[rows][inputs]` for a range of at most 32 outputs.
    pub fn pack(
        threads: &Threads,
        memory: &WeightMemory,
        element: Dtype,
        (outputs, inputs): (usize, usize),
        read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), EngineError> + Sync,
    ) -> Result<Self, EngineError> {
        let panel_bytes = panel_elements(inputs) * element.block_bytes();
        let mut panels = memory.zeroed(outputs.div_ceil(PANEL) * panel_bytes)?;
        let slots: Vec<_> = panels.chunks_exact_mut(panel_bytes.max(1)).map(Mutex::new).collect();
        let failed = Mutex::new(None);
        threads.for_each(slots.len(), true, |_, panel| {
            let range = panel * PANEL..outputs.min((panel + 1) * PANEL);
            let mut rows = vec![0.0; range.len() * inputs];
            let mut slot = slots[panel].lock().unwrap_or_else(PoisonError::into_inner);
            match read(range, &mut rows) {
                Ok(()) => match element {
                    Dtype::F16 => pack_panel::<f16>(&rows, inputs, numbers_mut(&mut slot)),
                    Dtype::BF16 => pack_panel::<bf16>(&rows, inputs, numbers_mut(&mut slot)),
                    _ => pack_panel::<f32>(&rows, inputs, numbers_mut(&mut slot)),
                },
                Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
            }
        });
        drop(slots);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Self { element, panels, outputs, inputs }),
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Whether products take rounded activations.
    pub fn is_rounded(&self) -> bool {
        self.element == Dtype::BF16
    }

    /// One row of the weight matrix: an embedding, where the matrix is the head too.
    pub fn copy_row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.outputs && to.len() == self.inputs, "row {row} of {}", self.outputs);
        match self.element {
            Dtype::F16 => self.copy_typed::<f16>(row, to),
            Dtype::BF16 => self.copy_typed::<bf16>(row, to),
            _ => self.copy_typed::<f32>(row, to),
        }
    }

    fn copy_typed<N: Number>(&self, row: usize, to: &mut [f32]) {
        let panel = &numbers::<N>(&self.panels)[row / PANEL * panel_elements(self.inputs)..];
        for (input, x) in to.iter_mut().enumerate() {
            *x = panel[place::<N>(row % PANEL, input)].to_f32();
        }
    }
}

/// Weights of a panel, an odd number of inputs made even.
fn panel_elements(inputs: usize) -> usize {
    inputs.div_ceil(2) * PANEL_PAIR
}

/// Where a weight lies in its panel.
fn place<N: Number>(output: usize, input: usize) -> usize {
    input / 2 * PANEL_PAIR + output / LANES * PAIR + N::place(output % LANES, input % 2)
}

fn pack_panel<N: Number>(rows: &[f32], inputs: usize, panel: &mut [N]) {
    for (output, row) in rows.chunks_exact(inputs).enumerate() {
        for (input, &x) in row.iter().enumerate() {
            panel[place::<N>(output, input)] = N::of(x);
        }
    }
}

/// Y = X W^T, or Y += X W^T: X, `[rows][inputs]`, is `rounded` where the matrix asks for it, else `x`.
pub(super) fn matmul(
    isa: Isa,
    threads: &Threads,
    x: &Rows,
    rounded: &RoundedRows,
    w: &PackedMatrix,
    to: Destination<'_>,
) {
    let rows = if w.is_rounded() { rounded.rows() } else { x.rows() };
    assert!(w.is_rounded() || x.columns() == w.inputs, "inputs of a matmul");
    let panels = w.outputs.div_ceil(PANEL);
    let parallel = rows * w.inputs * w.outputs >= PARALLEL_WORK;
    // Some tasks per thread, so that one that was late does not hold up the rest.
    let group = if parallel { panels.div_ceil(threads.count() * 4) } else { panels };
    let groups = panels.div_ceil(group);
    let tasks = rows.div_ceil(ROW_BLOCK) * groups;
    threads.for_each(tasks, parallel, |_, task| {
        let (first_row, first, next) = (task / groups * ROW_BLOCK, task % groups * group, task + threads.count());
        let part = Part {
            rows: first_row..rows.min(first_row + ROW_BLOCK),
            panels: first..panels.min(first + group),
            then: if next < tasks { next % groups * group } else { panels },
        };
        match w.is_rounded() {
            true => rounded_products(isa, rounded, w, to, part),
            false => single_products(isa, x, w, to, part),
        }
    });
}

/// What one task computes: some rows against some panels.
struct Part {
    rows: Range<usize>,
    panels: Range<usize>,
    /// The first panel of the thread's next task, most likely; the number of panels where there is none.
    then: usize,
}

per_isa! {
    fn rounded_products(x: &RoundedRows, w: &PackedMatrix, to: Destination<'_>, part: Part) = rounded_products_of<Pairs>
}

#[inline(always)]
fn rounded_products_of<P: Pairs<Input = bf16>>(x: &RoundedRows, w: &PackedMatrix, to: Destination<'_>, part: Part) {
    typed_products::<P>(Operand { at: x.as_ptr(), stride: x.stride() }, w, to, part);
}

per_isa! {
    fn single_products(x: &Rows, w: &PackedMatrix, to: Destination<'_>, part: Part) = single_products_of<Floats>
}

#[inline(always)]
fn single_products_of<V: F32x16>(x: &Rows, w: &PackedMatrix, to: Destination<'_>, part: Part) {
    let x = Operand { at: x.as_ptr(), stride: x.stride() };
    match w.element {
        Dtype::F16 => typed_products::<Single<V, f16>>(x, w, to, part),
        _ => typed_products::<Single<V, f32>>(x, w, to, part),
    }
}

/// `x` has the rows of the part.
#[inline(always)]
fn typed_products<P: Pairs>(x: Operand<*const P::Input>, w: &PackedMatrix, to: Destination<'_>, part: Part) {
    let whole = if P::TILES { part.rows.len() / TILE_BLOCK * TILE_BLOCK } else { part.rows.len() };
    let middle = part.rows.start + whole;
    for rows in [part.rows.start..middle, middle..part.rows.end] {
        if !rows.is_empty() {
            // SAFETY: this thread has no other shape, and keeps this one while it computes these rows.
            let _shape = unsafe { shape::<P>(rows.len()) };
            row_products::<P>(x, w, to, Part { rows, panels: part.panels.clone(), then: part.then });
        }
    }
}

/// As [`typed_products`], of the rows that the shape of matrix tiles is for.
#[inline(always)]
fn row_products<P: Pairs>(x: Operand<*const P::Input>, w: &PackedMatrix, to: Destination<'_>, part: Part) {
    let Part { rows, panels, then } = part;
    let depth_block = if P::TILES { TILE_DEPTH_BLOCK } else { DEPTH_BLOCK };
    let Destination { y, column, target } = to;
    for panel in panels.clone() {
        let panel_elements = panel_elements(w.inputs);
        let weights = &numbers::<P::Weight>(&w.panels)[panel * panel_elements..][..panel_elements];
        // Rows of Y have room for a multiple of 16 columns, so only whole vectors are left out.
        let columns = (w.outputs - panel * PANEL).div_ceil(LANES).min(PANEL / LANES) * LANES;
        let mut depth = 0;
        while depth < w.inputs {
            let accumulate = depth > 0 || target == Target::Add;
            let extent = Extent { rows: rows.len(), depth: depth_block.min(w.inputs - depth), columns, accumulate };
            let c = Operand { at: y.at(rows.start, column + panel * PANEL, columns), stride: y.stride() };
            // SAFETY: `rows` of X, the panel's inputs from `depth` on, and this task's own part of Y.
            unsafe {
                let a = Operand { at: x.at.add(rows.start * x.stride + depth), ..x };
                let b = Operand { at: weights.as_ptr().add(depth / 2 * PANEL_PAIR), stride: PANEL_PAIR };
                // The inputs that follow, or the next panel's first.
                let is_last = panel + 1 == panels.end && depth + depth_block >= w.inputs;
                let next = if is_last {
                    numbers::<P::Weight>(&w.panels).as_ptr().wrapping_add(then * panel_elements)
                } else {
                    b.at.wrapping_add(extent.depth / 2 * PANEL_PAIR)
                };
                let bytes = size_of::<P::Weight>() * PANEL_PAIR * extent.depth / 2;
                let mut ahead = Ahead::new::<P>(next.cast(), bytes, extent);
                product::<P>(extent, a, b, c, &mut ahead);
            }
            depth += depth_block;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::row_buffers::RowBuffers;
    use super::*;
    use crate::kernels::guarded::on_both_sides;
    use crate::kernels::reference;

    const ELEMENTS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

    /// Numbers in [-1, 1] of as few bits as every type has.
    fn shortened(w: &[f32]) -> Vec<f32> {
        w.iter().map(|w| (w * 128.0).round() / 128.0).collect()
    }

    fn packed(threads: &Threads, element: Dtype, w: &[f32], inputs: usize) -> PackedMatrix {
        let read = |range: Range<usize>, to: &mut [f32]| {
            to.copy_from_slice(&w[range.start * inputs..range.end * inputs]);
            Ok(())
        };
        PackedMatrix::pack(threads, &WeightMemory::guarded(), element, (w.len() / inputs, inputs), read).unwrap()
    }

    #[test]
    fn equals_the_reference_bit_for_bit_over_odd_shapes() {
        on_both_sides(compare_odd_shapes);
    }

    fn compare_odd_shapes() {
        let shapes = [
            (1, 1, 1),
            (1, 33, 5),
            (2, 16, 17),
            (7, 47, 300),
            (12, 32, 64),
            (13, 100, 257),
            (15, 31, 33),
            (16, 48, 31),
            (17, 17, 15),
            (29, 65, 520),
            (33, 47, 96),
            (65, 33, 1100),
            (100, 40, 9),
        ];
        for (rows, outputs, inputs) in shapes {
            let w = reference::random(outputs as u64, outputs * inputs);
            let short = shortened(&w);
            let mut x = Rows::new(inputs);
            x.resize(rows);
            for row in 0..rows {
                x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
            }
            let cases = Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]);
            for (isa, count, element) in cases.flat_map(|(isa, n)| ELEMENTS.map(|element| (isa, n, element))) {
                let threads = Threads::new(count).unwrap();
                let w = if element == Dtype::F32 { &w } else { &short };
                let mut rounded = RoundedRows::new();
                let buffers = RowBuffers::new(&threads, inputs);
                let copy = |row: usize, to: &mut [f32]| to.copy_from_slice(x.row(row));
                rounded.fill(isa, &threads, (rows, inputs), &buffers, copy);
                let w_packed = packed(&threads, element, w, inputs);
                let mut y = Rows::new(outputs);
                y.resize(rows);
                for target in [Target::Set, Target::Add] {
                    let before: Vec<_> = (0..rows).map(|row| y.row(row).to_vec()).collect();
                    let to = Destination { y: &y.share(), column: 0, target };
                    matmul(isa, &threads, &x, &rounded, &w_packed, to);
                    for (row, before) in before.iter().enumerate() {
                        let x: Vec<_> = match element {
                            Dtype::BF16 => x.row(row).iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
                            _ => x.row(row).to_vec(),
                        };
                        let start = if target == Target::Set { vec![0.0; outputs] } else { before.clone() };
                        let in_tiles = isa.has_tiles() && element == Dtype::BF16;
                        let expected = match in_tiles {
                            true => reference::matmul_in_tiles(&start, &x, w),
                            false => reference::matmul_onto(&start, &x, w),
                        };
                        assert_eq!(
                            y.row(row),
                            expected,
                            "{isa} {element} {rows}x{outputs}x{inputs} {target:?} row {row}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_packed_row_reads_back() {
        let w = shortened(&reference::random(1, 70 * 9));
        for element in ELEMENTS {
            let packed = packed(&Threads::new(1).unwrap(), element, &w, 9);
            let mut row = [0.0; 9];
            packed.copy_row(69, &mut row);
            assert_eq!(row, w[69 * 9..]);
        }
    }

    #[test]
    fn a_failed_read_fails_the_packing() {
        let read = |range: Range<usize>, _: &mut [f32]| {
            if range.start == 32 { Err(EngineError::Model("row 32".to_owned())) } else { Ok(()) }
        };
        let (threads, memory) = (Threads::new(2).unwrap(), WeightMemory::new());
        let failed = PackedMatrix::pack(&threads, &memory, Dtype::F32, (64, 4), read).err().unwrap();
        assert_eq!(failed.to_string(), "model: row 32");
    }
}
