//! Blocks of 256 elements in groups, each with a scale (and a minimum) of its own that is itself quantized.
//!
//! ```text
//! Q4_K  d:f16 dmin:f16 scales:12       qs:128        x = (d * sc) * q - dmin * m     8 groups of 32
//! Q5_K  d:f16 dmin:f16 scales:12 qh:32 qs:128        x = (d * sc) * q - dmin * m     8 groups of 32
//! Q6_K  ql:128 qh:64 scales:16 (i8) d:f16            x = (d * sc) * (q - 32)         16 groups of 16
//! ```

use super::{f16_at, field};

const ELEMENTS: usize = 256;

pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; ELEMENTS]) {
    let scales = GroupScales::of(block);
    let quants: &[u8; 128] = field(block, 16);
    // Two groups share 32 bytes: the low nibbles are the first's, the high ones the second's.
    for (pair, (quants, out)) in quants.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let (low, high) = out.split_at_mut(32);
        scales.apply(2 * pair, low, |i| quants[i] & 0x0f);
        scales.apply(2 * pair + 1, high, |i| quants[i] >> 4);
    }
}

pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; ELEMENTS]) {
    let scales = GroupScales::of(block);
    let fifth: &[u8; 32] = field(block, 16);
    let quants: &[u8; 128] = field(block, 48);
    // As Q4_K; bit g of fifth[i] belongs to element i of group g.
    for (pair, (quants, out)) in quants.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<64>().0).enumerate() {
        let (low, high) = out.split_at_mut(32);
        let group = 2 * pair;
        scales.apply(group, low, |i| (quants[i] & 0x0f) | (((fifth[i] >> group) & 1) << 4));
        scales.apply(group + 1, high, |i| (quants[i] >> 4) | (((fifth[i] >> (group + 1)) & 1) << 4));
    }
}

pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; ELEMENTS]) {
    let low: &[u8; 128] = field(block, 0);
    let high: &[u8; 64] = field(block, 128);
    let scales: &[u8; 16] = field(block, 192);
    let d = f16_at(block, 208);
    // Each half of the block: four runs of 32 elements. Runs r and r + 2 are the nibbles of the same 32 bytes; two bits of high[i] belong to each run.
    for (half, out) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low: &[u8; 64] = field(low, half * 64);
        let high: &[u8; 32] = field(high, half * 32);
        for (run, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low: &[u8; 32] = field(low, (run % 2) * 32);
            let (nibble, pair) = (4 * (run / 2), 2 * run);
            for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let scale = d * f32::from(scales[half * 8 + run * 2 + group].cast_signed());
                for (i, x) in out.iter_mut().enumerate() {
                    let (low, high) = (low[group * 16 + i], high[group * 16 + i]);
                    let q = ((low >> nibble) & 0x0f) | (((high >> pair) & 3) << 4);
                    *x = scale * (i32::from(q) - 32) as f32;
                }
            }
        }
    }
}

/// Scales `d * sc` and minima `dmin * m` of the 8 groups of a Q4_K or Q5_K block.
struct GroupScales {
    scales: [f32; 8],
    minima: [f32; 8],
}

impl GroupScales {
    /// The 12 bytes hold, for groups 0..4, the 6 bits of sc in bytes 0..4 and of m in bytes 4..8; for groups 4..8, the low 4 bits in the nibbles of bytes 8..12
    /// and the upper 2 bits in the top of the bytes of groups 0..4.
    fn of(block: &[u8]) -> Self {
        let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
        let packed: &[u8; 12] = field(block, 4);
        let mut groups = Self { scales: [0.0; 8], minima: [0.0; 8] };
        for g in 0..4 {
            let (scale, minimum, both) = (packed[g], packed[g + 4], packed[g + 8]);
            groups.scales[g] = d * f32::from(scale & 0x3f);
            groups.minima[g] = dmin * f32::from(minimum & 0x3f);
            groups.scales[g + 4] = d * f32::from((both & 0x0f) | ((scale >> 2) & 0x30));
            groups.minima[g + 4] = dmin * f32::from((both >> 4) | ((minimum >> 2) & 0x30));
        }
        groups
    }

    #[inline(always)] // or the loop does not vectorize over the closure
    fn apply(&self, group: usize, out: &mut [f32], quant: impl Fn(usize) -> u8) {
        let (scale, minimum) = (self.scales[group], self.minima[group]);
        for (i, x) in out.iter_mut().enumerate() {
            *x = scale * f32::from(quant(i)) - minimum;
        }
    }
}
