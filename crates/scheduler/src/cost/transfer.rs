//! How long KV takes from node to node.

use std::collections::HashMap;

use baton_types::NodeId;

/// Weight of one more observation of a pair.
const SHARE: f64 = 0.2;
/// Pairs whose bandwidth is remembered.
const MAX_PAIRS: usize = 1 << 16;
/// Smaller transfers tell what each costs, and larger ones the bandwidth.
const MIN_BYTES: u64 = 1 << 20;
/// Part of the fixed cost, and seconds beside it, that one observation may be off by: one that
/// waited for something else says little.
const SURPRISE: (f64, f64) = (0.5, 5e-4);

/// Time of a transfer: a fixed cost, and what is under way at the sender and then its bytes, at the
/// bandwidth of the pair.
#[derive(Debug, Clone)]
pub struct TransferCost {
    /// Bytes per second of a pair that was not measured, and whose sender does not say.
    bandwidth: f64,
    /// What senders say of themselves.
    own: HashMap<NodeId, f64>,
    pairs: HashMap<(NodeId, NodeId), f64>,
    /// Bytes per second that a decode node receives of pushes that compute does not hide.
    receives: HashMap<NodeId, f64>,
    fetch: FixedCost,
    push: FixedCost,
}

/// Seconds that a transfer takes however small it is: messages, and waking up for them.
#[derive(Debug, Clone, Copy, Default)]
struct FixedCost(f64);

impl FixedCost {
    /// One took so many seconds more than predicted.
    fn observe(&mut self, surprise: f64) {
        if !surprise.is_finite() {
            return;
        }
        let most = SURPRISE.0 * self.0 + SURPRISE.1;
        self.0 = (self.0 + SHARE * surprise.clamp(-most, most)).max(0.0);
    }
}

/// Bytes per second that no link has.
const MAX_RATE: f64 = 1e13;

/// One more observation of a rate.
fn learn<K: std::hash::Hash + Eq>(rates: &mut HashMap<K, f64>, key: K, measured: f64) {
    if !(0.0..MAX_RATE).contains(&measured)
        || measured == 0.0
        || (rates.len() >= MAX_PAIRS && !rates.contains_key(&key))
    {
        return;
    }
    let known = rates.entry(key).or_insert(measured);
    *known += SHARE * (measured - *known);
}

impl TransferCost {
    /// `bandwidth` (bytes per second) holds for every pair until it is measured.
    pub fn new(bandwidth: f64) -> Self {
        Self {
            bandwidth: bandwidth.max(1.0),
            own: HashMap::new(),
            pairs: HashMap::new(),
            receives: HashMap::new(),
            fetch: FixedCost::default(),
            push: FixedCost::default(),
        }
    }

    /// Seconds until `bytes` more are over, if so many are `waiting` at the sender.
    pub fn seconds(&self, from: &NodeId, to: &NodeId, waiting: u64, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        self.fetch.0 + (waiting as f64 + bytes as f64) / self.pair(from, to)
    }

    /// Seconds to push so many bytes to a decode node, and so many of them after its last layer's
    /// compute. The same from every sender: a cluster's nodes have links alike.
    pub fn push_seconds(&self, to: &NodeId, bytes: f64, layers: u32) -> (f64, f64) {
        if bytes <= 0.0 {
            return (0.0, 0.0);
        }
        let seconds = bytes / self.receiving(to);
        (self.push.0 + seconds, self.push.0 + seconds / f64::from(layers.max(1)))
    }

    /// A push of so many layers took `elapsed` seconds from its first byte on, `exposed` of them
    /// after its compute.
    pub fn observe_push(&mut self, to: &NodeId, bytes: u64, layers: u32, exposed: f64, elapsed: f64) {
        // What comes before the first byte, as the wait for a grant, is no transfer's.
        let exposed = exposed.min(elapsed);
        let is_hidden = exposed <= 0.5 * elapsed;
        let measured = bytes as f64 / (elapsed - self.push.0).max(0.5 * elapsed);
        // The transfer took the time, or it was faster than is known although compute made it wait.
        if bytes >= MIN_BYTES && (!is_hidden || measured > self.receiving(to)) {
            return learn(&mut self.receives, to.clone(), measured);
        }
        let (whole, last_layer) = self.push_seconds(to, bytes as f64, layers);
        self.push.observe(exposed - if is_hidden { last_layer } else { whole });
    }

    /// Bytes per second.
    fn receiving(&self, to: &NodeId) -> f64 {
        let known = self.receives.get(to).or_else(|| self.own.get(to));
        known.copied().unwrap_or(self.bandwidth).max(1.0)
    }

    /// Bytes per second.
    fn pair(&self, from: &NodeId, to: &NodeId) -> f64 {
        let measured = if self.pairs.is_empty() { None } else { self.pairs.get(&(from.clone(), to.clone())) };
        measured.or_else(|| self.own.get(from)).copied().unwrap_or(self.bandwidth).max(1.0)
    }

