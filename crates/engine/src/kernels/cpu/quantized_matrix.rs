//! Quantized weights as their products read them.
//!
//! ```text
//! packed quants    [n / 16][k / 32][8 quads][16 outputs][4 inputs]          8-bit quants, 512 bytes a block
//!                 [n / 16][k / 32][4 + p][16 outputs][4 inputs]            quants of 4 + p bits: 4 times nibbles, quad 2 i low and 2 i + 1 high, then p planes:
//!                                                                          bit q of a byte of plane b is bit 4 + b of the quant in quad q
//! packed scales   [n / 16][k / 32][scale of each group, then minimum][16 outputs]      f16 where the file's are, else f32
//! ```

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use baton_formats::{Dtype, QUANTS, QuantBlock, QuantFormat};
use half::f16;

use crate::error::EngineError;
use crate::kernels::dots::{Dots, QUADS};
use crate::kernels::lanes::{F32x16, LANES};
use crate::kernels::{Threads, WeightBytes, WeightMemory};

use super::linear::WeightShape;
use super::quantize::BLOCK;
use super::unrolled::unrolled;

const _: () = assert!(QUANTS == BLOCK);
/// Outputs of one packed tile.
pub(crate) const TILE_OUTPUTS: usize = LANES;

/// Compiles an expression for each quantized type, and picks at run time: with the type's index in
/// `Dtype::ALL` as a constant.
macro_rules! per_type {
    ($dtype:expr, $index:ident => $body:expr) => {
        $crate::kernels::cpu::quantized_matrix::per_type!($dtype, $index => $body; Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K)
    };
    ($dtype:expr, $index:ident => $body:expr; $($type:ident)*) => {
        match $dtype {
            $(baton_formats::Dtype::$type => {
                const $index: usize = baton_formats::Dtype::$type as usize;
                $body
            })*
            // By name, so that another quantized type is missed when this is compiled.
            dtype @ (baton_formats::Dtype::F32 | baton_formats::Dtype::F16 | baton_formats::Dtype::BF16) => {
                unreachable!("{dtype} is not quantized")
            }
        }
    };
}

pub(super) use per_type;

/// A quantized weight matrix, `outputs x inputs`.
pub(crate) struct QuantizedMatrix {
    dtype: Dtype,
    form: QuantFormat,
    quants: WeightBytes,
    scales: WeightBytes,
    outputs: usize,
    inputs: usize,
}

impl QuantizedMatrix {
    /// Packs a matrix of the quantized type `dtype` whose rows `read` gives, as blocks of quants.
    /// `inputs` is a multiple of 32.
    pub fn pack(
        threads: &Threads,
        memory: &WeightMemory,
        dtype: Dtype,
        shape: WeightShape,
        read: impl Fn(usize, &mut [QuantBlock]) -> Result<(), EngineError> + Sync,
    ) -> Result<Self, EngineError> {
        let WeightShape { outputs, inputs } = shape;
        let form = dtype.quant_format().unwrap_or_else(|| unreachable!("{dtype} is not quantized"));
        let blocks = inputs / BLOCK;
        let packed_tiles = outputs.div_ceil(TILE_OUTPUTS);
        let quant_bytes = blocks * quant_bytes(form);
        let scale_bytes = blocks * scale_bytes(form);
        let mut quants = memory.zeroed(packed_tiles * quant_bytes)?;
        let mut scales = memory.zeroed(packed_tiles * scale_bytes)?;
        let slots = quants.chunks_exact_mut(quant_bytes.max(1)).zip(scales.chunks_exact_mut(scale_bytes.max(1)));
        let slots: Vec<_> = slots.map(Mutex::new).collect();
        let failed = Mutex::new(None);
        threads.for_each(slots.len(), true, |_, packed_tile| {
            let mut row = vec![QuantBlock::EMPTY; blocks];
            let mut slot = slots[packed_tile].lock().unwrap_or_else(PoisonError::into_inner);
            let (quants, scales) = &mut *slot;
            for (lane, output) in
                (packed_tile * TILE_OUTPUTS..outputs.min((packed_tile + 1) * TILE_OUTPUTS)).enumerate()
            {
                match read(output, &mut row) {
                    Ok(()) => pack_row(form, &row, lane, quants, scales),
                    Err(error) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error),
                }
            }
        });
        drop(slots);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(Self { dtype, form, quants, scales, outputs, inputs }),
        }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Whether each half of the outputs is whole blocks of inputs of what follows.
    pub fn halves_are_blocks(&self) -> bool {
        self.outputs.is_multiple_of(2 * BLOCK)
    }

    /// Packed tiles of 16 outputs.
    pub fn packed_tiles(&self) -> usize {
        self.outputs.div_ceil(TILE_OUTPUTS)
    }

    /// Quants and scales of some packed tiles, each of which has those of all its blocks.
    pub fn whole(&self, packed_tiles: Range<usize>) -> (&[u8], &[u8]) {
        let of = |block: usize| {
            let bytes = self.inputs / BLOCK * block;
            packed_tiles.start * bytes..packed_tiles.end * bytes
        };
        (&self.quants[of(quant_bytes(self.form))], &self.scales[of(scale_bytes(self.form))])
    }

    /// One row of the weight matrix: an embedding, if the matrix is the head too.
    pub fn copy_row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.outputs && to.len() == self.inputs, "row {row} of {}", self.outputs);
        let packed_tile = row / TILE_OUTPUTS;
        let lane = row % TILE_OUTPUTS;
        let blocks = self.inputs / BLOCK;
        let quant_bytes = quant_bytes(self.form);
        let scale_bytes = scale_bytes(self.form);
        let quants = self.quants[packed_tile * blocks * quant_bytes..].chunks_exact(quant_bytes);
        let scales = self.scales[packed_tile * blocks * scale_bytes..].chunks_exact(scale_bytes);
        for ((quants, scales), to) in quants.zip(scales).zip(to.as_chunks_mut().0) {
            unpack_block(self.form, quants, scales, lane).elements(self.form, to);
        }
    }
}

