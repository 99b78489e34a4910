//! What one task of a product of quants computes.

use std::ops::Range;

use crate::kernels::SharedRows;
use crate::kernels::dots::Dots;
use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{CACHE_LINE, F32x16, LANES, prefetch_line};

use super::super::linear::{Destination, Target};
use super::super::product_buffers::{GATE_STRIDE, GATES};
use super::super::quantize::{BLOCK, QuantizedBlock, QuantizedRows, ZERO, quantize_block};
use super::super::quantized_matrix::{
    QuantizedMatrix, TILE_OUTPUTS, format_of, groups, lanes, per_type, quant_bytes, scale_bytes, two_quads,
};
use super::super::row_buffers::GROUP;
use super::super::swiglu::gate_of;
use super::super::tile::Operand;
use super::super::unrolled::unrolled;
use super::{GATED_TILES, GroupTask, Output, TileStep, WIDEST_TILE};

per_isa! {
    /// Some rows against some packed tiles.
    pub(super) fn group_products(x: &QuantizedRows, w: &QuantizedMatrix, gates: &mut [f32], to: Output<'_>, task: GroupTask) = group_products_of<Dots>
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
    let form = format_of::<TYPE>();
    // A minimum is taken off a whole block, and the sums of nibbles are of one.
    const { assert!(format_of::<TYPE>().zero.is_some() || groups(format_of::<TYPE>()) == 1) };
    const { assert!(format_of::<TYPE>().bits != 4 || groups(format_of::<TYPE>()) == 1) };
    let next_quants = blocks.len() * quant_bytes(form);
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
            let mut nibble_sums = [[D::begin_nibbles(0); TILES]; ROWS];
            unrolled!(pair in 0 1 2 3 => {
                if pair == 0 || pair == 2 && groups(form) == 2 {
                    unrolled!(row in 0 1 2 3 => if row < ROWS {
                        let zero = zero::<TYPE>(block, pair / 2, first, row);
                        dots[row] = [D::splat(zero); TILES];
                        nibble_sums[row] = [D::begin_nibbles(zero); TILES];
                    });
                }
                let mut quads = [[D::bytes(quants); 2]; TILES];
                unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                    quads[packed_tile] = two_quads::<D, TYPE>(quants.add(packed_tile * next_quants), pair);
                });
                unrolled!(quad in 0 1 => { unrolled!(row in 0 1 2 3 => if row < ROWS {
                    let inputs = inputs.add(row).cast::<i32>().add(2 * pair + quad).read_unaligned();
                    unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                        let quads = quads[packed_tile][quad];
                        if const { format_of::<TYPE>().bits == 4 } {
                            let sums = &mut nibble_sums[row][packed_tile];
                            *sums = D::dot_nibbles(*sums, quads, inputs);
                        } else {
                            let dots = &mut dots[row][packed_tile];
                            let is_wide = const { format_of::<TYPE>().is_wide() };
                            *dots = if is_wide { D::dot_wide(*dots, quads, inputs) } else { D::dot(*dots, quads, inputs) };
                        }
                    });
                }); });
                if pair == 3 && form.bits == 4 {
                    unrolled!(row in 0 1 2 3 => if row < ROWS {
                        let zero = zero::<TYPE>(block, 0, first, row);
                        unrolled!(packed_tile in 0 1 => if packed_tile < TILES {
                            dots[row][packed_tile] = D::end_nibbles(nibble_sums[row][packed_tile], zero);
                        });
                    });
                }
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
            quants = quants.add(quant_bytes(form));
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
    let form = format_of::<TYPE>();
    let Some(zero) = form.zero else { return 0 };
    const {
        if let Some(zero) = format_of::<TYPE>().zero {
            assert!(zero as i32 % ZERO == 0);
        }
    }
    let zeros = if groups(form) == 1 { block.zeros.as_ptr() } else { block.half_zeros[group].as_ptr() };
    // Wrapping, so that nothing is checked in the inner loop: it is at most 2^20.
    // SAFETY: the caller's promise.
    unsafe { (*zeros.add(first).add(row)).wrapping_mul(i32::from(zero) / ZERO) }
}
