//! The figures of a run.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::args::ServeArgs;
use super::gaps::{GapCounts, GapHistogram};
use super::play::{Played, Server};
use crate::stats::{mean, quantiles};
use crate::table::{named_values, seconds};

/// A generator that was later than this for one request in a hundred measured itself, too. Seconds.
const SLIP_TO_TRUST_S: f64 = 0.01;

/// The figures of a run. Times in seconds; quantiles are over completed requests, and `None` if
/// there are none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    url: String,
    /// `openai` or `grpc`.
    api: &'static str,
    model: String,
    seed: u64,
    /// How requests came.
    arrivals: String,
    /// That were due.
    requests: usize,
    /// How they ended; the sum is `requests`.
    ends: Ends,
    /// Of what failed, by reason.
    failures: BTreeMap<String, usize>,
    /// Of what was aborted, by reason.
    aborts: BTreeMap<String, usize>,
    /// From the beginning to the last end.
    seconds: f64,
    /// Requests over the time in which they were due.
    offered_per_s: f64,
    /// Time to first token, from when the request was due.
    ttft_mean_s: Option<f64>,
    ttft_p50_s: Option<f64>,
    ttft_p90_s: Option<f64>,
    ttft_p99_s: Option<f64>,
    /// Mean gap of a request.
    tbt_mean_p50_s: Option<f64>,
    tbt_mean_p90_s: Option<f64>,
    /// Mean of the longest tenth of a request's gaps.
    tbt_tail_mean_s: Option<f64>,
    tbt_tail_p50_s: Option<f64>,
    tbt_tail_p90_s: Option<f64>,
    tbt_tail_p99_s: Option<f64>,
    /// Of all gaps.
    gap_p50_s: Option<f64>,
    gap_p99_s: Option<f64>,
    /// Longest of all gaps.
    gap_max_s: Option<f64>,
    /// Of completed requests, as the server says.
    prompt_tokens: u64,
    /// Of them, those that were not computed, if the server says so.
    cached_tokens: u64,
    /// Of completed requests.
    output_tokens: u64,
    output_tokens_per_s: f64,
    /// Share of output tokens that came in one message with another one.
    merged_share: f64,
    /// Completed requests with fewer tokens than were asked for: their server had less to do than
    /// one that gave all of them.
    short: usize,
    ttft_limit_s: f64,
    tbt_limit_s: f64,
    /// Requests within both limits, of all that were due.
    goodput_share: f64,
    /// The same for each second.
    goodput_per_s: f64,
    /// How late the generator sent.
    slip_p50_s: Option<f64>,
    slip_p99_s: Option<f64>,
    slip_max_s: Option<f64>,
    /// Most requests under way at a time.
    in_flight_max: usize,
    gaps: GapHistogram,
    #[serde(skip)]
    drawn: GapCounts,
}

/// Requests by how they ended; each is in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Ends {
    /// Completed within both limits.
    met: usize,
    /// Completed otherwise.
    late: usize,
    rejected_429: usize,
    rejected_503: usize,
    /// Given up by their client, by this one after --timeout: neither met nor late.
    aborted: usize,
    failed: usize,
    /// Due while as many as may be were under way.
    not_sent: usize,
}

