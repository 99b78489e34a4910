//! Rotates the pairs (x\[i], x\[i + half]) of a head by the angle position x frequency\[i] (Su et
//! al., 2021; halves as in GPT-NeoX).

/// `head` is `[2 * frequencies.len()]`.
pub(crate) fn rope(head: &[f32], position: u32, frequencies: &[f64]) -> Vec<f32> {
    let half = frequencies.len();
    let mut out = head.to_vec();
    for (i, frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
        let a = f64::from(head[i]);
        let b = f64::from(head[i + half]);
        out[i] = (a * cos - b * sin) as f32;
        out[i + half] = (b * cos + a * sin) as f32;
    }
    out
}
