//! One direction of a node's adapter, or its disk: one transfer after the other, at its bandwidth.

use std::time::{Duration, Instant};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Link {
    bytes_per_s: f64,
    latency: Duration,
    free_at: Option<Instant>,
}

impl Link {
    pub(super) fn new(bytes_per_s: f64, latency: Duration) -> Self {
        Self { bytes_per_s, latency, free_at: None }
    }

    /// Takes the adapter for so many bytes; when they have arrived.
    pub(super) fn reserve(&mut self, now: Instant, bytes: u64) -> Instant {
        let begin = self.free_at.map_or(now, |free_at| free_at.max(now));
        let end = begin + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        self.free_at = Some(end);
        end + self.latency
    }
}
