//! The figures of an engine.

use std::io::{self, Write};

use serde::Serialize;

/// The figures of a run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Of a prompt of 512 tokens, in one chunk.
    pub prefill_512_tok_s: f64,
    /// Of a prompt of 2,048 tokens, in four chunks.
    pub prefill_2048_tok_s: f64,
    /// Of one sequence.
    pub decode_1_tok_s: f64,
    /// Of 8 sequences together.
    pub decode_8_tok_s: f64,
    /// Of 32 sequences together.
    pub decode_32_tok_s: f64,
    /// From opening the file to an engine that can take a step.
    pub load_s: f64,
    /// Memory of the process at the end: weights, buffers, and the KV that was used.
    pub rss_bytes: u64,
    /// Name of the model, as its file gives it.
    pub model: String,
    /// Class of machines and settings that give the same numbers to the last bit.
    pub kv_class: String,
    /// Threads that computed.
    pub threads: usize,
    /// Runs of each figure.
    pub rounds: u32,
    /// Instruction set.
    pub isa: String,
    /// Element type of stored K and V.
    pub kv_dtype: &'static str,
    /// `stored`, `bf16` or `f32`.
    pub compute_dtype: &'static str,
    /// Of Baton.
    pub version: &'static str,
}

impl Report {
    /// To stdout.
    pub fn print(&self, json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if json {
            return writeln!(out, "{}", serde_json::to_string(self)?);
        }
        let Self { model, compute_dtype, kv_class, threads, rounds, isa, kv_dtype, load_s, .. } = self;
        writeln!(
            out,
            "{model}: {compute_dtype}, {kv_class}, instructions {isa}, KV in {kv_dtype}; loaded in {load_s:.2} s"
        )?;
        writeln!(out, "threads: {threads}, runs of each figure: {rounds}\n")?;
        for (name, figure) in [
            ("prefill, 512 tokens", self.prefill_512_tok_s),
            ("prefill, 2048 tokens", self.prefill_2048_tok_s),
            ("decode, 1 sequence", self.decode_1_tok_s),
            ("decode, 8 sequences", self.decode_8_tok_s),
            ("decode, 32 sequences", self.decode_32_tok_s),
        ] {
            writeln!(out, "{name:24} {figure:>9.1} tokens/s")?;
        }
        writeln!(out, "{:24} {:>9.1} MB", "resident memory", self.rss_bytes as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_bench_json_has_the_compared_keys() {
        let value = serde_json::to_value(Report::default()).unwrap();
        for key in ["prefill_512_tok_s", "prefill_2048_tok_s", "decode_1_tok_s", "decode_8_tok_s", "decode_32_tok_s"] {
            assert!(value[key].is_number(), "{key}");
        }
        for key in ["model", "kv_class", "threads", "rounds", "isa", "kv_dtype", "version"] {
            assert!(!value[key].is_null(), "{key} tells reports apart");
        }
        assert!(value["load_s"].is_number() && value["rss_bytes"].is_number() && value["isa"].is_string());
    }
}
