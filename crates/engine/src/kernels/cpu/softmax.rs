//! Exponentials of logits, for the sampler.

use crate::kernels::isa::per_isa;
use crate::kernels::lanes::{F32x16, LANES, exp};

use super::largest::largest_of;

/// Terms that are summed in single precision before the sum goes on in double.
const CHUNK: usize = 1024;

per_isa! {
    /// ln of the sum of e^x, of at least one x.
    pub(crate) fn log_sum_exp(x: &[f32]) -> f32 = log_sum_exp_of<Floats>
}

#[inline(always)]
fn log_sum_exp_of<V: F32x16>(x: &[f32]) -> f32 {
    let max = x[largest_of::<V>(x).index];
    let mut total = 0.0f64;
    for chunk in x.chunks(CHUNK) {
        let mut sum = V::splat(0.0);
        for x in chunk.chunks(LANES) {
            let mut y = exp(V::read(x).sub(V::splat(max))).to_array();
            y[x.len()..].fill(0.0);
            sum = sum.add(V::read(&y));
        }
        total += f64::from(sum.sum());
    }
    (f64::from(max) + total.ln()) as f32
}

per_isa! {
    /// y\[i] = e^((x\[i] - max) / temperature): probabilities, but for their common factor. `max`
    /// is the largest x.
    pub(crate) fn exp_weights(x: &[f32], max: f32, temperature: f32, y: &mut [f32]) = exp_weights_of<Floats>
}

#[inline(always)]
fn exp_weights_of<V: F32x16>(x: &[f32], max: f32, temperature: f32, y: &mut [f32]) {
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        exp(V::read(x).sub(V::splat(max)).div(V::splat(temperature))).write(y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::guarded::{Guarded, on_both_sides};
    use crate::kernels::{Isa, reference};

    #[test]
    fn softmax_is_near_the_reference_and_the_same_on_all_isas() {
        on_both_sides(compare);
    }

    fn compare() {
        for len in [1, 15, 16, 17, 1024, 5000] {
            let x: Vec<_> = reference::random(len as u64, len).iter().map(|x| x * 30.0 + 100.0).collect();
            let x = Guarded::copy_of(&x);
            let scalar = log_sum_exp(Isa::SCALAR, &x);
            assert!((f64::from(scalar) - reference::log_sum_exp(&x)).abs() < 2e-5, "{len}");
            let mut weights = vec![0.0; len];
            exp_weights(Isa::SCALAR, &x, 130.0, 0.7, &mut weights);
            for (x, w) in x.iter().zip(&weights) {
                let expected = ((f64::from(*x) - 130.0) / 0.7).exp();
                assert!((f64::from(*w) - expected).abs() < 1e-5 * expected + 1e-37, "{x} {w} {expected}");
            }
            for isa in Isa::available() {
                assert_eq!(log_sum_exp(isa, &x), scalar, "{isa} {len}");
                let mut y = Guarded::zeroed(len);
                exp_weights(isa, &x, 130.0, 0.7, &mut y);
                assert_eq!(*y, weights, "{isa} {len}");
            }
        }
    }
}
