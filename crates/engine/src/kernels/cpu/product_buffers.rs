//! Working memory of products.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kernels::lanes::LANES;
use crate::kernels::{AlignedBuf, Threads};

/// Gates that are made at once, and as many ups: a packed tile of floats, and what a scale of
/// quantized activations is of.
pub(super) const GATES: usize = 2 * LANES;
/// Elements from one row's gates and ups to the next one's: an odd number of lines.
pub(super) const GATE_STRIDE: usize = 2 * GATES + LANES;

/// One for each thread: `[rows][GATES gates, then their ups]`, rows [`GATE_STRIDE`] apart.
pub(crate) struct ProductBuffers(Vec<Mutex<AlignedBuf>>);

impl ProductBuffers {
    /// Without room for gates yet.
    pub fn new(threads: &Threads) -> Self {
        Self((0..threads.count()).map(|_| Mutex::new(AlignedBuf::zeroed(0))).collect())
    }

    /// A thread's own, with room for the gates of so many rows.
    pub fn lock(&self, worker: usize, gate_rows: usize) -> MutexGuard<'_, AlignedBuf> {
        let mut gates = self.0[worker].lock().unwrap_or_else(PoisonError::into_inner);
        if gates.len() < gate_rows * GATE_STRIDE {
            *gates = AlignedBuf::zeroed(gate_rows * GATE_STRIDE);
        }
        gates
    }
}
