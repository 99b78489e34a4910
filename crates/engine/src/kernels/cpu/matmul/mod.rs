//! Y = X W^T, with W packed at load.
//!
//! Vectors run over outputs, so that each output is one chain of fused multiply-adds in the order
//! of k. It has the same bits whatever the width of a register, the number of rows or the thread.
//! bfloat16 weights take activations that are rounded to bfloat16; the others take them as they
//! are.

mod kernel;
mod packed;
#[cfg(test)]
mod tests;

use std::ops::Range;

use half::bf16;

use crate::kernels::{Compute, RowShape, Rows, SharedRows, Threads};

use super::linear::Destination;
use super::product_buffers::ProductBuffers;
use super::rounded::RoundedRows;
use super::tile::{Operand, TILE_BLOCK};
use kernel::{gated_products, rounded_products, single_products};
pub(crate) use packed::PackedMatrix;
use packed::TILE_OUTPUTS;

/// Rows computed against a packed tile before the next packed tile: their activations (some 400 KB
/// in single precision) stay in the second-level cache.
const ROW_BLOCK: usize = 96;
/// Bytes of activations that matrix tiles take against a packed tile before the next. As many as
/// leave room in a second-level cache of 2 MB, for weights are read again for each such block.
const TILE_ROW_BYTES: usize = 768 << 10;
/// Multiply-adds below which waking another thread does not pay (some 10 us of work).
const PARALLEL_WORK: usize = 200_000;

/// Y = X W^T, or Y += X W^T, in single precision: `x` is `[rows][inputs]`.
pub(super) fn single_matmul(compute: &Compute, x: &Rows, w: &PackedMatrix, to: Destination<'_>) {
    assert!(!w.is_rounded() && x.columns() == w.inputs, "inputs of a matmul");
    let shape = TaskShape {
        rows: x.rows(),
        row_block: ROW_BLOCK,
        packed_tiles: w.outputs.div_ceil(TILE_OUTPUTS),
        work: w.outputs * w.inputs,
    };
    let isa = compute.isa;
    shape.for_each(&compute.threads, |_, task| single_products(isa, x, w, to, task));
}

/// Where products of bfloat16 go.
#[derive(Clone, Copy)]
enum Output<'a> {
    Rows(Destination<'a>),
    /// silu(gate) x up, rounded.
    Gated(SharedRows<'a, bf16>, &'a ProductBuffers),
}

/// Y = X W^T, or Y += X W^T, of bfloat16.
pub(super) fn rounded_matmul(compute: &Compute, x: &RoundedRows, w: &PackedMatrix, to: Destination<'_>) {
    rounded_tasks(compute, x, w, Output::Rows(to));
}

/// silu(gate) x up, rounded, where gate and up are the halves of X W^T, each of whole packed tiles.
/// Neither of them is ever in memory as a whole.
pub(super) fn gated_matmul(
    compute: &Compute,
    x: &RoundedRows,
    w: &PackedMatrix,
    buffers: &ProductBuffers,
    to: &mut RoundedRows,
) {
    assert!(w.halves_are_whole_tiles(), "halves of whole packed tiles");
    to.resize(RowShape { rows: x.rows(), columns: w.outputs / 2 });
    rounded_tasks(compute, x, w, Output::Gated(to.share(), buffers));
}

fn rounded_tasks(compute: &Compute, x: &RoundedRows, w: &PackedMatrix, to: Output<'_>) {
    assert!(w.is_rounded(), "weights of bfloat16");
    let isa = compute.isa;
    let outputs = if let Output::Gated(..) = to { w.outputs / 2 } else { w.outputs };
    let row_block = if isa.has_tiles() {
        (TILE_ROW_BYTES / (size_of::<bf16>() * w.inputs) / TILE_BLOCK).max(1) * TILE_BLOCK
    } else {
        ROW_BLOCK
    };
    let shape = TaskShape {
        rows: x.rows(),
        row_block,
        packed_tiles: outputs.div_ceil(TILE_OUTPUTS),
        work: w.outputs * w.inputs,
    };
    shape.for_each(&compute.threads, |worker, task| {
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
