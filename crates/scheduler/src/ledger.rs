//! What placed requests will cost their nodes: charged when they are placed, so that a burst does not herd, and given back as they get on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::{Generation, NodeId, RequestKey};

/// What one placed request was charged.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Charge {
    /// Where it is prefilled, until that node leaves. The generation keeps a node that came back from being credited for its past.
    pub prefill: Option<(NodeId, Generation)>,
    /// Until that node leaves.
    pub decode: Option<DecodeCharge>,
}

/// The decode node's part.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DecodeCharge {
    pub node: (NodeId, Generation),
    /// Blocks of prompt and answer.
    pub blocks: usize,
    /// Tokens attended to, on average over the answer.
    pub kv_tokens: u64,
    /// When it should be over.
    pub expected_end: Instant,
}

/// The sum of what a node was charged.
#[derive(Debug, Default)]
pub(crate) struct NodeCharges {
    /// Prompts whose first token has not come, first come, first served.
    pending: VecDeque<(RequestKey, Duration)>,
    /// Since when the first of them is being computed.
    head_since: Option<Instant>,
    /// Requests placed here that have not ended.
    pub requests: usize,
    /// Of them, those that decode here.
    pub sequences: usize,
    pub blocks: usize,
    pub kv_tokens: u64,
}

impl NodeCharges {
    pub(crate) fn add_prefill(&mut self, now: Instant, key: RequestKey, seconds: Duration) {
        self.requests += 1;
        if self.pending.is_empty() {
            self.head_since = Some(now);
        }
        self.pending.push_back((key, seconds));
    }

    /// The prompt is computed, or will not be.
    pub(crate) fn finish_prefill(&mut self, now: Instant, key: RequestKey) {
        let before = self.pending.len();
        self.pending.retain(|(other, _)| *other != key);
        if self.pending.len() < before {
            self.head_since = Some(now);
        }
    }

    pub(crate) fn add_decode(&mut self, charge: &DecodeCharge) {
        self.requests += 1;
        self.sequences += 1;
        self.blocks += charge.blocks;
        self.kv_tokens += charge.kv_tokens;
    }

    pub(crate) fn end_decode(&mut self, charge: &DecodeCharge) {
        self.requests -= 1;
        self.sequences -= 1;
        self.blocks -= charge.blocks;
        self.kv_tokens -= charge.kv_tokens;
    }

    /// Prompts that wait or are being computed.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// How long the prompts that are here will still take. What the first of them has had is not counted again, as far as it was expected to take.
    pub(crate) fn queue_time(&self, now: Instant) -> Duration {
        let all: Duration = self.pending.iter().map(|(_, seconds)| *seconds).sum();
        let spent = self.head_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let head = self.pending.front().map_or(Duration::ZERO, |(_, seconds)| *seconds);
        all - spent.min(head)
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Attempt, RequestId};

    use super::*;

    #[test]
    fn the_queue_shrinks_with_time_and_with_first_tokens() {
        let key = |n| RequestKey { request: RequestId(n), attempt: Attempt(0) };
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut charges = NodeCharges::default();
        assert_eq!(charges.queue_time(start), Duration::ZERO);
        charges.add_prefill(start, key(1), 4 * second);
        charges.add_prefill(start + second, key(2), 2 * second);
        assert_eq!(charges.queue_time(start + second), 5 * second);
        assert_eq!(charges.queue_time(start + 60 * second), 2 * second, "the second has not begun");
        charges.finish_prefill(start + 60 * second, key(1));
        charges.finish_prefill(start + 60 * second, key(1));
        assert_eq!(charges.queue_time(start + 61 * second), second);
        charges.finish_prefill(start + 61 * second, key(2));
        assert_eq!((charges.pending(), charges.queue_time(start)), (0, Duration::ZERO));
    }
}
