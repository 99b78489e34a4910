//! The one place where products of floats are summed: a small matrix product whose accumulators
//! stay in registers.
//!
//! ```text
//! C[r][j] (+)= sum over p of A[r][p] x B[p][j]      A: rows x depth, B: depth x columns (a multiple of 16), in pairs of p (see `Pairs`)
//! ```
//!
//! Each C\[r]\[j] is one chain of fused multiply-adds in the order of the pairs. So the size of a
//! register tile does not show in the result. If there are matrix tiles, the sum of each 32 inputs
//! is theirs ([`crate::kernels::amx`]); inputs beyond the last 32 are added as elsewhere.

#[cfg(target_arch = "x86_64")]
use crate::kernels::amx::{self, PairsProduct, Shape, pairs_product};
use crate::kernels::lanes::{CACHE_LINE, F32x16, LANES, prefetch_line};
use crate::kernels::pairs::{PAIR, Pairs};

#[cfg(not(target_arch = "x86_64"))]
use std::convert::Infallible as Shape;

use super::unrolled::unrolled;

/// Rows of a block of matrix tiles.
pub(super) const TILE_BLOCK: usize = 32;

/// A matrix in memory: where it begins, and the elements from one row, or one pair of rows, to the
/// next.
#[derive(Clone, Copy)]
pub(super) struct Operand<P> {
    pub at: P,
    pub stride: usize,
}

/// Extent of a product.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    pub rows: usize,
    pub depth: usize,
    /// A multiple of 16.
    pub columns: usize,
    /// Add to what C holds, instead of beginning at 0.
    pub accumulate: bool,
}

/// What to prefetch during a product, if anything: consecutive bytes, asked for evenly over its
/// register tiles, so that memory is never idle.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Any address will do: it is only a hint.
    at: *const u8,
    /// Bytes per pair of inputs and register tile.
    step: usize,
}

impl Ahead {
    /// Nothing.
    fn nothing() -> Self {
        Self { at: std::ptr::null(), step: 0 }
    }

    /// `len` bytes, during a product of this extent.
    pub fn new<P: Pairs>(at: *const u8, len: usize, extent: Extent) -> Self {
        let rows = if P::TILES { TILE_BLOCK } else { P::TILE_ROWS };
        let tiles = extent.rows.div_ceil(rows) * extent.columns.div_ceil(P::TILE_VECTORS * LANES);
        Self { at, step: len.div_ceil((extent.depth / 2 * tiles).max(1)) }
    }
}

/// What products of at most so many rows need while they are computed: the shape of this thread's
/// matrix tiles. Of more than 32 rows, all are multiples of 32.
///
/// # Safety
/// No other shape lives on this thread.
#[inline(always)]
pub(super) unsafe fn shape<P: Pairs>(rows: usize) -> Option<Shape> {
    #[cfg(target_arch = "x86_64")]
    if P::TILES {
        // SAFETY: the type is used only if there are tiles (see the trait); the caller's promise.
        return Some(unsafe { Shape::of_pairs(rows.min(TILE_BLOCK)) });
    }
    None
}

/// The product, in register tiles.
///
/// # Safety
/// `a` can be read at `rows x depth`, `b` at `depth.div_ceil(2) x columns` pairs, and `c` written
/// at `rows x columns`, with their strides. Nothing else touches that part of `c`. With matrix
/// tiles a [`shape`] lives on this thread, and there are as many rows as its tiles have, from each
/// 32nd row on.
#[inline(always)]
pub(super) unsafe fn product<P: Pairs>(
    extent: Extent,
    a: Operand<*const P::Input>,
    b: Operand<*const P::Weight>,
    c: Operand<*mut f32>,
    ahead: Option<&mut Ahead>,
) {
    #[cfg(target_arch = "x86_64")]
    if P::TILES {
        // SAFETY: the caller's promise.
        return unsafe { matrix_tile_product::<P>(extent, a, b, c, ahead) };
    }
    // SAFETY: the caller's promise.
    unsafe { register_product::<P>(extent, a, b, c, ahead) }
}

