//! y\[i] = x\[i] / sqrt(mean(x^2) + eps) * w\[i] (Zhang and Sennrich, 2019).

pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&x, &w)| (f64::from(x) * scale * f64::from(w)) as f32).collect()
}
