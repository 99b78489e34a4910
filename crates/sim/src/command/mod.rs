//! `baton simulate`: plays a trace, and says what became of it.
//!
//! Options (`args`) become runs (`plan`) over a trace (`workload`). Each is made once (`runs`) and
//! shown as text or as JSON (`report`).
//!
//! **Invariant**: what goes to stdout depends on the options and the trace alone, not on the
//! machine.

mod args;
mod error;
#[cfg(test)]
mod fixture;
mod numbers;
mod plan;
mod report;
mod runs;
mod workload;

use std::io::{self, Write};

pub use args::{Compare, SimulateArgs};
pub use error::SimulateError;
pub use numbers::Curve;

use workload::Workload;

/// Runs the command to its end.
pub fn run(args: &SimulateArgs, json: bool) -> Result<(), SimulateError> {
    args.check()?;
    let workload = Workload::load(args)?;
    if let Some(warning) = workload.warning() {
        eprintln!("baton: warning: {warning}");
    }
    let text = answer(args, &workload, json)?;
    Ok(writeln!(io::stdout(), "{text}")?)
}

/// What goes to stdout.
fn answer(args: &SimulateArgs, workload: &Workload, json: bool) -> Result<String, SimulateError> {
    let runs = runs::run_all(workload, &plan::settings(args));
    if json {
        Ok(report::json(args, workload, &runs).map_err(io::Error::from)?.to_string())
    } else {
        Ok(report::text(args, workload, &runs))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::args::tests::parse;
    use super::fixture::trace_file;
    use super::*;

    fn answer_of(rest: &str, json: bool) -> String {
        let trace = trace_file(60, |n| n * 700);
        let args = parse(&format!("--trace {} {rest}", trace.path().display())).unwrap();
        let workload = Workload { name: "small.jsonl".to_owned(), ..Workload::load(&args).unwrap() };
        answer(&args, &workload, json).unwrap()
    }

    fn json_of(rest: &str) -> Value {
        serde_json::from_str(&answer_of(rest, true)).unwrap()
    }

    #[test]
    fn json_report_has_the_promised_fields() {
        let json = json_of("--placement mooncake --speed 2 --window second-half");
        for field in ["requests", "completed", "rejected", "late", "failed", "met", "computed_tokens"] {
            assert!(json[field].is_u64(), "{field}: {}", json[field]);
        }
        let shares = ["goodput_per_s", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "tbt_p90_s", "cache_hit_ratio"];
        for field in shares.into_iter().chain(["floor_ttft_mean_s", "met_bound"]) {
            assert!(json[field].is_f64(), "{field}: {}", json[field]);
        }
        assert_eq!((&json["requests"], &json["options"]["placement"]), (&30.into(), &"mooncake".into()));
        for part in ["by_requests", "by_prompt_tokens", "longest_tenth"] {
            let ends = ["met", "late", "rejected", "failed"].map(|end| json[part][end].as_f64().unwrap());
            assert!((ends.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{part}: {ends:?}");
        }
        assert_eq!(json["options"]["balancing_threshold"], 1.5);
        assert_eq!((&json["options"]["trace"], &json["options"]["speed"]), (&"small.jsonl".into(), &2.0.into()));
        assert!(json["ttft_mean_s"].as_f64() >= json["floor_ttft_mean_s"].as_f64().map(|floor| floor * 0.9));
    }

    #[test]
    fn json_report_of_several_runs_is_a_list() {
        assert_eq!(json_of("--compare admission")["runs"].as_array().unwrap().len(), 5);
        assert_eq!(json_of("--curve 1:1:1")["runs"].as_array().unwrap().len(), 1, "a curve, if of one point");
    }

    #[test]
    fn same_seed_gives_the_same_figures() {
        let options = "--compare pairs --curve 1:3:1 --jitter 2 --seed";
        assert_eq!(answer_of(&format!("{options} 7"), true), answer_of(&format!("{options} 7"), true));
        assert_ne!(json_of("--seed 7")["ttft_mean_s"], json_of("--seed 8")["ttft_mean_s"]);
    }

    #[test]
    fn text_report_names_trace_options_and_results() {
        let text = answer_of("--jitter 2 --seed 7", false);
        for part in ["small.jsonl: 60 requests", "llama3-70b-a800", "seed 7, jitter 2 s", "met, 0 late", "TTFT floor"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text =
            answer_of("--cache-blocks 1 --decode-blocks 1 --max-wait-ms off --fault-every 5 --fault pause", false);
        for part in [
            "max_wait_ms off, cache_blocks 1, decode_blocks 1, fault_every_s 5.0, fault pause",
            "nothing was completed",
            "faults        pause ",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(json_of("--cache-blocks 1 --decode-blocks 1")["ttft_mean_s"].is_null());
        let table = answer_of("--compare pairs --curve 1:2:1", false);
        assert_eq!(table.lines().filter(|line| line.starts_with("mooncake + predictive")).count(), 2, "{table}");
    }
}
