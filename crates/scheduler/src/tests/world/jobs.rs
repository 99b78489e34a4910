//! What is asked of the world.

use std::sync::Arc;
use std::time::Duration;

use baton_types::{ConductorId, DecodeTarget, FetchSource, Generation, PrefillJob, QueueTerms, SamplingParams};

use super::super::engine::{BLOCK_TOKENS, VOCAB};
use super::{World, key, target};

impl World {
    pub(super) fn job(&mut self, n: u64) -> PrefillJob {
        let (base, len) = (self.rng.below(3), 1 + self.rng.below(40) as usize);
        let shared = self.rng.below(40) as usize;
        let token = |position: usize| if position < shared { base + position as u64 } else { n + position as u64 };
        let tokens: Vec<_> = (0..len).map(|position| (token(position) % u64::from(VOCAB)) as u32).collect();
        let sampling = SamplingParams {
            max_tokens: 1 + self.rng.below(24) as u32,
            stop_token_ids: vec![self.rng.below(VOCAB.into()) as u32],
            prompt_logprobs: self.rng.chance(10).then_some(2),
            ..SamplingParams::default()
        };
        // The conductor may be wrong about what is there.
        let there = self.rng.below(45) as u32;
        let fetch = self.rng.chance(50).then(|| FetchSource {
            node: target().node,
            generation: Generation(1),
            address: String::new(),
            tokens: there,
        });
        let tbt = self.rng.chance(30).then(|| Duration::from_micros(self.rng.below(3000)));
        PrefillJob {
            key: key(n),
            conductor: ConductorId(self.rng.below(2)),
            tokens: tokens.into(),
            output_tokens: 0,
            fetch,
            tail_tokens: self.tail_tokens(len),
            decode: (sampling.max_tokens > 1 || self.rng.chance(50)).then(|| DecodeTarget { tbt, ..target() }),
            sampling: Arc::new(sampling),
            salt: Arc::from([]),
            terms: self.queue_terms(),
        }
    }

    /// Whole blocks come before it, mostly.
    fn tail_tokens(&mut self, prompt_tokens: usize) -> u32 {
        if prompt_tokens < 2 || self.rng.chance(50) {
            return 0;
        }
        let before = 1 + self.rng.below(prompt_tokens as u64 - 1) as usize;
        let whole = before.next_multiple_of(BLOCK_TOKENS);
        let before = if whole < prompt_tokens && self.rng.chance(90) { whole } else { before };
        (prompt_tokens - before) as u32
    }

    fn queue_terms(&mut self) -> QueueTerms {
        let mut time = |below| Duration::from_millis(self.rng.below(below));
        let (patience, deadline, max_overtaken, compute) = (time(500), time(300), time(800), time(100));
        let deadline = Some(deadline).filter(|_| self.rng.chance(50));
        let (priority, value) = (self.rng.below(3) as i32, self.rng.below(5) as f64);
        QueueTerms { priority, patience, deadline, value, max_overtaken, timeout: Duration::from_secs(3), compute }
    }
}