/// The product in matrix tiles, and of the last inputs, fewer than 32, in registers.
///
/// # Safety
/// As for [`product`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn matrix_tile_product<P: Pairs>(
    extent: Extent,
    a: Operand<*const P::Input>,
    b: Operand<*const P::Weight>,
    c: Operand<*mut f32>,
    mut ahead: Option<&mut Ahead>,
) {
    let steps = extent.depth / amx::DEPTH;
    if steps > 0 {
        let mut column = 0;
        while column < extent.columns {
            let wide = extent.columns - column >= 2 * LANES;
            for row in (0..extent.rows).step_by(TILE_BLOCK) {
                let Ahead { at, step } = ahead.as_deref().copied().unwrap_or(Ahead::nothing());
                let lines = (step * amx::DEPTH / 2).div_ceil(CACHE_LINE);
                // SAFETY: rows `row..` and columns `column..` of the caller's operands.
                unsafe {
                    let product = PairsProduct {
                        a: a.at.add(row * a.stride).cast(),
                        a_stride: a.stride * size_of::<P::Input>(),
                        b: b.at.add(2 * column).cast(),
                        b_stride: b.stride * size_of::<P::Weight>(),
                        c: c.at.add(row * c.stride + column).cast(),
                        c_stride: c.stride * size_of::<f32>(),
                        steps,
                        accumulate: extent.accumulate,
                        ahead: at,
                        ahead_lines: lines,
                    };
                    match (extent.rows - row > amx::TILE, wide) {
                        (true, true) => pairs_product::<true, true>(product),
                        (false, true) => pairs_product::<false, true>(product),
                        (true, false) => pairs_product::<true, false>(product),
                        (false, false) => pairs_product::<false, false>(product),
                    }
                }
                if let Some(ahead) = &mut ahead {
                    ahead.at = at.wrapping_add(steps * lines * CACHE_LINE);
                }
            }
            column += if wide { 2 * LANES } else { LANES };
        }
    }
    let done = steps * amx::DEPTH;
    if done < extent.depth {
        let rest = Extent { depth: extent.depth - done, accumulate: steps > 0 || extent.accumulate, ..extent };
        // SAFETY: the inputs from `done` on of the caller's operands.
        unsafe {
            let a = Operand { at: a.at.add(done), ..a };
            let b = Operand { at: b.at.add(done / 2 * b.stride), ..b };
            register_product::<P>(rest, a, b, c, ahead);
        }
    }
}

/// The product, in register tiles.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn register_product<P: Pairs>(
    extent: Extent,
    a: Operand<*const P::Input>,
    b: Operand<*const P::Weight>,
    c: Operand<*mut f32>,
    mut ahead: Option<&mut Ahead>,
) {
    let mut column = 0;
    while column < extent.columns {
        let wide = P::TILE_VECTORS > 1 && extent.columns - column >= 2 * LANES;
        // SAFETY: columns `column..` of the caller's operands, two vectors of them only if there
        // are as many.
        unsafe {
            let b = Operand { at: b.at.add(2 * column), ..b };
            let c = Operand { at: c.at.add(column), ..c };
            if wide {
                strip::<P, 2>(extent, a, b, c, ahead.as_deref_mut());
            } else {
                strip::<P, 1>(extent, a, b, c, ahead.as_deref_mut());
            }
        }
        column += if wide { 2 * LANES } else { LANES };
    }
}

