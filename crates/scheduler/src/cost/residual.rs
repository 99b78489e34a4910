//! How far predictions are off, so that admission can go by a quantile and not by the mean.

/// Differences remembered.
const WINDOW: usize = 512;
/// Fewer say nothing about a tail.
const ENOUGH: usize = 32;

/// By how much the last measured values exceeded what was predicted. For waits these are times and not ratios: what makes a short wait twice as long does not make a long one so.
#[derive(Debug, Clone, Default)]
pub struct Residuals {
    /// In the order in which they came, from `next` on around.
    window: Vec<f64>,
    next: usize,
    /// The same, ascending: they are asked for more often than they come.
    sorted: Vec<f64>,
}

impl Residuals {
    /// Takes in one pair of times, both in seconds or both as parts of the prediction. What is no time is left out.
    pub fn observe(&mut self, predicted: f64, measured: f64) {
        let difference = measured - predicted;
        if !difference.is_finite() || measured < 0.0 {
            return;
        }
        if self.window.len() == WINDOW {
            let oldest = std::mem::replace(&mut self.window[self.next], difference);
            let index = self.sorted.partition_point(|other| *other < oldest);
            self.sorted.remove(index);
        } else {
            self.window.push(difference);
        }
        let index = self.sorted.partition_point(|other| *other < difference);
        self.sorted.insert(index, difference);
        self.next = (self.next + 1) % WINDOW;
    }

    /// What the share `q` (0 to 1) of the differences does not exceed, 0 at least, and 0 until there are enough of them.
    pub fn quantile(&self, q: f64) -> f64 {
        if self.sorted.len() < ENOUGH {
            return 0.0;
        }
        let rank = ((self.sorted.len() - 1) as f64 * q.clamp(0.0, 1.0)).round() as usize;
        self.sorted[rank].max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_last_differences() {
        let mut residuals = Residuals::default();
        for nonsense in [f64::NAN, -1.0, f64::INFINITY] {
            residuals.observe(1.0, nonsense);
            residuals.observe(nonsense, f64::NAN);
        }
        residuals.observe(1.0, 9.0);
        assert_eq!(residuals.quantile(0.9), 0.0, "one is not enough");
        for n in 0..3 * WINDOW {
            residuals.observe(2.0, 1.0 + (n % 100) as f64 / 25.0);
        }
        assert_eq!((residuals.window.len(), residuals.sorted.len()), (WINDOW, WINDOW));
        assert!(residuals.sorted.is_sorted());
        let near = |q, seconds: f64| (residuals.quantile(q) - seconds).abs() < 0.1;
        assert!(near(0.5, 1.0) && near(0.95, 2.8) && near(2.0, 2.96) && near(0.1, 0.0));
    }
}
