//! What the engine's integration tests share.

#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used)] // test helpers: a panic is the failure

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use baton_engine::{CpuEngine, CpuOptions, Engine, Isa, KvCapacity, LogitsWanted, SequenceStep, StepObserver};
use baton_formats::ModelFile;
use baton_types::{BlockId, KvDtype, TokenId};

/// Logits by (sequence of the step, position), and the layers in the order in which they were
/// ready.
#[derive(Default)]
pub struct Recorder {
    pub layers: Vec<u32>,
    pub rows: Vec<(usize, u32, Vec<f32>)>,
}

impl StepObserver for Recorder {
    fn kv_ready(&mut self, layer: u32) {
        self.layers.push(layer);
    }

    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]) {
        self.rows.push((sequence, position, logits.to_vec()));
    }
}

/// The model that `BATON_MODEL` names. Tests that ask for it are ignored by default; `make test`
/// fetches it and runs them.
pub fn real_model() -> PathBuf {
    std::env::var_os("BATON_MODEL").expect("BATON_MODEL names a model file (make test sets it)").into()
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub fn options(threads: usize, kv_dtype: KvDtype, tokens: u32) -> CpuOptions {
    let kv_capacity = KvCapacity::Blocks(tokens.div_ceil(16));
    CpuOptions { threads, kv_dtype, kv_capacity, ..Default::default() }
}

pub fn load(path: &Path, options: &CpuOptions) -> CpuEngine {
    CpuEngine::load(&ModelFile::open(path).unwrap(), options, &mut |_| ()).unwrap()
}

/// The instruction sets that compute the same bits of a model, class by class.
pub fn classes(path: &Path, options: &CpuOptions) -> Vec<Vec<Isa>> {
    let class = |isa: Isa| load(path, &CpuOptions { isa: Some(isa), ..options.clone() }).model().kv_class.clone();
    let all: Vec<_> = Isa::available().into_iter().map(|isa| (class(isa), isa)).collect();
    // All but matrix tiles are of one class, and they come last.
    all.chunk_by(|(a, _), (b, _)| a == b).map(|class| class.iter().map(|(_, isa)| *isa).collect()).collect()
}

/// Enough blocks from `first` on for `tokens` tokens, last one first.
pub fn table(engine: &CpuEngine, first: u32, tokens: usize) -> Vec<BlockId> {
    let blocks = engine.arena().layout().blocks_for(tokens) as u32;
    (first..first + blocks).rev().map(BlockId).collect()
}

/// Logits of all positions of one sequence, computed in chunks.
pub fn run(engine: &mut CpuEngine, tokens: &[TokenId], block_table: &[BlockId], chunk: usize) -> Vec<Vec<f32>> {
    let mut recorder = Recorder::default();
    let mut start = 0;
    for tokens in tokens.chunks(chunk) {
        let step = SequenceStep { tokens, start, block_table, logits: LogitsWanted::All };
        engine.step(&[step], &mut recorder).unwrap();
        start += tokens.len() as u32;
    }
    assert_eq!(recorder.rows.len(), tokens.len());
    recorder.rows.into_iter().map(|row| row.2).collect()
}

/// Where the steps of a batch cut a sequence. Some decode from the second step on, in mixed batches
/// with later chunks of some prompts and the first of others. In the last step all have one token.
fn cuts(sequence: usize, tokens: usize) -> [usize; 5] {
    let last = tokens - 1;
    match sequence % 4 {
        0 => [0, last - 2, last - 1, last, tokens],
        1 => [0, (last - 1) / 2, last - 1, last, tokens],
        2 => [0, last / 3, last / 2, last, tokens],
        _ => [0, 0, last / 2, last, tokens],
    }
}

/// What each step of a batch reports; `wanted` says of what logits, by a chunk's first position.
pub fn run_together(
    engine: &mut CpuEngine,
    prompts: &[Vec<TokenId>],
    tables: &[Vec<BlockId>],
    wanted: impl Fn(usize) -> LogitsWanted,
) -> Vec<Recorder> {
    let step = |step: usize| {
        let sequences = prompts.iter().zip(tables).enumerate().map(|(index, (tokens, block_table))| {
            let cuts = cuts(index, tokens.len());
            let from = cuts[step];
            let to = cuts[step + 1];
            (index, SequenceStep { tokens: &tokens[from..to], start: from as u32, block_table, logits: wanted(from) })
        });
        let (indices, batch): (Vec<_>, Vec<_>) = sequences.filter(|(_, step)| !step.tokens.is_empty()).unzip();
        let mut recorder = Recorder::default();
        engine.step(&batch, &mut recorder).unwrap();
        recorder.rows.iter_mut().for_each(|row| row.0 = indices[row.0]);
        recorder
    };
    (0..4).map(step).collect()
}

/// Tokens below `below`, the same on every run.
pub fn tokens(seed: u32, below: u32, count: usize) -> Vec<TokenId> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    (0..count).map(next).collect()
}

pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Gives what `run` returns, and the lines that it logs on this thread.
pub fn logged<T>(run: impl FnOnce() -> T) -> (T, String) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let written = Lines(Arc::clone(&lines));
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || written.clone()).finish();
    let value = tracing::subscriber::with_default(subscriber, run);
    let lines = lines.lock().unwrap();
    (value, String::from_utf8_lossy(&lines).into_owned())
}

#[derive(Clone)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
