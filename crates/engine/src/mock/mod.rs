//! An engine without a model: time from a cost model, tokens from a hash of the KV bytes.
//!
//! For each layer and position, a step writes a record of the layer, the position, the token and
//! the record of the position before. A row's logits are drawn from a hash over the last record of
//! every layer, after every record before it was checked against its neighbours. A block that was
//! lost, swapped or left over from another sequence changes the tokens. So the real control plane
//! and real transfers are tested, at the speed of a laptop.
//!
//! A step looks at the ends of every block. It looks at what lies between only if it has not seen a
//! block between these ends. So a sequence of 100,000 tokens costs a few microseconds a step. What
//! is overlooked is a block whose middle was overwritten after it was seen, both ends as they were.
//!
//! A step ends when its time is over, counted from its beginning: what it does meanwhile is part of
//! it.

#![allow(unsafe_code)] // reads and writes blocks of the arena; see each SAFETY note

mod answers;

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_profile::{LAYER_GROUPS, StepCost, step_noise};
use baton_types::{BlockId, KvDtype, KvLayout, ModelFingerprint, Random, mix};

use crate::arena::KvArena;
use crate::engine::{
    Engine, LayerSlice, LogitsWanted, ModelInfo, SequenceStep, StepObserver, check_batch, check_slice,
};
use crate::error::EngineError;

pub use answers::MockAnswers;

/// Tokens of the mock's vocabulary: the bytes, and specials as in `baton_text::Tokenizer::bytes()`.
pub const MOCK_VOCAB_SIZE: u32 = 512;
/// Largest blocks and arena.
const MAX_BLOCK_TOKENS: u32 = 4096;
const MAX_ARENA_BYTES: u64 = 1 << 40;
/// Bytes of a record: one K row and one V row of 4 elements each.
const RECORD_BYTES: usize = 16;
/// Logits of the token that the hash chose, and of all others.
const CHOSEN: f32 = 12.0;
/// Logit of a token of a given answer: no other is drawn at any ordinary temperature.
const GIVEN: f32 = 1000.0;

/// What the mock pretends to be.
#[derive(Debug, Clone, PartialEq)]
pub struct MockOptions {
    /// Layers.
    pub num_layers: u32,
    /// Bytes of KV of a token, all layers: a multiple of 16 for each layer. The first 16 of a layer
    /// are the record, the rest is moved along.
    pub kv_bytes_per_token: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks of the arena.
    pub num_blocks: u32,
    /// Most tokens of prompt and output together.
    pub context_length: u32,
    /// Time of a step, of its rows and of the positions that they attend to.
    pub cost: StepCost,
    /// Of the noise of `cost`.
    pub seed: u64,
    /// Token that ends an output, and one chance in how many it has at each position; 0 is never.
    pub end_token: u32,
    /// See `end_token`.
    pub end_one_in: u32,
    /// A step that computes this token never ends: it stands for a driver that hangs.
    pub stuck_token: Option<u32>,
    /// What it answers; `None`: noise.
    pub answers: Option<Arc<MockAnswers>>,
}

impl Default for MockOptions {
    fn default() -> Self {
        Self {
            num_layers: LAYER_GROUPS,
            kv_bytes_per_token: 64,
            block_tokens: 16,
            num_blocks: 4096,
            context_length: 32_768,
            cost: StepCost { base: 500e-6, per_row: 20e-6, per_row_pair: 5e-9, noise: 0.0 },
            seed: 1,
            end_token: 257,
            end_one_in: 0,
            stuck_token: None,
            answers: None,
        }
    }
}

