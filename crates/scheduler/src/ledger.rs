//! What placed requests will cost their nodes: charged when they are placed, so that a burst does not herd, and given back as they get on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{Generation, NodeId, RequestKey};

use crate::cost::OutputLength;
use crate::queue::{Backlog, QueuedPrompt};

/// One start of one node. The generation keeps a node that came back from being credited for its past.
pub(crate) type NodeStart = (NodeId, Generation);

/// What one placed request was charged.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Charge {
    /// Where it is prefilled, until that node leaves.
    pub prefill: Option<NodeStart>,
    /// Who computes parts of it beside that one, those that left not counted.
    pub helpers: Vec<NodeStart>,
    /// Bytes that come from another node first, until they are there or that node leaves.
    pub fetch: Option<(NodeStart, u64)>,
    /// Where it decodes, until that node leaves.
    pub decode: Option<(NodeStart, DecodeCharge)>,
    pub placed: Instant,
    /// Predicted.
    pub ttft: Duration,
    /// Whether the prompt is computed.
    pub prefilled: bool,
}

/// The decode node's part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DecodeCharge {
    /// Blocks of prompt and answer.
    pub blocks: usize,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    /// Tokens attended to, on average over the answer.
    pub kv_tokens: u64,
    /// Its objective of the time between tokens.
    pub tbt: Option<Duration>,
    /// When its prompt is computed: predicted until it is so.
    pub begins: Instant,
    pub begun: bool,
}

impl DecodeCharge {
    /// When it began, or begins: what should have begun and has not will do so now at the earliest.
    fn begins(&self, now: Instant) -> Instant {
        if self.begun { self.begins } else { self.begins.max(now) }
    }
}

/// Sequences of a decode node at some time, as far as can be told.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct DecodeForecast {
    pub sequences: f64,
    pub kv_tokens: f64,
    pub blocks: f64,
}

impl DecodeForecast {
    /// One sequence.
    pub(crate) fn of(charge: &DecodeCharge) -> Self {
        let mut forecast = Self::default();
        forecast.add(charge, 1.0);
        forecast
    }

    fn add(&mut self, charge: &DecodeCharge, weight: f64) {
        self.sequences += weight;
        self.kv_tokens += weight * charge.kv_tokens as f64;
        self.blocks += weight * charge.blocks as f64;
    }
}

/// The sum of what a node was charged.
#[derive(Debug, Default)]
pub(crate) struct NodeCharges {
    /// Prompts whose first token has not come.
    pub backlog: Backlog,
    /// Requests placed here that have not ended.
    pub requests: usize,
    /// Of them, those that decode here.
    decoding: BTreeMap<RequestKey, DecodeCharge>,
    pub blocks: usize,
    pub kv_tokens: u64,
}

impl NodeCharges {
    pub(crate) fn add_prefill(&mut self, now: Instant, prompt: QueuedPrompt) {
        self.requests += 1;
        self.backlog.add(now, prompt);
    }

    pub(crate) fn add_decode(&mut self, key: RequestKey, charge: DecodeCharge) {
        self.requests += 1;
        self.blocks += charge.blocks;
        self.kv_tokens += charge.kv_tokens;
        self.decoding.insert(key, charge);
    }

    /// The prompt is computed: the sequence decodes from now on.
    pub(crate) fn begin_decode(&mut self, now: Instant, key: RequestKey) {
        if let Some(charge) = self.decoding.get_mut(&key) {
            charge.begins = now;
            charge.begun = true;
        }
    }

    pub(crate) fn end_decode(&mut self, key: RequestKey) {
        let Some(charge) = self.decoding.remove(&key) else { return };
        self.requests -= 1;
        self.blocks -= charge.blocks;
        self.kv_tokens -= charge.kv_tokens;
    }

    pub(crate) fn sequences(&self) -> usize {
        self.decoding.len()
    }

    /// Prompts that wait or are being computed.
    pub(crate) fn pending(&self) -> usize {
        self.backlog.len()
    }

    /// Those that decode now.
    pub(crate) fn decoding_now(&self) -> DecodeForecast {
        let mut forecast = DecodeForecast::default();
        self.decoding.values().filter(|charge| charge.begun).for_each(|charge| forecast.add(charge, 1.0));
        forecast
    }

