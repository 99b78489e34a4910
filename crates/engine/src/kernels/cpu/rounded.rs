//! Activations as bfloat16: what products with bfloat16 weights take.

use std::sync::{Mutex, PoisonError};

use half::bf16;

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::pairs::Pairs;
use crate::kernels::{AlignedBuf, AlignedBytes, Isa, Threads};

/// Rows that a thread takes at once.
const ROW_GRAIN: usize = 16;

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

    /// Takes rows that `make` writes, of so many columns. `buffers` hold one for each thread.
    pub fn fill(
        &mut self,
        isa: Isa,
        threads: &Threads,
        (rows, columns): (usize, usize),
        buffers: &[Mutex<AlignedBuf>],
        make: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        (self.rows, self.stride) = (rows, (columns.div_ceil(2 * LANES) | 1) * 2 * LANES);
        let row_bytes = self.stride * size_of::<bf16>();
        if rows * row_bytes > self.bytes.len() {
            self.bytes = AlignedBytes::zeroed(rows * row_bytes);
        }
        let parallel = rows > ROW_GRAIN;
        let bytes = &mut self.bytes[..rows * row_bytes];
        threads.for_each_chunk(bytes, ROW_GRAIN * row_bytes, parallel, |worker, index, chunk| {
            let mut buffer = buffers[worker].lock().unwrap_or_else(PoisonError::into_inner);
            for (row, to) in (index * ROW_GRAIN..).zip(chunk.chunks_exact_mut(row_bytes)) {
                make(row, &mut buffer[..columns]);
                round_row(isa, &buffer[..columns], halves_mut(to));
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
    for (x, to) in x.chunks(LANES).zip(to.chunks_exact_mut(LANES)) {
        // SAFETY: 16 elements.
        unsafe { P::store_inputs(P::Floats::read(x), to.as_mut_ptr()) }
    }
}