impl MockOptions {
    fn check(&self) -> Result<(), EngineError> {
        for (field, value) in
            [("block_tokens", self.block_tokens), ("num_blocks", self.num_blocks), ("num_layers", self.num_layers)]
        {
            if value == 0 {
                return Err(EngineError::Options { field, problem: "0, but must be at least 1".into() });
            }
        }
        if self.block_tokens > MAX_BLOCK_TOKENS {
            let problem = format!("{}, but must be at most {MAX_BLOCK_TOKENS}", self.block_tokens);
            return Err(EngineError::Options { field: "block_tokens", problem });
        }
        let tokens = u64::from(self.block_tokens) * u64::from(self.num_blocks);
        if tokens.checked_mul(self.kv_bytes_per_token.into()).is_none_or(|bytes| bytes > MAX_ARENA_BYTES) {
            let problem = format!("{}, but an arena has at most {MAX_ARENA_BYTES} bytes", self.num_blocks);
            return Err(EngineError::Options { field: "num_blocks", problem });
        }
        let field = "kv_bytes_per_token";
        let of_records = self.num_layers * RECORD_BYTES as u32;
        if self.kv_bytes_per_token == 0 || !self.kv_bytes_per_token.is_multiple_of(of_records) {
            let problem = format!("{}, but must be a multiple of {of_records}", self.kv_bytes_per_token);
            return Err(EngineError::Options { field, problem });
        }
        Ok(())
    }

    /// The part of a token's KV that is a head: the record.
    fn num_kv_heads(&self) -> u32 {
        self.kv_bytes_per_token / (self.num_layers * RECORD_BYTES as u32)
    }
}

/// Rows of a step, and the positions that they attend to in sum.
fn work(batch: &[SequenceStep<'_>]) -> (u64, u64) {
    let of_sequence = |sequence: &SequenceStep<'_>| {
        let rows = sequence.tokens.len() as u64;
        let start = u64::from(sequence.start);
        (rows, rows * start + rows * (rows + 1) / 2)
    };
    batch.iter().map(of_sequence).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

type Record = [u8; RECORD_BYTES];

/// Records of one layer of a block that follow each other, from the first one on. Seen once, and
/// taken to be there while both ends are.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    records: usize,
    before: Record,
    first: Record,
    last: Record,
}

/// See the module's text.
pub struct MockEngine {
    options: MockOptions,
    model: ModelInfo,
    arena: KvArena,
    /// Of each block of each layer.
    seen: Vec<Seen>,
    /// Draws the noise.
    random: Random,
    /// Logits of tokens that the hash did not choose, for two vocabularies. A row takes one that
    /// begins where its hash says.
    noise: Vec<f32>,
    logits: Vec<f32>,
}

impl MockEngine {
    /// An engine that pretends to be what `options` say.
    pub fn new(options: MockOptions) -> Result<Self, EngineError> {
        options.check()?;
        let fingerprint = ModelFingerprint(0x6d6f_636b_0000_0000 | u64::from(options.num_layers));
        let layout = KvLayout {
            model: fingerprint.0,
            num_layers: options.num_layers,
            num_kv_heads: options.num_kv_heads(),
            head_dim: 4,
            block_tokens: options.block_tokens,
            dtype: KvDtype::F16,
            num_blocks: options.num_blocks,
        };
        let model = ModelInfo {
            name: "mock".into(),
            architecture: "mock".into(),
            vocab_size: MOCK_VOCAB_SIZE,
            context_length: options.context_length,
            num_layers: options.num_layers,
            fingerprint,
            kv_class: "mock".into(),
        };
        let seen = vec![Seen::default(); options.num_layers as usize * options.num_blocks as usize];
        let arena = KvArena::allocate(layout)?;
        let noise = (0..2 * u64::from(MOCK_VOCAB_SIZE)).map(|token| (mix(token + 1) >> 48) as f32 / 65_536.0).collect();
        let random = Random::new(options.seed);
        Ok(Self { options, model, arena, seen, random, noise, logits: vec![0.0; MOCK_VOCAB_SIZE as usize] })
    }

    /// The record of a position: its K row, then its V row.
    fn record(&self, layer: u32, table: &[BlockId], position: usize) -> Record {
        let (block, k, v) = self.place(table, position);
        // SAFETY: the sequence's own blocks; the only writer is this thread's step.
        let bytes = unsafe { self.arena.block(layer, block) };
        let mut record = [0; RECORD_BYTES];
        record[..8].copy_from_slice(&bytes[k..k + 8]);
        record[8..].copy_from_slice(&bytes[v..v + 8]);
        record
    }

    /// The token that an answer of the file goes on with; `None` if there is no file.
    fn given_token(&self, sequence: &SequenceStep<'_>, position: usize) -> Option<u32> {
        let answers = self.options.answers.as_ref()?;
        let token = |at| u64::from_le_bytes(half(&self.record(0, sequence.block_table, at), 8)) as u32;
        Some(answers.next_token((0..=position).map(token), self.options.end_token))
    }

