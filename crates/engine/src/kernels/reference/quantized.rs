//! Products of quantized weights and activations, as `cpu::quantized` defines their bits.

use baton_formats::{Dtype, QUANTS, QuantBlock};

/// 32 activations.
pub(crate) struct Quantized {
    pub quants: [i8; QUANTS],
    pub scale: f32,
}

/// scale = max |x| * (1 / 127), quant = x * min(127 / max |x|, f32::MAX), rounded to nearest even,
/// of each 32 activations.
pub(crate) fn quantize(x: &[f32]) -> Vec<Quantized> {
    let block = |x: &[f32]| {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest > 0.0 { (127.0 / largest).min(f32::MAX) } else { 0.0 };
        Quantized {
            quants: std::array::from_fn(|i| (x[i] * inverse).round_ties_even() as i8),
            scale: largest * (1.0 / 127.0),
        }
    };
    x.chunks_exact(QUANTS).map(block).collect()
}

/// `x` is `[k]`, `w` is `[n][k / 32]`.
pub(crate) fn quantized_matmul(x: &[f32], dtype: Dtype, w: &[QuantBlock]) -> Vec<f32> {
    let x = quantize(x);
    let form = dtype.quant_format().unwrap();
    let output = |row: &[QuantBlock]| {
        row.iter().zip(&x).fold(0.0f32, |mut y, (w, x)| {
            for group in 0..QUANTS / form.group {
                let inputs = group * form.group..(group + 1) * form.group;
                let zero = form.zero.map_or(0, i32::from);
                let product = |i: usize| (i32::from(w.quants[i]) - zero) * i32::from(x.quants[i]);
                let dot: i32 = inputs.map(product).sum();
                y = (dot as f32 * x.scale).mul_add(w.scales[group], y);
            }
            let sum: i32 = x.quants.iter().map(|&quant| i32::from(quant)).sum();
            match form.zero {
                Some(_) => y,
                None => (x.scale * sum as f32).mul_add(w.minima[0], y),
            }
        })
    };
    w.chunks_exact(x.len()).map(output).collect()
}
