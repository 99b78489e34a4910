//! `baton score` with a real model, the file that `BATON_MODEL` names: the arithmetics and the instruction sets beside each other.
//!
//! The text is the beginning of Lewis Carroll's Alice's Adventures in Wonderland (1865; in the public domain), chapters 1 and 2, as the Canterbury corpus has it (`alice29.txt`, without
//! the spaces at the ends of lines).

#![allow(clippy::unwrap_used)] // helpers of tests

#[path = "../../engine/tests/retyped/mod.rs"]
mod retyped;

use baton_bench::score::{Likelihood, Windows, compare, score};
use baton_engine::{Arithmetic, CpuEngine, CpuOptions, Isa, KvCapacity};
use baton_formats::{Dtype, ModelFile, TensorView};
use baton_text::Tokenizer;
use baton_types::KvDtype;

/// What `fixtures/score_llama_cpp.py` measured.
const LLAMA_CPP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama_cpp.json");
const TEXT: &str = include_str!("fixtures/alice.txt");
/// What the slowest instruction set scores in a few seconds, bytes of the text.
const FEW_BYTES: usize = 48;
const CONTEXT: u32 = 512;

fn model() -> ModelFile {
    let path = std::env::var_os("BATON_MODEL").expect("BATON_MODEL names a model file (make test sets it)");
    ModelFile::open(path.as_ref()).expect("BATON_MODEL is a model")
}

/// What a model makes of a text.
fn likelihood(file: &ModelFile, text: &str, options: CpuOptions) -> Likelihood {
    let windows = Windows::of_text(&Tokenizer::from_model(file).unwrap(), text, CONTEXT).unwrap();
    let mut last = 0.0;
    let found = score(&mut engine(file, options), &windows, &mut |share| last = share).unwrap();
    assert_eq!((last, found.tokens as usize), (1.0, windows.scored()), "all of it was scored");
    found
}

/// In single precision, KV included.
fn exact(file: &ModelFile) -> f64 {
    let options = CpuOptions { arithmetic: Arithmetic::F32, kv_dtype: KvDtype::F32, ..Default::default() };
    let found = likelihood(file, TEXT, options).perplexity();
    assert!((10.0..40.0).contains(&found), "English is neither certain nor noise: {found}");
    found
}

