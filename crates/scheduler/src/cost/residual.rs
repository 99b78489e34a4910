//! How far predictions are off, so that admission can go by a quantile and not by the mean.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::quantile;

/// Differences remembered.
const WINDOW: usize = 512;
/// And for how long. Who is refused for them adds none: if they were kept until others push them
/// out, one bad minute would close a cluster for good.
const MEMORY: Duration = Duration::from_secs(30);
/// Fewer say nothing about a tail.
const ENOUGH: usize = 32;
/// The last so many are kept for longer: there are clusters with a request a minute.
const LONGEST: Duration = Duration::from_secs(300);

/// By how much the last measured values exceeded what was predicted. For waits these are times and
/// not ratios: what makes a short wait twice as long does not make a long one so.
#[derive(Debug, Clone, Default)]
pub struct Residuals {
    /// In the order in which they came.
    window: VecDeque<(Instant, f64)>,
    /// The same, ascending: they are asked for more often than they come.
    sorted: Vec<f64>,
}

impl Residuals {
    /// Takes in one pair of times, both in seconds or both as parts of the prediction. What is no
    /// time is left out.
    pub fn observe(&mut self, now: Instant, predicted: f64, measured: f64) {
        let difference = measured - predicted;
        if !difference.is_finite() || measured < 0.0 {
            return;
        }
        if self.window.len() == WINDOW {
            self.forget_first();
        }
        self.window.push_back((now, difference));
        let index = self.sorted.partition_point(|other| *other < difference);
        self.sorted.insert(index, difference);
    }

    /// Drops what is too old to tell anything of now.
    pub fn forget_old(&mut self, now: Instant) {
        let is_old = |residuals: &Self| {
            let longest = if residuals.window.len() > ENOUGH { MEMORY } else { LONGEST };
            residuals.window.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) > longest)
        };
        while is_old(self) {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        let Some((_, first)) = self.window.pop_front() else { return };
        let index = self.sorted.partition_point(|other| *other < first);
        self.sorted.remove(index);
    }

    /// What the share `q` (0 to 1) of the differences does not exceed, 0 at least, and 0 until
    /// there are enough of them.
    pub fn quantile(&self, q: f64) -> f64 {
        if self.sorted.len() < ENOUGH {
            return 0.0;
        }
        quantile(&self.sorted, q.clamp(0.0, 1.0)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residual_quantiles_are_of_the_last_window() {
        let mut residuals = Residuals::default();
        let now = Instant::now();
        for nonsense in [f64::NAN, -1.0, f64::INFINITY] {
            residuals.observe(now, 1.0, nonsense);
            residuals.observe(now, nonsense, f64::NAN);
        }
        residuals.observe(now, 1.0, 9.0);
        assert_eq!(residuals.quantile(0.9), 0.0, "one is not enough");
        for n in 0..3 * WINDOW {
            residuals.observe(now, 2.0, 1.0 + (n % 100) as f64 / 25.0);
        }
        assert_eq!((residuals.window.len(), residuals.sorted.len()), (WINDOW, WINDOW));
        assert!(residuals.sorted.is_sorted());
        let near = |q, seconds: f64| (residuals.quantile(q) - seconds).abs() < 0.1;
        assert!(near(0.5, 1.0) && near(0.95, 2.8) && near(2.0, 2.96) && near(0.1, 0.0));
    }

    #[test]
    fn old_residuals_are_forgotten() {
        let mut residuals = Residuals::default();
        let now = Instant::now();
        (0..100).for_each(|_| residuals.observe(now, 1.0, 9.0));
        (0..40).for_each(|n| residuals.observe(now + Duration::from_secs(n), 1.0, 1.5));
        residuals.forget_old(now + MEMORY);
        assert_eq!(residuals.quantile(0.9), 8.0, "not yet");
        residuals.forget_old(now + MEMORY + Duration::from_secs(1));
        assert_eq!((residuals.quantile(0.9), residuals.sorted.len()), (0.5, 39));
        residuals.forget_old(now + Duration::from_secs(39) + LONGEST);
        assert_eq!((residuals.quantile(0.9), residuals.sorted.len()), (0.0, 1), "the last one");
        residuals.forget_old(now + Duration::from_secs(1000));
        assert_eq!((residuals.quantile(0.9), residuals.sorted.len()), (0.0, 0));
    }
}
