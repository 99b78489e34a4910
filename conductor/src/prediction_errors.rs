//! What placement predicted beside what came of it.

use std::collections::VecDeque;

use baton_types::quantile;

/// Pairs remembered of each estimate.
const WINDOW: usize = 512;

/// What placement predicts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Estimate {
    /// Seconds from the placement to the first token at the frontend.
    Ttft,
    /// Seconds between tokens: the mean of the longest tenth of the gaps, as everywhere.
    Tbt,
    /// Seconds of the KV push that compute does not hide; if it hides all of it, nothing is
    /// compared.
    Transfer,
    /// Tokens of the answer.
    Output,
}

impl Estimate {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ttft, Self::Tbt, Self::Transfer, Self::Output];

    /// `ttft`, `tbt`, `transfer` or `output`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tbt => "tbt",
            Self::Transfer => "transfer",
            Self::Output => "output",
        }
    }
}

/// A prediction and what came of it, both in the estimate's unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// By placement.
    pub predicted: f64,
    /// What was measured.
    pub measured: f64,
}

impl Pair {
    /// A pair of which a relative error can be told; none if nothing was measured or one of the two
    /// is no number.
    pub fn new(predicted: f64, measured: f64) -> Option<Self> {
        let tells = predicted.is_finite() && measured.is_finite() && predicted >= 0.0 && measured > 0.0;
        tells.then_some(Self { predicted, measured })
    }

    /// |predicted - measured| / measured.
    pub fn error(&self) -> f64 {
        (self.predicted - self.measured).abs() / self.measured
    }
}

/// How good the last predictions of each kind were.
#[derive(Debug, Default)]
pub struct PredictionErrors {
    windows: [Window; Estimate::ALL.len()],
}

/// The last pairs of one estimate.
#[derive(Debug, Default)]
struct Window {
    pairs: VecDeque<Pair>,
}

/// One estimate's last predictions in numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AccuracySummary {
    /// Pairs that it is of.
    pub count: usize,
    /// Median of the relative errors.
    pub error_p50: f64,
    /// 90 % of them are not above.
    pub error_p90: f64,
    /// Median of the predictions.
    pub predicted_p50: f64,
    /// Median of what was measured.
    pub measured_p50: f64,
    /// Sum of the predictions over the sum of what was measured, less 1: more than 0 if too much is
    /// predicted.
    pub bias: f64,
}

impl PredictionErrors {
    /// Takes in a pair; beyond the window, the oldest is forgotten.
    pub fn observe(&mut self, estimate: Estimate, pair: Pair) {
        let pairs = &mut self.windows[estimate as usize].pairs;
        if pairs.len() == WINDOW {
            pairs.pop_front();
        }
        pairs.push_back(pair);
    }

    /// Of the last pairs; none if there is none.
    pub fn summary(&self, estimate: Estimate) -> Option<AccuracySummary> {
        self.windows[estimate as usize].summary()
    }
}

impl Window {
    fn summary(&self) -> Option<AccuracySummary> {
        if self.pairs.is_empty() {
            return None;
        }
        let errors = self.sorted(Pair::error);
        let predicted = self.sorted(|pair| pair.predicted);
        let measured = self.sorted(|pair| pair.measured);
        Some(AccuracySummary {
            count: self.pairs.len(),
            error_p50: quantile(&errors, 0.5),
            error_p90: quantile(&errors, 0.9),
            predicted_p50: quantile(&predicted, 0.5),
            measured_p50: quantile(&measured, 0.5),
            bias: predicted.iter().sum::<f64>() / measured.iter().sum::<f64>() - 1.0,
        })
    }

    fn sorted(&self, value: impl Fn(&Pair) -> f64) -> Vec<f64> {
        let mut values: Vec<_> = self.pairs.iter().map(value).collect();
        values.sort_unstable_by(f64::total_cmp);
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(predicted: f64, measured: f64) -> Pair {
        Pair::new(predicted, measured).unwrap()
    }

    #[test]
    fn prediction_error_and_bias_are_separate_figures() {
        let mut prediction_errors = PredictionErrors::default();
        assert_eq!(prediction_errors.summary(Estimate::Ttft), None);
        // Off by half on either side: a large error, and no bias.
        for _ in 0..10 {
            prediction_errors.observe(Estimate::Ttft, pair(1.5, 1.0));
            prediction_errors.observe(Estimate::Ttft, pair(0.5, 1.0));
        }
        let summary = prediction_errors.summary(Estimate::Ttft).unwrap();
        assert_eq!((summary.count, summary.error_p50, summary.error_p90, summary.bias), (20, 0.5, 0.5, 0.0));
        assert_eq!((summary.predicted_p50, summary.measured_p50), (1.5, 1.0));
        assert_eq!(prediction_errors.summary(Estimate::Tbt), None, "each has a window of its own");
        prediction_errors.observe(Estimate::Tbt, pair(3.0, 2.0));
        assert_eq!(prediction_errors.summary(Estimate::Tbt).unwrap().bias, 0.5);
    }

    #[test]
    fn prediction_error_quantiles_cover_only_the_last_window() {
        let mut prediction_errors = PredictionErrors::default();
        (0..3 * WINDOW).for_each(|_| prediction_errors.observe(Estimate::Output, pair(1000.0, 1.0)));
        for n in 0..WINDOW {
            prediction_errors.observe(Estimate::Output, pair(100.0 + (n % 101) as f64, 100.0));
        }
        let summary = prediction_errors.summary(Estimate::Output).unwrap();
        assert_eq!(summary.count, WINDOW);
        assert!((summary.error_p50 - 0.5).abs() < 0.02 && (summary.error_p90 - 0.9).abs() < 0.02, "{summary:?}");
    }

    #[test]
    fn unmeasured_or_invalid_prediction_is_not_counted() {
        for (predicted, measured) in [(1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (-1.0, 1.0), (1.0, -1.0)] {
            assert_eq!(Pair::new(predicted, measured), None);
        }
        assert_eq!(pair(0.0, 2.0).error(), 1.0);
    }
}
