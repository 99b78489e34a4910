//! What placed requests will cost their nodes. Charged when they are placed, so that a burst does
//! not herd, and given back as they get on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_types::{ConductorId, RequestKey};

pub use baton_types::NodeStart;

use crate::backlog::{Backlog, QueuedPrompt};
use crate::cost::{OutputLength, duration};

/// What one placed request was charged.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Charge {
    /// Where it is prefilled, until that node leaves.
    pub prefill: Option<NodeStart>,
    /// The decode node, if it computes the last part of the prompt (partial prefill), until that
    /// node leaves.
    pub tail: Option<NodeStart>,
    /// Bytes that come from another node first, until they are there or that node leaves.
    pub fetch: Option<FetchCharge>,
    /// Where it decodes, until that node leaves.
    pub decode: Option<Placed>,
    pub placed: Instant,
    /// Since when it is where it is: reports from before say nothing of it.
    pub since: Instant,
    /// Predicted; `None` if another leader predicted it, and nothing is learnt from it.
    pub ttft: Option<Duration>,
    /// Whether the prompt is computed.
    pub prefilled: bool,
    /// The conductor that says that it has it; `None`: this one.
    pub owner: Option<ConductorId>,
}

impl Charge {
    /// One at no node.
    pub(crate) fn new(placed: Instant, since: Instant) -> Self {
        Self {
            prefill: None,
            tail: None,
            fetch: None,
            decode: None,
            placed,
            since,
            ttft: None,
            prefilled: false,
            owner: None,
        }
    }

    /// The node whose reports show it.
    pub(crate) fn shown_at(&self) -> Option<&NodeStart> {
        let decode = self.decode.as_ref().map(|decode| &decode.at);
        if self.prefilled { decode } else { self.prefill.as_ref().or(decode) }
    }
}

/// Bytes that come from another node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FetchCharge {
    pub from: NodeStart,
    pub bytes: u64,
}

/// A sequence at its decode node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Placed {
    pub at: NodeStart,
    pub charge: DecodeCharge,
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
    /// When its first token goes out: predicted until it does.
    pub begins: Instant,
    pub begun: bool,
    /// When it was charged to the node: reports from before say nothing of it.
    pub charged: Instant,
}

impl DecodeCharge {
    /// Tokens that it has by a time, each of which takes `step`.
    fn tokens_by(&self, then: Instant, step: Duration) -> u32 {
        (then.saturating_duration_since(self.begins).as_secs_f64() / step.as_secs_f64().max(1e-6)) as u32
    }

    /// Probability that it decodes at `then`.
    fn survival(&self, now: Instant, then: Instant, step: Duration, lengths: &OutputLength) -> f64 {
        let begins = self.begins(now);
        if begins > then {
            return 0.0;
        }
        let done = if self.begun { self.tokens_by(now, step) } else { 0 };
        lengths.survival(done, Self { begins, ..*self }.tokens_by(then, step))
    }

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

/// Now, and a later time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Between {
    pub now: Instant,
    pub then: Instant,
}

/// Steps of a node without a newcomer, and with it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    pub without: Duration,
    pub with: Duration,
}

/// A node that has nothing more to do for a request answers within this time.
const ANSWER_DUE: Duration = Duration::from_secs(10);