/// Bytes of the quants of a block of 16 outputs.
pub(super) const fn quant_bytes(form: QuantFormat) -> usize {
    QUADS * if form.bits == 8 { BLOCK / 4 } else { form.bits as usize }
}

/// Scales of a block of one output.
pub(super) const fn groups(form: QuantFormat) -> usize {
    BLOCK / form.group
}

/// Bytes of the scales, and of the minima, of a group of 16 outputs.
const fn lane_bytes(form: QuantFormat) -> usize {
    LANES * if form.half_scales { 2 } else { 4 }
}

/// Bytes of the scales and minima of a block of 16 outputs.
pub(super) const fn scale_bytes(form: QuantFormat) -> usize {
    groups(form) * lane_bytes(form) * if form.zero.is_none() { 2 } else { 1 }
}

fn pack_row(form: QuantFormat, row: &[QuantBlock], lane: usize, quants: &mut [u8], scales: &mut [u8]) {
    let slots = quants.chunks_exact_mut(quant_bytes(form)).zip(scales.chunks_exact_mut(scale_bytes(form)));
    for (block, (quants, scales)) in row.iter().zip(slots) {
        for (i, &quant) in block.quants.iter().enumerate() {
            let quad = i / 4;
            let byte = 4 * lane + i % 4;
            if form.bits == 8 {
                quants[quad * QUADS + byte] = quant;
                continue;
            }
            quants[quad / 2 * QUADS + byte] |= (quant & 15) << (4 * (quad % 2));
            for plane in 4..form.bits as usize {
                quants[plane * QUADS + byte] |= ((quant >> plane) & 1) << quad;
            }
        }
        let groups = groups(form);
        let numbers = block.scales[..groups].iter().chain(&block.minima[..groups]);
        for (&x, to) in numbers.zip(scales.chunks_exact_mut(lane_bytes(form))) {
            if form.half_scales {
                to[2 * lane..2 * lane + 2].copy_from_slice(&f16::from_f32(x).to_ne_bytes())
            } else {
                to[4 * lane..4 * lane + 4].copy_from_slice(&x.to_ne_bytes())
            }
        }
    }
}

fn unpack_block(form: QuantFormat, quants: &[u8], scales: &[u8], lane: usize) -> QuantBlock {
    let quant = |i: usize| {
        let quad = i / 4;
        let byte = 4 * lane + i % 4;
        if form.bits == 8 {
            return quants[quad * QUADS + byte];
        }
        let nibble = (quants[quad / 2 * QUADS + byte] >> (4 * (quad % 2))) & 15;
        let bit = |plane: usize| ((quants[plane * QUADS + byte] >> quad) & 1) << plane;
        (4..form.bits as usize).fold(nibble, |quant, plane| quant | bit(plane))
    };
    let number = |index: usize| {
        let lanes = &scales[index * lane_bytes(form)..][..lane_bytes(form)];
        if form.half_scales {
            f16::from_ne_bytes([lanes[2 * lane], lanes[2 * lane + 1]]).to_f32()
        } else {
            f32::from_ne_bytes(std::array::from_fn(|i| lanes[4 * lane + i]))
        }
    };
    let groups = groups(form);
    let minimum = form.zero.is_none();
    let minima = if minimum { [number(groups), number(2 * groups - 1)] } else { [0.0; 2] };
    QuantBlock { quants: std::array::from_fn(quant), scales: [number(0), number(groups - 1)], minima }
}

/// The form of the type with this index in `Dtype::ALL`, as a constant.
#[inline(always)]
pub(super) const fn format_of<const TYPE: usize>() -> QuantFormat {
    const {
        match Dtype::ALL[TYPE].quant_format() {
            Some(form) => form,
            None => panic!("the type is not quantized"),
        }
    }
}