/// All rows of one or two vectors of columns. Tiles are of even height: 16 rows are 8 + 8, not 12 +
/// 4.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn strip<P: Pairs, const VECTORS: usize>(
    extent: Extent,
    a: Operand<*const P::Input>,
    b: Operand<*const P::Weight>,
    c: Operand<*mut f32>,
    mut ahead: Option<&mut Ahead>,
) {
    let tiles = extent.rows.div_ceil(P::TILE_ROWS);
    for tile in 0..tiles {
        let first = extent.rows * tile / tiles;
        let end = extent.rows * (tile + 1) / tiles;
        // SAFETY: rows `first..end` of the caller's operands.
        unsafe {
            let a = Operand { at: a.at.add(first * a.stride), ..a };
            let c = Operand { at: c.at.add(first * c.stride), ..c };
            of_height::<P, VECTORS>(end - first, extent, a, b, c, ahead.as_deref_mut());
        }
    }
}

/// A register tile of `height` rows, which is at most `P::TILE_ROWS`.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn of_height<P: Pairs, const VECTORS: usize>(
    height: usize,
    extent: Extent,
    a: Operand<*const P::Input>,
    b: Operand<*const P::Weight>,
    c: Operand<*mut f32>,
    ahead: Option<&mut Ahead>,
) {
    macro_rules! pick {
        ($($rows:literal)*) => {
            match height {
                // SAFETY: the caller's promise.
                $($rows if $rows <= P::TILE_ROWS => unsafe { registers::<P, $rows, VECTORS>(extent, a, b, c, ahead) },)*
                _ => unreachable!("a tile of {height} rows"),
            }
        };
    }
    pick!(1 2 3 4 5 6 7 8 9 10 11 12);
}

/// The inner loop: per pair, `VECTORS` loads of B, `ROWS` broadcasts of A, `ROWS x VECTORS`
/// products.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn registers<P: Pairs, const ROWS: usize, const VECTORS: usize>(
    extent: Extent,
    a: Operand<*const P::Input>,
    b: Operand<*const P::Weight>,
    c: Operand<*mut f32>,
    ahead: Option<&mut Ahead>,
) {
    // Loops over the registers would be unrolled too late for the compiler to see that nothing else
    // looks at the sums: it would store each of them after each product.
    macro_rules! each {
        ($row:ident, $j:ident => $body:expr) => {
            unrolled!($row in 0 1 2 3 4 5 6 7 8 9 10 11 => if $row < ROWS {
                unrolled!($j in 0 1 => if $j < VECTORS { $body });
            })
        };
    }
    const { assert!(ROWS <= 12 && VECTORS <= 2) };
    // SAFETY: the caller's promise, for every access below.
    unsafe {
        let mut sums = [[P::Floats::splat(0.0); VECTORS]; ROWS];
        if extent.accumulate {
            each!(row, j => sums[row][j] = P::Floats::load(c.at.add(row * c.stride + j * LANES)));
        }
        let Ahead { mut at, step } = ahead.as_deref().copied().unwrap_or(Ahead::nothing());
        let mut b_pair = b.at;
        for p in 0..extent.depth / 2 {
            let weights: [_; 2] = [P::load(b_pair), P::load(b_pair.add((VECTORS - 1) * PAIR))];
            let mut a_at = a.at.add(2 * p);
            unrolled!(row in 0 1 2 3 4 5 6 7 8 9 10 11 => if row < ROWS {
                unrolled!(j in 0 1 => if j < VECTORS { sums[row][j] = P::dot(sums[row][j], weights[j], a_at) });
                // Wrapping, for past the last row it may point outside.
                a_at = a_at.wrapping_add(a.stride);
            });
            b_pair = b_pair.wrapping_add(b.stride);
            if ahead.is_some() {
                prefetch_line(at);
                at = at.wrapping_add(step);
            }
        }
        if let Some(ahead) = ahead {
            ahead.at = at;
        }
        if extent.depth % 2 == 1 {
            let weights = [P::load(b_pair), P::load(b_pair.add((VECTORS - 1) * PAIR))];
            let last = extent.depth - 1;
            each!(row, j => sums[row][j] = P::dot_even(sums[row][j], weights[j], a.at.add(row * a.stride + last)));
        }
        each!(row, j => sums[row][j].store(c.at.add(row * c.stride + j * LANES)));
    }
}
