//! Y = X W^T, with W as quantized as its file has it, and X as signed bytes ([`QuantizedRows`]).
//!
//! ```text
//! y = sum over blocks of 32 inputs, in their order:
//!       dot = sum of code * a                      a: quants of the activations; exact in 32-bit integers
//!       y = fma(dot * a_scale, scale, y)           where the type has a zero: dot of (code - zero)
//!       y = fma(a_scale * sum of a, minimum, y)    where it has a minimum
//! ```
//!
//! Vectors run over outputs, so each output is one chain of operations in the order of k. It has
//! the same bits whatever the instruction set, the number of rows or the thread.

use std::ops::Range;

use crate::kernels::dots::Dots;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{CACHE_LINE, F32x16, LANES, prefetch_line};
use crate::kernels::{Isa, RowShape, SharedRows, Threads};

use super::linear::{Destination, Target};
use super::product_buffers::{GATE_STRIDE, GATES, ProductBuffers};
use super::quantize::{BLOCK, QuantizedBlock, QuantizedRows, ZERO, quantize_block};
use super::quantized_matrix::{
    QuantizedMatrix, TILE_OUTPUTS, code_bytes, form_of, groups, lanes, per_type, scale_bytes, two_quads,
};
use super::row_buffers::GROUP;
use super::swiglu::gate_of;
use super::tile::Operand;
use super::unrolled::unrolled;

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
pub(super) fn quantized_matmul(
    isa: Isa,
    threads: &Threads,
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    to: Destination<'_>,
) {
    quantized_tasks(isa, threads, x, w, Output::Rows(to));
}

/// silu(gate) x up, quantized, where gate and up are the halves of X W^T, each of whole blocks.
/// Neither of them is ever in memory as a whole.
pub(super) fn gated_quantized_matmul(
    isa: Isa,
    threads: &Threads,
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    buffers: &ProductBuffers,
    to: &mut QuantizedRows,
) {
    assert!(w.halves_are_blocks(), "halves of whole blocks");
    let shape = RowShape { rows: x.rows(), columns: w.outputs() / 2 };
    quantized_tasks(isa, threads, x, w, Output::Gated(to.share(shape), buffers));
}

