//! What one task of attention computes.

use std::ops::Range;

use crate::kernels::SharedRows;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, exp2_of_negative};
use crate::kernels::pairs::{Number, Pairs, numbers, numbers_mut};

use super::super::tile::{Extent, Operand, product, shape as tile_shape};
use super::load::{depth_of, load_tile};
use super::{Attention, AttentionShape, KEY_STRIDE, KEYS, KeyTiles, Partial, SCORE_ROWS, SCORE_STRIDE, Scratch, Task};

per_isa! {
    /// The queries, rounded to bfloat16.
    pub(super) fn load_queries_rounded(task: Task<'_>, scratch: &mut Scratch) = load_queries_of<Pairs>
}

per_isa! {
    /// The queries, in single precision.
    pub(super) fn load_queries_single(task: Task<'_>, scratch: &mut Scratch) = load_queries_of<Singles>
}

per_isa! {
    /// One split, with numbers rounded to bfloat16.
    pub(super) fn attend_rounded(
        task: Task<'_>,
        split: usize,
        ahead: &mut KeyTiles<'_>,
        scratch: &mut Scratch,
        partial: &mut Partial,
    ) = attend_of<Pairs>
}

per_isa! {
    /// One split, in single precision.
    pub(super) fn attend_single(
        task: Task<'_>,
        split: usize,
        ahead: &mut KeyTiles<'_>,
        scratch: &mut Scratch,
        partial: &mut Partial,
    ) = attend_of<Singles>
}

#[inline(always)]
fn attend_of<P: Pairs>(
    task: Task<'_>,
    split: usize,
    ahead: &mut KeyTiles<'_>,
    scratch: &mut Scratch,
    partial: &mut Partial,
) {
    let shape = task.operands.shape;
    let tile = task.tile;
    let rows = task.rows();
    let group = shape.group();
    let Range { start, end } = tile.positions(shape, split);
    for keys in task.key_tiles(split) {
        load_tile::<P>(&keys, ahead.next().as_ref(), keys.positions.start - start, scratch);
    }

    // Rows before this one see nothing of the split.
    let first = start.saturating_sub(tile.position) * group;
    partial.clear(shape, first);
    // SAFETY: this thread has no other shape; more rows than 32 are whole tiles, for the scratch
    // buffers have room for them.
    let _shape = unsafe { tile_shape::<P>(rows) };
    for row in (first..rows).step_by(SCORE_ROWS) {
        let rows = SCORE_ROWS.min(rows - row);
        let seen = |row: usize| shape.seen(tile.position + row / group);
        // What the last row sees is all that any of them sees.
        let positions = start..end.min(seen(row + rows - 1).end);
        // Of keys beyond the last, scores are not looked at.
        let columns = positions.len().next_multiple_of(LANES);
        // Inputs that matrix tiles have beyond the last are zeros, so that their sums do not show
        // how many there are.
        let depth = depth_of::<P>(positions.len());
        let scores = Extent { rows, depth: depth_of::<P>(shape.head_dim), columns, accumulate: false };
        let values = Extent { rows, depth, columns: shape.padded_dim(), accumulate: false };
        // SAFETY: the scratch buffers have these extents, and they are borrowed exclusively.
        unsafe {
            let queries = matrix(numbers::<P::Input>(&scratch.queries), row, shape.padded_depth());
            let keys = matrix(numbers::<P::Weight>(&scratch.keys), 0, 2 * KEY_STRIDE);
            let to = matrix_mut(&mut scratch.scores, 0, SCORE_STRIDE);
            product::<P>(scores, queries, keys, to, None);
            weigh::<P>(row..row + rows, seen, positions, depth, scratch, partial);
            let weights = matrix(numbers::<P::Input>(&scratch.weights), 0, SCORE_STRIDE);
            let v = matrix(numbers::<P::Weight>(&scratch.values), 0, 2 * shape.padded_dim());
            let to = matrix_mut(&mut partial.out, row, shape.padded_dim());
            product::<P>(values, weights, v, to, None);
        }
    }
}

fn matrix<N>(buffer: &[N], row: usize, stride: usize) -> Operand<*const N> {
    Operand { at: buffer[row * stride..].as_ptr(), stride }
}

fn matrix_mut(buffer: &mut [f32], row: usize, stride: usize) -> Operand<*mut f32> {
    Operand { at: buffer[row * stride..].as_mut_ptr(), stride }
}

/// Copies the queries, ordered by (token, head of the group), scaled so that scores are powers of
/// 2.
#[inline(always)]
fn load_queries_of<P: Pairs>(task: Task<'_>, scratch: &mut Scratch) {
    let Task { operands, tile, kv_head } = task;
    let shape = operands.shape;
    let group = shape.group();
    let dim = shape.head_dim;
    let depth = shape.padded_depth();
    let scale = P::Floats::splat(std::f32::consts::LOG2_E / (dim as f32).sqrt());
    let queries = numbers_mut::<P::Input>(&mut scratch.queries);
    for (row, to) in queries.chunks_exact_mut(depth).take(task.rows()).enumerate() {
        let head = &operands.q.row(tile.row + row / group)[(kv_head * group + row % group) * dim..][..dim];
        for (x, to) in head.chunks(LANES).zip(to.chunks_exact_mut(LANES)) {
            // SAFETY: 16 elements.
            unsafe { P::store_inputs(P::Floats::read(x).mul(scale), to.as_mut_ptr()) }
        }
    }
}

/// Turns the scores of some rows and one split's positions into weights, as many as `depth`, and
/// has their sums and the largest scores. What a row does not see weighs nothing.
#[inline(always)]
fn weigh<P: Pairs>(
    rows: Range<usize>,
    seen: impl Fn(usize) -> Range<usize>,
    positions: Range<usize>,
    depth: usize,
    scratch: &mut Scratch,
    partial: &mut Partial,
) {
    // What each row sees, in whole tiles of keys.
    let mut tiles = [(0, 0); SCORE_ROWS];
    // Loops, not closures: a closure does not inherit the caller's instruction set, and what it
    // calls stays a call.
    for ((row, scores), tiles) in rows.clone().zip(scratch.scores.chunks_exact_mut(SCORE_STRIDE)).zip(&mut tiles) {
        let seen = seen(row);
        let from = seen.start.saturating_sub(positions.start).min(positions.len());
        let to = (seen.end - positions.start).min(positions.len());
        let mut largest = P::Floats::splat(f32::MIN);
        if from < to {
            let first = from / KEYS * KEYS;
            let last = to.next_multiple_of(KEYS);
            scores[first..from].fill(f32::NEG_INFINITY);
            scores[to..last].fill(f32::NEG_INFINITY);
            for tile in scores[first..last].chunks_exact(KEYS) {
                let [a, b, c, d] = vectors::<P::Floats>(tile);
                largest = largest.max(a.max(b).max(c.max(d)));
            }
            *tiles = (first, last);
        }
        partial.maxima[row] = largest.largest();
    }
    let weights = numbers_mut::<P::Input>(&mut scratch.weights).chunks_exact_mut(SCORE_STRIDE);
    let scores = scratch.scores.chunks_exact(SCORE_STRIDE);
    for (((row, scores), weights), (first, last)) in rows.zip(scores).zip(weights).zip(tiles) {
        let max = P::Floats::splat(partial.maxima[row]);
        let mut total = P::Floats::splat(0.0);
        for (tile, to) in scores[first..last].chunks_exact(KEYS).zip(weights[first..last].chunks_exact_mut(KEYS)) {
            let mut s = vectors::<P::Floats>(tile);
            for (s, to) in s.iter_mut().zip(to.chunks_exact_mut(LANES)) {
                *s = exp2_of_negative(s.sub(max));
                // SAFETY: 16 elements.
                unsafe { P::store_inputs(*s, to.as_mut_ptr()) }
            }
            total = total.add(s[0].add(s[1]).add(s[2].add(s[3])));
        }
        weights[..first].fill(P::Input::of(0.0));
        weights[last..depth.max(last)].fill(P::Input::of(0.0));
        total.write(&mut partial.sums[row * LANES..][..LANES]);
    }
}

/// A row's scores of one tile of keys.
#[inline(always)]
fn vectors<V: F32x16>(tile: &[f32]) -> [V; KEYS / LANES] {
    let mut s = [V::splat(0.0); KEYS / LANES];
    for (s, from) in s.iter_mut().zip(tile.chunks_exact(LANES)) {
        *s = V::read(from);
    }
    s
}

per_isa! {
    /// Adds the sums of some rows over later positions to those over earlier ones.
    pub(super) fn merge(shape: &AttentionShape, rows: usize, later: &Partial, total: &mut Partial) = merge_of<Floats>
}

#[inline(always)]
fn merge_of<V: F32x16>(shape: &AttentionShape, rows: usize, later: &Partial, total: &mut Partial) {
    let padded = shape.padded_dim();
    for row in 0..rows {
        let old = total.maxima[row];
        let new = later.maxima[row];
        let max = if new > old { new } else { old };
        let keep = exp2_of_negative(V::splat(old - max));
        let take = exp2_of_negative(V::splat(new - max));
        total.maxima[row] = max;
        let from = &later.sums[row * LANES..][..LANES];
        let to = &mut total.sums[row * LANES..][..LANES];
        V::read(from).mul_add(take, V::read(to).mul(keep)).write(to);
        let rows = later.out[row * padded..][..padded].chunks_exact(LANES);
        for (from, to) in rows.zip(total.out[row * padded..][..padded].chunks_exact_mut(LANES)) {
            V::read(from).mul_add(take, V::read(to).mul(keep)).write(to);
        }
    }
}

per_isa! {
    /// Divides by the sums of the weights, which are at least 1: a row sees itself.
    pub(super) fn finish(task: Task<'_>, total: &Partial, out: &SharedRows<'_>) = finish_of<Floats>
}

#[inline(always)]
fn finish_of<V: F32x16>(task: Task<'_>, total: &Partial, out: &SharedRows<'_>) {
    let Task { operands: Attention { shape, .. }, tile, kv_head } = task;
    let group = shape.group();
    let dim = shape.head_dim;
    let padded = shape.padded_dim();
    for row in 0..task.rows() {
        let sum = V::splat(V::read(&total.sums[row * LANES..][..LANES]).sum());
        let head = kv_head * group + row % group;
        // SAFETY: this task's rows and heads; no other task has them.
        let to = unsafe { out.part(tile.row + row / group, head * dim, dim) };
        for (from, to) in total.out[row * padded..][..padded].chunks_exact(LANES).zip(to.chunks_mut(LANES)) {
            V::read(from).div(sum).write(to);
        }
    }
}
