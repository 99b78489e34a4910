//! `baton score`: how likely a model finds a text, on this machine's CPU. It says in one number
//! what another compute dtype costs.
//!
//! The text becomes tokens once, and these are cut into windows that know nothing of each other
//! ([`Windows`]). Each token is scored once, given what stands before it in its window:
//!
//! ```text
//! nll = -1/T  sum over t of ln p(token t | window's tokens before t)      nats per token
//! perplexity = e^nll
//! ```
//!
//! **Invariant**: sums are of f64, in the order of the text, so that the same logits give the same
//! number to the last bit.

mod divergence;
mod likelihood;
mod report;
mod windows;

use std::fs;
use std::path::{Path, PathBuf};

use baton_engine::{
    ComputeDtype, CpuEngine, CpuOptions, Engine, EngineError, LogitsWanted, SequenceStep, StepObserver,
};
use baton_formats::ModelFile;
use baton_text::{EncodeOptions, Tokenizer};
use baton_types::{BlockId, KvDtype, TokenId};
use clap::Args;

use crate::BenchError;
use crate::inference::{ComputeArgs, check_context, load, open, progress};
pub use divergence::{Divergence, compare};
pub use likelihood::Likelihood;
use likelihood::Listener;
use report::Report;
pub use windows::Windows;

/// Tokens of a step, as a prefill node cuts prompts. Results do not depend on it.
const CHUNK: usize = 512;
/// Longest text taken, bytes.
const MAX_TEXT_BYTES: usize = 64 << 20;

/// Of `baton score`.
#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// Load this GGUF file, or this folder with config.json and safetensors
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Score this UTF-8 text; what looks like a special token is ordinary text
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Score in windows of N tokens
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=1_048_576))]
    pub context: u32,
    /// Score in f32 too, KV included; print KL divergence and how often best tokens agree
    #[arg(long)]
    pub kl_divergence: bool,
    /// Threads, compute dtype, and KV dtype
    #[command(flatten)]
    pub compute: ComputeArgs,
}

impl ScoreArgs {
    /// Room for one window.
    fn options(&self) -> CpuOptions {
        self.compute.options(self.context)
    }

    /// The same in single precision.
    fn reference_options(&self) -> CpuOptions {
        CpuOptions { compute_dtype: ComputeDtype::F32, kv_dtype: KvDtype::F32, ..self.options() }
    }
}

/// Scores the text and prints the figures.
pub fn run(args: &ScoreArgs, json: bool) -> Result<(), BenchError> {
    let text = read(&args.text)?;
    let bar = progress(json);
    let file = open(&args.model)?;
    let windows = Windows::of_text(&tokenizer(&file)?, &text, args.context)?;
    let mut engine = load(&file, &args.options(), &bar)?;
    check_context(&engine, "--context", args.context)?;
    bar.set_message("scoring");
    let progress = &mut |share| bar.set_position((share * 100.0) as u64);
    let began = baton_runtime::now();
    let (found, divergence) = if args.kl_divergence {
        let mut reference = load(&file, &args.reference_options(), &bar)?;
        let (found, divergence) = compare(&mut reference, &mut engine, &windows, progress)?;
        (found, Some(divergence))
    } else {
        (score(&mut engine, &windows, progress)?, None)
    };
    bar.finish_and_clear();
    let report = Report::new(args, &engine, &windows, &found, divergence, began.elapsed());
    report.print(json).map_err(BenchError::Output)
}

/// The whole file; the error names `--text`.
fn read(path: &Path) -> Result<String, BenchError> {
    let wrong = |problem: String| BenchError::invalid("--text", format!("{}: {problem}", path.display()));
    let bytes = fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if bytes > MAX_TEXT_BYTES as u64 {
        return Err(wrong(format!("{bytes} bytes, but at most {MAX_TEXT_BYTES} are taken")));
    }
    let text = fs::read(path).map_err(|error| wrong(error.to_string()))?;
    if text.is_empty() {
        return Err(wrong("empty".to_owned()));
    }
    String::from_utf8(text).map_err(|error| wrong(format!("no UTF-8 at byte {}", error.utf8_error().valid_up_to())))
}

