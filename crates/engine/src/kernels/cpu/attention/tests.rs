use baton_types::KvLayout;
use half::{bf16, f16};

use super::AttentionPrecision::{Rounded, Single};
use super::*;
use crate::arena::KvArena;
use crate::kernels::guarded::on_both_sides;
use crate::kernels::{Threads, reference};

struct Case {
    shape: AttentionShape,
    block_tokens: u32,
    length: usize,
}

/// Rounds to the KV's type and back.
fn rounded(dtype: KvDtype, head_dim: usize, x: Vec<f32>) -> Vec<f32> {
    match dtype {
        KvDtype::F32 => x,
        KvDtype::F16 => x.into_iter().map(|x| f16::from_f32(x).to_f32()).collect(),
        KvDtype::Bf16 => x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
        KvDtype::Int8 => x.chunks_exact(head_dim).flat_map(as_bytes).collect(),
    }
}

/// A row of one head as bytes with a scale, and back.
fn as_bytes(row: &[f32]) -> Vec<f32> {
    let scale = row.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
    row.iter().map(|x| (x / scale).round_ties_even() * scale).collect()
}

fn inputs(case: &Case) -> (Rows, Vec<f32>, Vec<f32>) {
    let shape = &case.shape;
    let length = case.length;
    let mut q = Rows::new(shape.heads * shape.head_dim);
    q.resize(length);
    for row in 0..length {
        let values = reference::random(row as u64, shape.heads * shape.head_dim);
        q.row_mut(row).iter_mut().zip(values).for_each(|(q, x)| *q = 6.0 * x);
    }
    let width = shape.kv_heads * shape.head_dim;
    (q, reference::random(71, length * width), reference::random(72, length * width))
}

/// What the arena's bytes are a multiple of, so that its last row ends right before the guard page:
/// pages of any machine.
const PAGES: usize = 64 << 10;

