//! Y = X W^T, with W packed at load.
//!
//! ```text
//! W of the file     [n][k]
//! packed            [n / 32][k / 2][2 x 16 outputs, pairs of inputs (see `Pairs`)]     the last packed_tile is padded with zero columns, and so is an odd k. Halves stay halves
//! ```
//!
//! Vectors run over outputs, so that each output is one chain of fused multiply-adds in the order
//! of k. It has the same bits whatever the width of a register, the number of rows or the thread.
//! bfloat16 weights take activations that are rounded to bfloat16; the others take them as they
//! are.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_formats::Dtype;
use half::{bf16, f16};

use crate::error::EngineError;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::pairs::{Number, PAIR, Pairs, Single, numbers, numbers_mut};
use crate::kernels::{Isa, RowShape, Rows, SharedRows, Threads, WeightBytes, WeightMemory};

use super::linear::{Destination, Target, WeightShape};
use super::product_buffers::{GATE_STRIDE, GATES, ProductBuffers};
use super::rounded::RoundedRows;
use super::swiglu::gate_of;
use super::tile::{Ahead, Extent, Operand, TILE_BLOCK, product, shape};

/// Outputs of one packed tile.
const TILE_OUTPUTS: usize = 2 * LANES;
const _: () = assert!(TILE_OUTPUTS == GATES);
/// Weights of a packed tile and a pair of inputs.
const TILE_PAIR: usize = 2 * PAIR;
/// Rows computed against a packed tile before the next packed tile: their activations (some 400 KB
/// in single precision) stay in the second-level cache.
const ROW_BLOCK: usize = 96;
/// Inputs computed for all rows of a block before the next inputs. The packed tile's part (32 KB of
/// single precision) stays in the first-level cache.
const DEPTH_BLOCK: usize = 256;
/// The same with matrix tiles, which are slow to fill and to empty (36 KB of bfloat16).
const TILE_DEPTH_BLOCK: usize = 576;
/// Bytes of activations that matrix tiles take against a packed tile before the next. As many as
/// leave room in a second-level cache of 2 MB, for weights are read again for each such block.
const TILE_ROW_BYTES: usize = 768 << 10;
/// Multiply-adds below which waking another thread does not pay (some 10 us of work).
const PARALLEL_WORK: usize = 200_000;

/// A weight matrix, `outputs x inputs`.
pub(crate) struct PackedMatrix {
    /// F32, F16 or BF16.
    element: Dtype,
    packed_tiles: WeightBytes,
    outputs: usize,
    inputs: usize,
}

impl PackedMatrix {
    /// Packs a matrix of the type `element`, F32, F16 or BF16. `read` gives its rows: it fills
    /// `[rows][inputs]` for a range of at most 32 outputs.
    pub fn pack(
        threads: &Threads,
        memory: &WeightMemory,
        element: Dtype,
        shape: WeightShape,
        read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), EngineError> + Sync,
    ) -> Result<Self, EngineError> {
        let WeightShape { outputs, inputs } = shape;
        let tile_bytes = packed_elements(inputs) * element.block_bytes();
        let mut packed_tiles = memory.zeroed(outputs.div_ceil(TILE_OUTPUTS) * tile_bytes)?;
        let slots: Vec<_> = packed_tiles.chunks_exact_mut(tile_bytes.max(1)).map(Mutex::new).collect();
        let failed = Mutex::new(None);
        threads.for_each(slots.len(), true, |_, packed_tile| {
            let range = packed_tile * TILE_OUTPUTS..outputs.min((packed_tile + 1) * TILE_OUTPUTS);
            let mut rows = vec![0.0; range.len() * inputs];
            let mut slot = slots[packed_tile].lock().unwrap_or_else(PoisonError::into_inner);
            match read(range, &mut rows) {
                Ok(()) => match element {
                    Dtype::F16 => pack_tile::<f16>(&rows, inputs, numbers_mut(&mut slot)),
                    Dtype::BF16 => pack_tile::<bf16>(&rows, inputs, numbers_mut(&mut slot)),
                    _ => pack_tile::<f32>(&rows, inputs, numbers_mut(&mut slot)),
                },
                Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
            }
        });
        drop(slots);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Self { element, packed_tiles, outputs, inputs }),
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

    /// Whether each half of the outputs is whole packed tiles.
    pub fn halves_are_whole_tiles(&self) -> bool {
        self.outputs.is_multiple_of(2 * TILE_OUTPUTS)
    }

    /// One row of the weight matrix: an embedding, if the matrix is the head too.
    pub fn copy_row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.outputs && to.len() == self.inputs, "row {row} of {}", self.outputs);
        match self.element {
            Dtype::F16 => self.copy_typed::<f16>(row, to),
            Dtype::BF16 => self.copy_typed::<bf16>(row, to),
            _ => self.copy_typed::<f32>(row, to),
        }
    }

    fn copy_typed<N: Number>(&self, row: usize, to: &mut [f32]) {
        let packed_tile = &numbers::<N>(&self.packed_tiles)[row / TILE_OUTPUTS * packed_elements(self.inputs)..];
        for (input, x) in to.iter_mut().enumerate() {
            *x = packed_tile[place::<N>(row % TILE_OUTPUTS, input)].to_f32();
        }
    }

    /// Some inputs of a packed tile, in pairs: `[depth / 2][2 x 16 outputs, pairs]`.
    #[inline(always)]
    fn weights<N: Number>(&self, packed_tile: usize, depth: Range<usize>) -> *const N {
        let elements = packed_elements(self.inputs);
        numbers::<N>(&self.packed_tiles)[packed_tile * elements..][..elements][depth.start / 2 * TILE_PAIR..].as_ptr()
    }

    /// The memory that these are read from. The packed tile may be one past the last.
    #[inline(always)]
    fn bytes<N: Number>(&self, packed_tile: usize, depth: Range<usize>) -> (*const u8, usize) {
        let bytes = |elements: usize| elements * size_of::<N>();
        let at = bytes(packed_tile * packed_elements(self.inputs) + depth.start / 2 * TILE_PAIR);
        (self.packed_tiles.as_ptr().wrapping_add(at), bytes(depth.len() / 2 * TILE_PAIR))
    }
}

