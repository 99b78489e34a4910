//! How far a compute dtype is from single precision, distribution by distribution.

use baton_engine::{CpuEngine, EngineError, StepObserver};
use baton_types::TokenId;
use serde::Serialize;

use super::likelihood::{Likelihood, Listener};
use super::{Windows, steps};

/// What a compute dtype makes of each position's distribution, compared with the reference.
///
/// ```text
/// KL(P || Q) = sum over tokens of p (ln p - ln q)      nats; P of the reference, Q of the dtype
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Divergence {
    /// Mean KL divergence of a position, nats (Kullback and Leibler, 1951).
    pub mean_kl: f64,
    /// Standard error of that mean, nats: the root of the variance over positions, over their
    /// number.
    pub kl_standard_error: f64,
    /// Share of positions at which both have the same best token.
    pub top1_agreement: f64,
    /// Perplexity of the text in single precision.
    pub reference_perplexity: f64,
}

/// Scores every window with both engines; `progress` hears the share that is done, from 0 to 1.
/// Each arena holds one window at least.
///
/// # Errors
/// An engine fails, or a window is longer than the model's context.
pub fn compare(
    reference: &mut CpuEngine,
    engine: &mut CpuEngine,
    windows: &Windows,
    progress: &mut dyn FnMut(f64),
) -> Result<(Likelihood, Divergence), EngineError> {
    let mut found = Likelihood::default();
    let mut expected = Likelihood::default();
    let mut sums = Sums::default();
    for window in windows.iter() {
        let mut rows = Vec::new();
        steps(
            reference,
            &window,
            &mut Rows { rows: &mut rows, listener: Listener { window: &window, found: &mut expected } },
        )?;
        let listener = Listener { window: &window, found: &mut found };
        steps(engine, &window, &mut Beside { rows: &rows, sums: &mut sums, listener })?;
        progress(found.tokens as f64 / windows.scored() as f64);
    }
    let positions = found.tokens.max(1) as f64;
    let mean_kl = sums.kl / positions;
    let divergence = Divergence {
        mean_kl,
        kl_standard_error: ((sums.kl_squared / positions - mean_kl * mean_kl).max(0.0) / positions).sqrt(),
        top1_agreement: sums.agreed as f64 / positions,
        reference_perplexity: expected.perplexity(),
    };
    Ok((found, divergence))
}

/// Over all positions.
#[derive(Default)]
struct Sums {
    kl: f64,
    kl_squared: f64,
    agreed: u64,
}

/// Keeps a window's logits, position by position.
struct Rows<'a> {
    rows: &'a mut Vec<Vec<f32>>,
    listener: Listener<'a>,
}

impl StepObserver for Rows<'_> {
    fn kv_ready(&mut self, _layer: u32) {}

    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        assert_eq!(position as usize, self.rows.len(), "positions come in order");
        self.rows.push(logits.to_vec());
        self.listener.logits(sequence, position, logits);
    }
}

/// Compares a window's logits with those that were kept.
struct Beside<'a> {
    rows: &'a [Vec<f32>],
    sums: &'a mut Sums,
    listener: Listener<'a>,
}

impl StepObserver for Beside<'_> {
    fn kv_ready(&mut self, _layer: u32) {}

    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        let expected = &self.rows[position as usize];
        let divergence = kl(expected, logits);
        self.sums.kl += divergence;
        self.sums.kl_squared += divergence * divergence;
        self.sums.agreed += u64::from(best(expected) == best(logits));
        self.listener.logits(sequence, position, logits);
    }
}

/// The token with the largest logit; the first of equals.
fn best(logits: &[f32]) -> TokenId {
    let larger = |best: usize, token: usize| if logits[token] > logits[best] { token } else { best };
    (0..logits.len()).fold(0, larger) as TokenId
}

/// KL divergence of the softmax of `found` from that of `expected`, nats.
fn kl(expected: &[f32], found: &[f32]) -> f64 {
    let expected_norm = log_sum_exp(expected);
    let found_norm = log_sum_exp(found);
    let term = |(&p, &q): (&f32, &f32)| {
        let p = f64::from(p) - expected_norm;
        let q = f64::from(q) - found_norm;
        p.exp() * (p - q)
    };
    expected.iter().zip(found).map(term).sum()
}

/// ln sum exp(x), with the largest taken out so that nothing overflows.
pub(super) fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - most).exp()).sum();
    most + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kl_divergence_of_equal_distributions_is_zero() {
        let logits = [0.5, -2.0, 3.0];
        assert_eq!(kl(&logits, &logits), 0.0);
        // A shift of all logits changes no probability.
        assert!(kl(&logits, &logits.map(|logit| logit + 100.0)).abs() < 1e-6);
    }

    #[test]
    fn kl_divergence_matches_its_formula() {
        // P = (1/2, 1/2), Q = (1/4, 3/4).
        let found = kl(&[0.0, 0.0], &[0.0, 3_f32.ln()]);
        let expected = 0.5 * 2_f64.ln() + 0.5 * (2.0_f64 / 3.0).ln();
        assert!((found - expected).abs() < 1e-7, "{found}, {expected}");
    }

    #[test]
    fn first_of_equal_logits_is_best() {
        assert_eq!((best(&[1.0, 3.0, 3.0]), best(&[-1.0])), (1, 0));
    }
}
