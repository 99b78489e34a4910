//! How long KV takes from node to node.

use std::collections::HashMap;

use baton_types::NodeId;

/// Weight of one more observation of a pair.
const SHARE: f64 = 0.2;
/// Pairs whose bandwidth is remembered.
const MAX_PAIRS: usize = 1 << 16;
/// Smaller transfers measure latency.
const MIN_BYTES: u64 = 1 << 20;

/// Time of a transfer: what is under way at the sender goes first, at the bandwidth of the pair.
#[derive(Debug, Clone)]
pub struct TransferCost {
    /// Bytes per second of a pair that was not measured, and whose sender does not say.
    bandwidth: f64,
    /// What senders say of themselves.
    own: HashMap<NodeId, f64>,
    pairs: HashMap<(NodeId, NodeId), f64>,
    in_flight: HashMap<NodeId, u64>,
}

impl TransferCost {
    /// `bandwidth` (bytes per second) holds for every pair until it is measured.
    pub fn new(bandwidth: f64) -> Self {
        Self { bandwidth: bandwidth.max(1.0), own: HashMap::new(), pairs: HashMap::new(), in_flight: HashMap::new() }
    }

    /// Seconds until `bytes` more are over.
    pub fn seconds(&self, from: &NodeId, to: &NodeId, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        let waiting = self.sending(from);
        (waiting as f64 + bytes as f64) / self.pair(from, to)
    }

    /// Bytes per second.
    fn pair(&self, from: &NodeId, to: &NodeId) -> f64 {
        let measured = match self.pairs.is_empty() {
            true => None,
            false => self.pairs.get(&(from.clone(), to.clone())),
        };
        measured.or_else(|| self.own.get(from)).copied().unwrap_or(self.bandwidth)
    }

    /// What a node says of its way to others, bytes per second; 0 is nothing.
    pub fn introduce(&mut self, node: &NodeId, bandwidth: f64) {
        if bandwidth > 0.0 {
            self.own.insert(node.clone(), bandwidth);
        }
    }

    /// Bytes are charged to their sender.
    pub fn begin(&mut self, from: &NodeId, bytes: u64) {
        *self.in_flight.entry(from.clone()).or_default() += bytes;
    }

    /// They have arrived, or will not.
    pub fn end(&mut self, from: &NodeId, bytes: u64) {
        if let Some(waiting) = self.in_flight.get_mut(from) {
            *waiting = waiting.saturating_sub(bytes);
            if *waiting == 0 {
                self.in_flight.remove(from);
            }
        }
    }

    /// A transfer that had the way for itself took so long.
    pub fn observe(&mut self, from: &NodeId, to: &NodeId, bytes: u64, seconds: f64) {
        let measured = bytes as f64 / seconds;
        if bytes < MIN_BYTES || !measured.is_finite() || measured <= 0.0 {
            return;
        }
        let pair = (from.clone(), to.clone());
        if self.pairs.len() >= MAX_PAIRS && !self.pairs.contains_key(&pair) {
            return;
        }
        let known = self.pairs.entry(pair).or_insert(measured);
        *known += SHARE * (measured - *known);
    }

    /// A node is gone: what it was sending and what was known of its pairs.
    pub fn forget(&mut self, node: &NodeId) {
        self.in_flight.remove(node);
        self.own.remove(node);
        self.pairs.retain(|(from, to), _| from != node && to != node);
    }

    /// Bytes charged to this sender.
    pub fn sending(&self, from: &NodeId) -> u64 {
        self.in_flight.get(from).copied().unwrap_or(0)
    }

    /// Bytes that are charged.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_sender_has_under_way_goes_first() {
        let (a, b) = (NodeId::new("a").unwrap(), NodeId::new("b").unwrap());
        let mut cost = TransferCost::new(1e9);
        assert_eq!(cost.seconds(&a, &b, 2_000_000_000), 2.0);
        cost.begin(&a, 3_000_000_000);
        assert_eq!((cost.seconds(&a, &b, 1_000_000_000), cost.seconds(&b, &a, 1_000_000_000)), (4.0, 1.0));
        assert_eq!(cost.seconds(&a, &b, 0), 0.0, "nothing does not wait");
        cost.end(&a, 1_000_000_000);
        assert_eq!(cost.in_flight(), 2_000_000_000);
        cost.end(&a, u64::MAX);
        assert_eq!(cost.in_flight(), 0);
    }

    #[test]
    fn a_pair_is_what_was_measured_of_it() {
        let (a, b) = (NodeId::new("a").unwrap(), NodeId::new("b").unwrap());
        let mut cost = TransferCost::new(1e9);
        cost.observe(&a, &b, 100, 1.0);
        cost.observe(&a, &b, 1 << 30, 0.0);
        assert_eq!(cost.pair(&a, &b), 1e9, "too small, or no time");
        (0..50).for_each(|_| cost.observe(&a, &b, 1 << 30, (1 << 30) as f64 / 5e9));
        assert!((cost.pair(&a, &b) / 5e9 - 1.0).abs() < 0.01);
        assert_eq!(cost.pair(&b, &a), 1e9);
        cost.introduce(&b, 7e9);
        assert_eq!((cost.pair(&b, &a), cost.pair(&a, &b) > 4e9), (7e9, true), "what was measured goes first");
        cost.forget(&b);
        assert_eq!((cost.pair(&a, &b), cost.pair(&b, &a)), (1e9, 1e9));
    }
}