/// Weights of a packed tile, an odd number of inputs made even.
fn packed_elements(inputs: usize) -> usize {
    inputs.div_ceil(2) * TILE_PAIR
}

/// Where a weight lies in its packed tile.
fn place<N: Number>(output: usize, input: usize) -> usize {
    input / 2 * TILE_PAIR + output / LANES * PAIR + N::place(output % LANES, input % 2)
}

fn pack_tile<N: Number>(rows: &[f32], inputs: usize, packed_tile: &mut [N]) {
    for (output, row) in rows.chunks_exact(inputs).enumerate() {
        for (input, &x) in row.iter().enumerate() {
            packed_tile[place::<N>(output, input)] = N::of(x);
        }
    }
}

/// Y = X W^T, or Y += X W^T, in single precision: `x` is `[rows][inputs]`.
pub(super) fn single_matmul(isa: Isa, threads: &Threads, x: &Rows, w: &PackedMatrix, to: Destination<'_>) {
    assert!(!w.is_rounded() && x.columns() == w.inputs, "inputs of a matmul");
    let shape = TaskShape {
        rows: x.rows(),
        row_block: ROW_BLOCK,
        packed_tiles: w.outputs.div_ceil(TILE_OUTPUTS),
        work: w.outputs * w.inputs,
    };
    shape.for_each(threads, |_, task| single_products(isa, x, w, to, task));
}

/// Where products of bfloat16 go.
#[derive(Clone, Copy)]
enum Output<'a> {
    Rows(Destination<'a>),
    /// silu(gate) x up, rounded.
    Gated(SharedRows<'a, bf16>, &'a ProductBuffers),
}

/// Y = X W^T, or Y += X W^T, of bfloat16.
pub(super) fn rounded_matmul(isa: Isa, threads: &Threads, x: &RoundedRows, w: &PackedMatrix, to: Destination<'_>) {
    rounded_tasks(isa, threads, x, w, Output::Rows(to));
}

/// silu(gate) x up, rounded, where gate and up are the halves of X W^T, each of whole packed tiles.
/// Neither of them is ever in memory as a whole.
pub(super) fn gated_matmul(
    isa: Isa,
    threads: &Threads,
    x: &RoundedRows,
    w: &PackedMatrix,
    buffers: &ProductBuffers,
    to: &mut RoundedRows,
) {
    assert!(w.halves_are_whole_tiles(), "halves of whole packed tiles");
    to.resize(RowShape { rows: x.rows(), columns: w.outputs / 2 });
    rounded_tasks(isa, threads, x, w, Output::Gated(to.share(), buffers));
}

