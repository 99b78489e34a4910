//! What one phase of a run did.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::BenchError;

/// Longest latency that is told apart, microseconds: an hour.
const MAX_US: u64 = 3_600_000_000;
/// Digits of a latency that count.
const DIGITS: u8 = 3;

/// What one phase of a run did.
#[derive(Debug)]
pub struct TransferStats {
    /// Batches that completed.
    pub batches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// From the start of the first to the end of the last.
    pub elapsed: Duration,
    latency_us: Histogram<u64>,
}

impl TransferStats {
    /// Nothing yet.
    pub fn new() -> Result<Self, BenchError> {
        let latency_us = Histogram::new_with_max(MAX_US, DIGITS)
            .map_err(|error| BenchError::control("histogram", error.to_string()))?;
        Ok(Self { batches: 0, bytes: 0, elapsed: Duration::ZERO, latency_us })
    }

    /// One more batch.
    pub fn add(&mut self, bytes: u64, took: Duration) {
        self.batches += 1;
        self.bytes += bytes;
        self.latency_us.saturating_record(took.as_micros() as u64);
    }

    /// Latency below which this share of batches stayed, microseconds.
    pub fn quantile_us(&self, share: f64) -> u64 {
        self.latency_us.value_at_quantile(share)
    }

    /// Rate, bytes per nanosecond, that is 1e9 bytes per second.
    pub fn gb_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_nanos().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_bench_quantiles_are_of_batches() {
        let mut stats = TransferStats::new().unwrap();
        for us in 1..=1000 {
            stats.add(1_000_000, Duration::from_micros(us));
        }
        stats.elapsed = Duration::from_millis(500);
        assert_eq!((stats.batches, stats.bytes), (1000, 1_000_000_000));
        assert_eq!((stats.quantile_us(0.5), stats.quantile_us(0.99)), (500, 990));
        assert!((stats.gb_s() - 2.0).abs() < 1e-9);
        stats.add(1, Duration::from_secs(7200));
        assert!(stats.quantile_us(1.0).abs_diff(MAX_US) < MAX_US / 500);
    }
}