/// The sum of what a node was charged.
#[derive(Debug, Default)]
pub(crate) struct NodeCharges {
    /// Prompts whose first token has not come.
    pub backlog: Backlog,
    /// Requests placed here that have not ended.
    pub requests: usize,
    /// Of them, those that decode here.
    decoding: BTreeMap<RequestKey, DecodeCharge>,
    /// How many of them have each objective of the time between tokens.
    tbt_limits: BTreeMap<Duration, usize>,
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
        if let Some(limit) = charge.tbt {
            *self.tbt_limits.entry(limit).or_default() += 1;
        }
        self.decoding.insert(key, charge);
    }

    /// The first token goes out: the sequence decodes from now on.
    pub(crate) fn begin_decode(&mut self, now: Instant, key: RequestKey) {
        if let Some(charge) = self.decoding.get_mut(&key) {
            charge.begins = now;
            charge.begun = true;
        }
    }

    /// What was charged of the sequence, as it stood.
    pub(crate) fn end_decode(&mut self, key: RequestKey) -> Option<DecodeCharge> {
        let charge = self.decoding.remove(&key)?;
        self.requests -= 1;
        self.blocks -= charge.blocks;
        self.kv_tokens -= charge.kv_tokens;
        if let Some(limit) = charge.tbt
            && let Some(sequences) = self.tbt_limits.get_mut(&limit)
        {
            *sequences -= 1;
            if *sequences == 0 {
                self.tbt_limits.remove(&limit);
            }
        }
        Some(charge)
    }

    /// Of a sequence, as it stands.
    pub(crate) fn decode(&self, key: RequestKey) -> Option<DecodeCharge> {
        self.decoding.get(&key).copied()
    }

    /// Sequences that were charged since, and their blocks.
    pub(crate) fn charged_since(&self, time: Instant) -> (usize, usize) {
        let since = self.decoding.values().filter(|charge| charge.charged >= time);
        since.fold((0, 0), |(sequences, blocks), charge| (sequences + 1, blocks + charge.blocks))
    }

    /// When the last of the requests came that should have had an answer by now.
    pub(crate) fn owes_since(&self, now: Instant) -> Option<Instant> {
        let is_due = |since: &Instant| now.saturating_duration_since(*since) > ANSWER_DUE;
        // What is left of the work is the node's to tell.
        let prompt = self.backlog.arrivals().filter(is_due).max();
        let is_busy = self.backlog.total(now) >= ANSWER_DUE.as_secs_f64();
        let begun = self.decoding.values().filter(|charge| charge.begun).map(|charge| charge.begins);
        let begun = begun.filter(is_due).max();
        if is_busy { begun } else { begun.max(prompt) }
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

    /// Those that decode at `then` if every answer takes `answer`: prompts computed by then come
    /// in, answers that old are over (Mooncake, section 7.4).
    pub(crate) fn decoding_at(&self, now: Instant, then: Instant, answer: Duration) -> DecodeForecast {
        let mut forecast = DecodeForecast::default();
        let alive = |charge: &&DecodeCharge| charge.begins(now) <= then && then < charge.begins(now) + answer;
        self.decoding.values().filter(alive).for_each(|charge| forecast.add(charge, 1.0));
        forecast
    }

    /// Expected of those that decode at `then`, each counted with the probability that its answer
    /// goes on for so long. Answers are as long as those before them were, and a token takes `tbt`.
    pub(crate) fn expected_at(
        &self,
        now: Instant,
        then: Instant,
        tbt: Duration,
        lengths: &OutputLength,
    ) -> DecodeForecast {
        let mut forecast = DecodeForecast::default();
        for charge in self.decoding.values() {
            forecast.add(charge, charge.survival(now, then, tbt, lengths));
        }
        forecast
    }

    /// How long until the first of those that decode should be over: a token takes `step`, and
    /// answers get as long as those before them.
    pub(crate) fn next_end(&self, now: Instant, step: Duration, lengths: &OutputLength) -> Option<Duration> {
        let left = |charge: &DecodeCharge| {
            let left = lengths.expected_left(charge.tokens_by(now, step), charge.max_tokens);
            duration(step.as_secs_f64() * left.max(1.0))
        };
        self.decoding.values().filter(|charge| charge.begun).map(left).min()
    }

    /// Sequences that are likely to go on until `then` and whose objective steps of `without` meet
    /// and steps of `with` do not.
    pub(crate) fn broken_sequences(
        &self,
        between: Between,
        steps: Steps,
        step: Duration,
        lengths: &OutputLength,
    ) -> usize {
        let Between { now, then } = between;
        let Steps { without, with } = steps;
        let breaks = |charge: &&DecodeCharge| charge.tbt.is_some_and(|limit| without <= limit && limit < with);
        let goes_on = |charge: &&DecodeCharge| charge.survival(now, then, step, lengths) >= 0.5;
        self.decoding.values().filter(breaks).filter(goes_on).count()
    }

    /// Whether some sequence's time between tokens may not be as long as so many seconds.
    pub(crate) fn has_tbt_limit_below(&self, seconds: f64) -> bool {
        self.tbt_limits.first_key_value().is_some_and(|(limit, _)| limit.as_secs_f64() < seconds)
    }

    /// Whether some sequence's time between tokens may be as long as `from` seconds, and not as
    /// long as `to`.
    pub(crate) fn has_tbt_limit_in(&self, from: f64, to: f64) -> bool {
        from < to && self.tbt_limits.range(duration(from)..duration(to)).next().is_some()
    }

    /// Whether nothing is charged.
    #[cfg(test)]
    pub(crate) fn is_zero(&self) -> bool {
        let empty = self.backlog.len() == 0 && self.decoding.is_empty();
        empty && self.tbt_limits.is_empty() && self.requests == 0 && self.blocks == 0 && self.kv_tokens == 0
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
        DecodeCharge {
            blocks: 2,
            prompt_tokens: 20,
            max_tokens: 10,
            kv_tokens: 25,
            tbt,
            begins,
            begun: false,
            charged: begins,
        }
    }

    #[test]
    fn forecast_of_batch_counts_sequences_that_join_and_leave() {
        let start = Instant::now();
        let mut charges = NodeCharges::default();
        for n in 0..3 {
            charges.add_decode(key(n.into()), charge(start + n * 10 * SECOND));
        }
        charges.begin_decode(start, key(0));
        assert_eq!(charges.decoding_now().sequences, 1.0);
        let at = |seconds: u32| charges.decoding_at(start, start + seconds * SECOND, 15 * SECOND).sequences;
        assert_eq!((at(5), at(12), at(16), at(22), at(99)), (1.0, 2.0, 1.0, 2.0, 0.0));
        let lengths = OutputLength::new(100);
        let left = |seconds: u32| charges.next_end(start + seconds * SECOND, SECOND, &lengths).unwrap().as_secs();
        assert_eq!((left(0), left(4), left(60)), (10, 6, 1), "ten tokens at most, and one more if they are over");
        let broken = |then: u32, without: u32, with: u32| {
            let between = Between { now: start, then: start + then * SECOND };
            let steps = Steps { without: SECOND / without, with: SECOND / with };
            charges.broken_sequences(between, steps, SECOND / 10, &lengths)
        };
        assert_eq!((broken(21, 20, 11), broken(21, 20, 9), broken(21, 9, 8)), (0, 1, 0), "two are over by then");
        assert_eq!(broken(5, 20, 9), 1, "two have not begun");
        assert!(charges.has_tbt_limit_in(0.05, 0.11) && !charges.has_tbt_limit_in(0.11, 0.2));
        (0..3).for_each(|n| assert!(charges.end_decode(key(n)).is_some()));
        assert_eq!(charges.end_decode(key(0)), None);
        assert!(charges.is_zero());
    }

    #[test]
    fn forecast_of_batch_counts_answers_of_unknown_length_in_part() {
        let start = Instant::now();
        let mut charges = NodeCharges::default();
        let mut lengths = OutputLength::new(100);
        (0..1000).for_each(|n| lengths.observe(if n % 2 == 0 { 10 } else { 1000 }));
        charges.add_decode(key(0), charge(start));
        let expected = charges.expected_at(start, start + 3 * SECOND, SECOND / 10, &lengths).sequences;
        assert!((0.4..0.6).contains(&expected), "{expected}: 30 tokens later half of the answers are over");
        charges.begin_decode(start, key(0));
        let later = charges.expected_at(start + 3 * SECOND, start + 4 * SECOND, SECOND / 10, &lengths).sequences;
        assert!(later > 0.95, "{later}: after 30 tokens it is a long one");
    }
}
