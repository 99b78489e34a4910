//! Keys and values on their way from the arena to the products of attention: decoded, in pairs,
//! keys transposed.

use baton_types::KvDtype;

use crate::kernels::lanes::{CACHE_LINE, F32x16, LANES, prefetch_line};
use crate::kernels::pairs::{PAIR, Pairs, numbers_mut};

use super::super::kv_store::{decode, decode_whole};
use super::super::unrolled::unrolled;
use super::{KEY_STRIDE, KEYS, KeyTile, Scratch, Task};

/// Inputs of a product, as many as matrix tiles have.
#[inline(always)]
pub(super) fn depth_of<P: Pairs>(inputs: usize) -> usize {
    if P::TILES { inputs.next_multiple_of(2 * LANES) } else { inputs }
}

/// Decodes K (transposed) and V of some positions, the first of which is the split's `at`th. The
/// tile's other positions become 0, never what an earlier owner of the block left. Meanwhile it
/// prefetches the rows of a later tile, line after line as it goes. So memory is not idle, nor the
/// processor's list of what is on its way full. What a short tile leaves over is prefetched at its
/// end.
#[inline(always)]
pub(super) fn load_tile<P: Pairs>(keys: &KeyTile<'_>, later: Option<&KeyTile<'_>>, at: usize, scratch: &mut Scratch) {
    let shape = keys.task.operands.shape;
    // Other widths are rare: they ask for every 16 elements what they are, and how many.
    if !shape.head_dim.is_multiple_of(PAIR) {
        return load_tile_of::<P, false>(shape.dtype, keys, later, at, scratch);
    }
    // Compiled for each type: what a row is decoded from is asked once, not for every 16 elements.
    match shape.dtype {
        KvDtype::F16 => load_tile_of::<P, true>(KvDtype::F16, keys, later, at, scratch),
        KvDtype::Bf16 => load_tile_of::<P, true>(KvDtype::Bf16, keys, later, at, scratch),
        KvDtype::F32 => load_tile_of::<P, true>(KvDtype::F32, keys, later, at, scratch),
        KvDtype::Int8 => load_tile_of::<P, true>(KvDtype::Int8, keys, later, at, scratch),
    }
}

/// With `WHOLE` rows are whole pairs of vectors.
#[inline(always)]
fn load_tile_of<P: Pairs, const WHOLE: bool>(
    dtype: KvDtype,
    keys: &KeyTile<'_>,
    later: Option<&KeyTile<'_>>,
    at: usize,
    scratch: &mut Scratch,
) {
    let shape = keys.task.operands.shape;
    let positions = keys.positions.len();
    let dim = shape.head_dim;
    let padded = shape.padded_dim();
    let row_bytes = dtype.row_bytes(shape.head_dim);
    assert_eq!(scratch.absent.len(), row_bytes, "memory for another layout");
    let [mut k_rows, mut v_rows] = [[scratch.absent.as_ptr(); KEYS]; 2];
    find_rows(keys, &mut k_rows, &mut v_rows);
    // Any address will do for what is asked for.
    let [mut later_k, mut later_v] = [[std::ptr::null(); KEYS]; 2];
    let mut coming = 0;
    if let Some(later) = later {
        find_rows(later, &mut later_k, &mut later_v);
        coming = later.positions.len();
    }
    let mut later_k = later_k[..coming].iter();
    let mut later_v = later_v[..coming].iter();

    let values = numbers_mut::<P::Weight>(&mut scratch.values);
    let pairs = depth_of::<P>(positions).div_ceil(2);
    for (rows, to) in v_rows.as_chunks::<2>().0[..pairs].iter().zip(values[at * padded..].chunks_exact_mut(2 * padded))
    {
        ask(later_v.by_ref().take(2), row_bytes);
        for (chunk, to) in to.chunks_exact_mut(PAIR).enumerate() {
            // SAFETY: rows of the arena, or the absent one, of `dim` elements; 32 weights.
            unsafe {
                let even = element::<P::Floats, WHOLE>(dtype, rows[0], chunk * LANES, dim);
                let odd = element::<P::Floats, WHOLE>(dtype, rows[1], chunk * LANES, dim);
                P::store_weights(even, odd, to.as_mut_ptr());
            }
        }
    }
    let keys = numbers_mut::<P::Weight>(&mut scratch.keys);
    for (group, rows) in k_rows.as_chunks::<LANES>().0[..positions.div_ceil(LANES)].iter().enumerate() {
        ask(later_k.by_ref().take(LANES), row_bytes);
        for from in (0..dim).step_by(PAIR) {
            // Not moved out of below: a move copies it.
            let zero = P::Floats::splat(0.0);
            let mut square = [P::row(zero, zero); LANES];
            unrolled!(i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 => {
                // SAFETY: as above.
                unsafe {
                    let first = element::<P::Floats, WHOLE>(dtype, rows[i], from, dim);
                    let last = element::<P::Floats, WHOLE>(dtype, rows[i], from + LANES, dim);
                    square[i] = P::row(first, last);
                }
            });
            let to = from / 2 * 2 * KEY_STRIDE + 2 * at + group * PAIR;
            let to = &mut keys[to..][..(LANES - 1) * 2 * KEY_STRIDE + PAIR];
            // SAFETY: the last of 16 rows of keys ends where the slice does.
            unsafe { P::store_transposed(&mut square, LANES, to.as_mut_ptr(), 2 * KEY_STRIDE) }
        }
    }
    ask(later_v.chain(later_k), row_bytes);
}

/// Where the rows of K and of V of a tile begin, encoded.
#[inline(always)]
fn find_rows(keys: &KeyTile<'_>, k_rows: &mut [*const u8; KEYS], v_rows: &mut [*const u8; KEYS]) {
    let Task { operands, tile, kv_head } = keys.task;
    let row_bytes = operands.shape.dtype.row_bytes(operands.shape.head_dim);
    let mut at = keys.positions.start;
    while at < keys.positions.end {
        let found = operands.store.rows(tile.block_table, kv_head, at, keys.positions.end - at);
        // What makes it sound to read whole rows.
        assert_eq!([found.k.len(), found.v.len()], [found.count * row_bytes; 2], "rows of another layout");
        let places = at - keys.positions.start..at - keys.positions.start + found.count;
        for (i, (k, v)) in k_rows[places.clone()].iter_mut().zip(&mut v_rows[places]).enumerate() {
            let from = i * row_bytes;
            *k = found.k.as_ptr().wrapping_add(from);
            *v = found.v.as_ptr().wrapping_add(from);
        }
        at += found.count;
    }
}

/// Asks for some rows.
#[inline(always)]
fn ask<'a>(rows: impl Iterator<Item = &'a *const u8>, row_bytes: usize) {
    for row in rows {
        for line in (0..row_bytes).step_by(CACHE_LINE) {
            prefetch_line(row.wrapping_add(line));
        }
    }
}

/// Elements `from..from + 16` of an encoded row of `dim` elements: 0 beyond its end.
///
/// # Safety
/// The row can be read; with `WHOLE`, it has these elements.
#[inline(always)]
unsafe fn element<V: F32x16, const WHOLE: bool>(dtype: KvDtype, row: *const u8, from: usize, dim: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        if WHOLE {
            return decode_whole(dtype, row, from, dim);
        }
        if from >= dim {
            return V::splat(0.0);
        }
        decode(dtype, std::slice::from_raw_parts(row, dtype.row_bytes(dim)), from, dim)
    }
}
