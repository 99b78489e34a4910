//! An engine without a model: time from a cost model, tokens from a hash of the KV bytes.
//!
//! A step writes, for each layer and position, a record that depends on the layer, the position, the token and the record of the position before. A row's logits
//! are drawn from a hash over the last record of every layer, after every record before it was checked against its neighbours: a block that was lost, swapped or
//! left over from another sequence changes the tokens. So the real control plane and real transfers are tested, at the speed of a laptop.

#![allow(unsafe_code)] // reads and writes blocks of the arena; see each SAFETY note

use std::time::Duration;

use baton_types::{BlockId, KvDtype, KvLayout, ModelFingerprint};

use crate::arena::KvArena;
use crate::engine::{Engine, LogitsWanted, ModelInfo, SequenceStep, StepObserver, check_batch};
use crate::error::EngineError;

/// Tokens of the mock's vocabulary: the bytes, and specials as in `baton_text::Tokenizer::bytes()`.
pub const MOCK_VOCAB_SIZE: u32 = 512;
/// Bytes of a record: one K row and one V row of 4 elements each.
const RECORD_BYTES: usize = 16;
/// Logits of the token that the hash chose, and of all others.
const CHOSEN: f32 = 12.0;

/// What the mock pretends to be.
#[derive(Debug, Clone, PartialEq)]
pub struct MockOptions {
    /// Layers; each token has 16 bytes of KV in each.
    pub num_layers: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks of the arena.
    pub num_blocks: u32,
    /// Most tokens of prompt and output together.
    pub context_length: u32,
    /// Time of a step.
    pub base: Duration,
    /// Time of each row of it.
    pub per_row: Duration,
    /// Time of each position that a row attends to.
    pub per_row_pair: Duration,
    /// Token that ends an output, and one chance in how many it has at each position; 0 is never.
    pub end_token: u32,
    /// See `end_token`.
    pub end_one_in: u32,
}

impl Default for MockOptions {
    fn default() -> Self {
        Self {
            num_layers: 4,
            block_tokens: 16,
            num_blocks: 4096,
            context_length: 32_768,
            base: Duration::from_micros(500),
            per_row: Duration::from_micros(20),
            per_row_pair: Duration::from_nanos(5),
            end_token: 257,
            end_one_in: 0,
        }
    }
}

impl MockOptions {
    /// Time of a step: a polynomial of its rows and of the positions that they attend to.
    fn time(&self, batch: &[SequenceStep<'_>]) -> Duration {
        let of_sequence = |sequence: &SequenceStep<'_>| {
            let (rows, start) = (sequence.tokens.len() as u64, u64::from(sequence.start));
            let pairs = rows * start + rows * (rows + 1) / 2;
            let times = |each: Duration, count: u64| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
            times(self.per_row, rows) + times(self.per_row_pair, pairs)
        };
        self.base + batch.iter().map(of_sequence).sum::<Duration>()
    }
}

/// See the module's text.
pub struct MockEngine {
    options: MockOptions,
    model: ModelInfo,
    arena: KvArena,
    logits: Vec<f32>,
}

impl MockEngine {
    /// An engine that pretends to be what `options` say.
    pub fn new(options: MockOptions) -> Result<Self, EngineError> {
        for (field, value) in [
            ("block_tokens", options.block_tokens),
            ("num_blocks", options.num_blocks),
            ("num_layers", options.num_layers),
        ] {
            if value == 0 {
                return Err(EngineError::Options { field, problem: "0, but must be at least 1".into() });
            }
        }
        let fingerprint = ModelFingerprint(0x6d6f_636b_0000_0000 | u64::from(options.num_layers));
        let layout = KvLayout {
            model: fingerprint.0,
            num_layers: options.num_layers,
            num_kv_heads: 1,
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
            numerics: "mock".into(),
        };
        let arena = KvArena::allocate(layout)?;
        Ok(Self { options, model, arena, logits: vec![0.0; MOCK_VOCAB_SIZE as usize] })
    }

    /// The record of a position: its K row, then its V row.
    fn record(&self, layer: u32, table: &[BlockId], position: usize) -> [u8; RECORD_BYTES] {
        let (block, k, v) = self.place(table, position);
        // SAFETY: the sequence's own blocks; the only writer is this thread's step.
        let bytes = unsafe { self.arena.block(layer, block) };
        let mut record = [0; RECORD_BYTES];
        record[..8].copy_from_slice(&bytes[k..k + 8]);
        record[8..].copy_from_slice(&bytes[v..v + 8]);
        record
    }