fn quantized_tasks(isa: Isa, threads: &Threads, x: &QuantizedRows, w: &QuantizedMatrix, to: Output<'_>) {
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
        group_products(isa, x, w, gates, to, task);
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

per_isa! {
    /// Some rows against some packed tiles.
    fn group_products(x: &QuantizedRows, w: &QuantizedMatrix, gates: &mut [f32], to: Output<'_>, task: GroupTask) = group_products_of<Dots>
}

#[inline(always)]
fn group_products_of<D: Dots>(
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    gates: &mut [f32],
    to: Output<'_>,
    task: GroupTask,
) {
    per_type!(w.dtype(), TYPE => typed_products::<D, TYPE>(x, w, gates, to, task));
}

#[inline(always)]
fn typed_products<D: Dots, const TYPE: usize>(
    x: &QuantizedRows,
    w: &QuantizedMatrix,
    gates: &mut [f32],
    to: Output<'_>,
    task: GroupTask,
) {
    let blocks = w.inputs() / BLOCK;
    // One row is read from memory alone: one stream of it is faster than two.
    let most = if x.rows() == 1 { 1 } else { D::REGISTER_TILES };
    let ups = if let Output::Gated(..) = to { Some(w.packed_tiles() / 2) } else { None };
    let mut step = 0;
    while let Some(TileStep { packed_tiles, place }) = task.step(step, most, ups) {
        step += 1;
        let (quants, scales) = w.whole(packed_tiles.clone());
        let weights = TileWeights { count: packed_tiles.len(), quants: quants.as_ptr(), scales: scales.as_ptr() };
        let tiles = task.groups.len() * GROUP.min(x.rows()).div_ceil(D::TILE_ROWS);
        let next = match task.step(step, most, ups) {
            Some(next) => next.packed_tiles,
            None => task.then.clone(),
        };
        let next = next.start..next.end.min(next.start + packed_tiles.len());
        let (quants, scales) = w.whole(next);
        let times = (tiles * blocks).max(1);
        let mut ahead = WeightsAhead { quants: Prefetch::new(quants, times), scales: Prefetch::new(scales, times) };
        for group in task.groups.clone() {
            let rows = GROUP.min(x.rows() - group * GROUP);
            for first in (0..rows).step_by(D::TILE_ROWS) {
                let (c, target) = match to {
                    Output::Rows(Destination { y, column, target }) => {
                        let at = y.at(
                            group * GROUP + first,
                            column + packed_tiles.start * TILE_OUTPUTS,
                            packed_tiles.len() * TILE_OUTPUTS,
                        );
                        (Operand { at, stride: y.stride() }, target)
                    }
                    Output::Gated(..) => {
                        let row = (group - task.groups.start) * GROUP + first;
                        let at = gates[row * GATE_STRIDE + place * TILE_OUTPUTS..].as_mut_ptr();
                        (Operand { at, stride: GATE_STRIDE }, Target::Set)
                    }
                };
                // SAFETY: the packed tiles have the quants and scales of as many blocks as the
                // group, rows `first..rows` are in the group, and this task alone has that part of
                // Y or these gates, whose rows have room for whole vectors.
                unsafe {
                    let rows = D::TILE_ROWS.min(rows - first);
                    of_shape::<D, TYPE>(weights, x.group(group), first, rows, c, target, &mut ahead);
                }
            }
        }
        if let (Some(ups), Output::Gated(to, _)) = (ups, to)
            && place + packed_tiles.len() == GATED_TILES
        {
            let block = (packed_tiles.end - ups) / WIDEST_TILE - 1;
            quantize_gates::<D::Floats>(gates, task.groups.clone(), x.rows(), block, to);
        }
    }
}

/// silu(gate) x up of 32 gates and ups of some groups' rows, quantized as block `block` of each
/// row.
#[inline(always)]
fn quantize_gates<V: F32x16>(
    gates: &[f32],
    groups: Range<usize>,
    rows: usize,
    block: usize,
    to: SharedRows<'_, QuantizedBlock>,
) {
    let first = groups.start * GROUP;
    for group in groups {
        // SAFETY: only this task has these rows and gates.
        let to = unsafe { &mut *to.at(group, block, 1) };
        for row in group * GROUP..rows.min((group + 1) * GROUP) {
            let (gate, up) = gates[(row - first) * GATE_STRIDE..][..2 * GATES].split_at(GATES);
            let mut gated = [0.0; BLOCK];
            for ((gate, up), to) in
                gate.chunks_exact(LANES).zip(up.chunks_exact(LANES)).zip(gated.chunks_exact_mut(LANES))
            {
                gate_of(V::read(gate), V::read(up)).write(to);
            }
            quantize_block::<V>(&gated, row % GROUP, to);
        }
    }
}

/// Where the weights of some packed tiles begin, which lie one after the other.
#[derive(Clone, Copy)]
struct TileWeights {
    count: usize,
    quants: *const u8,
    scales: *const u8,
}

/// Consecutive bytes to prefetch, some at a time.
struct Prefetch {
    at: *const u8,
    step: usize,
}

impl Prefetch {
    /// All of them in so many times.
    #[inline(always)]
    fn new(bytes: &[u8], times: usize) -> Self {
        Self { at: bytes.as_ptr(), step: bytes.len().div_ceil(times) }
    }

    /// Asks for what comes next. The addresses may be past the end: then nothing comes.
    #[inline(always)]
    fn ask(&mut self) {
        for line in (0..self.step).step_by(CACHE_LINE) {
            prefetch_line(self.at.wrapping_add(line));
        }
        self.at = self.at.wrapping_add(self.step);
    }
}

/// The weights of the packed tiles that follow, which are asked for while others are computed with:
/// memory is never idle.
struct WeightsAhead {
    quants: Prefetch,
    scales: Prefetch,
}

impl WeightsAhead {
    /// Asks for what belongs to one block of one register tile.
    #[inline(always)]
    fn ask(&mut self) {
        self.quants.ask();
        self.scales.ask();
    }
}

/// `rows` rows of a group from `first` on, in a register tile of at least that height: rows beyond
/// the last are computed and dropped.
///
/// # Safety
/// There are weights for all `blocks` of `weights.count` packed tiles, at most
/// `D::REGISTER_TILES`. `first + rows` is at most 16, and `rows` at most `D::TILE_ROWS`, a divisor
/// of 16. As many whole vectors as there are packed tiles can be written to each of `rows` rows of
/// `c`, which nothing else touches.
#[inline(always)]
unsafe fn of_shape<D: Dots, const TYPE: usize>(
    weights: TileWeights,
    blocks: &[QuantizedBlock],
    first: usize,
    rows: usize,
    c: Operand<*mut f32>,
    target: Target,
    ahead: &mut WeightsAhead,
) {
    macro_rules! pick {
        ($($height:literal x $width:literal)*) => {
            $(if rows <= $height && weights.count == $width && $height <= D::TILE_ROWS && $width <= D::REGISTER_TILES {
                // SAFETY: the caller's promise; the next heights divide 16 into whole tiles.
                return unsafe { registers::<D, TYPE, $height, $width>(weights, blocks, first, rows, c, target, ahead) };
            })*
        };
    }
    pick!(1 x 1 2 x 1 4 x 1 1 x 2 2 x 2 4 x 2);
    unreachable!("a tile of {rows} rows and {} packed tiles", weights.count);
}

/// The inner loop: per row, block and packed tile, 8 dot products and two or three float
/// operations. The dot products of all rows and packed tiles go side by side. Each alone is a chain
/// of 8 instructions that wait for one another.
///
/// # Safety
/// As for [`of_shape`]; `first + ROWS` is at most 16, `ROWS` at most 4 and `TILES` at most 2.
#[inline(always)]
unsafe fn registers<D: Dots, const TYPE: usize, const ROWS: usize, const TILES: usize>(
    weights: TileWeights,
    blocks: &[QuantizedBlock],
    first: usize,
    rows: usize,
    c: Operand<*mut f32>,
    target: Target,
    ahead: &mut WeightsAhead,
) {
    let form = form_of::<TYPE>();
    // A minimum is taken off a whole block.
    const { assert!(form_of::<TYPE>().zero.is_some() || groups(form_of::<TYPE>()) == 1) };
    let next_codes = blocks.len() * code_bytes(form);
    let next_scales = blocks.len() * scale_bytes(form);
    let mut sums = [[D::Floats::splat(0.0); TILES]; ROWS];
    let TileWeights { mut quants, mut scales, .. } = weights;
    for block in blocks {
        // First: behind the products, its branches would part them from the loads, all of which the
        // compiler then keeps at once, in memory.
        ahead.ask();
        // SAFETY: the caller's promise: a block's quants and scales in each packed tile, and rows
        // of the group; 4 bytes of quants are read as a number, of any alignment.
        unsafe {
            let inputs = block.quants.as_ptr().add(first).cast::<[i32; BLOCK / 4]>();
            let a_scales = block.scales.as_ptr().add(first);
            let weighted_sums = block.weighted_sums.as_ptr().add(first);
            let mut dots = [[D::splat(0); TILES]; ROWS];
            unrolled!(pair in 0 1 2 3 => {
                if pair == 0 || pair == 2 && groups(form) == 2 {
                    unrolled!(row in 0 1 2 3 => if row < ROWS {
                        dots[row] = [D::splat(zero::<TYPE>(block, pair / 2, first, row)); TILES];
                    });
                }
                let mut quads = [[D::bytes(quants); 2]; TILES];
                unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                    quads[packed_tile] = two_quads::<D, TYPE>(quants.add(packed_tile * next_codes), pair);
                });
                unrolled!(quad in 0 1 => { unrolled!(row in 0 1 2 3 => if row < ROWS {
                    let inputs = inputs.add(row).cast::<i32>().add(2 * pair + quad).read_unaligned();
                    unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                        dots[row][packed_tile] = match form.bits {
                            8 => D::dot_wide(dots[row][packed_tile], quads[packed_tile][quad], inputs),
                            _ => D::dot(dots[row][packed_tile], quads[packed_tile][quad], inputs),
                        };
                    });
                }); });
                if pair == 3 || pair == 1 && groups(form) == 2 {
                    unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                        let scale = lanes::<D::Floats, TYPE>(scales.add(packed_tile * next_scales), pair / 2 * (groups(form) - 1));
                        unrolled!(row in 0 1 2 3 => if row < ROWS {
                            let dot = D::floats(dots[row][packed_tile]).mul(D::Floats::splat(*a_scales.add(row)));
                            sums[row][packed_tile] = dot.mul_add(scale, sums[row][packed_tile]);
                        });
                    });
                }
            });
            if form.zero.is_none() {
                unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                    let minimum = lanes::<D::Floats, TYPE>(scales.add(packed_tile * next_scales), groups(form));
                    unrolled!(row in 0 1 2 3 => if row < ROWS {
                        let weighted = D::Floats::splat(*weighted_sums.add(row));
                        sums[row][packed_tile] = weighted.mul_add(minimum, sums[row][packed_tile]);
                    });
                });
            }
            quants = quants.add(code_bytes(form));
            scales = scales.add(scale_bytes(form));
        }
    }
    unrolled!(row in 0 1 2 3 => if row < ROWS && row < rows {
        unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
            // SAFETY: the caller's promise.
            unsafe {
                let at = c.at.add(row * c.stride + packed_tile * TILE_OUTPUTS);
                match target {
                    Target::Set => sums[row][packed_tile].store(at),
                    Target::Add => D::Floats::load(at).add(sums[row][packed_tile]).store(at),
                }
            }
        });
    });
}