impl Report {
    /// `due_s` is when the last request was due.
    pub(super) fn new(args: &ServeArgs, servers: &[Server], due_s: f64, played: Played) -> Self {
        let Played { sums, elapsed, in_flight_max } = played;
        let seconds = elapsed.as_secs_f64();
        let requests = sums.requests();
        let [ttft_p50_s, ttft_p90_s, ttft_p99_s] = quantiles(&sums.ttft_s, [0.5, 0.9, 0.99]);
        let [tbt_mean_p50_s, tbt_mean_p90_s] = quantiles(&sums.tbt_mean_s, [0.5, 0.9]);
        let [tbt_tail_p50_s, tbt_tail_p90_s, tbt_tail_p99_s] = quantiles(&sums.tbt_tail_s, [0.5, 0.9, 0.99]);
        let [slip_p50_s, slip_p99_s, slip_max_s] = quantiles(&sums.slip_s, [0.5, 0.99, 1.0]);
        // They serve the same.
        let (api, model) = servers.first().map_or(("", ""), Server::names);
        Self {
            url: args.url.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            api,
            model: model.to_owned(),
            seed: args.seed,
            arrivals: arrivals(args),
            requests,
            ends: Ends {
                met: sums.met,
                late: sums.late,
                rejected_429: sums.rejected_429,
                rejected_503: sums.rejected_503,
                aborted: sums.aborted,
                failed: sums.failed,
                not_sent: sums.not_sent,
            },
            seconds,
            offered_per_s: share(requests as f64, due_s),
            ttft_mean_s: mean(&sums.ttft_s),
            ttft_p50_s,
            ttft_p90_s,
            ttft_p99_s,
            tbt_mean_p50_s,
            tbt_mean_p90_s,
            tbt_tail_mean_s: mean(&sums.tbt_tail_s),
            tbt_tail_p50_s,
            tbt_tail_p90_s,
            tbt_tail_p99_s,
            gap_p50_s: sums.gaps.quantile_s(0.5),
            gap_p99_s: sums.gaps.quantile_s(0.99),
            gap_max_s: sums.gaps.longest().map(|gap| gap.as_secs_f64()),
            prompt_tokens: sums.usage.prompt,
            cached_tokens: sums.usage.cached,
            output_tokens: sums.usage.output,
            output_tokens_per_s: share(sums.usage.output as f64, seconds),
            merged_share: share(sums.merged as f64, sums.usage.output as f64),
            short: sums.short,
            ttft_limit_s: args.ttft_limit.as_secs_f64(),
            tbt_limit_s: args.tbt_limit.as_secs_f64(),
            goodput_share: share(sums.met as f64, requests as f64),
            goodput_per_s: share(sums.met as f64, seconds),
            slip_p50_s,
            slip_p99_s,
            slip_max_s,
            in_flight_max,
            gaps: sums.gaps.histogram(),
            drawn: sums.gaps,
            failures: sums.failures.into_map(),
            aborts: sums.aborts.into_map(),
        }
    }

    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json { serde_json::to_string(self)? } else { self.table() };
        writeln!(io::stdout(), "{text}")
    }

    fn table(&self) -> String {
        let Ends { met, late, rejected_429, rejected_503, aborted, failed, not_sent } = self.ends;
        let mut rows = vec![
            ("server", format!("{} ({}), {}", self.url, self.api, self.model)),
            (
                "requests",
                format!(
                    "{}, {}, in {:.1} s; at most {} under way",
                    self.requests, self.arrivals, self.seconds, self.in_flight_max
                ),
            ),
            (
                "ended",
                format!(
                    "{met} met, {late} late, {rejected_429} rejected (429), {rejected_503} rejected (503), {aborted} aborted, {failed} failed, {not_sent} not sent"
                ),
            ),
            (
                "goodput",
                format!(
                    "{:.1} %, {:.3} requests/s, with TTFT up to {} and tail TBT up to {}",
                    self.goodput_share * 100.0,
                    self.goodput_per_s,
                    seconds(self.ttft_limit_s),
                    seconds(self.tbt_limit_s)
                ),
            ),
            ("TTFT", row([("p50", self.ttft_p50_s), ("p90", self.ttft_p90_s), ("p99", self.ttft_p99_s)])),
            ("TBT, mean", row([("p50", self.tbt_mean_p50_s), ("p90", self.tbt_mean_p90_s)])),
            (
                "TBT, tail",
                row([("p50", self.tbt_tail_p50_s), ("p90", self.tbt_tail_p90_s), ("longest gap", self.gap_max_s)]),
            ),
            (
                "output",
                format!(
                    "{} tokens, {:.1} tokens/s, {:.1} % in one message with another; {} answers shorter than asked",
                    self.output_tokens,
                    self.output_tokens_per_s,
                    self.merged_share * 100.0,
                    self.short
                ),
            ),
            ("prompts", format!("{} tokens, of which {} were cached", self.prompt_tokens, self.cached_tokens)),
            ("sent late by", row([("p50", self.slip_p50_s), ("p99", self.slip_p99_s), ("max", self.slip_max_s)])),
        ];
        if self.slip_p99_s.is_some_and(|slip| slip > SLIP_TO_TRUST_S) {
            rows.push(("", "the generator itself was late: times hold its delays, too".to_owned()));
        }
        let mut lines = vec![named_values(&rows)];
        lines.extend(self.aborts.iter().map(|(reason, count)| format!("{count} aborted: {reason}")));
        lines.extend(self.failures.iter().map(|(reason, count)| format!("{count} failed: {reason}")));
        lines.push("\ngaps between tokens".to_owned());
        lines.extend(self.drawn.lines());
        lines.join("\n")
    }
}

/// How requests came.
fn arrivals(args: &ServeArgs) -> String {
    match (&args.trace, args.rate) {
        (Some(path), _) => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            format!("trace {name} x{}", args.speed)
        }
        (None, rate) => format!("poisson {}/s", rate.unwrap_or_default()),
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn row<const N: usize>(figures: [(&str, Option<f64>); N]) -> String {
    figures.map(|(name, time)| format!("{name} {}", time.map_or_else(|| "-".to_owned(), seconds))).join(", ")
}
