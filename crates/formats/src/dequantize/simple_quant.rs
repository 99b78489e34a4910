//! Blocks of 32 elements with one scale `d` and, for the `_1` types, a minimum `m`.
//!
//! ```text
//! Q4_0  d:f16           qs:16         x = d * (q - 8)
//! Q4_1  d:f16 m:f16     qs:16         x = d * q + m
//! Q5_0  d:f16      qh:4 qs:16         x = d * (q - 16)
//! Q5_1  d:f16 m:f16 qh:4 qs:16        x = d * q + m
//! Q8_0  d:f16           qs:32 (i8)    x = d * q
//! ```
//!
//! The low nibbles of `qs` are elements 0..16, the high ones 16..32; bit i of `qh` is the fifth bit
//! of element i. The quant of Q8_0 is q + 128.

use super::quants::{QUANTS, QuantBlock};
use super::{f16_at, field};

pub(super) fn q4_0(block: &[u8; 18], out: &mut [QuantBlock; 1]) {
    out[0] = of(nibbles(field(block, 2)), f16_at(block, 0), 0.0);
}

pub(super) fn q4_1(block: &[u8; 20], out: &mut [QuantBlock; 1]) {
    out[0] = of(nibbles(field(block, 4)), f16_at(block, 0), f16_at(block, 2));
}

pub(super) fn q5_0(block: &[u8; 22], out: &mut [QuantBlock; 1]) {
    let quants = with_fifth_bits(nibbles(field(block, 6)), u32::from_le_bytes(*field(block, 2)));
    out[0] = of(quants, f16_at(block, 0), 0.0);
}

pub(super) fn q5_1(block: &[u8; 24], out: &mut [QuantBlock; 1]) {
    let quants = with_fifth_bits(nibbles(field(block, 8)), u32::from_le_bytes(*field(block, 4)));
    out[0] = of(quants, f16_at(block, 0), f16_at(block, 2));
}

pub(super) fn q8_0(block: &[u8; 34], out: &mut [QuantBlock; 1]) {
    let quants: &[u8; QUANTS] = field(block, 2);
    out[0] = of(quants.map(|q| q ^ 0x80), f16_at(block, 0), 0.0);
}

fn of(quants: [u8; QUANTS], scale: f32, minimum: f32) -> QuantBlock {
    QuantBlock { quants, scales: [scale; 2], minima: [minimum; 2] }
}

/// The 32 4-bit elements.
fn nibbles(packed: &[u8; 16]) -> [u8; QUANTS] {
    let mut quants = [0; QUANTS];
    let (low, high) = quants.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(packed) {
        *low = q & 0x0f;
        *high = q >> 4;
    }
    quants
}

fn with_fifth_bits(mut quants: [u8; QUANTS], bits: u32) -> [u8; QUANTS] {
    for (i, quant) in quants.iter_mut().enumerate() {
        *quant |= (((bits >> i) & 1) << 4) as u8;
    }
    quants
}