/// Computes the queries in chunks, over blocks that lie in disorder in an arena full of garbage.
/// With one thread the arena begins with the sequence's first block; with several it ends with it.
/// On either side of both lies a guard page.
fn run(case: &Case, isa: Isa, count: usize, chunk: usize) -> Vec<Vec<f32>> {
    let shape = &case.shape;
    let (q, k, v) = inputs(case);
    let blocks = case.length.div_ceil(case.block_tokens as usize) as u32;
    let mut layout = KvLayout {
        model: 0,
        num_layers: 2,
        num_kv_heads: shape.kv_heads as u32,
        head_dim: shape.head_dim as u32,
        block_tokens: case.block_tokens,
        dtype: shape.dtype,
        num_blocks: blocks + 3,
    };
    while !layout.arena_bytes().is_multiple_of(PAGES) {
        layout.num_blocks += 1;
    }
    let arena = KvArena::allocate(layout).unwrap();
    // SAFETY: one thread.
    unsafe { arena.region().slice_mut(0..arena.region().len()).fill(0xff) };
    let layer = u32::from(count > 1);
    let last = arena.layout().num_blocks - 1;
    // The first block's place is 0; no two have the same, since 17 divides the number of places of
    // no case.
    let place = |block: u32| block * 17 % (blocks + 3);
    let table: Vec<_> = (0..blocks).map(|b| BlockId(if count > 1 { last - place(b) } else { place(b) })).collect();
    let store = KvStore::new(&arena, layer);
    let compute = Compute { isa, threads: Threads::new(count).unwrap() };
    let mut scratch = AttentionScratch::new(shape, count);
    let width = shape.kv_heads * shape.head_dim;
    let mut results = Vec::new();
    for first in (0..case.length).step_by(chunk) {
        let end = case.length.min(first + chunk);
        let mut part = Rows::new(q.columns());
        part.resize(end - first);
        for position in first..end {
            let at = position * width..(position + 1) * width;
            store.write(isa, &table, position, &k[at.clone()], &v[at]);
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
        attention(&compute, Attention { shape, store, q: &part }, &tiles, &mut out, &mut scratch);
        results.extend((0..end - first).map(|row| out.row(row).to_vec()));
    }
    results
}

fn expected(case: &Case) -> Vec<Vec<f32>> {
    let shape = &case.shape;
    let (q, k, v) = inputs(case);
    let k = stored(shape, k);
    let v = stored(shape, v);
    (0..case.length).map(|position| expected_row(shape, q.row(position), &k, &v, position)).collect()
}

/// What is read of K or V: rounded to its type.
fn stored(shape: &AttentionShape, x: Vec<f32>) -> Vec<f32> {
    rounded(shape.dtype, shape.head_dim, x)
}

/// What the query at a position sees.
fn expected_row(shape: &AttentionShape, q: &[f32], k: &[f32], v: &[f32], position: usize) -> Vec<f32> {
    let dim = shape.head_dim;
    let width = shape.kv_heads * shape.head_dim;
    let of_head = |x: &[f32], head: usize| -> Vec<f32> {
        x.chunks_exact(width).flat_map(|row| row[head * dim..(head + 1) * dim].to_vec()).collect()
    };
    let window = shape.window.map_or(usize::MAX, |w| w as usize);
    let seen = (position + 1).saturating_sub(window)..position + 1;
    let head_out = |(head, q): (usize, &[f32])| {
        let kv_head = head / shape.group();
        reference::attention(q, &of_head(k, kv_head), &of_head(v, kv_head), seen.clone())
    };
    q.chunks_exact(dim).enumerate().flat_map(head_out).collect()
}

/// Cases, and how far from the reference they may be. Numbers of 8 bits are rounded by at most
/// 1/512, which scores of up to 6 make a hundredth of the weights.
fn cases() -> Vec<(Case, f32)> {
    let case = |heads, kv_heads, head_dim, dtype, window, block_tokens, length, precision| Case {
        shape: AttentionShape { heads, kv_heads, head_dim, dtype, window, precision },
        block_tokens,
        length,
    };
    let single = [
        case(1, 1, 4, KvDtype::F32, None, 16, 1, Single),
        case(3, 1, 64, KvDtype::F16, None, 16, 150, Single),
        case(4, 2, 20, KvDtype::F32, None, 5, 131, Single),
        case(2, 2, 16, KvDtype::Bf16, Some(7), 16, 100, Single),
        case(4, 1, 40, KvDtype::F16, Some(70), 64, 200, Single),
        case(2, 1, 9, KvDtype::F16, None, 16, 600, Single),
        case(4, 2, 33, KvDtype::Int8, None, 16, 150, Single),
        case(2, 1, 96, KvDtype::F32, None, 16, 140, Single),
        case(4, 2, 32, KvDtype::Bf16, Some(70), 5, 200, Single),
        case(2, 2, 32, KvDtype::Int8, None, 48, 100, Single),
    ];
    let rounded = [
        case(1, 1, 4, KvDtype::F16, None, 16, 1, Rounded),
        case(3, 1, 64, KvDtype::F16, None, 16, 530, Rounded),
        case(4, 2, 20, KvDtype::Bf16, None, 5, 131, Rounded),
        case(2, 1, 33, KvDtype::F16, Some(300), 16, 590, Rounded),
        case(2, 2, 7, KvDtype::Bf16, Some(7), 16, 300, Rounded),
        case(3, 1, 64, KvDtype::Int8, None, 16, 300, Rounded),
        case(4, 2, 32, KvDtype::Bf16, Some(90), 5, 300, Rounded),
    ];
    single.into_iter().map(|case| (case, 1e-5)).chain(rounded.into_iter().map(|case| (case, 0.02))).collect()
}

#[test]
fn attention_is_near_the_reference_and_batch_invariant() {
    on_both_sides(compare);
}

fn compare() {
    for (index, (case, tolerance)) in cases().iter().enumerate() {
        let expected = expected(case);
        let of_others = run(case, Isa::SCALAR, 1, case.length);
        for isa in Isa::available() {
            // Matrix tiles sum in another order.
            let whole = match case.shape.precision {
                Rounded if isa.has_tiles() => &run(case, isa, 1, case.length),
                Single | Rounded => &of_others,
            };
            for (position, (found, expected)) in whole.iter().zip(&expected).enumerate() {
                let distance = reference::distance(found, expected);
                assert!(distance < *tolerance, "case {index}, {isa}, position {position}: {distance}");
            }
            for (threads, chunk) in [(2, case.length), (1, 1), (2, 1), (1, 15), (2, 16), (2, 17), (2, 33)] {
                assert!(
                    run(case, isa, threads, chunk) == *whole,
                    "case {index}, {isa}, {threads} threads, chunks of {chunk}"
                );
            }
        }
    }
}

/// Sequences of a token each, of which a thread has several tasks in a row and asks for the keys of
/// those that follow.
#[test]
fn attention_of_batched_sequences_equals_each_alone() {
    on_both_sides(compare_sequences);
}

fn compare_sequences() {
    let shape = |heads, kv_heads, head_dim, dtype, window, precision| AttentionShape {
        heads,
        kv_heads,
        head_dim,
        dtype,
        window,
        precision,
    };
    compare_beside(&shape(9, 3, 64, KvDtype::F16, None, Rounded), 0.02);
    compare_beside(&shape(4, 2, 32, KvDtype::Bf16, Some(70), Single), 1e-5);
    compare_beside(&shape(8, 4, 20, KvDtype::Int8, None, Single), 1e-5);
}

/// One that attends to itself alone, ends of tiles and of splits. The first one fills its blocks,
/// the arena's last ones.
const LENGTHS: [usize; 9] = [64, 1, 63, 65, 300, 257, 17, 130, 2];
const BLOCK_TOKENS: usize = 16;

fn compare_beside(shape: &AttentionShape, tolerance: f32) {
    let width = shape.kv_heads * shape.head_dim;
    let mut layout = KvLayout {
        model: 0,
        num_layers: 1,
        num_kv_heads: shape.kv_heads as u32,
        head_dim: shape.head_dim as u32,
        block_tokens: BLOCK_TOKENS as u32,
        dtype: shape.dtype,
        num_blocks: LENGTHS.iter().map(|length| length.div_ceil(BLOCK_TOKENS) as u32).sum(),
    };
    while !layout.arena_bytes().is_multiple_of(PAGES) {
        layout.num_blocks += 1;
    }
    let arena = KvArena::allocate(layout).unwrap();
    // SAFETY: one thread.
    unsafe { arena.region().slice_mut(0..arena.region().len()).fill(0xff) };
    let store = KvStore::new(&arena, 0);
    let mut tables = Vec::new();
    let mut expected = Vec::new();
    let mut free = (0..arena.layout().num_blocks).rev().map(BlockId);
    let mut q = Rows::new(shape.heads * shape.head_dim);
    q.resize(LENGTHS.len());
    for (row, length) in LENGTHS.into_iter().enumerate() {
        let random = |seed: usize, len| reference::random((10 * row + seed) as u64, len);
        let values = random(0, q.columns());
        q.row_mut(row).iter_mut().zip(values).for_each(|(q, x)| *q = 6.0 * x);
        let k = random(1, length * width);
        let v = random(2, length * width);
        let mut table: Vec<_> = free.by_ref().take(length.div_ceil(BLOCK_TOKENS)).collect();
        table.reverse();
        for (position, (k, v)) in k.chunks_exact(width).zip(v.chunks_exact(width)).enumerate() {
            store.write(Isa::SCALAR, &table, position, k, v);
        }
        tables.push(table);
        expected.push(expected_row(shape, q.row(row), &stored(shape, k), &stored(shape, v), length - 1));
    }
    let tiles: Vec<_> = (tables.iter().zip(LENGTHS).enumerate())
        .map(|(row, (block_table, length))| QueryTile { row, position: length - 1, tokens: 1, block_table })
        .collect();
    for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let compute = Compute { isa, threads: Threads::new(count).unwrap() };
        let mut scratch = AttentionScratch::new(shape, count);
        let mut beside = Rows::new(q.columns());
        let mut alone = Rows::new(q.columns());
        attention(&compute, Attention { shape, store, q: &q }, &tiles, &mut beside, &mut scratch);
        for (row, expected) in expected.iter().enumerate() {
            let distance = reference::distance(beside.row(row), expected);
            assert!(distance < tolerance, "{isa}, {count} threads, sequence {row}: {distance}");
            attention(&compute, Attention { shape, store, q: &q }, &tiles[row..=row], &mut alone, &mut scratch);
            assert_eq!(beside.row(row), alone.row(row), "{isa}, {count} threads, sequence {row}");
        }
    }
}
