//! The engine on a real model: SmolLM2-135M-Instruct, Q4_1, the file that `BATON_MODEL` names.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;
mod retyped;

use std::path::Path;
use std::time::Instant;

use baton_engine::{ComputeDtype, CpuEngine, CpuOptions, Engine, Isa, LogitsWanted, SequenceStep, logprobs};
use baton_formats::Dtype;
use baton_types::{KvDtype, TokenId};
use common::{Recorder, classes, load, options, real_model, run, run_together, same_bits, table, tokens};
use retyped::{as_bf16, retyped};
use serde::Deserialize;

/// An entry of the reference: what `transformers` computes in f32, greedy.
#[derive(Deserialize)]
struct Entry {
    prompt_ids: Vec<TokenId>,
    greedy: Vec<Position>,
}

#[derive(Deserialize)]
struct Position {
    id: TokenId,
    /// (token, log-probability), best first.
    top: Vec<(TokenId, f32)>,
}

fn reference() -> Vec<Entry> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../text/tests/fixtures/smollm2-135m-greedy.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Longest prompts of the reference that are computed with instruction sets that are not the
/// fastest, tokens. All of them take minutes (`make test-long`), and within a class all compute the
/// same bits.
const SLOWER_PROMPT: usize = 8;
/// All of them.
const EVERY_PROMPT: usize = usize::MAX;

/// How an engine's choice of tokens differs from the reference's.
struct Differences {
    /// Of the best token's log-probability.
    mean: f32,
    most: f32,
    /// The largest margin by which the reference's best token leads if another is the engine's, and
    /// where that is.
    missed: (f32, String),
}

/// Over prompts of at most so many tokens.
fn differences(mut engine: CpuEngine, most: usize) -> Differences {
    let mut differences = Vec::new();
    let mut missed = (0.0, String::from("nowhere"));
    let positions = match most {
        SLOWER_PROMPT => 96,
        _ => 202,
    };
    for (index, entry) in reference().iter().enumerate().filter(|(_, entry)| entry.prompt_ids.len() <= most) {
        let mut tokens = entry.prompt_ids.clone();
        tokens.extend(entry.greedy.iter().map(|position| position.id));
        let table = table(&engine, 3, tokens.len());
        let rows = run(&mut engine, &tokens, &table, 256);
        for (at, position) in entry.greedy.iter().enumerate() {
            let found = logprobs(&rows[entry.prompt_ids.len() + at - 1], None, 5).unwrap().top;
            let margin = position.top[0].1 - position.top[1].1;
            if found[0].token != position.id && margin > missed.0 {
                missed = (margin, format!("entry {index}, position {at}: {found:?}"));
            }
            let expected = position.top.iter().find(|(token, _)| *token == found[0].token).unwrap().1;
            differences.push((found[0].logprob - expected).abs());
        }
    }
    assert_eq!(differences.len(), positions, "positions compared");
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    Differences { mean, most: differences.into_iter().fold(0.0, f32::max), missed }
}

/// How near to the reference a compute dtype has to be.
struct Near {
    /// Mean difference of log-probabilities.
    mean: f32,
    /// Largest difference.
    most: f32,
    /// Margin from which on the reference's best token must be ours; `None`: no margin decides.
    sure: Option<f32>,
}

/// Single precision, and bfloat16.
const EXACT: Near = Near { mean: 0.03, most: 0.25, sure: Some(0.15) };
/// 8 bits move log-probabilities by 0.036 on average, and which tokens that swaps changes with
/// every order of summation. So a margin says little here: `crates/bench/tests/score.rs` counts
/// swapped tokens over a whole text, beside llama.cpp's.
const QUANTIZED: Near = Near { mean: 0.05, most: 0.5, sure: None };

