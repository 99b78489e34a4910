//! Loads a model for this machine's CPU, with a bar for people.

use std::path::Path;

use baton_engine::{ComputeDtype, CpuEngine, CpuOptions, Engine, KvCapacity};
use baton_formats::ModelFile;
use baton_types::KvDtype;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::BenchError;

/// How a model computes, as nodes are told it.
#[derive(Debug, Args)]
pub struct ComputeArgs {
    /// Compute with N threads. Without it, one for each core that this process may use
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Store K and V as f16, bf16, f32 or int8. int8 has a scale per row of a head
    #[arg(long, value_name = "TYPE", default_value = CpuOptions::default().kv_dtype.as_str())]
    pub kv_dtype: KvDtype,
    /// Compute in auto or f32. auto goes by the weights; f32 is a slow reference
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub compute_dtype: ComputeDtype,
}

impl ComputeArgs {
    /// With room for so many tokens.
    pub(crate) fn options(&self, tokens: u32) -> CpuOptions {
        let defaults = CpuOptions::default();
        CpuOptions {
            threads: self.threads.unwrap_or(defaults.threads),
            kv_dtype: self.kv_dtype,
            compute_dtype: self.compute_dtype,
            kv_capacity: KvCapacity::Blocks(tokens.div_ceil(defaults.block_tokens)),
            ..defaults
        }
    }
}

/// Opens a GGUF file, or a folder with config.json and safetensors. The error names `--model`.
pub(crate) fn open(path: &Path) -> Result<ModelFile, BenchError> {
    ModelFile::open(path).map_err(|error| BenchError::invalid("--model", error.to_string()))
}

/// Loads the weights; `bar` goes to 100.
pub(crate) fn load(file: &ModelFile, options: &CpuOptions, bar: &ProgressBar) -> Result<CpuEngine, BenchError> {
    bar.set_message("loading");
    Ok(CpuEngine::load(file, options, &mut |done| bar.set_position((done * 100.0) as u64))?)
}

/// Refuses, naming `flag`, a model whose context holds fewer than `positions` tokens.
pub(crate) fn check_context(engine: &dyn Engine, flag: &'static str, positions: u32) -> Result<(), BenchError> {
    let held = engine.model().context_length;
    if held < positions {
        return Err(BenchError::invalid(flag, format!("the model's context holds {held}, but must hold {positions}")));
    }
    Ok(())
}

/// A bar of percents on stderr; none if that is no terminal, or if a program reads the output.
pub(crate) fn progress(json: bool) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:16} {bar:40} {pos} %");
    if json {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(100).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }
}
