//! `baton simulate`: plays a trace, and says what became of it.
//!
//! Options (`args`) become runs (`plan`) over a trace (`workload`). Each is made once (`runs`) and shown as text (`report`), as JSON (`json`) and as a page (`html`). `paper`
//! makes other runs: those of what Baton claims of a trace, and of the Mooncake papers' tables.
//!
//! **Invariant**: what goes to stdout depends on the options and the trace alone, not on the machine.

mod args;
mod columns;
mod error;
#[cfg(test)]
mod fixture;
mod html;
mod json;
mod numbers;
mod paper;
mod plan;
mod progress;
mod report;
mod runs;
mod table;
mod workload;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

pub use args::{Compare, SimulateArgs, WindowName};
pub use error::SimulateError;
pub use numbers::{Curve, Split};

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

/// What goes to stdout. Writes the page, too, if one is wanted.
fn answer(args: &SimulateArgs, workload: &Workload, json: bool) -> Result<String, SimulateError> {
    if args.paper {
        return paper::answer(args, workload, json);
    }
    // Before the runs, which may take long: a path that cannot be written is known now.
    let page = args.html.as_deref().map(create).transpose()?;
    let runs = runs::run_all(workload, &plan::settings(args), !json);
    if let (Some(mut file), Some(path)) = (page, &args.html) {
        file.write_all(html::page(args, workload, &runs).as_bytes()).map_err(|error| html_error(path, error))?;
    }
    match json {
        true => Ok(json::report(args, workload, &runs).map_err(io::Error::from)?.to_string()),
        false => Ok(report::report(workload, args.counted().as_str(), &runs)),
    }
}

fn create(path: &Path) -> Result<File, SimulateError> {
    File::create(path).map_err(|error| html_error(path, error))
}

fn html_error(path: &Path, error: io::Error) -> SimulateError {
    SimulateError::Html { path: path.display().to_string(), error }
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
    fn json_has_the_promised_fields() {
        let json = json_of("--placement mooncake --speed 2 --window second-half");
        for field in ["requests", "completed", "rejected", "late", "failed", "slo_met", "computed_tokens"] {
            assert!(json[field].is_u64(), "{field}: {}", json[field]);
        }
        let shares = ["slo_met_token_share", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "tbt_p90_s", "cache_hit_ratio"];
        for field in shares.into_iter().chain(["floor_ttft_mean_s"]) {
            assert!(json[field].is_f64(), "{field}: {}", json[field]);
        }
        assert_eq!((&json["requests"], &json["options"]["placement"]), (&30.into(), &"mooncake".into()));
        assert_eq!(json["options"]["balancing_threshold"], 1.5);
        assert_eq!((&json["options"]["trace"], &json["options"]["speed"]), (&"small.jsonl".into(), &2.0.into()));
        assert!(json["ttft_mean_s"].as_f64() >= json["floor_ttft_mean_s"].as_f64().map(|floor| floor * 0.9));
    }

    #[test]
    fn a_single_run_has_its_load_over_time() {
        let json = json_of("--placement random");
        let load = json["load"].as_array().unwrap();
        let mean =
            |field: &str| load.iter().map(|sample| sample[field].as_f64().unwrap()).sum::<f64>() / load.len() as f64;
        assert!(load.len() > 5 && load.is_sorted_by_key(|sample| sample["t_s"].as_f64()), "{load:?}");
        assert!(mean("prefill") > 0.0 && mean("decode") > 0.0, "{load:?}");
        assert!(json_of("--compare admission")["runs"][0].get("load").is_none());
    }

    #[test]
    fn several_runs_are_a_list() {
        assert_eq!(json_of("--compare admission")["runs"].as_array().unwrap().len(), 5);
        assert_eq!(json_of("--curve 1:1:1")["runs"].as_array().unwrap().len(), 1, "a curve, if of one point");
    }

    #[test]
    fn the_same_seed_gives_the_same_figures() {
        let options = "--compare all --curve 1:3:1 --jitter 2 --seed";
        assert_eq!(answer_of(&format!("{options} 7"), true), answer_of(&format!("{options} 7"), true));
        assert_ne!(json_of("--seed 7")["ttft_mean_s"], json_of("--seed 8")["ttft_mean_s"]);
    }

    #[test]
    fn a_report_says_what_was_played() {
        let text = answer_of("--jitter 2 --seed 7", false);
        for part in ["small.jsonl: 60 requests", "llama3-70b-a800", "seed 7, jitter 2 s", "SLO met", "TTFT floor"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let table = answer_of("--compare all --curve 1:2:1", false);
        assert_eq!(table.lines().filter(|line| line.starts_with("admission")).count(), 10, "{table}");
    }

    #[test]
    fn a_page_is_written_where_it_is_wanted() {
        let page = tempfile::NamedTempFile::new().unwrap();
        answer_of(&format!("--html {}", page.path().display()), true);
        assert!(std::fs::read_to_string(page.path()).unwrap().ends_with("</html>\n"));
        let args = parse("--trace t --html /nowhere/page.html").unwrap();
        let error = html_error(args.html.as_deref().unwrap(), io::ErrorKind::NotFound.into());
        assert!(error.to_string().starts_with("--html /nowhere/page.html: "), "{error}");
    }
}