fn rounded_tasks(isa: Isa, threads: &Threads, x: &RoundedRows, w: &PackedMatrix, to: Output<'_>) {
    assert!(w.is_rounded(), "weights of bfloat16");
    let outputs = if let Output::Gated(..) = to { w.outputs / 2 } else { w.outputs };
    let row_block = match isa.has_tiles() {
        true => (TILE_ROW_BYTES / (size_of::<bf16>() * w.inputs) / TILE_BLOCK).max(1) * TILE_BLOCK,
        false => ROW_BLOCK,
    };
    let shape = TaskShape {
        rows: x.rows(),
        row_block,
        packed_tiles: outputs.div_ceil(TILE_OUTPUTS),
        work: w.outputs * w.inputs,
    };
    shape.for_each(threads, |worker, task| {
        let x = Operand { at: x.as_ptr(), stride: x.stride() };
        match to {
            Output::Rows(to) => rounded_products(isa, x, w, to, task),
            Output::Gated(to, buffers) => {
                let mut gates = buffers.lock(worker, task.rows.len().next_multiple_of(TILE_BLOCK));
                gated_products(isa, x, w, &mut gates, to, task);
            }
        }
    });
}

/// How a product is cut into tasks: blocks of rows, and groups of packed tiles.
struct TaskShape {
    rows: usize,
    /// Most rows of a task.
    row_block: usize,
    packed_tiles: usize,
    /// Multiply-adds per row.
    work: usize,
}

impl TaskShape {
    /// Runs `work(worker, task)` for each task.
    fn for_each(self, threads: &Threads, work: impl Fn(usize, RowTask) + Sync) {
        let Self { rows, packed_tiles, .. } = self;
        let parallel = rows * self.work >= PARALLEL_WORK;
        // Some tasks per thread, so that one that was late does not hold up the rest: of few packed
        // tiles each, then of few rows.
        let group = if parallel { packed_tiles.div_ceil(threads.count() * 4) } else { packed_tiles };
        let groups = packed_tiles.div_ceil(group);
        let blocks = if parallel { (threads.count() * 2).div_ceil(groups) } else { 1 };
        let row_block = self.row_block.min(rows.div_ceil(blocks).max(1).next_multiple_of(TILE_BLOCK));
        let tasks = rows.div_ceil(row_block) * groups;
        threads.for_each(tasks, parallel, |worker, index| {
            let first_row = index / groups * row_block;
            let first = index % groups * group;
            let next = index + threads.count();
            let task = RowTask {
                rows: first_row..rows.min(first_row + row_block),
                packed_tiles: first..packed_tiles.min(first + group),
                then: if next < tasks { next % groups * group } else { packed_tiles },
            };
            work(worker, task);
        });
    }
}

/// What one task computes: some rows against some packed tiles.
struct RowTask {
    rows: Range<usize>,
    packed_tiles: Range<usize>,
    /// The first packed tile of the thread's next task, most likely; the number of packed tiles if
    /// there is none.
    then: usize,
}

impl RowTask {
    /// The packed tile that follows, most likely.
    fn after(&self, packed_tile: usize) -> usize {
        if packed_tile + 1 < self.packed_tiles.end { packed_tile + 1 } else { self.then }
    }
}

/// A packed tile, and the one that will be asked for next.
#[derive(Clone, Copy)]
struct TileTurn {
    tile: usize,
    next: usize,
}

/// The columns that a packed tile's product goes to.
#[derive(Clone, Copy)]
struct TileOutput {
    c: Operand<*mut f32>,
    columns: usize,
    target: Target,
}