/// The quants of a block of 16 outputs, 4 inputs a vector: vectors 2 `pair` and the next.
///
/// # Safety
/// A block's quants can be read; `pair` is below 4.
#[inline(always)]
pub(super) unsafe fn two_quads<D: Dots, const TYPE: usize>(quants: *const u8, pair: usize) -> [D::Quants; 2] {
    let bits = format_of::<TYPE>().bits;
    // SAFETY: the caller's promise.
    unsafe {
        if bits == 8 {
            return [D::bytes(quants.add(2 * pair * QUADS)), D::bytes(quants.add((2 * pair + 1) * QUADS))];
        }
        let [mut low, mut high] = D::nibbles(quants.add(pair * QUADS));
        unrolled!(plane in 4 5 6 7 => if plane < bits as usize {
            let bits = D::bytes(quants.add(plane * QUADS));
            low = D::with_bit(low, bits, 2 * pair as u32, plane as u32);
            high = D::with_bit(high, bits, 2 * pair as u32 + 1, plane as u32);
        });
        [low, high]
    }
}

/// 16 numbers of a block.
///
/// # Safety
/// They can be read.
#[inline(always)]
pub(super) unsafe fn lanes<V: F32x16, const TYPE: usize>(scales: *const u8, index: usize) -> V {
    let form = format_of::<TYPE>();
    // SAFETY: the caller's promise; they begin at a multiple of 32 bytes.
    unsafe {
        let at = scales.add(index * lane_bytes(form));
        if form.half_scales { V::from_f16(&*at.cast()) } else { V::load(at.cast()) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::kernels::reference;

    /// Rows of a quantized type, from a seed.
    pub fn random_blocks(dtype: Dtype, seed: u64, count: usize) -> Vec<QuantBlock> {
        let form = dtype.quant_format().unwrap();
        let numbers = reference::random(seed, count * (QUANTS + 4));
        let blocks = numbers.chunks_exact(QUANTS + 4).map(|x| {
            let number = |i: usize| f16::from_f32(x[i] * 0.1).to_f32();
            let mut scales = [number(0), number(1)];
            let mut minima = if form.zero.is_none() { [number(2), number(3)] } else { [0.0; 2] };
            if form.group == QUANTS {
                (scales[1], minima[1]) = (scales[0], minima[0]);
            }
            let quant = |i: usize| ((x[4 + i] + 1.0) * 0.5 * (1u32 << form.bits) as f32) as u8;
            QuantBlock { quants: std::array::from_fn(quant), scales, minima }
        });
        blocks.collect()
    }

    pub fn packed(threads: &Threads, dtype: Dtype, blocks: &[QuantBlock], inputs: usize) -> QuantizedMatrix {
        let per_row = inputs / BLOCK;
        let read = |row: usize, to: &mut [QuantBlock]| {
            to.copy_from_slice(&blocks[row * per_row..][..per_row]);
            Ok(())
        };
        let shape = WeightShape { outputs: blocks.len() / per_row, inputs };
        QuantizedMatrix::pack(threads, &WeightMemory::guarded(), dtype, shape, read).unwrap()
    }

    pub fn quantized() -> impl Iterator<Item = Dtype> {
        Dtype::ALL.into_iter().filter(|dtype| dtype.quant_format().is_some())
    }

    #[test]
    fn row_of_packed_quants_reads_back() {
        let threads = Threads::new(2).unwrap();
        for dtype in quantized() {
            let blocks = random_blocks(dtype, 3, 37 * 2);
            let w = packed(&threads, dtype, &blocks, 64);
            let mut found = [0.0; 64];
            let mut expected = [0.0; 64];
            w.copy_row(36, &mut found);
            let form = dtype.quant_format().unwrap();
            blocks[72..].iter().zip(expected.as_chunks_mut().0).for_each(|(block, out)| block.elements(form, out));
            assert_eq!(found, expected, "{dtype}");
        }
    }

    #[test]
    fn packed_tiles_take_little_more_memory_than_the_file() {
        for dtype in quantized() {
            let form = dtype.quant_format().unwrap();
            let packed = (quant_bytes(form) + scale_bytes(form)) as f64 / (BLOCK * TILE_OUTPUTS) as f64;
            let file = dtype.block_bytes() as f64 / dtype.block_elements() as f64;
            assert!(packed <= 1.34 * file, "{dtype}: {packed} bytes an element, {file} in the file");
        }
    }

    #[test]
    fn failed_read_fails_packing_of_quants() {
        let read = |row: usize, _: &mut [QuantBlock]| {
            if row == 32 { Err(EngineError::Model("row 32".to_owned())) } else { Ok(()) }
        };
        let threads = Threads::new(2).unwrap();
        let memory = WeightMemory::new();
        let shape = WeightShape { outputs: 64, inputs: 32 };
        let failed = QuantizedMatrix::pack(&threads, &memory, Dtype::Q8_0, shape, read).err().unwrap();
        assert_eq!(failed.to_string(), "row 32");
    }
}
