//! The report of runs: for people, and for programs.

use std::time::Duration;

use serde_json::{Value, json};

use super::args::SimulateArgs;
use super::runs::Run;
use super::workload::Workload;
use crate::options::{Feature, SimOptions};
use crate::policy::SimPlacement;

/// What a table shows of each run: its head, how to read it, and the figure.
type Column = (&'static str, &'static str, fn(&Run) -> String);

const COLUMNS: [Column; 13] = [
    ("MET", "requests within both objectives", |run| percent(run.summary.by_requests.met)),
    ("BOUND", "the most that any policy can serve within both", |run| percent(run.bound)),
    ("BY TOKENS", "met, each request weighted by its prompt's tokens", |run| percent(run.summary.by_prompt_tokens.met)),
    ("LONGEST", "met of the longest tenth of prompts", |run| percent(run.summary.longest_tenth.met)),
    ("LATE", "served, but not within both", |run| percent(run.summary.by_requests.late)),
    ("REJECTED", "refused when they came", |run| percent(run.summary.by_requests.rejected)),
    ("FAILED", "taken in, and not served to their end", |run| percent(run.summary.by_requests.failed)),
    ("TTFT", "mean time to first token, seconds", |run| format!("{:.3}", run.summary.ttft_mean_s)),
    ("P50", "half are below, seconds", |run| format!("{:.3}", run.summary.ttft_p50_s)),
    ("P99", "99 % are below, seconds", |run| format!("{:.3}", run.summary.ttft_p99_s)),
    ("TBT", "mean time between tokens, milliseconds", |run| format!("{:.1}", run.summary.tbt_mean_s * 1e3)),
    ("P99", "99 % are below, milliseconds", |run| format!("{:.1}", run.summary.tbt_p99_s * 1e3)),
    ("HITS", "tokens of prompts that were cached", |run| percent(run.summary.cache_hit_ratio)),
];

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// For people: one run in full, or several in a table.
pub(crate) fn text(args: &SimulateArgs, workload: &Workload, runs: &[Run]) -> String {
    let mut head = head(args, workload);
    match runs {
        [run] => {
            head.insert(1, ("speed", format!("{}x", run.setting.options.speed)));
            let others = other_options(workload, &run.setting.options);
            if !others.is_empty() {
                head.push(("options", others.join(", ")));
            }
            format!("{}\n\n{}", lines(&head), lines(&figures(workload, run)))
        }
        _ => {
            let meanings = COLUMNS.map(|(head, meaning, _)| (head, meaning.to_owned()));
            format!("{}\n\n{}\n\n{}", lines(&head), comparison(runs), lines(&meanings))
        }
    }
}

fn lines(rows: &[(&str, String)]) -> String {
    let rows: Vec<_> = rows.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]).collect();
    table(2, &rows)
}

