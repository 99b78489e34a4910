//! Tiny random models of each family, from safetensors folders and from GGUF: logits are those of
//! `transformers` (see `fixtures/generate.py`).

#![allow(clippy::unwrap_used)] // tests: a panic is the failure

mod common;

use baton_engine::{ComputeDtype, CpuOptions, Engine, Isa};
use baton_types::{KvDtype, TokenId};
use common::{fixture, load, logged, options, run, same_bits, table};
use serde::Deserialize;

const FAMILIES: [&str; 6] = ["llama2", "llama3", "linear", "mistral", "qwen2", "smollm"];

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<TokenId>,
    positions: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

fn expected(family: &str) -> Expected {
    serde_json::from_slice(&std::fs::read(fixture(family).join("expected.json")).unwrap()).unwrap()
}

/// Largest difference of the logits from the expected ones.
fn difference(found: &[Vec<f32>], expected: &Expected) -> f32 {
    let rows = expected.positions.iter().zip(&expected.logits);
    let differences = rows.flat_map(|(&position, row)| found[position].iter().zip(row).map(|(a, b)| (a - b).abs()));
    differences.fold(0.0, |worst, d| if d > worst || d.is_nan() { d } else { worst })
}

/// How far logits may be off. `exact` if products are exact. With bfloat16, which has 8 bits,
/// rounding shows in the second digit of logits of some 10.
fn most(engine: &impl Engine, exact: f32) -> f32 {
    if engine.model().kv_class.starts_with("cpu-bf16") { 0.3 } else { exact }
}

#[test]
fn logits_match_those_of_hugging_face_transformers() {
    for family in FAMILIES {
        let expected = expected(family);
        for path in [fixture(family), fixture(family).join("model.gguf")] {
            let sets = Isa::available().into_iter();
            for (isa, compute_dtype) in sets.flat_map(|isa| [(isa, ComputeDtype::F32), (isa, ComputeDtype::Auto)]) {
                let options = CpuOptions { compute_dtype, isa: Some(isa), ..options(2, KvDtype::F32, 128) };
                let mut engine = load(&path, &options);
                assert_eq!(expected.logits[0].len(), engine.model().vocab_size as usize);
                let table = table(&engine, 1, expected.tokens.len());
                let found = run(&mut engine, &expected.tokens, &table, 80);
                let difference = difference(&found, &expected);
                let what = format!("{} {compute_dtype:?} {isa}", path.display());
                println!("{what}: {difference:e}");
                assert!(difference < most(&engine, 1e-4), "{what}: {difference}");
            }
        }
    }
}

#[test]
fn folder_and_gguf_of_a_model_give_same_logits_with_rounded_kv() {
    for family in FAMILIES {
        let expected = expected(family);
        for (dtype, most) in [(KvDtype::F16, 0.03), (KvDtype::Bf16, 0.3), (KvDtype::Int8, 0.3)] {
            let logits = [fixture(family), fixture(family).join("model.gguf")].map(|path| {
                let mut engine =
                    load(&path, &CpuOptions { compute_dtype: ComputeDtype::F32, ..options(1, dtype, 128) });
                let table = table(&engine, 0, expected.tokens.len());
                run(&mut engine, &expected.tokens, &table, 33)
            });
            assert!(difference(&logits[0], &expected) < most, "{family} {dtype:?}");
            // Frequencies of llama3 come as rounded factors in GGUF; all else is the same numbers
            // in the same order.
            let same = logits[0].iter().zip(&logits[1]).all(|(a, b)| same_bits(a, b));
            assert!(same || family == "llama3", "{family} {dtype:?}");
        }
    }
}

#[test]
fn model_fingerprint_differs_between_models() {
    let fingerprint = |family: &str| load(&fixture(family), &options(1, KvDtype::F16, 16)).model().fingerprint;
    let mut all: Vec<_> = FAMILIES.iter().map(|family| fingerprint(family)).collect();
    assert_eq!(all[0], fingerprint("llama2"));
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), FAMILIES.len());
}

#[test]
fn qwen2_without_biases_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    // Mistral's tensors are those of Qwen2, but for the biases.
    std::fs::copy(fixture("mistral").join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(fixture("mistral").join("config.json")).unwrap();
    let config = config.replace("MistralForCausalLM", "Qwen2ForCausalLM");
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let options = options(1, KvDtype::F32, 16);
    let (_, lines) = logged(|| load(folder.path(), &options));
    assert!(lines.contains("WARN") && lines.contains("a qwen2 model without biases"), "{lines}");
    let (_, lines) = logged(|| load(&fixture("qwen2"), &options));
    assert!(!lines.contains("biases"), "{lines}");
}
