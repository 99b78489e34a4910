//! `baton score` with a real model, the file that `BATON_MODEL` names: the arithmetics and the instruction sets beside each other.
//!
//! The text is the beginning of Lewis Carroll's Alice's Adventures in Wonderland (1865; in the public domain), chapters 1 and 2, as the Canterbury corpus has it (`alice29.txt`, without
//! the spaces at the ends of lines).

#![allow(clippy::unwrap_used)] // helpers of tests

#[path = "../../engine/tests/common/retyped.rs"]
mod retyped;

use baton_bench::score::{Likelihood, Windows, score};
use baton_engine::{Arithmetic, CpuEngine, CpuOptions, Isa, KvCapacity};
use baton_formats::ModelFile;
use baton_text::Tokenizer;
use baton_types::KvDtype;

const TEXT: &str = include_str!("fixtures/alice.txt");
/// What the slowest instruction set scores in a few seconds, bytes of the text.
const FEW_BYTES: usize = 48;
const CONTEXT: u32 = 512;

fn model(test: &str) -> Option<ModelFile> {
    let Some(path) = std::env::var_os("BATON_MODEL") else {
        println!("SKIPPED {test}: BATON_MODEL is not set (make test fetches the model)");
        return None;
    };
    Some(ModelFile::open(path.as_ref()).expect("BATON_MODEL is a model"))
}

/// What a model makes of a text.
fn likelihood(file: &ModelFile, text: &str, arithmetic: Arithmetic, isa: Option<Isa>) -> Likelihood {
    of_options(file, text, CpuOptions { arithmetic, isa, ..Default::default() })
}

fn of_options(file: &ModelFile, text: &str, options: CpuOptions) -> Likelihood {
    let windows = Windows::of_text(&Tokenizer::from_model(file).unwrap(), text, CONTEXT).unwrap();
    let kv_capacity = KvCapacity::Blocks(CONTEXT.div_ceil(options.block_tokens));
    let options = CpuOptions { kv_capacity, ..options };
    let mut engine = CpuEngine::load(file, &options, &mut |_| ()).unwrap();
    let mut last = 0.0;
    let found = score(&mut engine, &windows, &mut |share| last = share).unwrap();
    assert_eq!((last, found.tokens as usize), (1.0, windows.scored()), "all of it was scored");
    found
}

#[test]
fn eight_bit_activations_cost_less_than_a_hundredth() {
    let Some(file) = model("eight_bit_activations_cost_less_than_a_hundredth") else { return };
    let [stored, f32] = [Arithmetic::Stored, Arithmetic::F32].map(|it| likelihood(&file, TEXT, it, None));
    println!("perplexity over {} tokens: {} stored, {} f32", f32.tokens, stored.perplexity(), f32.perplexity());
    assert!((10.0..40.0).contains(&f32.perplexity()), "English is neither certain nor noise: {}", f32.perplexity());
    assert!((stored.perplexity() / f32.perplexity() - 1.0).abs() < 0.01, "{stored:?}, {f32:?}");
}

#[test]
fn bfloat16_and_keys_and_values_of_fewer_bits_cost_less_than_they_may() {
    let Some(file) = model("bfloat16_and_keys_and_values_of_fewer_bits_cost_less_than_they_may") else { return };
    let exact = |file: &ModelFile| {
        let options = CpuOptions { arithmetic: Arithmetic::F32, kv_dtype: KvDtype::F32, ..Default::default() };
        of_options(file, TEXT, options).perplexity()
    };
    let stored =
        |file: &ModelFile, kv_dtype| of_options(file, TEXT, CpuOptions { kv_dtype, ..Default::default() }).perplexity();
    let rounded = retyped::as_bf16(file.path());
    let bf16 = ModelFile::open(rounded.path()).unwrap();
    let (expected, found) = (exact(&bf16), stored(&bf16, KvDtype::F16));
    println!("perplexity: {found} with bfloat16, {expected} in single precision");
    assert!((found / expected - 1.0).abs() < 0.005, "{found}, {expected}");
    let expected = exact(&file);
    for (kv_dtype, most) in [(KvDtype::F16, 0.01), (KvDtype::Bf16, 0.01), (KvDtype::Int8, 0.01)] {
        let found = stored(&file, kv_dtype);
        println!(
            "perplexity: {found} with 8-bit activations and KV of {}, {expected} in single precision",
            kv_dtype.as_str()
        );
        assert!((found / expected - 1.0).abs() < most, "{kv_dtype:?}: {found}, {expected}");
    }
}

#[test]
fn every_instruction_set_gives_the_same_number() {
    let Some(file) = model("every_instruction_set_gives_the_same_number") else { return };
    let start = TEXT.find("Alice").unwrap();
    for arithmetic in [Arithmetic::Stored, Arithmetic::F32] {
        let of = |isa| likelihood(&file, &TEXT[start..][..FEW_BYTES], arithmetic, Some(isa));
        let expected = of(Isa::detect());
        for isa in Isa::available() {
            assert_eq!(of(isa), expected, "{isa}, {arithmetic:?}");
        }
    }
}
