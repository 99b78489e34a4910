//! `baton bench engine`: how fast a model on this machine's CPU reads prompts and writes tokens,
//! through the trait that nodes call.
//!
//! Figures are medians. Prompts are computed one after the other, in chunks as a prefill node cuts
//! them; decode steps have sequences of equal length.
//!
//! **Invariant**: only the engine's steps are timed; every prompt ends with logits, every sequence
//! of a decode step yields some.

mod measure;
mod model;
mod report;

use std::path::PathBuf;

use baton_engine::{Engine, EngineError};
use clap::Args;

use crate::BenchError;
use measure::Bench;
pub use model::ComputeArgs;
pub(crate) use model::{check_context, load, open, progress};
use report::Report;

/// Tokens of the longest prompt.
const LONGEST_PROMPT: u32 = 2048;
/// Tokens that the arena holds: the longest prompt, and 32 sequences with their steps.
const ARENA_TOKENS: u32 = 32 * 128;
/// Figures that are measured.
const FIGURES: u64 = 5;

/// Of `baton bench engine`.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Load this GGUF file, or this folder with config.json and safetensors
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Threads, compute dtype, and KV dtype
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Run each figure N times, and print the median
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
}

/// Loads the model, measures and prints.
pub fn run(args: &EngineArgs, json: bool) -> Result<(), BenchError> {
    let options = args.compute.options(ARENA_TOKENS);
    let bar = progress(json);
    let began = baton_runtime::now();
    let mut engine = load(&open(&args.model)?, &options, &bar)?;
    check_context(&engine, "--model", LONGEST_PROMPT)?;
    let load_s = began.elapsed().as_secs_f64();
    let mut report = Report {
        model: engine.model().name.clone(),
        kv_class: engine.model().kv_class.clone(),
        threads: options.threads,
        rounds: args.rounds,
        isa: engine.isa().to_string(),
        kv_dtype: options.kv_dtype.as_str(),
        compute_dtype: options.compute_dtype.as_str(),
        version: env!("CARGO_PKG_VERSION"),
        load_s,
        ..Report::default()
    };
    let mut bench = Bench::new(&mut engine, args.rounds);
    bar.set_position(0);
    let mut figure = |name: &'static str, to: &mut f64, rate: &mut dyn FnMut(&mut Bench<'_>) -> Result<f64, _>| {
        bar.set_message(name);
        *to = rate(&mut bench)?;
        bar.inc(100 / FIGURES);
        Ok::<_, EngineError>(())
    };
    figure("prefill of 512", &mut report.prefill_512_tok_s, &mut |bench| bench.prefill(512))?;
    figure("prefill of 2048", &mut report.prefill_2048_tok_s, &mut |bench| bench.prefill(2048))?;
    figure("decode of 1", &mut report.decode_1_tok_s, &mut |bench| bench.decode(1))?;
    figure("decode of 8", &mut report.decode_8_tok_s, &mut |bench| bench.decode(8))?;
    figure("decode of 32", &mut report.decode_32_tok_s, &mut |bench| bench.decode(32))?;
    bar.finish_and_clear();
    report.rss_bytes = baton_runtime::telemetry::resident_bytes().unwrap_or(0);
    report.print(json).map_err(BenchError::Output)
}
