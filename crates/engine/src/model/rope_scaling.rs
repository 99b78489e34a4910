//! RoPE frequencies, and how models stretch them to contexts longer than they were trained on.

use std::f64::consts::TAU;

/// How frequencies are scaled.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RopeScaling {
    None,
    /// Positions are divided by the factor (Chen et al., 2023).
    Linear(f64),
    /// Only slow pairs are divided (Llama 3.1).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: f64,
    },
    /// Each frequency is divided by a factor of its own, as GGUF stores it.
    Factors(Vec<f32>),
}

/// Angle per position of pair i: base^(-2 i / head_dim), scaled. `[head_dim / 2]`.
pub(super) fn frequencies(base: f64, head_dim: usize, scaling: &RopeScaling) -> Vec<f64> {
    let plain = |i: usize| base.powf(-2.0 * i as f64 / head_dim as f64);
    (0..head_dim / 2).map(|i| scale(plain(i), i, scaling)).collect()
}

fn scale(frequency: f64, pair: usize, scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear(factor) => frequency / factor,
        RopeScaling::Factors(factors) => frequency / f64::from(factors[pair]),
        &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            // Turns of this pair within the original context: many stay, few are slowed, in between
            // is a ramp.
            let turns = original_context * frequency / TAU;
            let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            (1.0 - keep) * frequency / factor + keep * frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rope_scaling_keeps_high_frequencies_and_divides_low_ones() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let plain = frequencies(5e5, 128, &RopeScaling::None);
        let scaled = frequencies(5e5, 128, &scaling);
        assert_eq!((plain[0], plain.len()), (1.0, 64));
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        assert!(plain.iter().zip(&scaled).all(|(p, s)| (p / 8.0..=*p).contains(s)));
        assert!(scaled.is_sorted_by(|a, b| a > b));
        assert_eq!(frequencies(5e5, 128, &RopeScaling::Linear(4.0))[5], plain[5] / 4.0);
        assert_eq!(frequencies(1e4, 4, &RopeScaling::Factors(vec![1.0, 2.0])), [1.0, 0.005]);
    }
}
