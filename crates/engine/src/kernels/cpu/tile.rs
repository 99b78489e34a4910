//! The one place where products are summed: a small matrix product whose accumulators stay in registers.
//!
//! ```text
//! C[r][j] (+)= sum over p of A[r][p] x B[p][j]      A: rows x depth, B: depth x columns (a multiple of 16)
//! ```
//!
//! Each C\[r]\[j] is one chain of fused multiply-adds in the order of p, so the size of a register tile does not show in the result.

use half::{bf16, f16};

use crate::kernels::lanes::{F32x16, LANES};

/// A number as it lies in memory. Every one is an f32 exactly.
pub(super) trait Element: Copy {
    /// Nearest to x; x itself where it is a number of this type.
    fn of(x: f32) -> Self;

    fn to_f32(self) -> f32;

    /// 16 of them.
    ///
    /// # Safety
    /// They can be read at `at`.
    unsafe fn lanes<V: F32x16>(at: *const Self) -> V;
}

impl Element for f32 {
    fn of(x: f32) -> Self {
        x
    }

    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn lanes<V: F32x16>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(at) }
    }
}

impl Element for f16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }

    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    unsafe fn lanes<V: F32x16>(at: *const Self) -> V {
        // SAFETY: the caller's promise; a half is its 16 bits.
        V::from_f16(unsafe { &*at.cast() })
    }
}

impl Element for bf16 {
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }

    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    unsafe fn lanes<V: F32x16>(at: *const Self) -> V {
        // SAFETY: the caller's promise; a bfloat16 is its 16 bits.
        V::from_bf16(unsafe { &*at.cast() })
    }
}

/// A matrix in memory: where it begins, and the elements from one row to the next.
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

/// The product, in register tiles.
///
/// # Safety
/// `a` can be read at `rows x depth`, `b` at `depth x columns`, and `c` written at `rows x columns`, with their strides; nobody else touches that part of `c`.
#[inline(always)]
pub(super) unsafe fn product<V: F32x16, B: Element>(
    extent: Extent,
    a: Operand<*const f32>,
    b: Operand<*const B>,
    c: Operand<*mut f32>,
) {
    let mut column = 0;
    while column < extent.columns {
        let wide = V::TILE_VECTORS > 1 && extent.columns - column >= 2 * LANES;
        // SAFETY: columns `column..` of the caller's operands, two vectors of them only where there are as many.
        unsafe {
            let b = Operand { at: b.at.add(column), ..b };
            let c = Operand { at: c.at.add(column), ..c };
            if wide {
                strip::<V, B, 2>(extent, a, b, c);
            } else {
                strip::<V, B, 1>(extent, a, b, c);
            }
        }
        column += if wide { 2 * LANES } else { LANES };
    }
}

/// All rows of one or two vectors of columns. Tiles are of even height: 16 rows are 8 + 8, not 12 + 4.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn strip<V: F32x16, B: Element, const VECTORS: usize>(
    extent: Extent,
    a: Operand<*const f32>,
    b: Operand<*const B>,
    c: Operand<*mut f32>,
) {
    let tiles = extent.rows.div_ceil(V::TILE_ROWS);
    for tile in 0..tiles {
        let (first, end) = (extent.rows * tile / tiles, extent.rows * (tile + 1) / tiles);
        // SAFETY: rows `first..end` of the caller's operands.
        unsafe {
            let a = Operand { at: a.at.add(first * a.stride), ..a };
            let c = Operand { at: c.at.add(first * c.stride), ..c };
            of_height::<V, B, VECTORS>(end - first, extent, a, b, c);
        }
    }
}

/// A register tile of `height` rows, which is at most `V::TILE_ROWS`.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn of_height<V: F32x16, B: Element, const VECTORS: usize>(
    height: usize,
    extent: Extent,
    a: Operand<*const f32>,
    b: Operand<*const B>,
    c: Operand<*mut f32>,
) {
    macro_rules! pick {
        ($($rows:literal)*) => {
            match height {
                // SAFETY: the caller's promise.
                $($rows if $rows <= V::TILE_ROWS => unsafe { registers::<V, B, $rows, VECTORS>(extent, a, b, c) },)*
                _ => unreachable!("a tile of {height} rows"),
            }
        };
    }
    pick!(1 2 3 4 5 6 7 8 9 10 11 12);
}

/// The inner loop: per p, `VECTORS` loads of B, `ROWS` broadcasts of A, `ROWS x VECTORS` multiply-adds.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn registers<V: F32x16, B: Element, const ROWS: usize, const VECTORS: usize>(
    extent: Extent,
    a: Operand<*const f32>,
    b: Operand<*const B>,
    c: Operand<*mut f32>,
) {
    // SAFETY: the caller's promise, for every access below.
    unsafe {
        let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
        if extent.accumulate {
            for (r, row) in sums.iter_mut().enumerate() {
                for (j, sum) in row.iter_mut().enumerate() {
                    *sum = V::load(c.at.add(r * c.stride + j * LANES));
                }
            }
        }
        let mut b_row = b.at;
        for p in 0..extent.depth {
            let mut weights = [V::splat(0.0); VECTORS];
            for (j, weight) in weights.iter_mut().enumerate() {
                *weight = B::lanes(b_row.add(j * LANES));
            }
            let mut a_at = a.at.add(p);
            for row in &mut sums {
                let x = V::splat(*a_at);
                for (sum, weight) in row.iter_mut().zip(weights) {
                    *sum = weight.mul_add(x, *sum);
                }
                // Wrapping, for past the last row it may point outside.
                a_at = a_at.wrapping_add(a.stride);
            }
            b_row = b_row.wrapping_add(b.stride);
        }
        for (r, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                sum.store(c.at.add(r * c.stride + j * LANES));
            }
        }
    }
}