/// What the dot products of a row and a group of a block begin with: what its quants' zero takes
/// off.
///
/// # Safety
/// `first + row` is below 16.
#[inline(always)]
unsafe fn zero<const TYPE: usize>(block: &QuantizedBlock, group: usize, first: usize, row: usize) -> i32 {
    let form = form_of::<TYPE>();
    let Some(zero) = form.zero else { return 0 };
    const {
        if let Some(zero) = form_of::<TYPE>().zero {
            assert!(zero as i32 % ZERO == 0);
        }
    }
    let zeros = if groups(form) == 1 { block.zeros.as_ptr() } else { block.half_zeros[group].as_ptr() };
    // Wrapping, so that nothing is checked in the inner loop: it is at most 2^20.
    // SAFETY: the caller's promise.
    unsafe { (*zeros.add(first).add(row)).wrapping_mul(i32::from(zero) / ZERO) }
}

#[cfg(test)]
mod tests {
    use super::super::quantized_matrix::tests::{packed, quantized, random_blocks};
    use super::super::swiglu::swiglu;
    use super::*;
    use crate::kernels::guarded::on_both_sides;
    use crate::kernels::{Rows, reference};

    #[test]
    fn quantized_matmul_equals_the_reference_over_odd_shapes() {
        on_both_sides(compare_odd_shapes);
    }