    fn write_record(&self, layer: u32, table: &[BlockId], position: usize, record: Record) {
        let (block, k, v) = self.place(table, position);
        // SAFETY: the block holds a position that this step computes, so it belongs to this step
        // alone.
        let bytes = unsafe { self.arena.block_mut(layer, block) };
        bytes[k..k + 8].copy_from_slice(&record[..8]);
        bytes[v..v + 8].copy_from_slice(&record[8..]);
    }

    /// Block of a position, and offsets of its K and V row in one layer of the block.
    fn place(&self, table: &[BlockId], position: usize) -> (BlockId, usize, usize) {
        let tokens = self.options.block_tokens as usize;
        let row = (position % tokens) * 8;
        (table[position / tokens], row, tokens * 8 + row)
    }

    /// The first 8 bytes chain the positions; the last 8 carry the token and its position, so that
    /// each record can be checked by itself.
    fn next_record(layer: u32, position: usize, token: u32, before: Record) -> Record {
        let mut chain = 0xcbf2_9ce4_8422_2325u64 ^ u64::from(layer);
        for value in [u64::from_le_bytes(half(&before, 0)), u64::from_le_bytes(half(&before, 8)), u64::from(token)] {
            chain = mix(chain ^ value);
        }
        let mut record = [0; RECORD_BYTES];
        record[..8].copy_from_slice(&chain.to_le_bytes());
        record[8..].copy_from_slice(&((position as u64) << 32 | u64::from(token)).to_le_bytes());
        record
    }

    fn write_layer(&self, layer: u32, sequence: &SequenceStep<'_>) {
        let start = sequence.start as usize;
        let mut before = [0; RECORD_BYTES];
        if start > 0 {
            before = self.record(layer, sequence.block_table, start - 1);
        }
        for (position, &token) in (start..).zip(sequence.tokens) {
            before = Self::next_record(layer, position, token, before);
            self.write_record(layer, sequence.block_table, position, before);
        }
    }

    /// Hash over all records up to a position: a false one changes it.
    fn context_hash(&mut self, sequence: &SequenceStep<'_>, position: usize) -> u64 {
        let mut hash = 0;
        for layer in 0..self.options.num_layers {
            let mut before = Record::default();
            for from in (0..=position).step_by(self.options.block_tokens as usize) {
                let to = (from + self.options.block_tokens as usize - 1).min(position);
                hash = self.check_block(hash, layer, sequence.block_table, from..=to, before);
                before = self.record(layer, sequence.block_table, to);
            }
            hash = mix(hash ^ u64::from_le_bytes(half(&before, 0)));
        }
        hash
    }

    /// Checks the records at these positions of one block, each against the one before; the hash
    /// with those that are wrong.
    fn check_block(
        &mut self,
        mut hash: u64,
        layer: u32,
        table: &[BlockId],
        positions: RangeInclusive<usize>,
        mut before: Record,
    ) -> u64 {
        let from = *positions.start();
        let to = *positions.end();
        let block = table[from / self.options.block_tokens as usize];
        let index = layer as usize * self.options.num_blocks as usize + block.0 as usize;
        let entry = before;
        let known = self.known(index, layer, table, from, to, before);
        if known > 0 {
            before = self.seen[index].last;
        }
        let mut right = true;
        for at in from + known..=to {
            let record = self.record(layer, table, at);
            let token = u64::from_le_bytes(half(&record, 8)) as u32;
            if record != Self::next_record(layer, at, token, before) {
                right = false;
                hash = mix(hash.wrapping_add(at as u64 + 1));
            }
            before = record;
        }
        if right && from + known <= to {
            let first = self.record(layer, table, from);
            self.seen[index] = Seen { records: to + 1 - from, before: entry, first, last: before };
        }
        hash
    }

