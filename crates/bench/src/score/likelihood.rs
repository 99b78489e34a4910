//! From logits to likelihoods.

use baton_engine::StepObserver;
use baton_types::TokenId;

use super::divergence::log_sum_exp;

/// How likely the tokens so far were.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Likelihood {
    /// Tokens that were scored.
    pub tokens: u64,
    /// Sum of their negative log-likelihoods, nats.
    pub nats: f64,
}

impl Likelihood {
    /// Mean negative log-likelihood of a token, nats; 0 if none was scored.
    pub fn nll(&self) -> f64 {
        self.nats / self.tokens.max(1) as f64
    }

    /// e to that: how many tokens the model was in doubt between.
    pub fn perplexity(&self) -> f64 {
        self.nll().exp()
    }

    /// One more token, given the logits before it.
    fn add(&mut self, logits: &[f32], token: TokenId) {
        self.tokens += 1;
        self.nats += surprise(logits, token);
    }
}

/// Hears the logits of a window's positions, each of which predicts the token after it.
pub(super) struct Listener<'a> {
    pub window: &'a [TokenId],
    pub found: &'a mut Likelihood,
}

impl StepObserver for Listener<'_> {
    fn kv_ready(&mut self, _layer: u32) {}

    fn logits(&mut self, _sequence: usize, position: u32, logits: &[f32]) {
        self.found.add(logits, self.window[position as usize + 1]);
    }
}

/// `-ln softmax(logits)[token]`, nats. The engine has seen to it that all are numbers.
fn surprise(logits: &[f32], token: TokenId) -> f64 {
    log_sum_exp(logits) - f64::from(logits[token as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12 * b.abs().max(1.0)
    }

    #[test]
    fn equal_logits_give_equal_likelihood() {
        for shift in [0.0, 1e4, -1e4] {
            assert!(near(surprise(&[shift; 8], 3), 8_f64.ln()), "{shift}");
        }
    }

    #[test]
    fn token_likelihood_is_its_softmax_share() {
        // Shares 1/7, 2/7, 4/7.
        let logits = [0.0, 2_f32.ln(), 4_f32.ln()];
        for (token, share) in [(0, 1.0), (1, 2.0), (2, 4.0)] {
            assert!((surprise(&logits, token) - (7.0_f64 / share).ln()).abs() < 1e-7, "{token}");
        }
        // As large as f32 goes: certain, and as good as impossible.
        assert_eq!(surprise(&[3e38, -3e38], 0), 0.0);
        assert!((surprise(&[3e38, -3e38], 1) / 6e38 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn nll_and_perplexity_are_means_over_tokens() {
        let mut found = Likelihood::default();
        assert_eq!((found.nll(), found.perplexity()), (0.0, 1.0));
        found.add(&[1.0; 4], 0);
        found.add(&[1.0; 16], 9);
        assert!(near(found.nll(), 8_f64.ln()) && near(found.perplexity(), 8.0), "{found:?}");
    }

    #[test]
    fn logits_of_a_position_score_the_token_after_it() {
        let mut found = Likelihood::default();
        let mut listener = Listener { window: &[7, 1, 0], found: &mut found };
        listener.logits(0, 0, &[0.0, 90.0]);
        listener.logits(0, 1, &[90.0, 0.0]);
        assert!(found.tokens == 2 && found.nats < 1e-30, "{found:?}");
    }
}