    fn write_record(&self, layer: u32, table: &[BlockId], position: usize, record: [u8; RECORD_BYTES]) {
        let (block, k, v) = self.place(table, position);
        // SAFETY: the block holds a position that this step computes, so it belongs to this step alone.
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

    /// The first 8 bytes chain the positions; the last 8 carry the token and its position, so that each record can be checked by itself.
    fn next_record(layer: u32, position: usize, token: u32, before: [u8; RECORD_BYTES]) -> [u8; RECORD_BYTES] {
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

    /// Hash over all records up to a position, each recomputed from the one before: a false one changes the hash from there on.
    fn context_hash(&self, sequence: &SequenceStep<'_>, position: usize) -> u64 {
        let mut hash = 0;
        for layer in 0..self.options.num_layers {
            let mut before = [0; RECORD_BYTES];
            for at in 0..=position {
                let record = self.record(layer, sequence.block_table, at);
                let token = u64::from_le_bytes(half(&record, 8)) as u32;
                let wrong = record != Self::next_record(layer, at, token, before);
                hash = mix(hash ^ u64::from(wrong));
                before = record;
            }
            hash = mix(hash ^ u64::from_le_bytes(half(&before, 0)));
        }
        hash
    }

    fn fill_logits(&mut self, hash: u64) {
        for (token, logit) in self.logits.iter_mut().enumerate() {
            *logit = (mix(hash ^ token as u64) >> 48) as f32 / 65_536.0;
        }
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
        let time = self.options.time(batch);
        for layer in 0..self.options.num_layers {
            // A record depends on the one before it.
            observer.await_prefix(layer)?;
            for sequence in batch {
                self.write_layer(layer, sequence);
            }
            observer.kv_ready(layer);
            std::thread::sleep(time / self.options.num_layers);
        }
        observer.layers_done();
        for (index, sequence) in batch.iter().enumerate() {
            let end = sequence.start as usize + sequence.tokens.len();
            let first = match sequence.logits {
                LogitsWanted::None => continue,
                LogitsWanted::Last => end - 1,
                LogitsWanted::All => sequence.start as usize,
            };
            for position in first..end {
                let hash = self.context_hash(sequence, position);
                self.fill_logits(hash);
                observer.logits(index, position as u32, &self.logits);
            }
        }
        Ok(())
    }
}

/// SplitMix64's output function (Steele, Lea and Flood, 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn half(record: &[u8; RECORD_BYTES], at: usize) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&record[at..at + 8]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Seen {
        layers: Vec<u32>,
        best: Vec<(usize, u32, usize)>,
    }

    impl StepObserver for Seen {
        fn kv_ready(&mut self, layer: u32) {
            self.layers.push(layer);
        }

        fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            self.best.push((sequence, position, best));
        }
    }

    fn engine() -> MockEngine {
        MockEngine::new(MockOptions {
            num_blocks: 16,
            base: Duration::ZERO,
            per_row: Duration::ZERO,
            ..Default::default()
        })
        .unwrap()
    }

    fn run(engine: &mut MockEngine, tokens: &[u32], start: u32, table: &[u32]) -> (usize, u32, usize) {
        let table: Vec<_> = table.iter().copied().map(BlockId).collect();
        let step = SequenceStep { tokens, start, block_table: &table, logits: LogitsWanted::Last };
        let mut seen = Seen::default();
        engine.step(&[step], &mut seen).unwrap();
        assert_eq!(seen.layers, [0, 1, 2, 3]);
        seen.best[0]
    }

    #[test]
    fn chunks_and_blocks_do_not_change_the_token_but_wrong_bytes_do() {
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
    fn a_wrong_batch_is_refused() {
        let mut engine = engine();
        let table = [BlockId(0)];
        let refused = |step: SequenceStep<'_>, engine: &mut MockEngine| {
            engine.step(&[step], &mut Seen::default()).unwrap_err().to_string()
        };
        let step = |tokens, start| SequenceStep { tokens, start, block_table: &table, logits: LogitsWanted::Last };
        assert!(refused(step(&[], 0), &mut engine).contains("no tokens"));
        assert!(refused(step(&[512], 0), &mut engine).contains("token 512"));
        assert!(refused(step(&[1], 16), &mut engine).contains("blocks are too few"));
        assert!(refused(step(&[1], 40_000), &mut engine).contains("the context holds"));
    }
}
