//! softmax(q k / sqrt(d)) v over paged K and V, for many query rows at once.
//!
//! ```text
//! task = (some consecutive queries of a sequence, one kv head): rows = queries x heads of the group
//! for each key tile of 64 positions, at fixed absolute positions:
//!     K, V: decoded from the arena, K transposed          keys [d][64], values [64][d]
//!     S = Q K                                             scores [rows][64]; what a row does not see is -inf
//!     m' = max(m, max S);  P = e^(S - m');  c = e^(m - m')
//!     l = l c + sum P;  O = O c + P V                     (online softmax: Milakov and Gimelshein, 2018)
//! out = O / l
//! ```
//!
//! A row's result depends on its own position alone: a tile that it does not see, or a key that is masked, adds exact zeros, and tiles do not move with the chunk.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_types::{BlockId, KvDtype};

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, exp};
use crate::kernels::{AlignedBuf, Isa, Rows, SharedRows, Threads};

use super::kv_store::{KvStore, decode};
use super::tile::{Extent, Operand, product};

/// Positions of a key tile.
const KEYS: usize = 64;
/// Query rows of a task: enough to pay for decoding the keys, few enough that scratch memory stays in the second-level cache.
const QUERY_ROWS: usize = 96;

/// What attention needs to know of a model's layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
    /// A row sees itself and the `window - 1` positions before it.
    pub window: Option<u32>,
}

impl AttentionShape {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Queries of one task.
    pub fn tile_tokens(&self) -> usize {
        (QUERY_ROWS / self.group()).max(1)
    }

    /// Positions that a row sees.
    fn seen(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        end.saturating_sub(self.window.map_or(end, |w| w as usize))..end
    }
}

/// Consecutive queries of one sequence, at most [`AttentionShape::tile_tokens`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueryTile<'a> {
    /// Row of the first one in the step.
    pub row: usize,
    /// Its position in the sequence.
    pub position: usize,
    pub tokens: usize,
    pub block_table: &'a [BlockId],
}

/// Working memory of one thread.
pub(crate) struct AttentionScratch {
    /// `[rows][head_dim]`, scaled by 1 / sqrt(head_dim).
    queries: AlignedBuf,
    /// `[head_dim][64]`.
    keys: AlignedBuf,
    /// `[64][padded_dim]`.
    values: AlignedBuf,
    /// `[rows][64]`.
    scores: AlignedBuf,
    /// `[rows][padded_dim]`.
    out: AlignedBuf,
    /// Largest score of each row so far.
    maxima: Vec<f32>,
    /// `[rows][16]`: sums of weights by lane.
    sums: AlignedBuf,
}

impl AttentionScratch {
    pub fn new(shape: &AttentionShape) -> Self {
        let rows = shape.tile_tokens() * shape.group();
        Self {
            queries: AlignedBuf::zeroed(rows * shape.head_dim),
            keys: AlignedBuf::zeroed(shape.head_dim * KEYS),
            values: AlignedBuf::zeroed(KEYS * shape.padded_dim()),
            scores: AlignedBuf::zeroed(rows * KEYS),
            out: AlignedBuf::zeroed(rows * shape.padded_dim()),
            maxima: vec![0.0; rows],
            sums: AlignedBuf::zeroed(rows * LANES),
        }
    }
}

