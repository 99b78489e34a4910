//! Traces in Mooncake's format: one request per line.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Tokens of a block.
const BLOCK_TOKENS: usize = 512;

#[derive(Deserialize)]
struct Line {
    input_length: usize,
    hash_ids: Vec<u64>,
}

/// Ids of the full blocks of every prompt that has any, in the order of the requests.
pub fn read(path: &Path) -> Result<Vec<Vec<u64>>> {
    let file = File::open(path).with_context(|| format!("--trace: {}", path.display()))?;
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let line = line.with_context(|| format!("line {number}"))?;
        let Line { input_length, mut hash_ids } =
            serde_json::from_str(&line).with_context(|| format!("line {number}"))?;
        hash_ids.truncate(input_length / BLOCK_TOKENS);
        prompts.push(hash_ids);
    }
    prompts.retain(|prompt| !prompt.is_empty());
    ensure!(!prompts.is_empty(), "{}: no prompt has a full block", path.display());
    Ok(prompts)
}