/// As nodes compute it.
fn stored(file: &ModelFile, kv_dtype: KvDtype) -> f64 {
    likelihood(file, TEXT, CpuOptions { kv_dtype, ..Default::default() }).perplexity()
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn eight_bit_activations_and_kv_cost_less_than_a_hundredth() {
    let file = model();
    let expected = exact(&file);
    for kv_dtype in [KvDtype::F16, KvDtype::Int8] {
        let found = stored(&file, kv_dtype);
        println!(
            "perplexity: {found} with 8-bit activations, KV in {}, {expected} in single precision",
            kv_dtype.as_str()
        );
        assert!((found / expected - 1.0).abs() < 0.01, "{kv_dtype:?}: {found}, {expected}");
    }
}

/// An engine with room for one window.
fn engine(file: &ModelFile, options: CpuOptions) -> CpuEngine {
    let kv_capacity = KvCapacity::Blocks(CONTEXT.div_ceil(options.block_tokens));
    CpuEngine::load(file, &CpuOptions { kv_capacity, ..options }, &mut |_| ()).unwrap()
}

/// An arithmetic beside single precision, both with the same weights, and beside llama.cpp as it computes by default: the same text, positions and formulas
/// (`fixtures/score_llama_cpp.py`).
fn assert_as_near_as_llama_cpp(name: &str, file: &ModelFile, options: CpuOptions) {
    let theirs: serde_json::Value = serde_json::from_slice(&std::fs::read(LLAMA_CPP).unwrap()).unwrap();
    let their = |figure: &str| theirs[figure].as_f64().unwrap();
    let mut reference =
        engine(file, CpuOptions { arithmetic: Arithmetic::F32, kv_dtype: KvDtype::F32, ..Default::default() });
    let windows = Windows::of_text(&Tokenizer::from_model(file).unwrap(), TEXT, CONTEXT).unwrap();
    assert_eq!(windows.scored() as u64, theirs["positions"].as_u64().unwrap(), "the same positions");
    let (_, ours) = compare(&mut reference, &mut engine(file, options), &windows, &mut |_| ()).unwrap();
    println!(
        "{name}: mean KL {:.6} +- {:.6} nats (llama.cpp {:.6}), same best token {:.4} ({:.4})",
        ours.mean_kl,
        ours.kl_standard_error,
        their("mean_kl"),
        ours.top1_agreement,
        their("top1_agreement")
    );
    // 8 bits: 2 % more than llama.cpp's, with the standard errors of both; the best token is the same more often.
    assert!(ours.mean_kl <= 1.05 * their("mean_kl"), "{name}: {ours:?}");
    assert!(ours.top1_agreement >= their("top1_agreement"), "{name}: {ours:?}");
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn quantized_arithmetic_is_as_near_to_single_precision_as_llama_cpps() {
    let file = model();
    assert_as_near_as_llama_cpp("8 bits", &file, CpuOptions::default());
    let bf16 = CpuOptions { arithmetic: Arithmetic::Bf16, ..Default::default() };
    assert_as_near_as_llama_cpp("codes that become bfloat16", &file, bf16);
}

/// As files for k-quants have it: values, and what goes down, in more bits than what they are fused with, or are beside.
#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn matrices_of_parts_of_several_types_are_as_near_to_single_precision() {
    let wider = |name: &str| name.contains("attn_v") || name.contains("ffn_up") || name.contains("ffn_down");
    let dtype = |tensor: &TensorView<'_>| if wider(tensor.name) { Dtype::Q8_0 } else { tensor.dtype };
    let mixed = retyped::retyped(model().path(), dtype);
    assert_as_near_as_llama_cpp("mixed types", &ModelFile::open(mixed.path()).unwrap(), CpuOptions::default());
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn bfloat16_costs_less_than_half_a_hundredth() {
    let file = model();
    let rounded = retyped::as_bf16(file.path());
    let file = ModelFile::open(rounded.path()).unwrap();
    let (expected, found) = (exact(&file), stored(&file, KvDtype::F16));
    println!("perplexity: {found} with bfloat16, {expected} in single precision");
    assert!((found / expected - 1.0).abs() < 0.005, "{found}, {expected}");
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn codes_that_become_bfloat16_cost_less_than_half_a_hundredth() {
    let file = model();
    let options = CpuOptions { arithmetic: Arithmetic::Bf16, ..Default::default() };
    let (expected, found) = (exact(&file), likelihood(&file, TEXT, options).perplexity());
    println!("perplexity: {found} with codes that become bfloat16, {expected} in single precision");
    assert!((found / expected - 1.0).abs() < 0.005, "{found}, {expected}");
}

#[test]
#[ignore = "needs a model: BATON_MODEL"]
fn every_instruction_set_gives_the_same_number_or_with_tiles_nearly() {
    let file = model();
    let start = TEXT.find("Alice").unwrap();
    for arithmetic in Arithmetic::ALL {
        let of = |isa| {
            let options = CpuOptions { arithmetic, isa: Some(isa), ..Default::default() };
            likelihood(&file, &TEXT[start..][..FEW_BYTES], options)
        };
        let expected = of(Isa::SCALAR);
        for isa in Isa::available() {
            match (isa.as_str(), arithmetic) {
                // Matrix tiles sum in another order.
                ("amx", Arithmetic::Stored | Arithmetic::Bf16) => {
                    let ratio = of(isa).nll() / expected.nll();
                    assert!((ratio - 1.0).abs() < 0.005, "{isa}: {ratio}");
                }
                _ => assert_eq!(of(isa), expected, "{isa}, {arithmetic:?}"),
            }
        }
    }
}
