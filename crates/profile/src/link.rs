//! A link that carries one transfer after the other.

use std::time::{Duration, Instant};

/// One direction of a node's adapter, or its disk: one transfer after the other, at its bandwidth.
#[derive(Debug, Clone)]
pub struct Link {
    bytes_per_s: f64,
    latency: Duration,
    /// When the last transfer so far is over.
    free_at: Option<Instant>,
}

impl Link {
    /// A link that is free.
    ///
    /// # Panics
    /// If the bandwidth is not positive: a profile was not checked.
    pub fn new(bytes_per_s: f64, latency: Duration) -> Self {
        assert!(bytes_per_s > 0.0, "{bytes_per_s} B/s");
        Self { bytes_per_s, latency, free_at: None }
    }

    /// Takes the link for so many bytes; when they have arrived.
    pub fn reserve(&mut self, now: Instant, bytes: u64) -> Instant {
        let begin = self.free_at.map_or(now, |free_at| free_at.max(now));
        let end = begin + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        self.free_at = Some(end);
        end + self.latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn link_serves_transfers_in_turn_and_idle_time_gives_no_credit() {
        let now = Instant::now();
        let mut link = Link::new(1e9, Duration::ZERO);
        assert_eq!(link.reserve(now, 1_000_000_000), now + SECOND);
        assert_eq!(link.reserve(now, 500_000_000), now + SECOND * 3 / 2, "the link is busy");
        assert_eq!(link.reserve(now + 9 * SECOND, 1_000_000_000), now + 10 * SECOND, "what it did not carry is lost");
    }

    #[test]
    fn link_latency_does_not_delay_the_next_transfer() {
        let now = Instant::now();
        let mut link = Link::new(64.0, SECOND);
        assert_eq!(link.reserve(now, 64), now + 2 * SECOND);
        assert_eq!(link.reserve(now, 64), now + 3 * SECOND);
    }
}
