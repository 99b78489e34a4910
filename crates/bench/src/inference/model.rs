//! Loads a model for this machine's CPU, with a bar for people.

use std::path::Path;

use baton_engine::{CpuEngine, CpuOptions, Engine};
use baton_formats::ModelFile;
use indicatif::{ProgressBar, ProgressStyle};

use crate::BenchError;

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

/// A bar of percents on stderr; none where that is no terminal, or where a program reads the output.
pub(crate) fn progress(json: bool) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:16} {bar:40} {pos} %");
    match json {
        true => ProgressBar::hidden(),
        false => ProgressBar::new(100).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())),
    }
}
