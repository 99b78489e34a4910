//! ln of the sum of e^x.

pub(crate) fn log_sum_exp(x: &[f32]) -> f64 {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(max) + x.iter().map(|&x| f64::from(x - max).exp()).sum::<f64>().ln()
}
