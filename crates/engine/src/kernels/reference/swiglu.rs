//! y = silu(gate) x up, silu(x) = x / (1 + e^-x) (Shazeer, 2020).

pub(crate) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    gate.iter().zip(up).map(|(&g, &u)| (silu(f64::from(g)) * f64::from(u)) as f32).collect()
}
