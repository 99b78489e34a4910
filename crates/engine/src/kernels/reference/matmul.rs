//! y\[n] = sum over k of x\[k] w\[n]\[k], added with fused multiply-adds in the order of pairs of k, the odd one of a pair first: the definition of the bits, too.

/// `x` is `[k]`, `w` is `[n][k]`.
pub(crate) fn matmul(x: &[f32], w: &[f32]) -> Vec<f32> {
    matmul_onto(&vec![0.0; w.len() / x.len()], x, w)
}

/// The sums begin with `start`, `[n]`.
pub(crate) fn matmul_onto(start: &[f32], x: &[f32], w: &[f32]) -> Vec<f32> {
    let add = |sum: f32, (x, w): (&[f32], &[f32])| x.iter().zip(w).rev().fold(sum, |sum, (&x, &w)| w.mul_add(x, sum));
    let dot = |(row, &start): (&[f32], &f32)| x.chunks(2).zip(row.chunks(2)).fold(start, add);
    w.chunks_exact(x.len()).zip(start).map(dot).collect()
}
