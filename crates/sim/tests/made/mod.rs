//! Traces that tests make.

use std::time::Duration;

use baton_sim::{BLOCK_TOKENS, Random, Trace, TraceRequest};

/// What conversations are like.
#[derive(Debug, Clone, Copy)]
pub struct Conversations {
    /// Requests a second, as a mean.
    pub per_second: f64,
    /// Blocks that a third of the prompts begin with.
    pub shared: u64,
    /// Most blocks that a turn adds.
    pub most_new: u64,
    /// Most tokens of an answer.
    pub most_output: u64,
}

impl Conversations {
    /// Requests without end: one of three goes on with a conversation, one begins as others do, one
    /// is new.
    pub fn requests(self, seed: u64) -> impl Iterator<Item = TraceRequest> {
        let mut random = Random::new(seed);
        let mut at = 0.0;
        let mut turns = Vec::<Vec<u64>>::new();
        let mut next_id = 1000;
        std::iter::repeat_with(move || {
            at += random.exponential(1.0 / self.per_second);
            let mut hash_ids = match random.below(3) {
                0 if !turns.is_empty() => turns[random.below(turns.len() as u64) as usize].clone(),
                1 => (0..self.shared).collect(),
                _ => Vec::new(),
            };
            let new = 1 + random.below(self.most_new);
            hash_ids.extend(next_id..next_id + new);
            next_id += new;
            turns.push(hash_ids.clone());
            let input_length = hash_ids.len() as u32 * BLOCK_TOKENS - random.below(u64::from(BLOCK_TOKENS)) as u32;
            let output_length = 1 + random.below(self.most_output) as u32;
            TraceRequest { timestamp: Duration::from_secs_f64(at), input_length, output_length, hash_ids }
        })
    }
}

/// A trace of these.
pub fn trace(requests: impl Iterator<Item = TraceRequest>) -> Trace {
    Trace { name: "made".to_owned(), requests: requests.collect(), block_tokens: BLOCK_TOKENS }
}
