//! y\[n] = sum over k of x\[k] w\[n]\[k], added with fused multiply-adds in the order of pairs of k, the odd one of a pair first: the definition of the bits, too.

/// `x` is `[k]`, `w` is `[n][k]`.
pub(crate) fn matmul(x: &[f32], w: &[f32]) -> Vec<f32> {
    let add = |sum: f32, (x, w): (&[f32], &[f32])| x.iter().zip(w).rev().fold(sum, |sum, (&x, &w)| w.mul_add(x, sum));
    let dot = |row: &[f32]| x.chunks(2).zip(row.chunks(2)).fold(0.0, add);
    w.chunks_exact(x.len()).map(dot).collect()
}
