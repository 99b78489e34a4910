//! y\[n] = sum over k of x\[k] w\[n]\[k], added with fused multiply-adds in the order of pairs of
//! k, the odd one of a pair first. It is the definition of the bits, too.

/// `x` is `[k]`, `w` is `[n][k]`; the sums begin with `start`, `[n]`.
pub(crate) fn matmul_onto(start: &[f32], x: &[f32], w: &[f32]) -> Vec<f32> {
    let add = |sum: f32, (x, w): (&[f32], &[f32])| x.iter().zip(w).rev().fold(sum, |sum, (&x, &w)| w.mul_add(x, sum));
    let dot = |(row, &start): (&[f32], &f32)| x.chunks(2).zip(row.chunks(2)).fold(start, add);
    w.chunks_exact(x.len()).zip(start).map(dot).collect()
}

/// The same as matrix tiles sum it. Of each 32 inputs, the even ones and the odd ones are each a
/// chain from 0, then both are added. Fewer inputs at the end go as above.
pub(crate) fn matmul_in_tiles(start: &[f32], x: &[f32], w: &[f32]) -> Vec<f32> {
    let whole = x.len() / 32 * 32;
    let chain = |x: &[f32], w: &[f32], odd: usize| {
        let pairs = x.iter().zip(w).skip(odd).step_by(2);
        pairs.fold(0.0f32, |sum, (&x, &w)| w.mul_add(x, sum))
    };
    let tiles = |(row, &start): (&[f32], &f32)| {
        let tiles = x[..whole].chunks(32).zip(row[..whole].chunks(32));
        tiles.fold(start, |sum, (x, w)| sum + (chain(x, w, 0) + chain(x, w, 1)))
    };
    let sums: Vec<_> = w.chunks_exact(x.len()).zip(start).map(tiles).collect();
    let rest: Vec<_> = w.chunks_exact(x.len()).flat_map(|row| &row[whole..]).copied().collect();
    if rest.is_empty() { sums } else { matmul_onto(&sums, &x[whole..], &rest) }
}
