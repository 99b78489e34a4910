//! Blocks of 256 elements in groups, each with a scale (and a minimum) of its own that is itself
//! quantized.
//!
//! ```text
//! Q4_K  d:f16 dmin:f16 scales:12       qs:128        x = (d * sc) * q - dmin * m     8 groups of 32
//! Q5_K  d:f16 dmin:f16 scales:12 qh:32 qs:128        x = (d * sc) * q - dmin * m     8 groups of 32
//! Q6_K  ql:128 qh:64 scales:16 (i8) d:f16            x = (d * sc) * (q - 32)         16 groups of 16
//! ```

use super::quants::{QUANTS, QuantBlock};
use super::{f16_at, field};

/// 32 elements each.
const BLOCKS: usize = 8;

pub(super) fn q4_k(block: &[u8; 144], out: &mut [QuantBlock; BLOCKS]) {
    let scales = GroupScales::of(block);
    let quants: &[u8; 128] = field(block, 16);
    // Two groups share 32 bytes: the low nibbles are the first's, the high ones the second's.
    for (group, out) in out.iter_mut().enumerate() {
        let quants = &quants.as_chunks::<QUANTS>().0[group / 2];
        let nibble = 4 * (group % 2);
        *out = scales.block(group, quants.map(|q| (q >> nibble) & 0x0f));
    }
}

pub(super) fn q5_k(block: &[u8; 176], out: &mut [QuantBlock; BLOCKS]) {
    let scales = GroupScales::of(block);
    let fifth: &[u8; QUANTS] = field(block, 16);
    let quants: &[u8; 128] = field(block, 48);
    // As Q4_K; bit g of fifth[i] belongs to element i of group g.
    for (group, out) in out.iter_mut().enumerate() {
        let quants = &quants.as_chunks::<QUANTS>().0[group / 2];
        let nibble = 4 * (group % 2);
        let quant = |i: usize| ((quants[i] >> nibble) & 0x0f) | (((fifth[i] >> group) & 1) << 4);
        *out = scales.block(group, std::array::from_fn(quant));
    }
}

pub(super) fn q6_k(block: &[u8; 210], out: &mut [QuantBlock; BLOCKS]) {
    let low: &[u8; 128] = field(block, 0);
    let high: &[u8; 64] = field(block, 128);
    let scales: &[u8; 16] = field(block, 192);
    let d = f16_at(block, 208);
    // Each half of the block: four runs of 32 elements. Runs r and r + 2 are the nibbles of the
    // same 32 bytes; two bits of high[i] belong to each run.
    for (index, out) in out.iter_mut().enumerate() {
        let half = index / 4;
        let run = index % 4;
        let low: &[u8; QUANTS] = field(low, half * 64 + (run % 2) * 32);
        let high: &[u8; QUANTS] = field(high, half * 32);
        let nibble = 4 * (run / 2);
        let pair = 2 * run;
        let quant = |i: usize| ((low[i] >> nibble) & 0x0f) | (((high[i] >> pair) & 3) << 4);
        let scale = |group: usize| d * f32::from(scales[2 * index + group].cast_signed());
        *out = QuantBlock { quants: std::array::from_fn(quant), scales: [scale(0), scale(1)], minima: [0.0; 2] };
    }
}

/// Scales `d * sc` and minima `dmin * m` of the 8 groups of a Q4_K or Q5_K block.
struct GroupScales {
    scales: [f32; 8],
    minima: [f32; 8],
}

impl GroupScales {
    /// The 12 bytes hold, for groups 0..4, the 6 bits of sc in bytes 0..4 and of m in bytes 4..8.
    /// For groups 4..8, they hold the low 4 bits in the nibbles of bytes 8..12 and the upper 2 bits
    /// in the top of the bytes of groups 0..4.
    fn of(block: &[u8]) -> Self {
        let d = f16_at(block, 0);
        let dmin = f16_at(block, 2);
        let packed: &[u8; 12] = field(block, 4);
        let mut groups = Self { scales: [0.0; 8], minima: [0.0; 8] };
        for g in 0..4 {
            let scale = packed[g];
            let minimum = packed[g + 4];
            let both = packed[g + 8];
            groups.scales[g] = d * f32::from(scale & 0x3f);
            groups.minima[g] = dmin * f32::from(minimum & 0x3f);
            groups.scales[g + 4] = d * f32::from((both & 0x0f) | ((scale >> 2) & 0x30));
            groups.minima[g + 4] = dmin * f32::from((both >> 4) | ((minimum >> 2) & 0x30));
        }
        groups
    }

    /// x = scale * quant + (-minimum).
    fn block(&self, group: usize, quants: [u8; QUANTS]) -> QuantBlock {
        QuantBlock { quants, scales: [self.scales[group]; 2], minima: [-self.minima[group]; 2] }
    }
}
