//! The report of runs for people.

use std::time::Duration;

use super::columns::COLUMNS;
use super::plan::Setting;
use super::runs::Run;
use super::table::{comparison, table};
use super::workload::Workload;
use crate::summary::Summary;

/// Lines of name and value.
pub(crate) fn lines(rows: &[(&str, String)]) -> String {
    let rows: Vec<_> = rows.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]).collect();
    table(2, &rows)
}

/// The whole report: one run in full, or several in a table.
pub(crate) fn report(workload: &Workload, window: &str, runs: &[Run]) -> String {
    match runs {
        [run] => format!("{}\n\n{}", lines(&head(workload, window, &run.setting)), lines(&figures(workload, run))),
        _ => {
            let head = runs.first().map_or_else(String::new, |run| lines(&shared_head(workload, window, &run.setting)));
            format!("{head}\n\n{}\n\n{}", comparison(runs), meanings())
        }
    }
}

/// What is the same for all runs of a comparison.
pub(crate) fn shared_head(workload: &Workload, window: &str, setting: &Setting) -> Vec<(&'static str, String)> {
    let options = &setting.options;
    let (requests, seconds) = (workload.trace.requests.len(), workload.span().as_secs_f64());
    let jitter = match workload.jitter.is_zero() {
        true => "none".to_owned(),
        false => format!("{} s", workload.jitter.as_secs_f64()),
    };
    let slo = |name, time: Option<Duration>| time.map(|time| format!("{name} {} s", time.as_secs_f64()));
    let slos: Vec<_> = slo("TTFT", options.ttft_slo).into_iter().chain(slo("TBT", options.tbt_slo)).collect();
    vec![
        ("trace", format!("{}: {requests} requests in {seconds:.0} s", workload.name)),
        (
            "cluster",
            format!("{} prefill + {} decode nodes, {}", options.prefill, options.decode, workload.profile.name),
        ),
        ("drawn", format!("seed {}, jitter {jitter}", options.seed)),
        ("counted", format!("window {window}")),
        ("objectives", if slos.is_empty() { "none".to_owned() } else { slos.join(", ") }),
        ("TTFT floor", format!("{:.3} s mean: infinite cache, no queue", workload.floor_ttft_mean_s)),
    ]
}

/// What is the same for the paper's tables, each of which has nodes of its own.
pub(crate) fn paper_head(workload: &Workload, window: &str, setting: &Setting) -> Vec<(&'static str, String)> {
    let mut rows = shared_head(workload, window, setting);
    rows[1] = ("model profile", workload.profile.name.clone());
    rows
}

pub(crate) fn head(workload: &Workload, window: &str, setting: &Setting) -> Vec<(&'static str, String)> {
    let options = &setting.options;
    let (placement, admission) = (options.placement.as_str(), options.admission.as_str());
    let policies =
        format!("placement {placement}, admission {admission}, eviction {}", setting.options.eviction.as_str());
    let mut rows = shared_head(workload, window, setting);
    rows.insert(2, ("policies", policies));
    rows.insert(3, ("speed", format!("{}x", options.speed)));
    rows
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn of(part: usize, whole: usize) -> String {
    percent(part as f64 / whole.max(1) as f64)
}

/// What a run came to, line by line.
pub(crate) fn figures(workload: &Workload, run: &Run) -> Vec<(&'static str, String)> {
    let s = &run.summary;
    let spread = |mean, p50, p90, p99| format!("mean {mean:.3} s, p50 {p50:.3}, p90 {p90:.3}, p99 {p99:.3}");
    let over_floor = s.ttft_mean_s / workload.floor_ttft_mean_s.max(f64::MIN_POSITIVE);
    let ttft = spread(s.ttft_mean_s, s.ttft_p50_s, s.ttft_p90_s, s.ttft_p99_s);
    vec![
        (
            "requests",
            format!("{}: {} met, {} late, {} rejected, {} failed", s.requests, s.slo_met, s.late, s.rejected, s.failed),
        ),
        ("SLO met", slo_met(s)),
        ("goodput", format!("{:.3} requests within both per second", s.goodput_per_s)),
        ("TTFT", format!("{ttft}; {over_floor:.2} times the floor")),
        ("TBT", spread(s.tbt_mean_s, s.tbt_p50_s, s.tbt_p90_s, s.tbt_p99_s)),
        ("cache hits", cache_hits(s)),
        ("computed", format!("{} tokens of prompts; {} requests migrated", s.computed_tokens, s.migrated)),
        ("prefill load", load(s.prefill_load_mean, s.prefill_load_swing) + &imbalance(s)),
        ("decode load", load(s.decode_load_mean, s.decode_load_swing)),
        ("prediction", prediction(s)),
    ]
}

fn slo_met(s: &Summary) -> String {
    format!(
        "{} both ({} of tokens, {} of the longest tenth), {} TTFT, {} TBT",
        percent(s.slo_met_share),
        percent(s.slo_met_token_share),
        percent(s.slo_met_share_longest_tenth),
        of(s.ttft_met, s.requests),
        of(s.tbt_met, s.requests)
    )
}

fn cache_hits(s: &Summary) -> String {
    let (all, local) = (percent(s.cache_hit_ratio), percent(s.cache_hit_ratio_local));
    let (ssd, fetched) = (percent(s.cache_hit_ratio_ssd), percent(s.cache_hit_ratio_fetched));
    format!("{all} of prompt tokens: {local} the node's own, {ssd} its SSD's, {fetched} from other nodes")
}

fn load(mean: f64, swing: f64) -> String {
    format!("mean {mean:.3}, swing {swing:.3}")
}

fn imbalance(s: &Summary) -> String {
    format!("; the busiest node computed {:.2} times the mean", s.prefill_imbalance)
}

fn prediction(s: &Summary) -> String {
    let [ttft_p50, ttft_p90] = [s.ttft_error_p50, s.ttft_error_p90].map(percent);
    let [tbt_p50, tbt_p90] = [s.tbt_error_p50, s.tbt_error_p90].map(percent);
    format!("TTFT wrong by {ttft_p50} (p50), {ttft_p90} (p90); TBT by {tbt_p50}, {tbt_p90}")
}

/// What the columns are.
fn meanings() -> String {
    let rows: Vec<_> = COLUMNS.iter().map(|column| (column.head, column.meaning.to_owned())).collect();
    lines(&rows)
}
