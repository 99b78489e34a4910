//! Blocks of 32 elements with one scale `d` and, for the `_1` types, a minimum `m`.
//!
//! ```text
//! Q4_0  d:f16           qs:16         x = d * (q - 8)
//! Q4_1  d:f16 m:f16     qs:16         x = d * q + m
//! Q5_0  d:f16      qh:4 qs:16         x = d * (q - 16)
//! Q5_1  d:f16 m:f16 qh:4 qs:16        x = d * q + m
//! Q8_0  d:f16           qs:32 (i8)    x = q * d
//! ```
//!
//! The low nibbles of `qs` are elements 0..16, the high ones 16..32; bit i of `qh` is the fifth bit of element i.

use super::{f16_at, field};

const ELEMENTS: usize = 32;

pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; ELEMENTS]) {
    let d = f16_at(block, 0);
    nibbles(field(block, 2), |i, q| out[i] = d * (i32::from(q) - 8) as f32);
}

pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; ELEMENTS]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    nibbles(field(block, 4), |i, q| out[i] = d * f32::from(q) + m);
}

pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; ELEMENTS]) {
    let d = f16_at(block, 0);
    let high = u32::from_le_bytes(*field(block, 2));
    nibbles(field(block, 6), |i, q| out[i] = d * (i32::from(q | fifth_bit(high, i)) - 16) as f32);
}

pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; ELEMENTS]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    let high = u32::from_le_bytes(*field(block, 4));
    nibbles(field(block, 8), |i, q| out[i] = d * f32::from(q | fifth_bit(high, i)) + m);
}

pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; ELEMENTS]) {
    let d = f16_at(block, 0);
    let quants: &[u8; ELEMENTS] = field(block, 2);
    for (x, &q) in out.iter_mut().zip(quants) {
        *x = f32::from(q.cast_signed()) * d;
    }
}

/// Calls `element(i, q)` for the 32 4-bit elements.
#[inline(always)] // or the closure's stores do not vectorize
fn nibbles(quants: &[u8; 16], mut element: impl FnMut(usize, u8)) {
    for (i, &q) in quants.iter().enumerate() {
        element(i, q & 0x0f);
    }
    for (i, &q) in quants.iter().enumerate() {
        element(i + 16, q >> 4);
    }
}

#[inline(always)]
fn fifth_bit(high: u32, i: usize) -> u8 {
    (((high >> i) & 1) << 4) as u8
}
