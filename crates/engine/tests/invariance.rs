//! A row's logits are bitwise the same, whatever else the step computes. (`smollm2.rs` repeats it briefly on a real model.)

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;

use baton_engine::{
    CpuEngine, CpuOptions, Engine, EngineError, Isa, LayerSlice, LogitsWanted, SequenceStep, StepObserver,
};
use baton_types::{BlockId, KvDtype, TokenId};
use common::{Recorder, fixture, load, options, run, same_bits, table, tokens};

const VOCABULARY: u32 = 61;

fn engine(family: &str, threads: usize, dtype: KvDtype) -> CpuEngine {
    load(&fixture(family), &options(threads, dtype, 16 * 17 * 16))
}

fn assert_same(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (position, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(same_bits(found, expected), "{what}: position {position}");
    }
}

#[test]
fn chunks_threads_instruction_sets_and_blocks_do_not_show() {
    let prompt = tokens(3, VOCABULARY, 200);
    let families =
        [("smollm", KvDtype::F16), ("mistral", KvDtype::Bf16), ("llama2", KvDtype::F32), ("llama3", KvDtype::Int8)];
    for (family, dtype) in families {
        let mut first = engine(family, 1, dtype);
        let blocks = table(&first, 0, prompt.len());
        let expected = run(&mut first, &prompt, &blocks, 512);
        for isa in Isa::available() {
            for threads in [1, 2] {
                let options = CpuOptions { isa: Some(isa), ..options(threads, dtype, 4096) };
                let mut engine = load(&fixture(family), &options);
                let blocks = table(&engine, 40, prompt.len());
                for chunk in [1, 16, 64, 512] {
                    let found = run(&mut engine, &prompt, &blocks, chunk);
                    assert_same(&found, &expected, &format!("{family}, {isa}, {threads} threads, chunks of {chunk}"));
                }
            }
        }
        // Blocks of another size hold the same numbers.
        let mut coarse = load(&fixture(family), &CpuOptions { block_tokens: 7, ..options(2, dtype, 4096) });
        let blocks = table(&coarse, 0, prompt.len());
        assert_same(&run(&mut coarse, &prompt, &blocks, 70), &expected, "blocks of 7");
    }
}

#[test]
fn a_batch_of_sixteen_does_not_show() {
    let prompts: Vec<Vec<TokenId>> = (0..16).map(|i| tokens(i, VOCABULARY, 3 + 15 * i as usize)).collect();
    let mut alone = engine("smollm", 1, KvDtype::F16);
    let expected: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let blocks = table(&alone, 0, prompt.len());
            run(&mut alone, prompt, &blocks, 512)
        })
        .collect();

    for isa in Isa::available() {
        batch_is_as_alone(isa, &prompts, &expected);
    }
}

/// One step that mixes all prompts but their last 2 tokens, then two decode steps: each row is what it is alone.
fn batch_is_as_alone(isa: Isa, prompts: &[Vec<TokenId>], expected: &[Vec<Vec<f32>>]) {
    let options = CpuOptions { isa: Some(isa), ..options(2, KvDtype::F16, 16 * 17 * 16) };
    let mut together = load(&fixture("smollm"), &options);
    let tables: Vec<_> = (0..16).map(|i| table(&together, i * 16, 240)).collect();
    let cuts = |prompt: &[TokenId]| [0, prompt.len() - 2, prompt.len() - 1, prompt.len()];
    for step in 0..3 {
        let steps: Vec<_> = prompts
            .iter()
            .zip(&tables)
            .map(|(prompt, block_table)| {
                let (from, to) = (cuts(prompt)[step], cuts(prompt)[step + 1]);
                let logits = if from % 2 == 0 { LogitsWanted::All } else { LogitsWanted::Last };
                SequenceStep { tokens: &prompt[from..to], start: from as u32, block_table, logits }
            })
            .collect();
        let mut recorder = Recorder::default();
        together.step(&steps, &mut recorder).unwrap();
        assert_eq!(recorder.layers, [0, 1]);
        assert!(recorder.rows.len() >= 16);
        for (sequence, position, logits) in recorder.rows {
            let expected = &expected[sequence][position as usize];
            assert!(same_bits(&logits, expected), "{isa}, step {step}, sequence {sequence}, position {position}");
        }
    }
}

/// Copies blocks `0..blocks` of a layer to another arena, in reverse order, as a push would.
#[allow(unsafe_code)] // stands in for the transfer engine
fn push(from: &CpuEngine, to: &CpuEngine, layer: u32, blocks: u32) {
    for block in 0..blocks {
        // SAFETY: one thread, and no step runs.
        let (source, target) = unsafe {
            (from.arena().block(layer, BlockId(block)), to.arena().block_mut(layer, BlockId(blocks - 1 - block)))
        };
        target.copy_from_slice(source);
    }
}