    /// Those that decode at `then` if every answer takes `answer`: prompts computed by then come in, answers that old are over (Mooncake, section 7.4).
    pub(crate) fn decoding_at(&self, now: Instant, then: Instant, answer: Duration) -> DecodeForecast {
        let mut forecast = DecodeForecast::default();
        let alive = |charge: &&DecodeCharge| charge.begins(now) <= then && then < charge.begins(now) + answer;
        self.decoding.values().filter(alive).for_each(|charge| forecast.add(charge, 1.0));
        forecast
    }

    /// Expected of those that decode at `then`, each counted with the probability that its answer goes on for so long: answers are as long as those before
    /// them were, and a token takes `tbt`.
    pub(crate) fn expected_at(
        &self,
        now: Instant,
        then: Instant,
        tbt: Duration,
        lengths: &OutputLength,
    ) -> DecodeForecast {
        let mut forecast = DecodeForecast::default();
        let tokens = |time: Duration| (time.as_secs_f64() / tbt.as_secs_f64().max(1e-6)) as u32;
        for charge in self.decoding.values().filter(|charge| charge.begins(now) <= then) {
            let done = if charge.begun { tokens(now.saturating_duration_since(charge.begins)) } else { 0 };
            let by_then = tokens(then.saturating_duration_since(charge.begins(now)));
            forecast.add(charge, lengths.survival(done, by_then));
        }
        forecast
    }

    /// How long until the first of those that decode should be over, if every answer takes `answer`.
    pub(crate) fn next_end(&self, now: Instant, answer: Duration) -> Option<Duration> {
        let begun = self.decoding.values().filter(|charge| charge.begun);
        begun.map(|charge| (charge.begins + answer).saturating_duration_since(now)).min()
    }

    /// Sequences whose objective steps of `without` meet and steps of `with` do not.
    pub(crate) fn broken_sequences(&self, without: Duration, with: Duration) -> usize {
        let limits = self.decoding.values().filter_map(|charge| charge.tbt);
        limits.filter(|limit| without <= *limit && *limit < with).count()
    }

    /// Whether nothing is charged.
    #[cfg(test)]
    pub(crate) fn is_zero(&self) -> bool {
        let empty = self.backlog.len() == 0 && self.decoding.is_empty();
        empty && self.requests == 0 && self.blocks == 0 && self.kv_tokens == 0
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Attempt, RequestId};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(n: u128) -> RequestKey {
        RequestKey { request: RequestId(n), attempt: Attempt(0) }
    }

    fn charge(begins: Instant) -> DecodeCharge {
        let tbt = Some(SECOND / 10);
        DecodeCharge { blocks: 2, prompt_tokens: 20, max_tokens: 10, kv_tokens: 25, tbt, begins, begun: false }
    }

    #[test]
    fn the_batch_of_a_later_time_counts_who_comes_and_who_goes() {
        let start = Instant::now();
        let mut charges = NodeCharges::default();
        for n in 0..3 {
            charges.add_decode(key(n.into()), charge(start + n * 10 * SECOND));
        }
        charges.begin_decode(start, key(0));
        assert_eq!(charges.decoding_now().sequences, 1.0);
        let at = |seconds: u32| charges.decoding_at(start, start + seconds * SECOND, 15 * SECOND).sequences;
        assert_eq!((at(5), at(12), at(16), at(22), at(99)), (1.0, 2.0, 1.0, 2.0, 0.0));
        assert_eq!(charges.next_end(start + SECOND, 15 * SECOND), Some(14 * SECOND));
        let broken = |without: u32, with: u32| charges.broken_sequences(SECOND / without, SECOND / with);
        assert_eq!((broken(20, 11), broken(20, 9), broken(9, 8)), (0, 3, 0), "who is late anyway loses nothing");
        (0..3).for_each(|n| charges.end_decode(key(n)));
        charges.end_decode(key(0));
        assert!(charges.is_zero());
    }

    #[test]
    fn answers_of_unknown_length_count_in_part() {
        let start = Instant::now();
        let (mut charges, mut lengths) = (NodeCharges::default(), OutputLength::new(100));
        (0..1000).for_each(|n| lengths.observe(if n % 2 == 0 { 10 } else { 1000 }));
        charges.add_decode(key(0), charge(start));
        let expected = charges.expected_at(start, start + 3 * SECOND, SECOND / 10, &lengths).sequences;
        assert!((0.4..0.6).contains(&expected), "{expected}: 30 tokens later half of the answers are over");
        charges.begin_decode(start, key(0));
        let later = charges.expected_at(start + 3 * SECOND, start + 4 * SECOND, SECOND / 10, &lengths).sequences;
        assert!(later > 0.95, "{later}: after 30 tokens it is a long one");
    }
}
