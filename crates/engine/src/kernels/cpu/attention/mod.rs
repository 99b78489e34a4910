//! softmax(q k / sqrt(d)) v over paged K and V, for many query rows at once.
//!
//! ```text
//! task = (some consecutive queries of a sequence, one kv head): rows = queries x heads of the group
//! for each split of 256 positions, at fixed absolute positions:
//!     K, V: decoded from the arena, in pairs (see `Pairs`)   keys [d / 2][256], values [256 / 2][d]
//!     S = Q K                                                scores [rows][256], as powers of 2; what a row does not see is -inf
//!     m = max S;  P = 2^(S - m);  l = sum P;  O = P V
//! of the splits, in order:  m' = max(m1, m2);  l' = l1 2^(m1 - m') + l2 2^(m2 - m'), and O likewise      (online softmax: Milakov and Gimelshein, 2018)
//! out = O / l
//! ```
//!
//! A row's result depends on its own position alone. A split that it does not see, or a key that is
//! masked, adds exact zeros, and splits do not move with the chunk. (K and V are finite. What a
//! half or a byte cannot hold is stored as its largest. What is infinite in bfloat16 or single
//! precision makes logits that are no numbers, an error.) With few rows and long contexts each
//! split is a task of its own (Flash-Decoding: Dao et al., 2023), with the same sums.

mod kernel;
mod load;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_types::{BlockId, KvDtype};

use crate::kernels::lanes::LANES;
use crate::kernels::{AlignedBuf, AlignedBytes, Compute, Isa, Rows, SharedRows};

use super::kv_store::KvStore;
use super::tile::TILE_BLOCK;
use kernel::{attend_rounded, attend_single, finish, load_queries_rounded, load_queries_single, merge};

/// Positions of a split: enough that merging splits costs little, few enough that their scores stay
/// in the second-level cache.
const SPLIT: usize = 256;
/// Positions that are decoded, weighed or skipped together.
const KEYS: usize = 64;
/// Rows whose scores are in memory at once: they stay in the first-level cache.
const SCORE_ROWS: usize = TILE_BLOCK;
/// Elements from one row of scores, or of weights, to the next: an odd number of lines of bfloat16.
const SCORE_STRIDE: usize = SPLIT + 2 * LANES;
/// Pairs from one row of keys to the next: an odd number of lines of bfloat16.
const KEY_STRIDE: usize = SPLIT + LANES;
/// Tiles of keys from the one that is decoded to the one that is prefetched, over the ends of
/// splits and tasks: some 2 us of work, and 32 KB of halves with heads of 64. One is too few, for a
/// sequence's last tile may be short.
const TILES_AHEAD: usize = 2;
/// Query rows of a task: enough to pay for decoding the keys, few enough that scratch memory stays
/// in the second-level cache.
const QUERY_ROWS: usize = 192;
/// Tasks per thread from which on splits are not computed apart: there is enough to share out.
const TASKS_PER_THREAD: usize = 4;
/// Most rows of results of splits, over all tasks: some 700 bytes each with heads of 64, and with
/// the room for matrix tiles.
const MAX_SPLIT_ROWS: usize = 1 << 16;

/// What Q, K, V and the weights of attention are rounded to. Sums are of single precision either
/// way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionPrecision {
    /// Single precision: not at all.
    Single,
    /// bfloat16.
    Rounded,
}

/// What attention needs to know of a model's layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
    /// A row sees itself and the `window - 1` positions before it.
    pub window: Option<u32>,
    pub precision: AttentionPrecision,
}