    /// Leading records of a block, of those up to `to`, that were seen to follow each other, and
    /// `before`. More than are asked for are of no use: an earlier owner may have left the last
    /// ones.
    fn known(&self, index: usize, layer: u32, table: &[BlockId], from: usize, to: usize, before: Record) -> usize {
        let Seen { records, before: seen_before, first, last } = self.seen[index];
        let as_seen = (1..=to + 1 - from).contains(&records)
            && before == seen_before
            && self.record(layer, table, from) == first
            && self.record(layer, table, from + records - 1) == last;
        if as_seen { records } else { 0 }
    }

    /// Sequence, position and hash of each row whose logits are wanted.
    fn hashes(&mut self, batch: &[SequenceStep<'_>]) -> Vec<(usize, usize, u64)> {
        let mut hashes = Vec::new();
        for (index, sequence) in batch.iter().enumerate() {
            let end = sequence.start as usize + sequence.tokens.len();
            let first = match sequence.logits {
                LogitsWanted::None => continue,
                LogitsWanted::Last => end - 1,
                LogitsWanted::All => sequence.start as usize,
            };
            for position in first..end {
                hashes.push((index, position, self.context_hash(sequence, position)));
            }
        }
        hashes
    }

    /// How long a step takes.
    fn time(&mut self, batch: &[SequenceStep<'_>]) -> Duration {
        let (rows, attended) = work(batch);
        let cost = self.options.cost;
        Duration::from_secs_f64(cost.seconds(rows, attended) * step_noise(cost.noise, &mut || self.random.unit()))
    }

    /// Some layers of a step, in `time`; after the last one the logits.
    #[allow(clippy::disallowed_methods)] // stands for compute, which takes real time
    fn run(&mut self, batch: &[SequenceStep<'_>], layers: Range<u32>, time: Duration, observer: &mut dyn StepObserver) {
        let mut tokens = batch.iter().flat_map(|sequence| sequence.tokens);
        if self.options.stuck_token.is_some_and(|stuck| tokens.any(|token| *token == stuck)) {
            hang();
        }
        let mut began = Instant::now();
        let is_last = layers.end == self.options.num_layers;
        for layer in layers.clone() {
            // A record depends on the one before it.
            let awaited = Instant::now();
            observer.await_prefix(layer);
            // Compute does not catch up.
            began += awaited.elapsed();
            for sequence in batch {
                self.write_layer(layer, sequence);
            }
            observer.kv_ready(layer);
            let part = f64::from(layer + 1 - layers.start) / layers.len() as f64;
            // The last part is what is left when the logits are there, too.
            if layer + 1 < layers.end {
                sleep_until(began + time.mul_f64(part));
            }
        }
        let hashes = if is_last { self.hashes(batch) } else { Vec::new() };
        sleep_until(began + time);
        if is_last {
            observer.layers_done();
        }
        for (sequence, position, hash) in hashes {
            self.fill_logits(hash);
            if let Some(token) = self.given_token(&batch[sequence], position) {
                self.logits[token as usize] = GIVEN;
            }
            observer.logits(sequence, position as u32, &self.logits);
        }
    }

    fn fill_logits(&mut self, hash: u64) {
        let begin = ((hash >> 32) % u64::from(MOCK_VOCAB_SIZE)) as usize;
        self.logits.copy_from_slice(&self.noise[begin..begin + MOCK_VOCAB_SIZE as usize]);
        let one_in = u64::from(self.options.end_one_in);
        let chosen = if one_in > 0 && hash.is_multiple_of(one_in) {
            self.options.end_token
        } else {
            u32::from(b' ') + (hash % 95) as u32
        };
        self.logits[chosen as usize] = CHOSEN;
    }
}

impl Engine for MockEngine {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn arena(&self) -> &KvArena {
        &self.arena
    }

    fn step(&mut self, batch: &[SequenceStep<'_>], observer: &mut dyn StepObserver) -> Result<(), EngineError> {
        check_batch(batch, &self.model, self.arena.layout())?;
        let time = self.time(batch);
        self.run(batch, 0..self.options.num_layers, time, observer);
        Ok(())
    }

    fn step_layers(&mut self, slice: LayerSlice<'_>, observer: &mut dyn StepObserver) -> Result<(), EngineError> {
        check_slice(&slice, 1, &self.model, self.arena.layout())?;
        let LayerSlice { sequence, layers, hidden } = slice;
        // The layers that these tokens have been through: a pass that is mixed up with another one
        // shows.
        let expected = layers.start as f32;
        if hidden.iter().any(|layers| *layers != expected) {
            return Err(EngineError::Invalid(format!("hidden numbers of another pass before layer {expected}")));
        }
        hidden.clear();
        if layers.end < self.options.num_layers {
            hidden.resize(sequence.tokens.len(), layers.end as f32);
        }
        let batch = std::slice::from_ref(&sequence);
        let time = self.time(batch).mul_f64(layers.len() as f64 / f64::from(self.options.num_layers));
        self.run(batch, layers, time, observer);
        Ok(())
    }
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

/// The thread sleeps; a time that is over costs nothing.
#[allow(clippy::disallowed_methods)] // stands for compute, which takes real time
fn sleep_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}

fn half(record: &Record, at: usize) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&record[at..at + 8]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Observed {
        layers: Vec<u32>,
        best: Vec<(usize, u32, usize)>,
    }

    impl StepObserver for Observed {
        fn kv_ready(&mut self, layer: u32) {
            self.layers.push(layer);
        }

        fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            self.best.push((sequence, position, best));
        }
    }

    const NO_TIME: StepCost = StepCost { base: 0.0, per_row: 0.0, per_row_pair: 0.0, noise: 0.0 };

    fn engine() -> MockEngine {
        MockEngine::new(MockOptions { num_blocks: 16, cost: NO_TIME, ..Default::default() }).unwrap()
    }

    /// Another token at one position, the chain before and after it as it was.
    fn spoil(engine: &MockEngine, layer: u32, table: &[u32], position: usize) {
        let table: Vec<_> = table.iter().copied().map(BlockId).collect();
        let mut record = engine.record(layer, &table, position);
        record[8] ^= 1;
        engine.write_record(layer, &table, position, record);
    }

    fn run(engine: &mut MockEngine, tokens: &[u32], start: u32, table: &[u32]) -> (usize, u32, usize) {
        let table: Vec<_> = table.iter().copied().map(BlockId).collect();
        let step = SequenceStep { tokens, start, block_table: &table, logits: LogitsWanted::Last };
        let mut observed = Observed::default();
        engine.step(&[step], &mut observed).unwrap();
        assert_eq!(observed.layers, [0, 1, 2, 3]);
        observed.best[0]
    }

    #[test]
    fn mock_token_depends_on_kv_bytes_and_not_on_chunks_or_blocks() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut whole = engine();
        let expected = run(&mut whole, &tokens, 0, &[0, 1, 2]);
        let mut chunked = engine();
        run(&mut chunked, &tokens[..32], 0, &[7, 3, 5]);
        assert_eq!(run(&mut chunked, &tokens[32..], 32, &[7, 3, 5]), expected);

        let mut swapped = engine();
        run(&mut swapped, &tokens[..32], 0, &[7, 3, 5]);
        assert_ne!(run(&mut swapped, &tokens[32..], 32, &[3, 7, 5]).2, expected.2);

        let mut lost = engine();
        run(&mut lost, &tokens[..32], 0, &[7, 3, 5]);
        lost.arena.zero_tail(2, BlockId(7), 4);
        assert_ne!(run(&mut lost, &tokens[32..], 32, &[7, 3, 5]).2, expected.2);
    }

    #[test]
    fn mock_layer_slices_give_same_token_and_refuse_another_pass() {
        let tokens: Vec<u32> = (0..40).collect();
        let table = [BlockId(0), BlockId(1), BlockId(2)];
        let expected = run(&mut engine(), &tokens, 0, &[0, 1, 2]);
        let mut engine = engine();
        let mut observed = Observed::default();
        let mut hidden = Vec::new();
        let mut part = |layers, hidden: &mut _| {
            let sequence = SequenceStep { tokens: &tokens, start: 0, block_table: &table, logits: LogitsWanted::Last };
            engine.step_layers(LayerSlice { sequence, layers, hidden }, &mut observed)
        };
        part(0..1, &mut hidden).unwrap();
        assert!(part(1..9, &mut hidden).is_err() && part(0..1, &mut hidden).is_err(), "9 of 4, and 0 again");
        part(1..3, &mut hidden).unwrap();
        assert!(part(2..4, &mut hidden).unwrap_err().to_string().contains("another pass"));
        part(3..4, &mut hidden).unwrap();
        assert!(hidden.is_empty());
        assert_eq!((observed.layers, observed.best), (vec![0, 1, 2, 3], vec![expected]));
    }

    #[test]
    fn mock_token_changes_after_a_wrong_kv_record() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut right = engine();
        run(&mut right, &tokens[..32], 0, &[0, 1, 2]);
        let expected =
            [32..36, 36..40].map(|part| run(&mut right, &tokens[part.clone()], part.start as u32, &[0, 1, 2]).2);
        let mut wrong = engine();
        // The first block is spoiled before a step looks at it.
        let table = [BlockId(0), BlockId(1), BlockId(2)];
        let step = SequenceStep { tokens: &tokens[..32], start: 0, block_table: &table, logits: LogitsWanted::None };
        wrong.step(&[step], &mut Observed::default()).unwrap();
        spoil(&wrong, 3, &[0, 1, 2], 7);
        let got = [32..36, 36..40].map(|part| run(&mut wrong, &tokens[part.clone()], part.start as u32, &[0, 1, 2]).2);
        assert!(got[0] != expected[0] && got[1] != expected[1], "{got:?}");
    }

