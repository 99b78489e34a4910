//! Activations as bfloat16: what products with bfloat16 weights take.

use half::bf16;

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::pairs::{Pairs, numbers_mut};
use crate::kernels::{AlignedBytes, Compute, RowShape, Rows, SharedRows};

use super::row_buffers::{GROUP, Groups, RowBuffers, take_groups};

/// Rounded activations of a step, `[rows][columns]`; rows begin on cache lines, an odd number of
/// them apart.
pub(crate) struct RoundedRows {
    bytes: AlignedBytes,
    rows: usize,
    stride: usize,
}

impl RoundedRows {
    /// No rows yet.
    pub fn new() -> Self {
        Self { bytes: AlignedBytes::zeroed(0), rows: 0, stride: 0 }
    }

    /// Takes rows that `make` writes.
    pub fn fill(
        &mut self,
        compute: &Compute,
        shape: RowShape,
        buffers: &RowBuffers,
        make: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        self.resize(shape);
        let row_bytes = self.stride * size_of::<bf16>();
        let groups = Groups { to: &mut self.bytes[..shape.rows * row_bytes], len: GROUP * row_bytes };
        let isa = compute.isa;
        buffers.pass(&compute.threads, shape, make, groups, |x, slot, group| {
            round_row(isa, x, numbers_mut(&mut group[slot * row_bytes..][..row_bytes]));
        });
    }

    /// Takes the rows of `x`.
    pub fn fill_from(&mut self, compute: &Compute, x: &Rows) {
        self.resize(x.shape());
        let row_bytes = self.stride * size_of::<bf16>();
        let groups = Groups { to: &mut self.bytes[..x.rows() * row_bytes], len: GROUP * row_bytes };
        let isa = compute.isa;
        take_groups(&compute.threads, x, groups, |x, slot, group| {
            round_row(isa, x, numbers_mut(&mut group[slot * row_bytes..][..row_bytes]));
        });
    }

    /// Makes it of this shape. The contents are unspecified; memory is only ever added.
    pub fn resize(&mut self, shape: RowShape) {
        let RowShape { rows, columns } = shape;
        self.rows = rows;
        self.stride = (columns.div_ceil(2 * LANES) | 1) * 2 * LANES;
        let bytes = rows * self.stride * size_of::<bf16>();
        if bytes > self.bytes.len() {
            self.bytes = AlignedBytes::zeroed(bytes);
        }
    }

    /// A handle through which several threads write different parts.
    pub fn share(&mut self) -> SharedRows<'_, bf16> {
        let shape = RowShape { rows: self.rows, columns: self.stride };
        SharedRows::new(numbers_mut(&mut self.bytes), shape, self.stride)
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn as_ptr(&self) -> *const bf16 {
        self.bytes.as_ptr().cast()
    }
}

per_isa! {
    /// One row; `to` has room for whole vectors.
    fn round_row(x: &[f32], to: &mut [bf16]) = round_row_of<Pairs>
}

#[inline(always)]
fn round_row_of<P: Pairs<Input = bf16>>(x: &[f32], to: &mut [bf16]) {
    for (x, to) in x.chunks(LANES).zip(to.chunks_exact_mut(LANES)) {
        // SAFETY: 16 elements.
        unsafe { P::store_inputs(P::Floats::read(x), to.as_mut_ptr()) }
    }
}