// Each is compiled apart: as one function they would take minutes.
per_isa! {
    fn rounded_products(x: Operand<*const bf16>, w: &PackedMatrix, to: Destination<'_>, task: RowTask) = products<Pairs>
}

per_isa! {
    fn gated_products(x: Operand<*const bf16>, w: &PackedMatrix, gates: &mut [f32], to: SharedRows<'_, bf16>, task: RowTask) = gated_products_of<Pairs>
}

per_isa! {
    fn single_products(x: &Rows, w: &PackedMatrix, to: Destination<'_>, task: RowTask) = single_products_of<Floats>
}

#[inline(always)]
fn single_products_of<V: F32x16>(x: &Rows, w: &PackedMatrix, to: Destination<'_>, task: RowTask) {
    let x = Operand { at: x.as_ptr(), stride: x.stride() };
    match w.element {
        Dtype::F16 => products::<Single<V, f16>>(x, w, to, task),
        _ => products::<Single<V, f32>>(x, w, to, task),
    }
}

/// `x` has the rows of the task.
#[inline(always)]
fn products<P: Pairs>(x: Operand<*const P::Input>, w: &PackedMatrix, to: Destination<'_>, task: RowTask) {
    let Destination { y, column, target } = to;
    for tile in task.packed_tiles.clone() {
        // Rows of Y have room for a multiple of 16 columns, so only whole vectors are left out.
        let columns = (w.outputs - tile * TILE_OUTPUTS).div_ceil(LANES).min(TILE_OUTPUTS / LANES) * LANES;
        let c = Operand { at: y.at(task.rows.start, column + tile * TILE_OUTPUTS, columns), stride: y.stride() };
        let turn = TileTurn { tile, next: task.after(tile) };
        // SAFETY: these rows of X, and this task's own part of Y.
        unsafe { tile_product::<P>(x, &task.rows, w, turn, TileOutput { c, columns, target }) };
    }
}

#[inline(always)]
fn gated_products_of<P: Pairs<Input = bf16, Weight = bf16>>(
    x: Operand<*const bf16>,
    w: &PackedMatrix,
    gates: &mut [f32],
    to: SharedRows<'_, bf16>,
    task: RowTask,
) {
    let rows = &task.rows;
    let half = w.outputs / 2 / TILE_OUTPUTS;
    for tile in task.packed_tiles.clone() {
        let gate = TileTurn { tile, next: half + tile };
        let up = TileTurn { tile: half + tile, next: task.after(tile) };
        let c = Operand { at: gates.as_mut_ptr(), stride: GATE_STRIDE };
        // SAFETY: these rows of X; the buffer has room for as many.
        unsafe {
            tile_product::<P>(x, rows, w, gate, TileOutput { c, columns: TILE_OUTPUTS, target: Target::Set });
            let c = Operand { at: c.at.add(TILE_OUTPUTS), ..c };
            tile_product::<P>(x, rows, w, up, TileOutput { c, columns: TILE_OUTPUTS, target: Target::Set });
        }
        for (row, from) in rows.clone().zip(gates.chunks_exact(GATE_STRIDE)) {
            let (gate, up) = from.split_at(TILE_OUTPUTS);
            let mut column = tile * TILE_OUTPUTS;
            for (gate, up) in gate.chunks_exact(LANES).zip(up.chunks_exact(LANES)) {
                let gated = gate_of(P::Floats::read(gate), P::Floats::read(up));
                // SAFETY: 16 columns of this task's own.
                unsafe { P::store_inputs(gated, to.at(row, column, LANES)) }
                column += LANES;
            }
        }
    }
}

/// Rows `rows` of X against one packed tile.
///
/// # Safety
/// These rows of `x` can be read, and the columns of as many rows of `to` written, which nothing
/// else touches.
#[inline(always)]
unsafe fn tile_product<P: Pairs>(
    x: Operand<*const P::Input>,
    rows: &Range<usize>,
    w: &PackedMatrix,
    turn: TileTurn,
    to: TileOutput,
) {
    let TileOutput { c, columns, target } = to;
    let depth_block = if P::TILES { TILE_DEPTH_BLOCK } else { DEPTH_BLOCK };
    // Whole blocks of matrix tiles, and the rest.
    let whole = if P::TILES { rows.len() / TILE_BLOCK * TILE_BLOCK } else { rows.len() };
    for start in (0..w.inputs).step_by(depth_block) {
        let depth = start..w.inputs.min(start + depth_block);
        let b = Operand { at: w.weights::<P::Weight>(turn.tile, depth.clone()), stride: TILE_PAIR };
        // The inputs that follow, or the next packed tile's first.
        let (next, bytes) = match depth.end < w.inputs {
            true => w.bytes::<P::Weight>(turn.tile, depth.end..w.inputs.min(depth.end + depth_block)),
            false => w.bytes::<P::Weight>(turn.next, 0..depth_block.min(w.inputs)),
        };
        for part in [0..whole, whole..rows.len()] {
            if part.is_empty() {
                continue;
            }
            let accumulate = start > 0 || target == Target::Add;
            let extent = Extent { rows: part.len(), depth: depth.len(), columns, accumulate };
            // Once is enough.
            let mut ahead = if part.start == 0 { Ahead::new::<P>(next, bytes, extent) } else { Ahead::nothing() };
            // SAFETY: this thread has no other shape, and keeps this one while it computes these
            // rows; these inputs, and the caller's promise.
            unsafe {
                let _shape = shape::<P>(part.len());
                let a = Operand { at: x.at.add((rows.start + part.start) * x.stride + start), ..x };
                let c = Operand { at: c.at.add(part.start * c.stride), ..c };
                product::<P>(extent, a, b, c, Some(&mut ahead));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::row_buffers::RowBuffers;
    use super::super::swiglu::swiglu;
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
        let shape = WeightShape { outputs: w.len() / inputs, inputs };
        PackedMatrix::pack(threads, &WeightMemory::guarded(), element, shape, read).unwrap()
    }

    #[test]
    fn matmul_equals_the_reference_over_odd_shapes() {
        on_both_sides(compare_odd_shapes);
    }

    fn compare_odd_shapes() {
        let shapes = [
            (1, 1, 1),
            (1, 33, 5),
            (1, 300, 700),
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
                match count {
                    1 => rounded.fill_from(isa, &threads, &x),
                    _ => rounded.fill(isa, &threads, x.shape(), &buffers, copy),
                }
                let w_packed = packed(&threads, element, w, inputs);
                let mut y = Rows::new(outputs);
                y.resize(rows);
                for target in [Target::Set, Target::Add] {
                    let before: Vec<_> = (0..rows).map(|row| y.row(row).to_vec()).collect();
                    let to = Destination { y: &y.share(), column: 0, target };
                    match element {
                        Dtype::BF16 => rounded_matmul(isa, &threads, &rounded, &w_packed, to),
                        _ => single_matmul(isa, &threads, &x, &w_packed, to),
                    }
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

    /// Random rows, and the same rounded to bfloat16 in the form that products take.
    fn rounded_rows(isa: Isa, threads: &Threads, shape: RowShape) -> (Vec<Vec<f32>>, RoundedRows) {
        let RowShape { rows, columns: inputs } = shape;
        let x: Vec<_> = (0..rows).map(|row| shortened(&reference::random(900 + row as u64, inputs))).collect();
        let mut rounded = RoundedRows::new();
        let copy = |row: usize, to: &mut [f32]| to.copy_from_slice(&x[row]);
        rounded.fill(isa, threads, shape, &RowBuffers::new(threads, inputs), copy);
        (x, rounded)
    }

    fn expected_product(isa: Isa, start: &[f32], x: &[f32], w: &[f32]) -> Vec<f32> {
        if isa.has_tiles() { reference::matmul_in_tiles(start, x, w) } else { reference::matmul_onto(start, x, w) }
    }

    #[test]
    fn gated_matmul_equals_matmul_then_swiglu() {
        on_both_sides(compare_gated);
    }

    fn compare_gated() {
        for (rows, half, inputs) in [(1, 32, 32), (15, 64, 96), (17, 96, 64), (33, 32, 608), (100, 64, 32)] {
            let weights = shortened(&reference::random(3, 2 * half * inputs));
            for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let threads = Threads::new(count).unwrap();
                let w = packed(&threads, Dtype::BF16, &weights, inputs);
                let (x, rounded) = rounded_rows(isa, &threads, RowShape { rows, columns: inputs });
                let mut found = RoundedRows::new();
                gated_matmul(isa, &threads, &rounded, &w, &ProductBuffers::new(&threads), &mut found);
                assert_eq!(found.rows(), rows);
                for (row, x) in x.iter().enumerate() {
                    let both = expected_product(isa, &vec![0.0; 2 * half], x, &weights);
                    let mut expected = vec![0.0; half];
                    swiglu(Isa::SCALAR, &both[..half], &both[half..], &mut expected);
                    let expected: Vec<_> = expected.into_iter().map(<bf16 as Number>::of).collect();
                    // SAFETY: a row of so many columns.
                    let found = unsafe { std::slice::from_raw_parts(found.as_ptr().add(row * found.stride()), half) };
                    assert_eq!(found, expected, "{isa} {rows}x{half}x{inputs} row {row}");
                }
            }
        }
    }

    #[test]
    fn row_of_packed_matrix_reads_back() {
        let w = shortened(&reference::random(1, 70 * 9));
        for element in ELEMENTS {
            let packed = packed(&Threads::new(1).unwrap(), element, &w, 9);
            let mut row = [0.0; 9];
            packed.copy_row(69, &mut row);
            assert_eq!(row, w[69 * 9..]);
        }
    }

    #[test]
    fn failed_read_fails_packing_of_matrix() {
        let read = |range: Range<usize>, _: &mut [f32]| {
            if range.start == 32 { Err(EngineError::Model("row 32".to_owned())) } else { Ok(()) }
        };
        let threads = Threads::new(2).unwrap();
        let memory = WeightMemory::new();
        let shape = WeightShape { outputs: 64, inputs: 4 };
        let failed = PackedMatrix::pack(&threads, &memory, Dtype::F32, shape, read).err().unwrap();
        assert_eq!(failed.to_string(), "row 32");
    }
}
