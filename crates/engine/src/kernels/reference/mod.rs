//! The operations as their formulas read: one element at a time, no blocking, double precision if
//! that is the better oracle. Test oracles only.

mod attention;
mod largest;
mod matmul;
mod quantized;
mod rms_norm;
mod rope;
mod softmax;
mod swiglu;

pub(crate) use attention::attention;
pub(crate) use largest::largest;
pub(crate) use matmul::{matmul_in_tiles, matmul_onto};
pub(crate) use quantized::{quantize, quantized_matmul};
pub(crate) use rms_norm::rms_norm;
pub(crate) use rope::rope;
pub(crate) use softmax::log_sum_exp;
pub(crate) use swiglu::swiglu;

/// Numbers in (-1, 1) from a seed, the same on every machine.
pub(crate) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(step).collect()
}

/// Largest difference of two vectors.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |worst, d| if d > worst || d.is_nan() { d } else { worst })
}
