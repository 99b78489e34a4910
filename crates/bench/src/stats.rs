//! What one phase of a run did; means and quantiles of figures.

use std::time::Duration;

use baton_sim::Spread;
use hdrhistogram::Histogram;

/// Longest latency that is told apart, microseconds: an hour.
const MAX_US: u64 = 3_600_000_000;
/// Digits of a latency that count.
const DIGITS: u8 = 3;

/// How long many things took.
#[derive(Debug, Clone, PartialEq)]
pub struct Latencies {
    microseconds: Histogram<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { microseconds: Histogram::new_with_max(MAX_US, DIGITS).expect("constants that it takes") }
    }
}

impl Latencies {
    /// One more.
    pub fn add(&mut self, took: Duration) {
        self.microseconds.saturating_record(took.as_micros().try_into().unwrap_or(u64::MAX));
    }

    /// What the share `q` of them does not exceed, microseconds; 0 if there are none.
    pub fn quantile_us(&self, q: f64) -> u64 {
        self.microseconds.value_at_quantile(q)
    }
}

/// What one phase of a run did.
#[derive(Debug, Default)]
pub struct TransferStats {
    /// Batches that completed.
    pub batches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// From the start of the first to the end of the last.
    pub elapsed: Duration,
    /// Of each batch.
    pub latencies: Latencies,
}

impl TransferStats {
    /// One more batch.
    pub fn add(&mut self, bytes: u64, took: Duration) {
        self.batches += 1;
        self.bytes += bytes;
        self.latencies.add(took);
    }

    /// Rate, bytes per nanosecond, that is 1e9 bytes per second.
    pub fn gb_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_nanos().max(1) as f64
    }
}

/// The mean of some figures; `None` if there are none.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The quantiles `q` of some figures, in the same order; `None` if there are none.
pub fn quantiles<const N: usize>(values: &[f64], q: [f64; N]) -> [Option<f64>; N] {
    let spread = Spread::of(values.iter().copied());
    q.map(|q| (!values.is_empty()).then(|| spread.quantile(q)))
}

/// The median of some figures, one at least. Of an even number it is the mean of the two in the
/// middle, as Python's `statistics.median`, which the others' figures go through, has it.
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    (figures[(figures.len() - 1) / 2] + figures[figures.len() / 2]) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_an_empty_list_are_none() {
        assert_eq!(quantiles(&[], [0.5]), [None]);
        assert_eq!(quantiles(&[3.0, 1.0, 2.0], [0.5, 1.0]), [Some(2.0), Some(3.0)]);
    }

    #[test]
    fn median_is_the_middle_or_the_mean_of_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![8.0, 1.0, 2.0, 4.0]), 3.0);
        assert_eq!((median(vec![5.0]), median(vec![5.0, 1.0])), (5.0, 3.0));
    }

    #[test]
    fn transfer_bench_quantiles_are_of_batches() {
        let mut stats = TransferStats::default();
        for us in 1..=1000 {
            stats.add(1_000_000, Duration::from_micros(us));
        }
        stats.elapsed = Duration::from_millis(500);
        assert_eq!((stats.batches, stats.bytes), (1000, 1_000_000_000));
        assert_eq!((stats.latencies.quantile_us(0.5), stats.latencies.quantile_us(0.99)), (500, 990));
        assert!((stats.gb_s() - 2.0).abs() < 1e-9);
        stats.add(1, Duration::from_secs(7200));
        assert!(stats.latencies.quantile_us(1.0).abs_diff(MAX_US) < MAX_US / 500);
    }
}