    fn compare_odd_shapes() {
        let shapes = [
            (1, 1, 32),
            (1, 300, 608),
            (2, 47, 64),
            (15, 33, 96),
            (16, 16, 256),
            (16, 300, 96),
            (17, 100, 64),
            (150, 40, 32),
        ];
        for (rows, outputs, inputs) in shapes {
            let mut x = Rows::new(inputs);
            x.resize(rows);
            for row in 0..rows {
                x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
            }
            for dtype in quantized() {
                let blocks = random_blocks(dtype, outputs as u64, outputs * inputs / BLOCK);
                for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                    let threads = Threads::new(count).unwrap();
                    let w = packed(&threads, dtype, &blocks, inputs);
                    let mut a = QuantizedRows::new();
                    a.fill_from(isa, &threads, &x);
                    let mut y = Rows::new(outputs + 16);
                    y.resize(rows);
                    for (times, target) in [(1.0, Target::Set), (2.0, Target::Add)] {
                        quantized_matmul(isa, &threads, &a, &w, Destination { y: &y.share(), column: 16, target });
                        for row in 0..rows {
                            let expected = reference::quantized_matmul(x.row(row), dtype, &blocks);
                            let expected: Vec<_> = expected.into_iter().map(|y| times * y).collect();
                            assert_eq!(y.row(row)[16..], expected, "{isa} {dtype} {rows}x{outputs}x{inputs} row {row}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn gated_quantized_matmul_equals_matmul_then_swiglu() {
        on_both_sides(compare_gated);
    }

    fn compare_gated() {
        for (rows, half, inputs) in
            [(1, 32, 32), (15, 64, 96), (17, 96, 64), (33, 32, 608), (150, 160, 32), (2, 256, 128)]
        {
            let mut x = Rows::new(inputs);
            x.resize(rows);
            for row in 0..rows {
                x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
            }
            for dtype in quantized() {
                let blocks = random_blocks(dtype, 3, 2 * half * inputs / BLOCK);
                for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                    let threads = Threads::new(count).unwrap();
                    let w = packed(&threads, dtype, &blocks, inputs);
                    let mut a = QuantizedRows::new();
                    let mut found = QuantizedRows::new();
                    a.fill_from(isa, &threads, &x);
                    gated_quantized_matmul(isa, &threads, &a, &w, &ProductBuffers::new(&threads), &mut found);
                    assert_eq!(found.rows(), rows);
                    for row in 0..rows {
                        let both = reference::quantized_matmul(x.row(row), dtype, &blocks);
                        let mut expected = vec![0.0; half];
                        swiglu(Isa::SCALAR, &both[..half], &both[half..], &mut expected);
                        let found = found.group(row / GROUP);
                        assert_eq!(found.len(), half / BLOCK);
                        for (found, expected) in found.iter().zip(reference::quantize(&expected)) {
                            let found = (found.quants[row % GROUP], found.scales[row % GROUP]);
                            assert_eq!(
                                found,
                                (expected.quants, expected.scale),
                                "{isa} {dtype} {rows}x{half}x{inputs} row {row}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn quantized_matmul_reference_is_near_the_float_product() {
        for dtype in quantized() {
            let blocks = random_blocks(dtype, 5, 3 * 4);
            let x = reference::random(6, 128);
            let form = dtype.quant_format().unwrap();
            let mut w = vec![0.0; 3 * 128];
            blocks.iter().zip(w.as_chunks_mut().0).for_each(|(block, out)| block.elements(form, out));
            let found = reference::quantized_matmul(&x, dtype, &blocks);
            for (row, found) in w.chunks_exact(128).zip(found) {
                let expected: f32 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
                let size: f32 = row.iter().zip(&x).map(|(w, x)| (w * x).powi(2)).sum::<f32>().sqrt();
                assert!((found - expected).abs() < 0.03 * size, "{dtype}: {found}, {expected}, of {size}");
            }
        }
    }
}
