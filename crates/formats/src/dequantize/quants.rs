//! Quantized elements as they are stored: small unsigned quants, and the scales that turn them into
//! numbers.

use crate::{Dtype, FormatError};

use super::{each_block, k_quant, simple_quant};

/// Elements of a [`QuantBlock`].
pub const QUANTS: usize = 32;

/// How a quantized type's elements are made from quants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantFormat {
    /// Quants are below 2^bits: 4, 5, 6 or 8.
    pub bits: u32,
    /// What stands for 0: x = scale * (quant - zero). `None`: x = scale * quant + minimum.
    pub zero: Option<u8>,
    /// Elements that share a scale: 16 or 32.
    pub group: usize,
    /// Scales and minima are IEEE halves, exactly.
    pub half_scales: bool,
}

impl QuantFormat {
    /// Whether quants can be 128 or more, which some instructions do not take.
    pub const fn is_wide(self) -> bool {
        self.bits > 7
    }
}

/// 32 consecutive elements of a row. Element i belongs to group `i / 16`; where the type's groups
/// have 32 elements, both have the same scale and minimum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantBlock {
    /// The quants, in the order of the elements.
    pub quants: [u8; QUANTS],
    /// Scale of each group.
    pub scales: [f32; 2],
    /// Minimum of each group; 0 if the type has none.
    pub minima: [f32; 2],
}

impl QuantBlock {
    /// A block of zeros.
    pub const EMPTY: Self = Self { quants: [0; QUANTS], scales: [0.0; 2], minima: [0.0; 2] };

    /// The elements, in the type's own order of operations.
    #[inline]
    pub fn elements(&self, form: QuantFormat, out: &mut [f32; QUANTS]) {
        for (group, (out, quants)) in out.chunks_exact_mut(16).zip(self.quants.chunks_exact(16)).enumerate() {
            let scale = self.scales[group];
            let minimum = self.minima[group];
            match form.zero {
                Some(zero) => out.iter_mut().zip(quants).for_each(|(x, &quant)| {
                    *x = scale * (i32::from(quant) - i32::from(zero)) as f32;
                }),
                None => out.iter_mut().zip(quants).for_each(|(x, &quant)| *x = scale * f32::from(quant) + minimum),
            }
        }
    }
}

impl Dtype {
    /// How quants become elements; `None` for types that are not quantized.
    pub const fn quant_format(self) -> Option<QuantFormat> {
        let (bits, zero, group, half_scales) = match self {
            Self::F32 | Self::F16 | Self::BF16 => return None,
            Self::Q4_0 => (4, Some(8), 32, true),
            Self::Q4_1 => (4, None, 32, true),
            Self::Q5_0 => (5, Some(16), 32, true),
            Self::Q5_1 => (5, None, 32, true),
            Self::Q8_0 => (8, Some(128), 32, true),
            Self::Q4_K => (4, None, 32, false),
            Self::Q5_K => (5, None, 32, false),
            Self::Q6_K => (6, Some(32), 16, false),
        };
        Some(QuantFormat { bits, zero, group, half_scales })
    }
}

/// Splits `data`, whole blocks of the quantized type `dtype`, into blocks of 32 quants.
///
/// # Errors
///
/// [`FormatError::Buffer`] if `data` is not the bytes of as many elements, or the type is not
/// quantized.
pub fn quants(dtype: Dtype, data: &[u8], out: &mut [QuantBlock]) -> Result<(), FormatError> {
    if dtype.quant_format().is_none() || dtype.bytes_of(out.len() * QUANTS) != Some(data.len()) {
        let expected = out.len() * QUANTS / dtype.block_elements() * dtype.block_bytes();
        return Err(FormatError::buffer(dtype, "bytes to split into quants", data.len(), expected));
    }
    match dtype {
        Dtype::Q4_0 => each_block(data, out, simple_quant::q4_0),
        Dtype::Q4_1 => each_block(data, out, simple_quant::q4_1),
        Dtype::Q5_0 => each_block(data, out, simple_quant::q5_0),
        Dtype::Q5_1 => each_block(data, out, simple_quant::q5_1),
        Dtype::Q8_0 => each_block(data, out, simple_quant::q8_0),
        Dtype::Q4_K => each_block(data, out, k_quant::q4_k),
        Dtype::Q5_K => each_block(data, out, k_quant::q5_k),
        Dtype::Q6_K => each_block(data, out, k_quant::q6_k),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => {} // refused above
    }
    Ok(())
}

/// Elements of whole blocks, by way of their quants. The lengths fit.
pub(super) fn elements(dtype: Dtype, form: QuantFormat, data: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    /// Blocks split at once: those of the largest type's block.
    const BATCH: usize = 8;
    let bytes = BATCH * QUANTS / dtype.block_elements() * dtype.block_bytes();
    let mut blocks = [QuantBlock::EMPTY; BATCH];
    for (data, out) in data.chunks(bytes).zip(out.chunks_mut(BATCH * QUANTS)) {
        let blocks = &mut blocks[..out.len() / QUANTS];
        quants(dtype, data, blocks)?;
        for (block, out) in blocks.iter().zip(out.as_chunks_mut().0) {
            block.elements(form, out);
        }
    }
    Ok(())
}