/// On every instruction set; those that are not the fastest over short prompts.
fn assert_near(path: &Path, compute_dtype: ComputeDtype, kv_class: &str, near: &Near) {
    let is_long = std::env::var_os("BATON_TEST_LONG").is_some();
    for isa in Isa::available() {
        let engine = load(path, &CpuOptions { compute_dtype, isa: Some(isa), ..options(2, KvDtype::F16, 4096) });
        assert!(engine.model().kv_class.starts_with(kv_class), "{}", engine.model().kv_class);
        let prompts = match isa {
            isa if isa == Isa::detect() || is_long => EVERY_PROMPT,
            _ => SLOWER_PROMPT,
        };
        let found = differences(engine, prompts);
        let (margin, place) = found.missed;
        println!(
            "{isa}: mean difference {:.5}, most {:.5}, another token at a margin of {margin:.3}",
            found.mean, found.most
        );
        assert!(near.sure.is_none_or(|sure| margin < sure), "{isa}: another token at a margin of {margin}, {place}");
        assert!(found.mean < near.mean && found.most < near.most, "{isa}: mean {}, most {}", found.mean, found.most);
    }
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn teacher_forced_logprobs_in_f32_match_the_reference() {
    let path = real_model();
    assert_near(&path, ComputeDtype::F32, "cpu-f32", &EXACT);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn teacher_forced_logprobs_in_int8_are_near_the_reference() {
    let path = real_model();
    assert_near(&path, ComputeDtype::Auto, "cpu-int8", &QUANTIZED);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn teacher_forced_logprobs_with_bf16_weights_are_near_the_reference() {
    let path = real_model();
    // The reference has the weights as they were before they were rounded.
    assert_near(as_bf16(&path).path(), ComputeDtype::Auto, "cpu-bf16", &EXACT);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn logprobs_with_mixed_quant_formats_are_near_the_reference() {
    let path = real_model();
    // As files for k-quants have it: values, and what goes down, in more bits than what they are
    // fused with, or are beside.
    let wider = |name: &str| name.contains("attn_v") || name.contains("ffn_up") || name.contains("ffn_down");
    let file = retyped(&path, |tensor| if wider(tensor.name) { Dtype::Q8_0 } else { tensor.dtype });
    // These weights were rounded once more than the reference's.
    let found = differences(load(file.path(), &options(2, KvDtype::F16, 4096)), EVERY_PROMPT);
    println!("mean difference {:.5}, most {:.5}", found.mean, found.most);
    assert!(found.mean < QUANTIZED.mean && found.most < QUANTIZED.most, "mean {}, most {}", found.mean, found.most);
    let prompt = tokens(1, 49_152, 150);
    let mut engine = load(file.path(), &options(1, KvDtype::F16, 16 * 160));
    let blocks = table(&engine, 0, prompt.len());
    let expected = run(&mut engine, &prompt, &blocks, 512);
    batch_is_as_alone(file.path(), Isa::detect(), &prompt, &expected);
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn all_isas_of_a_kv_class_give_same_logits() {
    let path = real_model();
    let prompt = tokens(11, 49_152, 19);
    for isas in classes(&path, &options(2, KvDtype::F16, 64)) {
        let mut expected: Option<Vec<Vec<f32>>> = None;
        for isa in isas {
            let mut engine = load(&path, &CpuOptions { isa: Some(isa), ..options(2, KvDtype::F16, 64) });
            let table = table(&engine, 0, prompt.len());
            let found = run(&mut engine, &prompt, &table, 16);
            let expected = expected.get_or_insert_with(|| found.clone());
            assert!(found.iter().zip(&*expected).all(|(a, b)| same_bits(a, b)), "{isa}");
        }
    }
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn logits_are_the_same_alone_batched_chunked_and_threaded() {
    let path = real_model();
    let prompt = tokens(1, 49_152, 150);
    let options = options(1, KvDtype::F16, 16 * 160);
    for isas in classes(&path, &options) {
        let mut engine = load(&path, &CpuOptions { isa: isas.last().copied(), ..options.clone() });
        let table_a = table(&engine, 0, prompt.len());
        let expected = run(&mut engine, &prompt, &table_a, 512);
        assert!(run(&mut engine, &prompt, &table_a, 64).iter().zip(&expected).all(|(a, b)| same_bits(a, b)));

        for isa in isas.into_iter().filter(|&isa| isa != Isa::SCALAR) {
            batch_is_as_alone(&path, isa, &prompt, &expected);
        }
    }
}

/// 16 sequences in steps that mix prompts, later chunks of them and single tokens: our tenth has in
/// each the logits that it has alone.
fn batch_is_as_alone(path: &Path, isa: Isa, prompt: &[TokenId], expected: &[Vec<f32>]) {
    let mut engine = load(path, &CpuOptions { isa: Some(isa), ..options(2, KvDtype::F16, 16 * 160) });
    let other = |i: usize| tokens(i as u32 + 2, 49_152, 10 + 9 * i);
    let prompts: Vec<_> = (0..16).map(|i| if i == 9 { prompt.to_vec() } else { other(i) }).collect();
    let tables: Vec<_> = (0..16).map(|i| table(&engine, i * 10, 160)).collect();
    for recorder in run_together(&mut engine, &prompts, &tables, |_| LogitsWanted::Last) {
        let (_, position, logits) = &recorder.rows[recorder.rows.iter().position(|row| row.0 == 9).unwrap()];
        assert!(same_bits(logits, &expected[*position as usize]), "{isa}, position {position}");
    }
}

/// Several sequences of several splits of 256 positions each, of which each is a task of its own if
/// there are few.
#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn long_batched_sequences_give_same_logits_as_alone() {
    let path = real_model();
    let prompts = [tokens(3, 49_152, 300), tokens(4, 49_152, 700)];
    let options = options(1, KvDtype::F16, 1024 + 64);
    let mut alone = load(&path, &options);
    let tables = [table(&alone, 0, 300), table(&alone, 20, 700)];
    let expected = [0, 1].map(|i| run(&mut alone, &prompts[i], &tables[i], 512));
    for threads in [1, 2, 3] {
        let mut together = load(&path, &CpuOptions { threads, ..options.clone() });
        let recorders = run_together(&mut together, &prompts, &tables, |_| LogitsWanted::Last);
        for (step, recorder) in recorders.iter().enumerate() {
            assert_eq!(recorder.rows.len(), 2);
            for (sequence, position, logits) in &recorder.rows {
                let same = same_bits(logits, &expected[*sequence][*position as usize]);
                assert!(same, "{threads} threads, step {step}, sequence {sequence}, position {position}");
            }
        }
    }
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn prefill_of_1500_tokens_takes_less_than_a_minute() {
    let path = real_model();
    let began = Instant::now();
    let mut engine = load(&path, &options(2, KvDtype::F16, 2048));
    println!("loaded in {:?}", began.elapsed());
    let prompt = tokens(5, 49_152, 1500);
    let table = table(&engine, 0, 1600);
    let began = Instant::now();
    for (index, tokens) in prompt.chunks(512).enumerate() {
        let start = 512 * index as u32;
        let step = SequenceStep { tokens, start, block_table: &table, logits: LogitsWanted::Last };
        engine.step(&[step], &mut Recorder::default()).unwrap();
    }
    let prefill = began.elapsed();
    let began = Instant::now();
    for start in 1500..1510 {
        let step = SequenceStep { tokens: &[7], start, block_table: &table, logits: LogitsWanted::Last };
        engine.step(&[step], &mut Recorder::default()).unwrap();
    }
    println!("1500 tokens in {prefill:?}, then {:?} per token", began.elapsed() / 10);
    let began = Instant::now();
    for start in 1510..1515 {
        let step = SequenceStep { tokens: &[7], start, block_table: &table, logits: LogitsWanted::Last };
        engine.step(&vec![step; 16], &mut Recorder::default()).unwrap();
    }
    println!("16 sequences of 1500 tokens: {:?} per step", began.elapsed() / 5);
    assert!(prefill.as_secs() < 60, "{prefill:?}");
}
