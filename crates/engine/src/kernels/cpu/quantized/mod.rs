//! Y = X W^T, with W as quantized as its file has it, and X as signed bytes ([`QuantizedRows`]).
//!
//! ```text
//! y = sum over blocks of 32 inputs, in their order:
//!       dot = sum of quant * a                     a: quants of the activations; exact in 32-bit integers
//!       y = fma(dot * a_scale, scale, y)           where the type has a zero: dot of (quant - zero)
//!       y = fma(a_scale * sum of a, minimum, y)    where it has a minimum
//! ```
//!
//! Vectors run over outputs, so each output is one chain of operations in the order of k. It has
//! the same bits whatever the instruction set, the number of rows or the thread.

mod kernel;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::kernels::{Compute, RowShape, SharedRows};

use super::linear::Destination;
use super::product_buffers::{GATES, ProductBuffers};
use super::quantize::{BLOCK, QuantizedBlock, QuantizedRows};
use super::quantized_matrix::{QuantizedMatrix, TILE_OUTPUTS};
use super::row_buffers::GROUP;
use kernel::group_products;

/// Groups of rows computed against a packed tile before the next packed tile: their activations
/// (some 300 KB) stay in the second-level cache.
const ROW_GROUPS: usize = 8;
/// Multiply-adds below which another thread does not pay: some 3 us of work; a helper that looks
/// for work takes 1 to come.
const PARALLEL_WORK: usize = 100_000;

/// Packed tiles of the widest register tile of any instruction set.
const WIDEST_TILE: usize = 2;
/// Packed tiles of the gates that are made at once, and of their ups.
const GATED_TILES: usize = 2 * WIDEST_TILE;
const _: () = assert!(WIDEST_TILE * TILE_OUTPUTS == GATES && GATES == BLOCK);

/// Where products go.
#[derive(Clone, Copy)]
enum Output<'a> {
    Rows(Destination<'a>),
    /// silu(gate) x up, quantized.
    Gated(SharedRows<'a, QuantizedBlock>, &'a ProductBuffers),
}

/// Y = X W^T, or Y += X W^T.
pub(super) fn quantized_matmul(compute: &Compute, x: &QuantizedRows, w: &QuantizedMatrix, to: Destination<'_>) {
    quantized_tasks(compute, x, w, Output::Rows(to));
}

/// silu(gate) x up, quantized, where gate and up are the halves of X W^T, each of whole blocks.
/// Neither of them is ever in memory as a whole.
pub(super) fn gated_quantized_matmul(
    compute: &Compute,
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    buffers: &ProductBuffers,
    to: &mut QuantizedRows,
) {
    assert!(w.halves_are_blocks(), "halves of whole blocks");
    let shape = RowShape { rows: x.rows(), columns: w.outputs() / 2 };
    quantized_tasks(compute, x, w, Output::Gated(to.share(shape), buffers));
}

fn quantized_tasks(compute: &Compute, x: &QuantizedRows, w: &QuantizedMatrix, to: Output<'_>) {
    let Compute { isa, threads } = compute;
    let packed_tiles = if let Output::Gated(..) = to { w.packed_tiles() / 2 } else { w.packed_tiles() };
    let parallel = x.rows() * w.inputs() * w.outputs() >= PARALLEL_WORK;
    // Some tasks per thread, so that one that was late does not hold up the rest; whole register
    // tiles each.
    let wanted_runs = threads.count() * if x.rows() > GROUP { 16 } else { 4 };
    let run = if parallel { (packed_tiles / wanted_runs / WIDEST_TILE).max(1) * WIDEST_TILE } else { packed_tiles };
    let runs = packed_tiles.div_ceil(run);
    let run_of = |index: usize| index % runs * run..packed_tiles.min((index % runs + 1) * run);
    let groups = x.rows().div_ceil(GROUP);
    let tasks = groups.div_ceil(ROW_GROUPS) * runs;
    threads.for_each(tasks, parallel, |worker, index| {
        let first_group = index / runs * ROW_GROUPS;
        let next = index + threads.count();
        let task = GroupTask {
            groups: first_group..groups.min(first_group + ROW_GROUPS),
            packed_tiles: run_of(index),
            then: if next < tasks { run_of(next) } else { 0..0 },
        };
        let mut buffer = match to {
            Output::Rows(_) => None,
            Output::Gated(_, buffers) => Some(buffers.lock(worker, task.groups.len() * GROUP)),
        };
        let gates = buffer.as_mut().map_or(&mut [][..], |gates| &mut gates[..]);
        group_products(*isa, x, w, gates, to, task);
    });
}

/// What one task computes: some groups of rows against some packed tiles.
struct GroupTask {
    groups: Range<usize>,
    /// Of gates, if there are gates.
    packed_tiles: Range<usize>,
    /// The packed tiles of the thread's next task, most likely.
    then: Range<usize>,
}

/// Packed tiles that a task takes at a time.
struct TileStep {
    packed_tiles: Range<usize>,
    /// The first one's place among those that belong together: gates and their ups.
    place: usize,
}

impl GroupTask {
    /// The `step`th packed tiles of a task that takes `most` at a time. Of two packed tiles of
    /// gates, these and then those of the ups, the first of which is `ups`.
    #[inline(always)]
    fn step(&self, step: usize, most: usize, ups: Option<usize>) -> Option<TileStep> {
        let at = step * most;
        let Some(ups) = ups else {
            let first = self.packed_tiles.start + at;
            let packed_tiles = first..self.packed_tiles.end.min(first + most);
            return (first < self.packed_tiles.end).then_some(TileStep { packed_tiles, place: 0 });
        };
        let gate = self.packed_tiles.start + at / GATED_TILES * WIDEST_TILE + at % WIDEST_TILE;
        let place = at % GATED_TILES;
        let first = if place < WIDEST_TILE { gate } else { ups + gate };
        (gate < self.packed_tiles.end).then_some(TileStep { packed_tiles: first..first + most, place })
    }
}