/// Columns padded to their widest cell, two spaces apart; the first `names` columns to the left,
/// figures to the right.
fn table(names: usize, rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let pad = |(column, cell): (usize, &String)| match (column < names, widths[column]) {
        (true, width) => format!("{cell:<width$}"),
        (false, width) => format!("{cell:>width$}"),
    };
    let lines = rows.iter().map(|row| row.iter().enumerate().map(pad).collect::<Vec<_>>().join("  "));
    lines.map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// One row for each run.
fn comparison(runs: &[Run]) -> String {
    let names = ["RUN", "SPEED"].map(str::to_owned).into_iter();
    let head = names.chain(COLUMNS.map(|(head, ..)| head.to_owned())).collect();
    let row = |run: &Run| {
        let names = [run.setting.name.clone(), format!("{}x", run.setting.options.speed)];
        names.into_iter().chain(COLUMNS.map(|(_, _, figure)| figure(run))).collect()
    };
    table(1, &std::iter::once(head).chain(runs.iter().map(row)).collect::<Vec<_>>())
}

/// What is the same for all runs.
fn head(args: &SimulateArgs, workload: &Workload) -> Vec<(&'static str, String)> {
    let requests = workload.trace.requests.len();
    let seconds = workload.span().as_secs_f64();
    let slo = |name, time: Option<Duration>| time.map(|time| format!("{name} {} ms", time.as_secs_f64() * 1e3));
    let slos: Vec<_> = slo("TTFT", args.ttft_slo_ms).into_iter().chain(slo("TBT", args.tbt_slo_ms)).collect();
    let placement = args.placement.as_str();
    let admission = args.admission.as_str();
    vec![
        ("trace", format!("{}: {requests} requests in {seconds:.0} s", workload.name)),
        ("cluster", format!("{} prefill + {} decode nodes, {}", args.prefill, args.decode, workload.profile.name)),
        ("policies", format!("placement {placement}, admission {admission}")),
        ("drawn", format!("seed {}, jitter {} s", args.seed, workload.jitter.as_secs_f64())),
        ("counted", format!("window {}", args.window.as_str())),
        ("objectives", if slos.is_empty() { "none".to_owned() } else { slos.join(", ") }),
        ("TTFT floor", format!("{:.3} s mean: infinite cache, no queue", workload.floor_ttft_mean_s)),
    ]
}

/// Options that differ from their defaults, without those that the head has by name.
fn other_options(workload: &Workload, options: &SimOptions) -> Vec<String> {
    let these = options_json(workload, options);
    let defaults = options_json(workload, &SimOptions::default());
    let names = [
        "without",
        "balancing_threshold",
        "max_wait_ms",
        "queue_timeout_s",
        "max_overtaken_s",
        "block_tokens",
        "cache_blocks",
        "decode_blocks",
        "ssd_blocks",
        "fault_every_s",
        "fault",
    ];
    let named = names.into_iter().filter(|name| these[name] != defaults[name]);
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    named
        .map(|name| format!("{name} {}", if these[name].is_null() { "off".into() } else { text(&these[name]) }))
        .collect()
}

/// What a run came to, line by line.
fn figures(workload: &Workload, run: &Run) -> Vec<(&'static str, String)> {
    let s = &run.summary;
    // A time of nothing is none.
    let or_none = |text: String| if s.completed == 0 { "nothing was completed".to_owned() } else { text };
    let spread = |mean, p50, p90, p99| format!("mean {mean:.3} s, p50 {p50:.3}, p90 {p90:.3}, p99 {p99:.3}");
    let ttft = spread(s.ttft_mean_s, s.ttft_p50_s, s.ttft_p90_s, s.ttft_p99_s);
    let over_floor = s.ttft_mean_s / workload.floor_ttft_mean_s.max(f64::MIN_POSITIVE);
    let all = percent(s.cache_hit_ratio);
    let local = percent(s.cache_hit_ratio_local);
    let ssd = percent(s.cache_hit_ratio_ssd);
    let fetched = percent(s.cache_hit_ratio_fetched);
    let [ttft_p50, ttft_p90] = [s.ttft_error_p50, s.ttft_error_p90].map(percent);
    let [tbt_p50, tbt_p90] = [s.tbt_error_p50, s.tbt_error_p90].map(percent);
    let mut lines = vec![
        (
            "requests",
            format!("{}: {} met, {} late, {} rejected, {} failed", s.requests, s.met, s.late, s.rejected, s.failed),
        ),
        (
            "met",
            format!(
                "{} ({} by prompt tokens, {} of the longest tenth); no policy gets above {}",
                percent(s.by_requests.met),
                percent(s.by_prompt_tokens.met),
                percent(s.longest_tenth.met),
                percent(run.bound)
            ),
        ),
        ("TTFT", or_none(format!("{ttft}; {over_floor:.2} times the floor"))),
        ("TBT", or_none(spread(s.tbt_mean_s, s.tbt_p50_s, s.tbt_p90_s, s.tbt_p99_s))),
        (
            "cache hits",
            format!("{all} of prompt tokens: {local} the node's own, {ssd} its SSD's, {fetched} from other nodes"),
        ),
        ("computed", format!("{} tokens of prompts; {} requests migrated", s.computed_tokens, s.migrated)),
        ("prefill load", format!("mean {:.3} s of work; {}", s.prefill_load_mean, imbalance(s.prefill_imbalance))),
        ("decode load", format!("mean {} of the blocks", percent(s.decode_load_mean))),
        (
            "prediction",
            or_none(format!("TTFT wrong by {ttft_p50} (p50), {ttft_p90} (p90); TBT by {tbt_p50}, {tbt_p90}")),
        ),
    ];
    if run.setting.options.fault_every.is_some() {
        let faults = run.faults.iter().map(|(kind, count)| format!("{} {count}", kind.as_str()));
        let faults: Vec<_> = faults.collect();
        lines.push(("faults", if faults.is_empty() { "none happened".to_owned() } else { faults.join(", ") }));
    }
    lines
}

fn imbalance(times: f64) -> String {
    format!("the busiest node computed {times:.2} times the mean")
}

/// For programs: the object of one run, or of several an object that lists them.
pub(crate) fn json(args: &SimulateArgs, workload: &Workload, runs: &[Run]) -> serde_json::Result<Value> {
    let mut objects = runs.iter().map(|run| run_json(args, workload, run)).collect::<Result<Vec<_>, _>>()?;
    let is_single = args.compare.is_none() && args.curve.is_none();
    Ok(if is_single { objects.swap_remove(0) } else { json!({ "runs": objects }) })
}

/// One run: its figures, the bounds, and what was played.
fn run_json(args: &SimulateArgs, workload: &Workload, run: &Run) -> serde_json::Result<Value> {
    let mut object = serde_json::to_value(&run.summary)?;
    if run.summary.completed == 0 {
        // A time of nothing is none.
        for name in ["ttft", "tbt"] {
            ["mean_s", "p50_s", "p90_s", "p99_s", "error_p50", "error_p90"]
                .iter()
                .for_each(|figure| object[format!("{name}_{figure}")] = Value::Null);
        }
    }
    object["floor_ttft_mean_s"] = json!(workload.floor_ttft_mean_s);
    object["met_bound"] = json!(run.bound);
    object["run"] = json!(run.setting.name);
    let faults = run.faults.iter().map(|(kind, count)| (kind.as_str().to_owned(), json!(count)));
    object["faults"] = Value::Object(faults.collect());
    object["options"] = options_json(workload, &run.setting.options);
    object["options"]["duration_s"] = json!(args.duration.map(|duration| duration.as_secs_f64()));
    Ok(object)
}

fn options_json(workload: &Workload, options: &SimOptions) -> Value {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let balancing_threshold = match options.placement {
        SimPlacement::Mooncake { balancing_threshold } => Some(balancing_threshold),
        _ => None,
    };
    json!({
        "trace": workload.name,
        "model_profile": workload.profile.name,
        "prefill": options.prefill,
        "decode": options.decode,
        "placement": options.placement.as_str(),
        "admission": options.admission.as_str(),
        "without": options.without.map(Feature::as_str),
        "balancing_threshold": balancing_threshold,
        "speed": options.speed,
        "ttft_slo_ms": options.ttft_slo.map(millis),
        "tbt_slo_ms": options.tbt_slo.map(millis),
        "max_wait_ms": options.max_wait.map(millis),
        "queue_timeout_s": options.queue_timeout.as_secs_f64(),
        "max_overtaken_s": options.max_overtaken.as_secs_f64(),
        "seed": options.seed,
        "jitter_s": workload.jitter.as_secs_f64(),
        "window": options.window.as_str(),
        "block_tokens": options.block_tokens,
        "cache_blocks": options.cache_blocks,
        "decode_blocks": options.decode_blocks,
        "ssd_blocks": options.ssd_blocks,
        "fault_every_s": options.fault_every.map(|every| every.as_secs_f64()),
        "fault": options.fault.map(|kind| kind.as_str()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_table_aligns_names_left_and_figures_right() {
        let rows = [["POLICY", "N"], ["décode", "200"], ["p", "1"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(1, &rows), "POLICY    N\ndécode  200\np         1");
    }
}
