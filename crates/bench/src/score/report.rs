//! The figures of a text.

use std::io::{self, Write};
use std::time::Duration;

use baton_engine::{CpuEngine, Engine};
use serde::Serialize;

use super::{Divergence, Likelihood, ScoreArgs, Windows};
use crate::table::named_values;

/// The figures of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    /// Tokens that were scored.
    tokens: u64,
    /// Mean negative log-likelihood of a token, nats.
    nll: f64,
    /// e to that.
    perplexity: f64,
    /// Tokens of a window.
    context: u32,
    /// Windows that the text was cut into.
    windows: usize,
    /// Name of the model, as its file gives it.
    model: String,
    /// `stored`, `bf16` or `f32`.
    compute_dtype: &'static str,
    /// Element type of stored K and V.
    kv_dtype: &'static str,
    /// Instruction set.
    isa: String,
    /// Class of machines and settings that give the same number to the last bit.
    kv_class: String,
    /// Threads that computed.
    threads: usize,
    /// From the first window's beginning to the last one's end.
    seconds: f64,
    /// From single precision, with `--kl-divergence`.
    #[serde(flatten)]
    divergence: Option<Divergence>,
}

impl Report {
    pub(super) fn new(
        args: &ScoreArgs,
        engine: &CpuEngine,
        windows: &Windows,
        found: &Likelihood,
        divergence: Option<Divergence>,
        took: Duration,
    ) -> Self {
        let model = engine.model();
        let options = args.options();
        Self {
            tokens: found.tokens,
            nll: found.nll(),
            perplexity: found.perplexity(),
            context: args.context,
            windows: windows.count(),
            model: model.name.clone(),
            compute_dtype: options.compute_dtype.as_str(),
            kv_dtype: options.kv_dtype.as_str(),
            isa: engine.isa().to_string(),
            kv_class: model.kv_class.clone(),
            threads: options.threads,
            seconds: took.as_secs_f64(),
            divergence,
        }
    }

    /// To stdout.
    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json { serde_json::to_string(self)? } else { self.table() };
        writeln!(io::stdout(), "{text}")
    }

    fn table(&self) -> String {
        let rate = self.tokens as f64 / self.seconds.max(1e-9);
        let mut rows = vec![
            ("perplexity", format!("{:.4}", self.perplexity)),
            ("nll", format!("{:.6} nats per token", self.nll)),
            ("tokens", format!("{}, in {} windows of {}", self.tokens, self.windows, self.context)),
            ("model", self.model.clone()),
            (
                "computed in",
                format!(
                    "{}, {}, instructions {}, KV in {}",
                    self.compute_dtype, self.kv_class, self.isa, self.kv_dtype
                ),
            ),
            ("took", format!("{:.2} s with {} threads, {rate:.0} tokens/s", self.seconds, self.threads)),
        ];
        if let Some(Divergence { mean_kl, kl_standard_error, top1_agreement, reference_perplexity }) = self.divergence {
            let from = format!("from single precision, whose perplexity is {reference_perplexity:.4}");
            rows.insert(1, ("KL", format!("{mean_kl:.6} +- {kl_standard_error:.6} nats per token {from}")));
            rows.insert(2, ("same best", format!("{:.2} % of positions", top1_agreement * 100.0)));
        }
        named_values(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            tokens: 1000,
            nll: 2.5,
            perplexity: 2.5_f64.exp(),
            context: 512,
            windows: 2,
            model: "m".into(),
            compute_dtype: "auto",
            kv_dtype: "f16",
            isa: "vnni".into(),
            kv_class: "cpu-int8-3".into(),
            threads: 2,
            seconds: 0.5,
            divergence: None,
        }
    }

    #[test]
    fn score_report_shows_kl_divergence_beside_likelihood() {
        let divergence = Divergence {
            mean_kl: 0.00125,
            kl_standard_error: 0.0001,
            top1_agreement: 0.975,
            reference_perplexity: 12.0,
        };
        let report = Report { divergence: Some(divergence), ..report() };
        let table = report.table();
        assert!(table.contains("KL          0.001250 +- 0.000100 nats per token from single precision"), "{table}");
        assert!(table.contains("same best   97.50 % of positions"), "{table}");
        let json = serde_json::to_value(report).unwrap();
        assert_eq!((json["mean_kl"].as_f64(), json["top1_agreement"].as_f64()), (Some(0.00125), Some(0.975)));
    }

    #[test]
    fn score_json_has_the_documented_fields() {
        let json = serde_json::to_value(report()).unwrap();
        for (field, value) in [("tokens", 1000.0), ("nll", 2.5), ("context", 512.0), ("seconds", 0.5)] {
            assert_eq!(json[field].as_f64(), Some(value), "{field}");
        }
        assert!((json["perplexity"].as_f64().unwrap() - 12.1825).abs() < 1e-4, "{json}");
        assert_eq!((&json["isa"], &json["kv_class"]), (&"vnni".into(), &"cpu-int8-3".into()));
    }

    #[test]
    fn score_table_shows_perplexity_and_how_it_was_computed() {
        let table = report().table();
        for part in [
            "perplexity  12.1825",
            "1000, in 2 windows of 512",
            "cpu-int8-3, instructions vnni, KV in f16",
            "2000 tokens/s",
        ] {
            assert!(table.contains(part), "{part}: {table}");
        }
    }
}
