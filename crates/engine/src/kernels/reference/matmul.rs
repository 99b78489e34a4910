//! y\[n] = sum over k of x\[k] w\[n]\[k], added in the order of k with fused multiply-adds: the definition of the bits, too.

/// `x` is `[k]`, `w` is `[n][k]`.
pub(crate) fn matmul(x: &[f32], w: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).fold(0.0, |acc: f32, (&w, &x)| w.mul_add(x, acc));
    w.chunks_exact(x.len()).map(dot).collect()
}