/// Attention of all query tiles of a step: `q` has the query heads in its first columns, `out` becomes `[rows][heads x head_dim]`. One scratch per thread.
pub(crate) fn attention(
    isa: Isa,
    threads: &Threads,
    shape: &AttentionShape,
    store: KvStore<'_>,
    tiles: &[QueryTile<'_>],
    q: &Rows,
    out: &mut Rows,
    scratch: &[Mutex<AttentionScratch>],
) {
    out.resize(q.rows());
    let shared = out.share();
    threads.for_each(tiles.len() * shape.kv_heads, true, |worker, task| {
        // The last tiles attend to most: the long tasks first.
        let tile = &tiles[tiles.len() - 1 - task / shape.kv_heads];
        let mut scratch = scratch[worker].lock().unwrap_or_else(PoisonError::into_inner);
        attend(isa, shape, store, tile, task % shape.kv_heads, q, &shared, &mut scratch);
    });
}

per_isa! {
    /// One query tile, one kv head.
    #[allow(clippy::too_many_arguments)] // a kernel's operands
    fn attend(
        shape: &AttentionShape,
        store: KvStore<'_>,
        tile: &QueryTile<'_>,
        kv_head: usize,
        q: &Rows,
        out: &SharedRows<'_>,
        scratch: &mut AttentionScratch,
    ) = attend_of
}

#[inline(always)]
fn attend_of<V: F32x16>(
    shape: &AttentionShape,
    store: KvStore<'_>,
    tile: &QueryTile<'_>,
    kv_head: usize,
    q: &Rows,
    out: &SharedRows<'_>,
    scratch: &mut AttentionScratch,
) {
    let from = shape.seen(tile.position).start / KEYS * KEYS;
    store.prefetch(tile.block_table, kv_head, from..(from + KEYS).min(tile.position + tile.tokens));
    begin(shape, tile, kv_head, q, scratch);
    let (group, rows) = (shape.group(), tile.tokens * shape.group());
    let end = tile.position + tile.tokens;
    let mut start = from;
    while start < end {
        let count = KEYS.min(end - start);
        // Rows before this one see nothing of the tile.
        let first = start.saturating_sub(tile.position) * group;
        let next = start + KEYS..end.min(start + 2 * KEYS);
        load_tile::<V>(shape, store, tile.block_table, kv_head, start..start + count, scratch);
        store.prefetch(tile.block_table, kv_head, next);
        // Of keys beyond the last, scores are not looked at.
        let columns = count.next_multiple_of(LANES);
        let scores = Extent { rows: rows - first, depth: shape.head_dim, columns, accumulate: false };
        let values = Extent { rows: rows - first, depth: count, columns: shape.padded_dim(), accumulate: true };
        // SAFETY: the scratch buffers have these shapes, and they are borrowed exclusively.
        unsafe {
            let queries = matrix(&scratch.queries, first, shape.head_dim);
            let keys = matrix(&scratch.keys, 0, KEYS);
            product::<V, f32>(scores, queries, keys, matrix_mut(&mut scratch.scores, first, KEYS));
            for row in first..rows {
                weigh::<V>(shape, tile.position + row / group, start, row, scratch);
            }
            let weights = matrix(&scratch.scores, first, KEYS);
            let v = matrix(&scratch.values, 0, shape.padded_dim());
            product::<V, f32>(values, weights, v, matrix_mut(&mut scratch.out, first, shape.padded_dim()));
        }
        start += KEYS;
    }
    finish::<V>(shape, tile, kv_head, out, scratch);
}

fn matrix(buffer: &AlignedBuf, row: usize, stride: usize) -> Operand<*const f32> {
    Operand { at: buffer[row * stride..].as_ptr(), stride }
}

fn matrix_mut(buffer: &mut AlignedBuf, row: usize, stride: usize) -> Operand<*mut f32> {
    Operand { at: buffer[row * stride..].as_mut_ptr(), stride }
}

/// Copies the queries, ordered by (token, head of the group), and clears the sums.
fn begin(shape: &AttentionShape, tile: &QueryTile<'_>, kv_head: usize, q: &Rows, scratch: &mut AttentionScratch) {
    let (group, dim) = (shape.group(), shape.head_dim);
    let scale = 1.0 / (dim as f32).sqrt();
    for (token, queries) in scratch.queries.chunks_exact_mut(group * dim).take(tile.tokens).enumerate() {
        let heads = &q.row(tile.row + token)[kv_head * group * dim..][..group * dim];
        queries.iter_mut().zip(heads).for_each(|(to, q)| *to = q * scale);
    }
    let rows = tile.tokens * group;
    scratch.maxima[..rows].fill(f32::MIN);
    scratch.sums[..rows * LANES].fill(0.0);
    scratch.out[..rows * shape.padded_dim()].fill(0.0);
}

/// Decodes K (transposed) and V of some positions; the tile's other positions become 0, never what an earlier owner of the block left.
#[inline(always)]
fn load_tile<V: F32x16>(
    shape: &AttentionShape,
    store: KvStore<'_>,
    table: &[BlockId],
    kv_head: usize,
    positions: Range<usize>,
    scratch: &mut AttentionScratch,
) {
    let (dim, padded, row_bytes) = (shape.head_dim, shape.padded_dim(), shape.head_dim * shape.dtype.bytes());
    let mut k_rows: [&[u8]; KEYS] = [&[]; KEYS];
    let mut at = positions.start;
    while at < positions.end {
        let rows = store.rows(table, kv_head, at, positions.end - at);
        let key = at - positions.start;
        for (i, (k, v)) in rows.k.chunks_exact(row_bytes).zip(rows.v.chunks_exact(row_bytes)).enumerate() {
            k_rows[key + i] = k;
            let to = &mut scratch.values[(key + i) * padded..][..padded];
            for (chunk, to) in to.chunks_exact_mut(LANES).enumerate() {
                decode::<V>(shape.dtype, v, chunk * LANES, dim).write(to);
            }
        }
        at += rows.count;
    }
    for (group, k_rows) in k_rows[..positions.len().next_multiple_of(LANES)].chunks_exact(LANES).enumerate() {
        for from in (0..dim).step_by(LANES) {
            // Not moved out of below: a move copies it.
            let mut square = [V::splat(0.0); LANES];
            for (lanes, row) in square.iter_mut().zip(k_rows) {
                if !row.is_empty() {
                    *lanes = decode(shape.dtype, row, from, dim);
                }
            }
            V::transpose(&mut square);
            for (i, column) in square.iter().enumerate().take(dim - from) {
                column.write(&mut scratch.keys[(from + i) * KEYS + group * LANES..][..LANES]);
            }
        }
    }
}

/// Turns a row's scores of one tile into weights, and brings its sums and output to the new maximum.
#[inline(always)]
fn weigh<V: F32x16>(shape: &AttentionShape, position: usize, start: usize, row: usize, scratch: &mut AttentionScratch) {
    let seen = shape.seen(position);
    let scores = &mut scratch.scores[row * KEYS..][..KEYS];
    scores[..seen.start.saturating_sub(start).min(KEYS)].fill(f32::NEG_INFINITY);
    scores[(seen.end - start).min(KEYS)..].fill(f32::NEG_INFINITY);

    // Loops, not closures: a closure does not inherit the caller's instruction set, and what it calls stays a call.
    let mut s = [V::splat(0.0); KEYS / LANES];
    for (s, from) in s.iter_mut().zip(scores.chunks_exact(LANES)) {
        *s = V::read(from);
    }
    let old = scratch.maxima[row];
    let largest = s[0].max(s[1]).max(s[2].max(s[3])).largest();
    let sums = &mut scratch.sums[row * LANES..][..LANES];
    let mut total = V::read(sums);
    let mut max = old;
    if largest > old {
        max = largest;
        let correction = exp(V::splat(old - max));
        total = total.mul(correction);
        let padded = shape.padded_dim();
        for out in scratch.out[row * padded..][..padded].chunks_exact_mut(LANES) {
            V::read(out).mul(correction).write(out);
        }
    }
    scratch.maxima[row] = max;
    for (s, to) in s.iter_mut().zip(scores.chunks_exact_mut(LANES)) {
        *s = exp(s.sub(V::splat(max)));
        s.write(to);
    }
    total.add(s[0].add(s[1]).add(s[2].add(s[3]))).write(sums);
}

/// Divides by the sums of the weights, which are at least 1: a row sees itself.
#[inline(always)]
fn finish<V: F32x16>(
    shape: &AttentionShape,
    tile: &QueryTile<'_>,
    kv_head: usize,
    out: &SharedRows<'_>,
    scratch: &AttentionScratch,
) {
    let (group, dim, padded) = (shape.group(), shape.head_dim, shape.padded_dim());
    for row in 0..tile.tokens * group {
        let total = V::splat(V::read(&scratch.sums[row * LANES..][..LANES]).sum());
        let head = kv_head * group + row % group;
        // SAFETY: this task's rows and heads; no other task has them.
        let to = unsafe { out.part(tile.row + row / group, head * dim, dim) };
        for (from, to) in scratch.out[row * padded..][..padded].chunks_exact(LANES).zip(to.chunks_mut(LANES)) {
            V::read(from).div(total).write(to);
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::KvLayout;
    use half::{bf16, f16};

    use super::*;
    use crate::arena::KvArena;
    use crate::kernels::reference;

    struct Case {
        shape: AttentionShape,
        block_tokens: u32,
        length: usize,
    }

    /// Rounds to the KV's type and back.
    fn rounded(dtype: KvDtype, x: Vec<f32>) -> Vec<f32> {
        match dtype {
            KvDtype::F32 => x,
            KvDtype::F16 => x.into_iter().map(|x| f16::from_f32(x).to_f32()).collect(),
            KvDtype::Bf16 => x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
        }
    }

    fn inputs(case: &Case) -> (Rows, Vec<f32>, Vec<f32>) {
        let (shape, length) = (&case.shape, case.length);
        let mut q = Rows::new(shape.heads * shape.head_dim);
        q.resize(length);
        for row in 0..length {
            let values = reference::random(row as u64, shape.heads * shape.head_dim);
            q.row_mut(row).iter_mut().zip(values).for_each(|(q, x)| *q = 6.0 * x);
        }
        let width = shape.kv_heads * shape.head_dim;
        (q, reference::random(71, length * width), reference::random(72, length * width))
    }

    /// Computes the queries in chunks, over blocks that lie in disorder in an arena full of garbage.
    fn run(case: &Case, isa: Isa, count: usize, chunk: usize) -> Vec<Vec<f32>> {
        let shape = &case.shape;
        let (q, k, v) = inputs(case);
        let blocks = case.length.div_ceil(case.block_tokens as usize) as u32;
        let layout = KvLayout {
            model: 0,
            num_layers: 2,
            num_kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            block_tokens: case.block_tokens,
            dtype: shape.dtype,
            num_blocks: blocks + 3,
        };
        let arena = KvArena::allocate(layout).unwrap();
        // SAFETY: one thread.
        unsafe { arena.region().slice_mut(0..arena.region().len()).fill(0xff) };
        let table: Vec<_> = (0..blocks).map(|b| BlockId((b * 5 + 2) % (blocks + 3))).collect();
        let table = if (blocks + 3).is_multiple_of(5) { (0..blocks).rev().map(BlockId).collect() } else { table };
        let store = KvStore::new(&arena, 1);
        let threads = Threads::new(count).unwrap();
        let scratch: Vec<_> = (0..count).map(|_| Mutex::new(AttentionScratch::new(shape))).collect();
        let width = shape.kv_heads * shape.head_dim;
        let mut results = Vec::new();
        for first in (0..case.length).step_by(chunk) {
            let end = case.length.min(first + chunk);
            let mut part = Rows::new(q.columns());
            part.resize(end - first);
            for position in first..end {
                let at = position * width..(position + 1) * width;
                store.write(&table, position, &k[at.clone()], &v[at]);
                part.row_mut(position - first).copy_from_slice(q.row(position));
            }
            let tile = |from: usize| QueryTile {
                row: from - first,
                position: from,
                tokens: shape.tile_tokens().min(end - from),
                block_table: &table,
            };
            let tiles: Vec<_> = (first..end).step_by(shape.tile_tokens()).map(tile).collect();
            let mut out = Rows::new(q.columns());
            attention(isa, &threads, shape, store, &tiles, &part, &mut out, &scratch);
            results.extend((0..end - first).map(|row| out.row(row).to_vec()));
        }
        results
    }

    fn expected(case: &Case) -> Vec<Vec<f32>> {
        let shape = &case.shape;
        let (q, k, v) = inputs(case);
        let (k, v) = (rounded(shape.dtype, k), rounded(shape.dtype, v));
        let (dim, width) = (shape.head_dim, shape.kv_heads * shape.head_dim);
        let of_head = |x: &[f32], head: usize| -> Vec<f32> {
            x.chunks_exact(width).flat_map(|row| row[head * dim..(head + 1) * dim].to_vec()).collect()
        };
        let head_out = |position: usize, head: usize| {
            let kv_head = head / shape.group();
            let q = &q.row(position)[head * dim..(head + 1) * dim];
            let window = shape.window.map_or(usize::MAX, |w| w as usize);
            let seen = (position + 1).saturating_sub(window)..position + 1;
            reference::attention(q, &of_head(&k, kv_head), &of_head(&v, kv_head), seen)
        };
        (0..case.length).map(|p| (0..shape.heads).flat_map(|h| head_out(p, h)).collect()).collect()
    }

    #[test]
    fn is_close_to_the_reference_and_invariant() {
        let case = |heads, kv_heads, head_dim, dtype, window, block_tokens, length| Case {
            shape: AttentionShape { heads, kv_heads, head_dim, dtype, window },
            block_tokens,
            length,
        };
        let cases = [
            case(1, 1, 4, KvDtype::F32, None, 16, 1),
            case(3, 1, 64, KvDtype::F16, None, 16, 150),
            case(4, 2, 20, KvDtype::F32, None, 5, 131),
            case(2, 2, 16, KvDtype::Bf16, Some(7), 16, 100),
            case(4, 1, 40, KvDtype::F16, Some(70), 64, 200),
        ];
        for (index, case) in cases.iter().enumerate() {
            let expected = expected(case);
            let whole = run(case, Isa::detect(), 1, case.length);
            for (position, (found, expected)) in whole.iter().zip(&expected).enumerate() {
                let distance = reference::distance(found, expected);
                assert!(distance < 1e-5, "case {index}, position {position}: {distance}");
            }
            for isa in Isa::available() {
                for (threads, chunk) in [(2, case.length), (1, 1), (2, 33)] {
                    assert!(
                        run(case, isa, threads, chunk) == whole,
                        "case {index}, {isa}, {threads} threads, chunks of {chunk}"
                    );
                }
            }
        }
    }
}
