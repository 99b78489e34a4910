//! What one task of a product of floats computes.

use std::ops::Range;

use baton_formats::Dtype;
use half::{bf16, f16};

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::pairs::{Pairs, Single};
use crate::kernels::{Rows, SharedRows};

use super::super::linear::{Destination, Target};
use super::super::product_buffers::GATE_STRIDE;
use super::super::swiglu::gate_of;
use super::super::tile::{Ahead, Extent, Operand, TILE_BLOCK, product, shape};
use super::RowTask;
use super::packed::{PackedMatrix, TILE_OUTPUTS, TILE_PAIR};

/// Inputs computed for all rows of a block before the next inputs. The packed tile's part (32 KB of
/// single precision) stays in the first-level cache.
const DEPTH_BLOCK: usize = 256;
/// The same with matrix tiles, which are slow to fill and to empty (36 KB of bfloat16).
const TILE_DEPTH_BLOCK: usize = 576;

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
    pub(super) fn rounded_products(x: Operand<*const bf16>, w: &PackedMatrix, to: Destination<'_>, task: RowTask) = products<Pairs>
}

per_isa! {
    pub(super) fn gated_products(x: Operand<*const bf16>, w: &PackedMatrix, gates: &mut [f32], to: SharedRows<'_, bf16>, task: RowTask) = gated_products_of<Pairs>
}

per_isa! {
    pub(super) fn single_products(x: &Rows, w: &PackedMatrix, to: Destination<'_>, task: RowTask) = single_products_of<Floats>
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
        let (next, bytes) = if depth.end < w.inputs {
            w.bytes::<P::Weight>(turn.tile, depth.end..w.inputs.min(depth.end + depth_block))
        } else {
            w.bytes::<P::Weight>(turn.next, 0..depth_block.min(w.inputs))
        };
        for part in [0..whole, whole..rows.len()] {
            if part.is_empty() {
                continue;
            }
            let accumulate = start > 0 || target == Target::Add;
            let extent = Extent { rows: part.len(), depth: depth.len(), columns, accumulate };
            // Once is enough. A single register tile streams through its weights as the hardware
            // expects: with prefetch, 8 sequences in bfloat16 decoded at 0.78 times the speed.
            let prefetches = part.start == 0 && (P::TILES || part.len() > P::TILE_ROWS);
            let mut ahead = prefetches.then(|| Ahead::new::<P>(next, bytes, extent));
            // SAFETY: this thread has no other shape, and keeps this one while it computes these
            // rows; these inputs, and the caller's promise.
            unsafe {
                let _shape = shape::<P>(part.len());
                let a = Operand { at: x.at.add((rows.start + part.start) * x.stride + start), ..x };
                let c = Operand { at: c.at.add(part.start * c.stride), ..c };
                product::<P>(extent, a, b, c, ahead.as_mut());
            }
        }
    }
}
