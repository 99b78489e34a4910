//! A row's logits are bitwise the same, whatever else the step computes. (`smollm2.rs` repeats it
//! briefly on a real model.)

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;
mod retyped;

use std::path::{Path, PathBuf};

use baton_engine::{
    ComputeDtype, CpuEngine, CpuOptions, Engine, EngineError, LayerSlice, LogitsWanted, SequenceStep, StepObserver,
};
use baton_formats::Dtype;
use baton_types::{BlockId, KvDtype, TokenId};
use common::{Recorder, classes, fixture, load, options, run, run_together, same_bits, table, tokens};
use retyped::retyped;
use tempfile::NamedTempFile;

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

/// The weights of `llama2` in 8 bits, if rows are whole blocks of 32; the others stay in single
/// precision.
fn quantized() -> NamedTempFile {
    retyped(&fixture("llama2").join("model.gguf"), |tensor| {
        let whole = tensor.shape.len() == 2 && tensor.shape[1].is_multiple_of(32);
        if whole { Dtype::Q8_0 } else { tensor.dtype }
    })
}

/// A model of each class, in single precision in two ways, with the class's name.
fn models(quantized: &NamedTempFile) -> [(PathBuf, ComputeDtype, &'static str); 4] {
    [
        (fixture("smollm"), ComputeDtype::Auto, "cpu-bf16"),
        (fixture("smollm"), ComputeDtype::F32, "cpu-f32"),
        (fixture("smollm").join("model.gguf"), ComputeDtype::Auto, "cpu-f32"),
        (quantized.path().to_owned(), ComputeDtype::Auto, "cpu-int8"),
    ]
}

#[test]
fn logits_do_not_depend_on_chunks_threads_isas_or_blocks() {
    let prompt = tokens(3, VOCABULARY, 200);
    let quantized = quantized();
    let families = [("mistral", KvDtype::Bf16), ("llama2", KvDtype::F32), ("llama3", KvDtype::Int8)];
    let families = families.map(|(family, dtype)| (fixture(family), ComputeDtype::Auto, "cpu-bf16", dtype));
    let models = models(&quantized).map(|(path, compute_dtype, class)| (path, compute_dtype, class, KvDtype::F16));
    let all_of_bytes = [(quantized.path().to_owned(), ComputeDtype::Auto, "cpu-int8", KvDtype::Int8)];
    for (path, compute_dtype, class, dtype) in families.into_iter().chain(models).chain(all_of_bytes) {
        let options = |threads| CpuOptions { compute_dtype, ..options(threads, dtype, 4096) };
        for isas in classes(&path, &options(1)) {
            let isa = isas.last().copied();
            let mut first = load(&path, &CpuOptions { isa, ..options(1) });
            assert!(first.model().kv_class.starts_with(class), "{}", first.model().kv_class);
            let blocks = table(&first, 0, prompt.len());
            let expected = run(&mut first, &prompt, &blocks, 512);
            for isa in isas {
                for threads in [1, 2, 3] {
                    let mut engine = load(&path, &CpuOptions { isa: Some(isa), ..options(threads) });
                    let blocks = table(&engine, 40, prompt.len());
                    for chunk in [1, 16, 64, 512] {
                        let found = run(&mut engine, &prompt, &blocks, chunk);
                        let what = format!("{}, {class}, {isa}, {threads} threads, chunks of {chunk}", path.display());
                        assert_same(&found, &expected, &what);
                    }
                }
            }
            // Blocks of another size hold the same numbers.
            let mut coarse = load(&path, &CpuOptions { isa, block_tokens: 7, ..options(2) });
            let blocks = table(&coarse, 0, prompt.len());
            assert_same(&run(&mut coarse, &prompt, &blocks, 70), &expected, "blocks of 7");
        }
    }
}

#[test]
fn logits_do_not_depend_on_a_batch_of_sixteen() {
    let prompts: Vec<Vec<TokenId>> = (0..16).map(|i| tokens(i, VOCABULARY, 3 + 15 * i as usize)).collect();
    let quantized = quantized();
    for (path, compute_dtype, class) in models(&quantized) {
        let options = CpuOptions { compute_dtype, ..options(1, KvDtype::F16, 16 * 17 * 16) };
        for isas in classes(&path, &options) {
            let mut alone = load(&path, &CpuOptions { isa: isas.last().copied(), ..options.clone() });
            assert!(alone.model().kv_class.starts_with(class), "{}", alone.model().kv_class);
            let expected: Vec<_> = prompts
                .iter()
                .map(|prompt| {
                    let blocks = table(&alone, 0, prompt.len());
                    run(&mut alone, prompt, &blocks, 512)
                })
                .collect();
            for (isa, threads) in isas.into_iter().flat_map(|isa| [1, 2, 3].map(|threads| (isa, threads))) {
                batch_is_as_alone(
                    &path,
                    &CpuOptions { isa: Some(isa), threads, ..options.clone() },
                    &prompts,
                    &expected,
                );
            }
        }
    }
}

/// Four steps that mix prompts, later chunks of them and single tokens: each row is what it is
/// alone.
fn batch_is_as_alone(path: &Path, options: &CpuOptions, prompts: &[Vec<TokenId>], expected: &[Vec<Vec<f32>>]) {
    let mut together = load(path, options);
    let tables: Vec<_> = (0..16).map(|i| table(&together, i * 16, 240)).collect();
    let wanted = |from: usize| if from.is_multiple_of(2) { LogitsWanted::All } else { LogitsWanted::Last };
    for (step, recorder) in run_together(&mut together, prompts, &tables, wanted).into_iter().enumerate() {
        assert_eq!(recorder.layers, [0, 1]);
        assert!(recorder.rows.len() >= 16);
        for (sequence, position, logits) in recorder.rows {
            let expected = &expected[sequence][position as usize];
            let what = format!("{}, {options:?}, step {step}", path.display());
            assert!(same_bits(&logits, expected), "{what}, sequence {sequence}, position {position}");
        }
    }
}

#[test]
fn logits_do_not_depend_on_rows_without_wanted_logits() {
    use LogitsWanted::{All, Last, None};
    // Of each sequence: where the first step cuts it, and what is wanted of that part.
    let parts = [(40, None), (1, Last), (70, All), (150, Last), (1, None), (33, Last), (9, None)];
    let mut rows: Vec<_> = (0..70).map(|position| (2, position)).collect();
    rows.insert(0, (1, 0));
    rows.extend([(3, 149), (5, 32)]);
    let prompts: Vec<_> = (0..).zip(parts).map(|(i, (cut, _))| tokens(i, VOCABULARY, cut + 1 + i as usize)).collect();
    let quantized = quantized();
    for (path, compute_dtype, class) in models(&quantized) {
        let options = CpuOptions { compute_dtype, ..options(2, KvDtype::F16, 16 * 16 * 7) };
        for isa in classes(&path, &options).concat() {
            let load = || load(&path, &CpuOptions { isa: Some(isa), ..options.clone() });
            let alone = prompts.iter().map(|prompt| {
                let mut engine = load();
                let table = table(&engine, 0, prompt.len());
                run(&mut engine, prompt, &table, 512)
            });
            let expected: Vec<_> = alone.collect();
            for (first, rows) in [(parts.map(|part| part.1), &rows[..]), ([None; 7], &[])] {
                // With an arena of its own: what the first step leaves out, the second does not
                // find.
                let mut engine = load();
                let tables: Vec<_> = (0..7).map(|i| table(&engine, i * 16, 240)).collect();
                let last: Vec<_> = prompts.iter().enumerate().map(|(i, prompt)| (i, prompt.len() - 1)).collect();
                for (step, (wanted, rows)) in [(first, rows), ([Last; 7], &last)].into_iter().enumerate() {
                    let sequences = prompts.iter().zip(&tables).zip(parts).zip(wanted);
                    let sequences = sequences.map(|(((prompt, block_table), (cut, _)), logits)| {
                        let (tokens, start) =
                            if step == 0 { (&prompt[..cut], 0) } else { (&prompt[cut..], cut as u32) };
                        SequenceStep { tokens, start, block_table, logits }
                    });
                    let mut recorder = Recorder::default();
                    engine.step(&sequences.collect::<Vec<_>>(), &mut recorder).unwrap();
                    assert_eq!(recorder.layers, [0, 1]);
                    let found: Vec<_> = recorder.rows.iter().map(|row| (row.0, row.1 as usize)).collect();
                    assert_eq!(found, rows);
                    for (sequence, position, logits) in recorder.rows {
                        let what = format!("{}, {class}, {isa}, sequence {sequence}", path.display());
                        assert!(same_bits(&logits, &expected[sequence][position as usize]), "{what}: {position}");
                    }
                }
            }
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
fn decode_continues_from_kv_of_another_engine_with_same_logits() {
    let prompt = tokens(9, VOCABULARY, 100);
    let mut whole = engine("llama3", 1, KvDtype::F16);
    let blocks = table(&whole, 0, prompt.len());
    let expected = run(&mut whole, &prompt, &blocks, 512);

    let mut prefill = engine("llama3", 2, KvDtype::F16);
    let mut decode = engine("llama3", 1, KvDtype::F16);
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
fn partial_prefill_layer_by_layer_gives_same_logits() {
    let prompt = tokens(9, VOCABULARY, 100);
    let cases = [("llama3", KvDtype::F16), ("smollm", KvDtype::Int8)];
    let wanted = [(LogitsWanted::All, 52), (LogitsWanted::Last, 1), (LogitsWanted::None, 0)];
    for ((family, dtype), (logits, rows)) in cases.into_iter().flat_map(|case| wanted.map(|wanted| (case, wanted))) {
        let mut whole = engine(family, 1, dtype);
        let blocks = table(&whole, 0, prompt.len());
        let expected = run(&mut whole, &prompt, &blocks, 512);

        let mut prefill = engine(family, 2, dtype);
        let mut decode = engine(family, 1, dtype);
        let forward: Vec<_> = (0..7).map(BlockId).collect();
        let backward: Vec<_> = forward.iter().rev().copied().collect();
        let step = SequenceStep { tokens: &prompt[..48], start: 0, block_table: &forward, logits: LogitsWanted::None };
        prefill.step(&[step], &mut Recorder::default()).unwrap();
        let mut recorder = Recorder::default();
        let mut hidden = Vec::new();
        for layer in 0..2 {
            // Nothing of the layers behind it is there yet; other sequences have their steps
            // between.
            push(&prefill, &decode, layer, 7);
            let sequence = SequenceStep { tokens: &prompt[48..], start: 48, block_table: &backward, logits };
            let slice = LayerSlice { sequence, layers: layer..layer + 1, hidden: &mut hidden };
            decode.step_layers(slice, &mut recorder).unwrap();
            let other = SequenceStep { tokens: &[1], start: 0, block_table: &[BlockId(9)], logits: LogitsWanted::Last };
            decode.step(&[other], &mut Recorder::default()).unwrap();
        }
        assert!(hidden.is_empty());
        let positions: Vec<_> = recorder.rows.iter().map(|row| row.1).collect();
        assert_eq!(positions, (100 - rows..100).collect::<Vec<_>>(), "{family}");
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
        // SAFETY: the layer is ready: no writer has it any more.
        self.seen.push(unsafe { self.arena.block(layer, BlockId(2)).to_vec() });
    }

    fn logits(&mut self, _: usize, _: u32, _: &[f32]) {}
}

#[test]
#[allow(unsafe_code)] // reads the arena
fn kv_of_a_layer_reported_ready_is_final() {
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
fn invalid_step_is_refused_and_engine_still_works() {
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