impl AttentionShape {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Of queries and keys: whole rows of pairs.
    fn padded_depth(&self) -> usize {
        self.head_dim.next_multiple_of(2 * LANES)
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

impl QueryTile<'_> {
    /// The splits that its rows see.
    fn splits(&self, shape: &AttentionShape) -> Range<usize> {
        shape.seen(self.position).start / SPLIT..(self.position + self.tokens).div_ceil(SPLIT)
    }

    /// Its positions of one split, from the first tile that a row sees on.
    fn positions(&self, shape: &AttentionShape, split: usize) -> Range<usize> {
        let from = shape.seen(self.position).start / KEYS * KEYS;
        from.max(split * SPLIT)..(self.position + self.tokens).min((split + 1) * SPLIT)
    }
}

/// One query tile and one kv head.
#[derive(Clone, Copy)]
struct Task<'a> {
    operands: Attention<'a>,
    tile: &'a QueryTile<'a>,
    kv_head: usize,
}

impl<'a> Task<'a> {
    /// Queries times heads of the group.
    fn rows(&self) -> usize {
        self.tile.tokens * self.operands.shape.group()
    }

    fn splits(&self) -> Range<usize> {
        self.tile.splits(self.operands.shape)
    }

    /// The tiles of keys of a split.
    fn key_tiles(self, split: usize) -> impl Iterator<Item = KeyTile<'a>> {
        let Range { start, end } = self.tile.positions(self.operands.shape, split);
        (start..end).step_by(KEYS).map(move |from| KeyTile { task: self, positions: from..end.min(from + KEYS) })
    }

    /// The tiles of keys of all splits.
    fn all_key_tiles(self) -> impl Iterator<Item = KeyTile<'a>> {
        self.splits().flat_map(move |split| self.key_tiles(split))
    }
}

/// Up to 64 positions that a task attends to.
struct KeyTile<'a> {
    task: Task<'a>,
    positions: Range<usize>,
}

/// Tiles that are attended to later, in their order.
type KeyTiles<'a> = dyn Iterator<Item = KeyTile<'a>> + 'a;

/// Room for rows of which matrix tiles may begin at any: a tile has no more than there are, and 32
/// at most.
fn with_tiles(rows: usize) -> usize {
    rows + rows.min(TILE_BLOCK)
}

/// Sums of some rows over a range of positions.
pub(crate) struct Partial {
    /// `[rows][padded_dim]`: weighted values.
    out: AlignedBuf,
    /// `[rows][16]`: sums of weights by lane.
    sums: AlignedBuf,
    /// Largest score of each row.
    maxima: Vec<f32>,
}

impl Partial {
    /// With room for as many rows as matrix tiles may have after the last.
    fn new(shape: &AttentionShape, rows: usize) -> Self {
        let rows = with_tiles(rows);
        Self {
            out: AlignedBuf::zeroed(rows * shape.padded_dim()),
            sums: AlignedBuf::zeroed(rows * LANES),
            maxima: vec![0.0; rows],
        }
    }

    /// Makes the first rows those of no positions.
    fn clear(&mut self, shape: &AttentionShape, rows: usize) {
        self.out[..rows * shape.padded_dim()].fill(0.0);
        self.sums[..rows * LANES].fill(0.0);
        self.maxima[..rows].fill(f32::MIN);
    }
}

/// Working memory of one thread. What holds numbers in pairs has room for single precision. What
/// has rows of queries has room for as many as matrix tiles may have after the last.
struct Scratch {
    /// `[rows][padded_depth]`, times log2(e) / sqrt(head_dim).
    queries: AlignedBytes,
    /// `[padded_depth / 2][256]` pairs.
    keys: AlignedBytes,
    /// `[256 / 2][padded_dim]` pairs.
    values: AlignedBytes,
    /// `[32][256]`: of some rows.
    scores: AlignedBuf,
    /// `[32][256]`: powers of the scores.
    weights: AlignedBytes,
    /// A row of K or V that is not there: zeros, of any type.
    absent: AlignedBytes,
}