    /// What a node says of its way to others, bytes per second; 0 is nothing.
    pub fn introduce(&mut self, node: &NodeId, bandwidth: f64) {
        if bandwidth > 0.0 {
            self.own.insert(node.clone(), bandwidth);
        }
    }

    /// A transfer that had the way for itself took so long. One of no bytes says nothing.
    pub fn observe(&mut self, from: &NodeId, to: &NodeId, bytes: u64, seconds: f64) {
        if bytes == 0 {
            return;
        }
        if bytes < MIN_BYTES {
            return self.fetch.observe(seconds - self.fetch.0 - bytes as f64 / self.pair(from, to));
        }
        let measured = bytes as f64 / (seconds - self.fetch.0).max(0.5 * seconds);
        learn(&mut self.pairs, (from.clone(), to.clone()), measured);
    }

    /// A node is gone, and what was known of its pairs.
    pub fn forget(&mut self, node: &NodeId) {
        self.own.remove(node);
        self.receives.remove(node);
        self.pairs.retain(|(from, to), _| from != node && to != node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_cost_includes_bytes_in_flight_at_the_sender() {
        let a = NodeId::new("a").unwrap();
        let b = NodeId::new("b").unwrap();
        let cost = TransferCost::new(1e9);
        assert_eq!(cost.seconds(&a, &b, 0, 2_000_000_000), 2.0);
        let waiting = 3_000_000_000;
        assert_eq!(cost.seconds(&a, &b, waiting, 1_000_000_000), 4.0);
        assert_eq!(cost.seconds(&b, &a, 0, 1_000_000_000), 1.0);
        assert_eq!(cost.seconds(&a, &b, waiting, 0), 0.0, "nothing does not wait");
    }

    #[test]
    fn transfer_cost_uses_measured_bandwidth_of_a_node_pair() {
        let a = NodeId::new("a").unwrap();
        let b = NodeId::new("b").unwrap();
        let mut cost = TransferCost::new(1e9);
        cost.observe(&a, &b, 1 << 30, 0.0);
        assert_eq!(cost.pair(&a, &b), 1e9, "no time");
        (0..50).for_each(|_| cost.observe(&a, &b, 1 << 30, (1 << 30) as f64 / 5e9));
        assert!((cost.pair(&a, &b) / 5e9 - 1.0).abs() < 0.01);
        assert_eq!(cost.pair(&b, &a), 1e9);
        cost.introduce(&b, 7e9);
        assert_eq!((cost.pair(&b, &a), cost.pair(&a, &b) > 4e9), (7e9, true), "what was measured goes first");
        cost.forget(&b);
        assert_eq!((cost.pair(&a, &b), cost.pair(&b, &a)), (1e9, 1e9));
    }

    #[test]
    fn transfer_cost_learns_fixed_cost_and_resists_outliers() {
        let a = NodeId::new("a").unwrap();
        let b = NodeId::new("b").unwrap();
        let mut cost = TransferCost::new(1e9);
        (0..60).for_each(|_| cost.observe(&a, &b, 100_000, 0.0021));
        assert!((cost.seconds(&b, &a, 0, 100_000) - 0.0021).abs() < 1e-4, "{}", cost.seconds(&b, &a, 0, 100_000));
        cost.observe(&a, &b, 100_000, 10.0);
        (0..60).for_each(|_| cost.observe(&a, &b, 0, 1.0));
        assert!(cost.seconds(&b, &a, 0, 100_000) < 0.003, "a fetch of no bytes says nothing");

        (0..60).for_each(|_| cost.observe_push(&b, 300_000, 30, 0.0018, 0.2));
        let (whole, last) = cost.push_seconds(&b, 300_000.0, 30);
        assert!((last - 0.0018).abs() < 1e-4 && (whole - last - 0.00029).abs() < 1e-5, "{whole} {last}");
        (0..60).for_each(|_| cost.observe_push(&b, 1 << 30, 30, 4.0, 5.0));
        let whole = |cost: &TransferCost| cost.push_seconds(&b, (1 << 30) as f64, 30).0;
        assert!((whole(&cost) / 5.0 - 1.0).abs() < 0.01, "{}: the transfer took the time", whole(&cost));
        (0..60).for_each(|_| cost.observe_push(&b, 1 << 30, 30, 0.05, 1.0));
        assert!((whole(&cost) - 1.0).abs() < 0.02, "{}: it is faster again", whole(&cost));
        (0..60).for_each(|_| cost.observe_push(&b, 1000, 30, 20.0, 0.002));
        assert!(cost.push.0 < 0.003, "{}: a wait for a grant is no transfer's", cost.push.0);
        for wrong in [f64::NAN, f64::INFINITY] {
            cost.observe_push(&b, 1 << 30, 30, wrong, wrong);
            cost.observe(&a, &b, 1000, wrong);
        }
        assert!(whole(&cost).is_finite() && cost.seconds(&a, &b, 0, 1000).is_finite());
        assert_eq!(cost.push_seconds(&b, 0.0, 30), (0.0, 0.0));
    }
}