    #[test]
    fn mock_engine_rereads_a_block_left_by_an_earlier_owner() {
        let mut long: Vec<u32> = (0..17).collect();
        let mut other: Vec<u32> = (0..17).collect();
        other[5] = 99;
        let mut engine = engine();
        run(&mut engine, &long, 0, &[4, 5]);
        // The same first token, and another one later: the block's last record is still the earlier
        // owner's.
        long.truncate(12);
        other.truncate(12);
        let step = |tokens| SequenceStep { tokens, start: 0, block_table: &[BlockId(4)], logits: LogitsWanted::None };
        engine.step(&[step(&other)], &mut Observed::default()).unwrap();
        spoil(&engine, 0, &[4], 8);
        let got = run(&mut engine, &[7], 12, &[4]);
        other.push(7);
        assert_ne!(got.2, run(&mut self::engine(), &other, 0, &[4]).2);
    }

    #[test]
    fn mock_step_takes_its_configured_time() {
        let cost = StepCost { base: 0.02, ..NO_TIME };
        let mut engine = MockEngine::new(MockOptions { cost, num_blocks: 4, ..Default::default() }).unwrap();
        let began = Instant::now();
        run(&mut engine, &[1, 2, 3], 0, &[0]);
        assert!(began.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn mock_kv_bytes_per_token_must_be_a_multiple_of_64() {
        let sized = |kv_bytes_per_token| {
            MockEngine::new(MockOptions { kv_bytes_per_token, num_blocks: 16, cost: NO_TIME, ..Default::default() })
        };
        let mut large = sized(320).unwrap();
        assert_eq!(large.arena().layout().block_bytes_all_layers(), 320 * 16);
        let tokens: Vec<u32> = (0..40).collect();
        assert_eq!(run(&mut large, &tokens, 0, &[2, 1, 0]), run(&mut engine(), &tokens, 0, &[0, 1, 2]));
        for wrong in [0, 63, 80] {
            let error = sized(wrong).err().unwrap().to_string();
            assert!(error.contains("kv_bytes_per_token") && error.contains("multiple of 64"), "{error}");
        }
    }

    #[test]
    fn mock_engine_refuses_an_invalid_batch() {
        let mut engine = engine();
        let table = [BlockId(0)];
        let refused = |step: SequenceStep<'_>, engine: &mut MockEngine| {
            engine.step(&[step], &mut Observed::default()).unwrap_err().to_string()
        };
        let step = |tokens, start| SequenceStep { tokens, start, block_table: &table, logits: LogitsWanted::Last };
        assert!(refused(step(&[], 0), &mut engine).contains("no tokens"));
        assert!(refused(step(&[512], 0), &mut engine).contains("token 512"));
        assert!(refused(step(&[1], 16), &mut engine).contains("blocks are too few"));
        assert!(refused(step(&[1], 40_000), &mut engine).contains("the context holds"));
    }
}