#[test]
fn decode_continues_what_another_engine_prefilled() {
    let prompt = tokens(9, VOCABULARY, 100);
    let mut whole = engine("llama3", 1, KvDtype::F16);
    let blocks = table(&whole, 0, prompt.len());
    let expected = run(&mut whole, &prompt, &blocks, 512);

    let (mut prefill, mut decode) = (engine("llama3", 2, KvDtype::F16), engine("llama3", 1, KvDtype::F16));
    let forward: Vec<_> = (0..7).map(BlockId).collect();
    let backward: Vec<_> = forward.iter().rev().copied().collect();
    let step = SequenceStep { tokens: &prompt[..90], start: 0, block_table: &forward, logits: LogitsWanted::None };
    prefill.step(&[step], &mut Recorder::default()).unwrap();
    for layer in 0..2 {
        prefill.arena().zero_tail(layer, BlockId(5), 10);
        push(&prefill, &decode, layer, 7);
    }
    for position in 90..100 {
        let tokens = &prompt[position..position + 1];
        let step = SequenceStep { tokens, start: position as u32, block_table: &backward, logits: LogitsWanted::Last };
        let mut recorder = Recorder::default();
        decode.step(&[step], &mut recorder).unwrap();
        assert!(same_bits(&recorder.rows[0].2, &expected[position]), "position {position}");
    }
}

#[test]
fn the_end_of_a_prompt_follows_its_beginning_layer_by_layer_on_another_engine() {
    let prompt = tokens(9, VOCABULARY, 100);
    for (family, dtype) in [("llama3", KvDtype::F16), ("smollm", KvDtype::Int8)] {
        let mut whole = engine(family, 1, dtype);
        let blocks = table(&whole, 0, prompt.len());
        let expected = run(&mut whole, &prompt, &blocks, 512);

        let (mut prefill, mut decode) = (engine(family, 2, dtype), engine(family, 1, dtype));
        let forward: Vec<_> = (0..7).map(BlockId).collect();
        let backward: Vec<_> = forward.iter().rev().copied().collect();
        let step = SequenceStep { tokens: &prompt[..48], start: 0, block_table: &forward, logits: LogitsWanted::None };
        prefill.step(&[step], &mut Recorder::default()).unwrap();
        let (mut recorder, mut hidden) = (Recorder::default(), Vec::new());
        for layer in 0..2 {
            // Nothing of the layers behind it is there yet; other sequences have their steps between.
            push(&prefill, &decode, layer, 7);
            let sequence =
                SequenceStep { tokens: &prompt[48..], start: 48, block_table: &backward, logits: LogitsWanted::All };
            let slice = LayerSlice { sequence, layers: layer..layer + 1, hidden: &mut hidden };
            decode.step_layers(slice, &mut recorder).unwrap();
            let other = SequenceStep { tokens: &[1], start: 0, block_table: &[BlockId(9)], logits: LogitsWanted::Last };
            decode.step(&[other], &mut Recorder::default()).unwrap();
        }
        assert!(hidden.is_empty() && recorder.rows.len() == 52, "{}", recorder.rows.len());
        for (_, position, logits) in recorder.rows {
            assert!(same_bits(&logits, &expected[position as usize]), "{family}, position {position}");
        }
    }
}

/// Takes the bytes of each layer when it is reported ready.
struct Watcher<'a> {
    arena: &'a baton_engine::KvArena,
    seen: Vec<Vec<u8>>,
}

impl StepObserver for Watcher<'_> {
    #[allow(unsafe_code)] // reads the arena as a push does
    fn kv_ready(&mut self, layer: u32) {
        // SAFETY: the layer is ready: nobody writes it any more.
        self.seen.push(unsafe { self.arena.block(layer, BlockId(2)).to_vec() });
    }

    fn logits(&mut self, _: usize, _: u32, _: &[f32]) {}
}

#[test]
#[allow(unsafe_code)] // reads the arena
fn a_layer_that_is_ready_is_final() {
    let mut engine = engine("qwen2", 2, KvDtype::F16);
    let arena = engine.arena().clone();
    let mut watcher = Watcher { arena: &arena, seen: Vec::new() };
    let prompt = tokens(4, VOCABULARY, 16);
    let step = SequenceStep { tokens: &prompt, start: 0, block_table: &[BlockId(2)], logits: LogitsWanted::None };
    engine.step(&[step], &mut watcher).unwrap();
    assert_eq!(watcher.seen.len(), 2);
    for (layer, seen) in watcher.seen.iter().enumerate() {
        // SAFETY: no step runs.
        let now = unsafe { arena.block(layer as u32, BlockId(2)) };
        assert!(now == seen && seen.iter().any(|&byte| byte != 0), "layer {layer}");
    }
}

#[test]
fn a_wrong_step_is_refused_and_leaves_the_engine_working() {
    let mut engine = engine("llama2", 1, KvDtype::F16);
    let table = [BlockId(0)];
    let beyond = SequenceStep { tokens: &[VOCABULARY], start: 0, block_table: &table, logits: LogitsWanted::Last };
    let error = engine.step(&[beyond], &mut Recorder::default()).unwrap_err();
    assert!(matches!(&error, EngineError::Invalid(text) if text.contains("token 61")), "{error}");
    let long = vec![1; 300];
    let long = SequenceStep { tokens: &long, start: 0, block_table: &table, logits: LogitsWanted::Last };
    assert!(engine.step(&[long], &mut Recorder::default()).unwrap_err().to_string().contains("the context holds 256"));
    assert_eq!(run(&mut engine, &[1, 2], &table, 2).len(), 2);
    engine.step(&[], &mut Recorder::default()).unwrap();
}
