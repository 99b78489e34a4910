//! softmax(q k / sqrt(d)) v of one query over the positions it sees (Vaswani et al., 2017).

use std::ops::Range;

/// `q` is one head `[d]`; `k` and `v` are `[position][d]`, of which `seen` takes part.
pub(crate) fn attention(q: &[f32], k: &[f32], v: &[f32], seen: Range<usize>) -> Vec<f32> {
    let dim = q.len();
    let score = |position: usize| {
        let dot: f64 = q.iter().zip(&k[position * dim..]).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
        dot / (dim as f64).sqrt()
    };
    let scores: Vec<_> = seen.clone().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<_> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let column = |i| seen.clone().zip(&weights).map(|(position, w)| w * f64::from(v[position * dim + i])).sum::<f64>();
    (0..dim).map(|i| (column(i) / total) as f32).collect()
}
