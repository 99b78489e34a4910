//! The way of KV between nodes: each node sends and receives one transfer after the other at the bandwidth of its adapters.

use std::time::{Duration, Instant};

/// When each node's adapters are free again, per direction.
#[derive(Debug)]
pub(crate) struct Network {
    bandwidth: f64,
    latency: Duration,
    sends_until: Vec<Instant>,
    receives_until: Vec<Instant>,
}

impl Network {
    pub(crate) fn new(nodes: usize, bandwidth: f64, latency: Duration, now: Instant) -> Self {
        Self { bandwidth, latency, sends_until: vec![now; nodes], receives_until: vec![now; nodes] }
    }

    /// Sends `bytes` that are there from `ready` on; when the last one has arrived.
    pub(crate) fn send(&mut self, ready: Instant, from: usize, to: usize, bytes: u64) -> Instant {
        let begin = ready.max(self.sends_until[from]).max(self.receives_until[to]);
        let end = begin + Duration::from_secs_f64(bytes as f64 / self.bandwidth);
        (self.sends_until[from], self.receives_until[to]) = (end, end);
        end + self.latency
    }

    /// Whether a transfer that was asked for at `asked` and arrives at `done` did not wait for others.
    pub(crate) fn had_the_way(&self, asked: Instant, done: Instant, bytes: u64) -> bool {
        done <= asked + self.latency + Duration::from_secs_f64(bytes as f64 / self.bandwidth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_of_one_sender_or_receiver_follow_each_other() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut network = Network::new(4, 1e9, Duration::ZERO, now);
        assert_eq!(network.send(now, 0, 1, 1_000_000_000), now + second);
        assert_eq!(network.send(now, 0, 2, 1_000_000_000), now + 2 * second, "the sender is busy");
        assert_eq!(network.send(now, 3, 2, 1_000_000_000), now + 3 * second, "the receiver is busy");
        assert_eq!(network.send(now + 9 * second, 0, 1, 0), now + 9 * second);
    }
}
