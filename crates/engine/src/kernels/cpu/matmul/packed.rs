//! Weights of floats as their products read them.
//!
//! ```text
//! W of the file     [n][k]
//! packed            [n / 32][k / 2][2 x 16 outputs, pairs of inputs (see `Pairs`)]     the last packed_tile is padded with zero columns, and so is an odd k. Halves stay halves
//! ```

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_formats::Dtype;
use half::{bf16, f16};

use crate::error::EngineError;
use crate::kernels::lanes::LANES;
use crate::kernels::pairs::{Number, PAIR, numbers, numbers_mut};
use crate::kernels::{Threads, WeightBytes, WeightMemory};

use super::super::linear::WeightShape;
use super::super::product_buffers::GATES;

/// Outputs of one packed tile.
pub(super) const TILE_OUTPUTS: usize = 2 * LANES;
const _: () = assert!(TILE_OUTPUTS == GATES);
/// Weights of a packed tile and a pair of inputs.
pub(super) const TILE_PAIR: usize = 2 * PAIR;

/// A weight matrix, `outputs x inputs`.
pub(crate) struct PackedMatrix {
    /// F32, F16 or BF16.
    pub(super) element: Dtype,
    packed_tiles: WeightBytes,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

impl PackedMatrix {
    /// Packs a matrix of the type `element`, F32, F16 or BF16. `read` gives its rows: it fills
    /// `[rows][inputs]` for a range of at most 32 outputs.
    pub fn pack(
        threads: &Threads,
        memory: &WeightMemory,
        element: Dtype,
        shape: WeightShape,
        read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), EngineError> + Sync,
    ) -> Result<Self, EngineError> {
        let WeightShape { outputs, inputs } = shape;
        let tile_bytes = packed_elements(inputs) * element.block_bytes();
        let mut packed_tiles = memory.zeroed(outputs.div_ceil(TILE_OUTPUTS) * tile_bytes)?;
        let slots: Vec<_> = packed_tiles.chunks_exact_mut(tile_bytes.max(1)).map(Mutex::new).collect();
        let failed = Mutex::new(None);
        threads.for_each(slots.len(), true, |_, packed_tile| {
            let range = packed_tile * TILE_OUTPUTS..outputs.min((packed_tile + 1) * TILE_OUTPUTS);
            let mut rows = vec![0.0; range.len() * inputs];
            let mut slot = slots[packed_tile].lock().unwrap_or_else(PoisonError::into_inner);
            match read(range, &mut rows) {
                Ok(()) => match element {
                    Dtype::F16 => pack_tile::<f16>(&rows, inputs, numbers_mut(&mut slot)),
                    Dtype::BF16 => pack_tile::<bf16>(&rows, inputs, numbers_mut(&mut slot)),
                    _ => pack_tile::<f32>(&rows, inputs, numbers_mut(&mut slot)),
                },
                Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
            }
        });
        drop(slots);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Self { element, packed_tiles, outputs, inputs }),
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Whether products take rounded activations.
    pub fn is_rounded(&self) -> bool {
        self.element == Dtype::BF16
    }

    /// Whether each half of the outputs is whole packed tiles.
    pub fn halves_are_whole_tiles(&self) -> bool {
        self.outputs.is_multiple_of(2 * TILE_OUTPUTS)
    }

    /// One row of the weight matrix: an embedding, if the matrix is the head too.
    pub fn copy_row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.outputs && to.len() == self.inputs, "row {row} of {}", self.outputs);
        match self.element {
            Dtype::F16 => self.copy_typed::<f16>(row, to),
            Dtype::BF16 => self.copy_typed::<bf16>(row, to),
            _ => self.copy_typed::<f32>(row, to),
        }
    }

    fn copy_typed<N: Number>(&self, row: usize, to: &mut [f32]) {
        let packed_tile = &numbers::<N>(&self.packed_tiles)[row / TILE_OUTPUTS * packed_elements(self.inputs)..];
        for (input, x) in to.iter_mut().enumerate() {
            *x = packed_tile[place::<N>(row % TILE_OUTPUTS, input)].to_f32();
        }
    }

    /// Some inputs of a packed tile, in pairs: `[depth / 2][2 x 16 outputs, pairs]`.
    #[inline(always)]
    pub(super) fn weights<N: Number>(&self, packed_tile: usize, depth: Range<usize>) -> *const N {
        let elements = packed_elements(self.inputs);
        numbers::<N>(&self.packed_tiles)[packed_tile * elements..][..elements][depth.start / 2 * TILE_PAIR..].as_ptr()
    }

    /// The memory that these are read from. The packed tile may be one past the last.
    #[inline(always)]
    pub(super) fn bytes<N: Number>(&self, packed_tile: usize, depth: Range<usize>) -> (*const u8, usize) {
        let bytes = |elements: usize| elements * size_of::<N>();
        let at = bytes(packed_tile * packed_elements(self.inputs) + depth.start / 2 * TILE_PAIR);
        (self.packed_tiles.as_ptr().wrapping_add(at), bytes(depth.len() / 2 * TILE_PAIR))
    }
}

/// Weights of a packed tile, an odd number of inputs made even.
fn packed_elements(inputs: usize) -> usize {
    inputs.div_ceil(2) * TILE_PAIR
}

/// Where a weight lies in its packed tile.
fn place<N: Number>(output: usize, input: usize) -> usize {
    input / 2 * TILE_PAIR + output / LANES * PAIR + N::place(output % LANES, input % 2)
}

fn pack_tile<N: Number>(rows: &[f32], inputs: usize, packed_tile: &mut [N]) {
    for (output, row) in rows.chunks_exact(inputs).enumerate() {
        for (input, &x) in row.iter().enumerate() {
            packed_tile[place::<N>(output, input)] = N::of(x);
        }
    }
}
