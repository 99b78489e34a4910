//! A decode node: sequences wait for room, join the batch at a step's start, and get a token per step.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockPool;
use baton_types::{BlockHash, BlockId, Tbt};

use crate::trace::BLOCK_TOKENS;
use baton_profile::ModelProfile;

/// A sequence whose prompt is here.
#[derive(Debug, Clone)]
pub(crate) struct Arrived {
    /// Index of the request.
    pub request: usize,
    pub prompt_tokens: u32,
    /// Room that it is given for its answer.
    pub max_tokens: u32,
    /// Tokens that it will get after the first one. Only the simulated engine knows.
    pub to_come: u32,
    /// Of the prompt's full blocks.
    pub hashes: Arc<[BlockHash]>,
    pub first_token_at: Instant,
}

#[derive(Debug)]
struct Running {
    blocks: Vec<BlockId>,
    prompt_tokens: u32,
    first_token_at: Instant,
    first_step: usize,
    first_gap: f64,
    to_come: u32,
}

/// A sequence that has all its tokens.
#[derive(Debug)]
pub(crate) struct Finished {
    pub request: usize,
    pub tbt: Option<Duration>,
}

/// One decode node.
#[derive(Debug)]
pub(crate) struct DecodeNode {
    pub pool: BlockPool,
    max_running: usize,
    waiting: VecDeque<Arrived>,
    running: HashMap<usize, Running>,
    /// Number of the step that gives a sequence its last token.
    ends: BinaryHeap<Reverse<(usize, usize)>>,
    joined: Vec<usize>,
    kv_tokens: u64,
    /// Seconds of each step so far.
    steps: Vec<f64>,
    in_step: bool,
}

impl DecodeNode {
    pub(crate) fn new(pool: BlockPool, profile: &ModelProfile) -> Self {
        Self {
            pool,
            max_running: profile.max_running as usize,
            waiting: VecDeque::new(),
            running: HashMap::new(),
            ends: BinaryHeap::new(),
            joined: Vec::new(),
            kv_tokens: 0,
            steps: Vec::new(),
            in_step: false,
        }
    }

    pub(crate) fn on_arrived(&mut self, sequence: Arrived) {
        self.waiting.push_back(sequence);
    }

    /// The next step, if the node is idle and has something to do: its seconds.
    pub(crate) fn plan(&mut self, profile: &ModelProfile, noise: impl FnOnce() -> f64) -> Option<f64> {
        if self.in_step {
            return None;
        }
        while self.running.len() < self.max_running && self.join_next() {}
        if self.running.is_empty() {
            return None;
        }
        self.in_step = true;
        let seconds = profile.decode_step(self.running.len(), self.kv_tokens) * noise();
        self.steps.push(seconds);
        Some(seconds)
    }

    /// Takes the first of those that wait into the batch; whether there was one, and room for it.
    fn join_next(&mut self) -> bool {
        let Some(next) = self.waiting.front() else { return false };
        let held = self.pool.match_prefix(&next.hashes);
        let missing = blocks_of(next) - held.len();
        if self.pool.check_fits(&held, missing).is_err() {
            return false;
        }
        self.pool.acquire(&held);
        let (Ok(new), Some(next)) = (self.pool.allocate(missing), self.waiting.pop_front()) else { return false };
        let complete = held.len();
        let blocks: Vec<_> = held.into_iter().chain(new).collect();
        for (index, (block, hash)) in blocks.iter().zip(next.hashes.iter()).enumerate().skip(complete) {
            let parent = index.checked_sub(1).map(|parent| next.hashes[parent]);
            self.pool.complete(*block, *hash, parent);
        }
        let first_step = self.steps.len();
        self.kv_tokens += u64::from(next.prompt_tokens) + 1;
        self.ends.push(Reverse((first_step + next.to_come as usize - 1, next.request)));
        self.joined.push(next.request);
        self.running.insert(
            next.request,
            Running {
                blocks,
                prompt_tokens: next.prompt_tokens,
                first_token_at: next.first_token_at,
                first_step,
                first_gap: 0.0,
                to_come: next.to_come,
            },
        );
        true
    }

    /// The step is over: the sequences that have all their tokens now.
    pub(crate) fn on_step_done(&mut self, now: Instant) -> Vec<Finished> {
        self.in_step = false;
        for request in self.joined.drain(..) {
            if let Some(sequence) = self.running.get_mut(&request) {
                sequence.first_gap = now.saturating_duration_since(sequence.first_token_at).as_secs_f64();
            }
        }
        self.kv_tokens += self.running.len() as u64;
        let step = self.steps.len() - 1;
        let mut finished = Vec::new();
        while let Some(Reverse((end, request))) = self.ends.peek().copied()
            && end <= step
        {
            self.ends.pop();
            finished.extend(self.finish(request));
        }
        finished
    }

    fn finish(&mut self, request: usize) -> Option<Finished> {
        let sequence = self.running.remove(&request)?;
        self.kv_tokens -= u64::from(sequence.prompt_tokens) + 1 + u64::from(sequence.to_come);
        self.pool.release(&sequence.blocks);
        let rest = &self.steps[sequence.first_step + 1..];
        let gaps = std::iter::once(sequence.first_gap).chain(rest.iter().copied());
        let mut gaps: Vec<_> = gaps.map(Duration::from_secs_f64).collect();
        Some(Finished { request, tbt: Tbt::of_gaps(&mut gaps).map(|Tbt(tbt)| tbt) })
    }

    /// Share of its blocks that sequences hold or wait for.
    pub(crate) fn demand(&self) -> f64 {
        let counts = self.pool.counts();
        let waiting: usize = self.waiting.iter().map(blocks_of).sum();
        (counts.used + waiting) as f64 / counts.total.max(1) as f64
    }

    /// Sequences of the batch, and of those that wait.
    pub(crate) fn sequences(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Sequences, tokens of KV and seconds of the last step.
    pub(crate) fn last_step(&self) -> Option<(usize, u64, f64)> {
        let seconds = self.steps.last()?;
        (!self.running.is_empty()).then_some((self.running.len(), self.kv_tokens, *seconds))
    }
}

fn blocks_of(sequence: &Arrived) -> usize {
    (sequence.prompt_tokens + sequence.max_tokens - 1).div_ceil(BLOCK_TOKENS) as usize
}
