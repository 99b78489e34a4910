//! Steps of an engine, timed.

use baton_engine::{Engine, EngineError, LogitsWanted, SequenceStep, StepObserver};
use baton_types::{BlockId, TokenId};

use crate::stats::median;

/// Tokens of a prefill node's chunk.
const CHUNK: usize = 512;
/// Tokens of each sequence before the first decode step.
const CONTEXT: usize = 64;
/// Decode steps of a round.
const STEPS: usize = 16;

/// Counts the rows whose logits came.
#[derive(Default)]
struct Count(usize);

impl StepObserver for Count {
    fn kv_ready(&mut self, _layer: u32) {}

    fn logits(&mut self, _sequence: usize, _position: u32, _logits: &[f32]) {
        self.0 += 1;
    }
}

/// An engine under measurement. Its arena is the bench's own.
pub struct Bench<'a> {
    engine: &'a mut dyn Engine,
    rounds: u32,
}

impl<'a> Bench<'a> {
    pub fn new(engine: &'a mut dyn Engine, rounds: u32) -> Self {
        Self { engine, rounds }
    }

    /// Tokens per second of a prompt of `tokens` tokens.
    pub fn prefill(&mut self, tokens: usize) -> Result<f64, EngineError> {
        let prompt = self.prompt(1, tokens);
        let table = self.table(0, tokens);
        self.compute(&prompt[..CHUNK.min(tokens)], &table)?; // warms buffers and pages
        let mut seconds = Vec::new();
        for _ in 0..self.rounds {
            let began = baton_runtime::now();
            self.compute(&prompt, &table)?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        Ok(tokens as f64 / median(seconds))
    }

    /// Tokens per second of all of `sequences` sequences together.
    pub fn decode(&mut self, sequences: usize) -> Result<f64, EngineError> {
        let most = CONTEXT + STEPS + 1;
        let tables: Vec<_> = (0..sequences).map(|sequence| self.table(sequence, most)).collect();
        for (sequence, table) in tables.iter().enumerate() {
            let prompt = self.prompt(sequence as u32, CONTEXT);
            self.compute(&prompt, table)?;
        }
        self.decode_step(&tables, CONTEXT)?;
        let mut seconds = Vec::new();
        for _ in 0..self.rounds {
            let began = baton_runtime::now();
            for step in 0..STEPS {
                self.decode_step(&tables, CONTEXT + 1 + step)?;
            }
            seconds.push(began.elapsed().as_secs_f64() / STEPS as f64);
        }
        Ok(sequences as f64 / median(seconds))
    }

    /// Computes a prompt in chunks, up to the logits of its last position.
    fn compute(&mut self, prompt: &[TokenId], block_table: &[BlockId]) -> Result<(), EngineError> {
        let mut start = 0;
        for tokens in prompt.chunks(CHUNK) {
            let last = start + tokens.len() == prompt.len();
            let logits = if last { LogitsWanted::Last } else { LogitsWanted::None };
            let step = SequenceStep { tokens, start: start as u32, block_table, logits };
            self.engine.step(&[step], &mut Count::default())?;
            start += tokens.len();
        }
        Ok(())
    }

    fn decode_step(&mut self, tables: &[Vec<BlockId>], position: usize) -> Result<(), EngineError> {
        let steps: Vec<_> = tables
            .iter()
            .map(|block_table| SequenceStep {
                tokens: &[7],
                start: position as u32,
                block_table,
                logits: LogitsWanted::Last,
            })
            .collect();
        let mut count = Count::default();
        self.engine.step(&steps, &mut count)?;
        assert_eq!(count.0, tables.len(), "a row of logits for each sequence");
        Ok(())
    }

    /// Tokens of no meaning, the same on every run.
    fn prompt(&self, seed: u32, tokens: usize) -> Vec<TokenId> {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % self.engine.model().vocab_size
        };
        (0..tokens).map(next).collect()
    }

    /// The blocks of a sequence of at most `tokens` tokens, when all are that long.
    fn table(&self, sequence: usize, tokens: usize) -> Vec<BlockId> {
        let blocks = self.engine.arena().layout().blocks_for(tokens) as u32;
        (sequence as u32 * blocks..).take(blocks as usize).map(BlockId).collect()
    }
}