impl Scratch {
    fn new(shape: &AttentionShape) -> Self {
        let rows = with_tiles(shape.tile_tokens() * shape.group());
        let numbers = |count: usize| AlignedBytes::zeroed(count * size_of::<f32>());
        Self {
            queries: numbers(rows * shape.padded_depth()),
            keys: numbers(shape.padded_depth() * KEY_STRIDE),
            values: numbers(SPLIT * shape.padded_dim()),
            scores: AlignedBuf::zeroed(SCORE_ROWS * SCORE_STRIDE),
            weights: numbers(SCORE_ROWS * SCORE_STRIDE),
            absent: AlignedBytes::zeroed(shape.dtype.row_bytes(shape.head_dim)),
        }
    }
}

/// What a thread works with: its memory, and the sums of a split and of all splits so far.
struct Worker {
    scratch: Scratch,
    partial: Partial,
    total: Partial,
}

impl Worker {
    fn new(shape: &AttentionShape) -> Self {
        let rows = shape.tile_tokens() * shape.group();
        Self { scratch: Scratch::new(shape), partial: Partial::new(shape, rows), total: Partial::new(shape, rows) }
    }
}

/// Working memory of attention, kept from one step to the next.
pub(crate) struct AttentionScratch {
    workers: Vec<Mutex<Worker>>,
    /// Results of splits that are computed apart.
    splits: Vec<Mutex<Partial>>,
    /// Rows that each of these has room for.
    split_rows: usize,
}

impl AttentionScratch {
    /// For layers of this shape, on so many threads.
    pub fn new(shape: &AttentionShape, threads: usize) -> Self {
        Self {
            workers: (0..threads).map(|_| Mutex::new(Worker::new(shape))).collect(),
            splits: Vec::new(),
            split_rows: 0,
        }
    }

    fn make_room(&mut self, shape: &AttentionShape, splits: usize, rows: usize) {
        if rows > self.split_rows {
            self.splits.clear();
            self.split_rows = rows;
        }
        let rows = self.split_rows;
        self.splits.resize_with(splits.max(self.splits.len()), || Mutex::new(Partial::new(shape, rows)));
    }
}

/// The operands of a step's attention.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub shape: &'a AttentionShape,
    pub store: KvStore<'a>,
    /// The query heads, in the first columns.
    pub q: &'a Rows,
}

