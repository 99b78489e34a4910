//! Activations as bfloat16: what products with bfloat16 weights take.

use half::bf16;

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::LANES;
use crate::kernels::pairs::Pairs;
use crate::kernels::{AlignedBytes, Isa, Rows, Threads};

/// Rows below which waking another thread does not pay.
const PARALLEL_ROWS: usize = 16;

/// Rounded activations of a step, `[rows][columns]`; rows begin on cache lines, an odd number of them apart.
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

    /// Takes the values of `x`.
    pub fn round(&mut self, isa: Isa, threads: &Threads, x: &Rows) {
        (self.rows, self.stride) = (x.rows(), (x.columns().div_ceil(2 * LANES) | 1) * 2 * LANES);
        let bytes = self.rows * self.stride * size_of::<bf16>();
        if bytes > self.bytes.len() {
            self.bytes = AlignedBytes::zeroed(bytes);
        }
        let row_bytes = self.stride * size_of::<bf16>();
        let run = self.rows.div_ceil(4 * threads.count()).max(1);
        let parallel = self.rows >= PARALLEL_ROWS;
        threads.for_each_chunk(&mut self.bytes[..bytes], run * row_bytes, parallel, |index, chunk| {
            for (row, to) in (index * run..).zip(chunk.chunks_exact_mut(row_bytes)) {
                round_row(isa, x.row(row), halves_mut(to));
            }
        });
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

fn halves_mut(bytes: &mut [u8]) -> &mut [bf16] {
    // SAFETY: any 16 bits are a bfloat16.
    let (before, halves, after) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "a row begins on a cache line");
    halves
}

per_isa! {
    /// One row; `to` has room for whole vectors.
    fn round_row(x: &[f32], to: &mut [bf16]) = round_row_of<Pairs>
}

#[inline(always)]
fn round_row_of<P: Pairs<Input = bf16>>(x: &[f32], to: &mut [bf16]) {
    use crate::kernels::lanes::F32x16;
    for (x, to) in x.chunks(LANES).zip(to.chunks_exact_mut(LANES)) {
        // SAFETY: 16 elements.
        unsafe { P::store_inputs(P::Floats::read(x), to.as_mut_ptr()) }
    }
}