fn tokenizer(file: &ModelFile) -> Result<Tokenizer, BenchError> {
    let tokenizer = Tokenizer::from_model(file).map_err(|error| BenchError::invalid("--model", error.to_string()))?;
    Ok(tokenizer.with_max_bytes(MAX_TEXT_BYTES))
}

impl Windows {
    /// Windows of `context` tokens, at least 2, over a text.
    ///
    /// # Errors
    /// The text has fewer than two tokens, or is too long; the error names `--text`.
    pub fn of_text(tokenizer: &Tokenizer, text: &str, context: u32) -> Result<Self, BenchError> {
        let wrong = |problem: String| BenchError::invalid("--text", problem);
        let plain = EncodeOptions { add_special: false, parse_special: false };
        let tokens = tokenizer.encode(text, plain).map_err(|error| wrong(error.to_string()))?;
        if tokens.len() < 2 {
            return Err(wrong(format!("at least 2 tokens are needed, but it has {}", tokens.len())));
        }
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        Ok(Self::new(tokens, bos, context as usize))
    }
}

/// Scores every window; `progress` hears the share that is done, from 0 to 1. The engine's arena
/// holds one window at least.
///
/// # Errors
/// The engine fails, or a window is longer than the model's context.
pub fn score(
    engine: &mut CpuEngine,
    windows: &Windows,
    progress: &mut dyn FnMut(f64),
) -> Result<Likelihood, EngineError> {
    let mut found = Likelihood::default();
    for window in windows.iter() {
        steps(engine, &window, &mut Listener { window: &window, found: &mut found })?;
        progress(found.tokens as f64 / windows.scored() as f64);
    }
    Ok(found)
}

/// One window, in chunks. Its last token is not computed: nothing that it predicts is scored.
fn steps(engine: &mut CpuEngine, window: &[TokenId], observer: &mut dyn StepObserver) -> Result<(), EngineError> {
    let block_table: Vec<_> = (0..engine.arena().layout().num_blocks).map(BlockId).collect();
    let mut start = 0;
    for tokens in window[..window.len() - 1].chunks(CHUNK) {
        let step = SequenceStep { tokens, start: start as u32, block_table: &block_table, logits: LogitsWanted::All };
        engine.step(&[step], observer)?;
        start += tokens.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: ScoreArgs,
    }

    fn parse(line: &str) -> Result<ScoreArgs, clap::Error> {
        let given = "score --model m --text t".split_whitespace();
        Cli::try_parse_from(given.chain(line.split_whitespace())).map(|cli| cli.args)
    }

    /// A file of this test's own, with these bytes.
    fn file(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("baton-score-{}-{name}", std::process::id()));
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn invalid_score_argument_names_its_flag() {
        assert_eq!(parse("--compute-dtype f32").unwrap().compute.compute_dtype, ComputeDtype::F32);
        assert_eq!(parse("--compute-dtype auto").unwrap().compute.compute_dtype, ComputeDtype::Auto);
        for (line, flag) in [
            ("--compute-dtype bf16", "--compute-dtype"),
            ("--context 1", "--context"),
            ("--threads x", "--threads"),
            ("--kv-dtype f8", "--kv-dtype"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(flag), "{line}: {error}");
        }
    }

    #[test]
    fn score_names_a_text_file_missing_empty_or_not_utf8() {
        let missing = read(Path::new("/nowhere/text")).unwrap_err().to_string();
        assert!(missing.starts_with("--text: /nowhere/text: "), "{missing}");
        for (name, bytes, problem) in [("empty", &b""[..], "empty"), ("latin1", b"caf\xe9", "no UTF-8 at byte 3")] {
            let path = file(name, bytes);
            let error = read(&path).unwrap_err().to_string();
            fs::remove_file(&path).unwrap();
            assert_eq!(error, format!("--text: {}: {problem}", path.display()));
        }
    }

    #[test]
    fn score_refuses_a_text_of_fewer_than_two_tokens() {
        let error = Windows::of_text(&Tokenizer::bytes(), "a", 8).unwrap_err().to_string();
        assert_eq!(error, "--text: at least 2 tokens are needed, but it has 1");
        let windows = Windows::of_text(&Tokenizer::bytes(), "ab", 8).unwrap();
        assert_eq!(windows.scored(), 2, "the byte vocabulary begins a text with a token");
    }
}