/// Attention of all query tiles of a step: `out` becomes `[rows][heads x head_dim]`.
pub(crate) fn attention(
    compute: &Compute,
    operands: Attention<'_>,
    tiles: &[QueryTile<'_>],
    out: &mut Rows,
    scratch: &mut AttentionScratch,
) {
    let Compute { isa, threads } = compute;
    let isa = *isa;
    out.resize(operands.q.rows());
    let shape = operands.shape;
    let out = out.share();
    let splits = tiles.iter().map(|tile| tile.splits(shape).len()).max().unwrap_or(0);
    let rows = tiles.iter().map(|tile| tile.tokens * shape.group()).max().unwrap_or(0);
    assert!(rows <= shape.tile_tokens() * shape.group(), "{rows} rows of a query tile");
    let tasks = tiles.len() * shape.kv_heads;
    let few = tasks < threads.count() * TASKS_PER_THREAD && threads.count() > 1;
    if few && splits > 1 && tasks * splits * rows.max(scratch.split_rows) <= MAX_SPLIT_ROWS {
        scratch.make_room(shape, tasks * splits, rows);
        attend_splits(compute, operands, tiles, splits, &out, scratch);
        return;
    }
    // The last tiles attend to most: the long tasks first.
    let task_at = |index: usize| {
        let tile = &tiles[tiles.len() - 1 - index / shape.kv_heads];
        Task { operands, tile, kv_head: index % shape.kv_heads }
    };
    // No more than the heads of a sequence, which lie side by side in its blocks; and a long task
    // may be the last that others wait for.
    let most = if rows <= shape.group() { shape.kv_heads } else { 1 };
    let run = tasks.div_ceil(threads.count() * TASKS_PER_THREAD).clamp(1, most);
    threads.for_each(tasks.div_ceil(run), true, |worker, index| {
        let mut worker = lock(&scratch.workers[worker]);
        let of_run = |index: usize| tasks.min(index * run)..tasks.min((index + 1) * run);
        // Of this run, and of the next that this thread has, most likely.
        let ahead = of_run(index).chain(of_run(index + threads.count()));
        let mut ahead = ahead.flat_map(|task| task_at(task).all_key_tiles()).skip(TILES_AHEAD);
        for task in of_run(index) {
            attend_task(isa, task_at(task), &mut ahead, &out, &mut worker);
        }
    });
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A task, split after split. For each tile of keys that is decoded, `ahead` gives one to prefetch
/// meanwhile, and none at the end.
fn attend_task<'a>(isa: Isa, task: Task<'a>, ahead: &mut KeyTiles<'a>, out: &SharedRows<'_>, worker: &mut Worker) {
    let shape = task.operands.shape;
    let splits = task.splits();
    let Worker { scratch, partial, total } = worker;
    load_queries(isa, task, scratch);
    for split in splits.clone() {
        if split == splits.start {
            attend(isa, task, split, ahead, scratch, total);
        } else {
            attend(isa, task, split, ahead, scratch, partial);
            merge(isa, shape, task.rows(), partial, total);
        }
    }
    finish(isa, task, total, out);
}

/// Each split of each query tile and kv head as a task, then their sums.
fn attend_splits(
    compute: &Compute,
    operands: Attention<'_>,
    tiles: &[QueryTile<'_>],
    splits: usize,
    out: &SharedRows<'_>,
    scratch: &AttentionScratch,
) {
    let Compute { isa, threads } = compute;
    let isa = *isa;
    let shape = operands.shape;
    let tasks = tiles.len() * shape.kv_heads;
    let task_at =
        |index: usize| Task { operands, tile: &tiles[index / shape.kv_heads], kv_head: index % shape.kv_heads };
    // The split that a task has at an index, if it has as many.
    let at = |index: usize| {
        let task = task_at(index / splits);
        task.splits().nth(index % splits).map(|split| (task, split))
    };
    let count = tasks * splits;
    let run = count.div_ceil(threads.count() * TASKS_PER_THREAD);
    threads.for_each(count.div_ceil(run), true, |worker, index| {
        let scratch_of_worker = &mut lock(&scratch.workers[worker]).scratch;
        let of_run = |index: usize| count.min(index * run)..count.min((index + 1) * run);
        let ahead = of_run(index).chain(of_run(index + threads.count())).filter_map(at);
        let mut ahead = ahead.flat_map(|(task, split)| task.key_tiles(split)).skip(TILES_AHEAD);
        for index in of_run(index) {
            let Some((task, split)) = at(index) else { continue };
            load_queries(isa, task, scratch_of_worker);
            attend(isa, task, split, &mut ahead, scratch_of_worker, &mut lock(&scratch.splits[index]));
        }
    });
    threads.for_each(tasks, true, |_, index| {
        let task = task_at(index);
        let mut total = lock(&scratch.splits[index * splits]);
        for at in 1..task.splits().len() {
            merge(isa, shape, task.rows(), &lock(&scratch.splits[index * splits + at]), &mut total);
        }
        finish(isa, task, &total, out);
    });
}

/// The queries of a task, to the scratch memory.
fn load_queries(isa: Isa, task: Task<'_>, scratch: &mut Scratch) {
    match task.operands.shape.precision {
        AttentionPrecision::Single => load_queries_single(isa, task, scratch),
        AttentionPrecision::Rounded => load_queries_rounded(isa, task, scratch),
    }
}

/// One split of the task whose queries were loaded; `ahead` as for [`attend_task`].
fn attend(
    isa: Isa,
    task: Task<'_>,
    split: usize,
    ahead: &mut KeyTiles<'_>,
    scratch: &mut Scratch,
    partial: &mut Partial,
) {
    match task.operands.shape.precision {
        AttentionPrecision::Single => attend_single(isa, task, split, ahead, scratch, partial),
        AttentionPrecision::Rounded => attend_rounded(isa, task, split, ahead, scratch, partial),
    }
}
