//! `baton score` with a real model, the file that `BATON_MODEL` names: the arithmetics and the instruction sets beside each other.
//!
//! The text is the beginning of Lewis Carroll's Alice's Adventures in Wonderland (1865; in the public domain), chapters 1 and 2, as the Canterbury corpus has it (`alice29.txt`, without
//! the spaces at the ends of lines).

#![allow(clippy::unwrap_used)] // helpers of tests

use baton_bench::score::{Likelihood, Windows, score};
use baton_engine::{Arithmetic, CpuEngine, CpuOptions, Isa, KvCapacity};
use baton_formats::ModelFile;
use baton_text::Tokenizer;

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

fn likelihood(file: &ModelFile, text: &str, arithmetic: Arithmetic, isa: Option<Isa>) -> Likelihood {
    let windows = Windows::of_text(&Tokenizer::from_model(file).unwrap(), text, CONTEXT).unwrap();
    let defaults = CpuOptions::default();
    let kv_capacity = KvCapacity::Blocks(CONTEXT.div_ceil(defaults.block_tokens));
    let options = CpuOptions { arithmetic, isa, kv_capacity, ..defaults };
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
