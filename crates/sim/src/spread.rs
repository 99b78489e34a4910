//! Mean and quantiles.

/// Mean and quantiles of some times.
#[derive(Debug, Clone, Default)]
pub struct Spread {
    sorted: Vec<f64>,
}

impl Spread {
    /// Of these values, in any order.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<_> = values.collect();
        sorted.sort_unstable_by(f64::total_cmp);
        Self { sorted }
    }

    /// 0 if there are none.
    pub fn mean(&self) -> f64 {
        if self.sorted.is_empty() { 0.0 } else { self.sorted.iter().sum::<f64>() / self.sorted.len() as f64 + 0.0 }
    }

    /// The standard deviation.
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        let squares: f64 = self.sorted.iter().map(|value| (value - mean).powi(2)).sum();
        (squares / self.sorted.len().max(1) as f64).sqrt()
    }

    /// The least value that the share `q` does not exceed; 0 if there are none.
    pub fn quantile(&self, q: f64) -> f64 {
        let rank = (self.sorted.len() as f64 * q).ceil() as usize;
        self.sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0].into_iter());
        assert_eq!([0.0, 0.25, 0.5, 0.9, 1.0].map(|q| spread.quantile(q)), [1.0, 1.0, 2.0, 4.0, 4.0]);
        assert_eq!((spread.mean(), Spread::default().mean(), Spread::default().quantile(0.5)), (2.5, 0.0, 0.0));
    }
}
