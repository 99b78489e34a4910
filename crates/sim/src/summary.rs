//! What a run amounts to.

use std::time::Duration;

use serde::Serialize;

use crate::cluster::Outcome;
use crate::options::SimOptions;
use crate::record::RequestRecord;
use crate::spread::Spread;

/// How requests ended, in shares of all. Their sum is 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Ends {
    /// Completed within both objectives. What has no objective meets it.
    pub met: f64,
    /// Completed, and not within both.
    pub late: f64,
    /// Refused when they came.
    pub rejected: f64,
    /// Taken in, and not served to their end.
    pub failed: f64,
}

/// What a run amounts to, over the requests of its window. Times in seconds, shares 0 to 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Requests that arrived.
    pub requests: usize,
    /// Of them, those that got all their tokens.
    pub completed: usize,
    /// Of those, the ones within both objectives.
    pub met: usize,
    /// And the others.
    pub late: usize,
    /// Requests that were refused.
    pub rejected: usize,
    /// Requests that were taken in and not served to their end; of a run with faults, those whose
    /// client left, too.
    pub failed: usize,
    /// Each request counts as one.
    pub by_requests: Ends,
    /// Each counts by the tokens of its prompt.
    pub by_prompt_tokens: Ends,
    /// Of the longest tenth of prompts.
    pub longest_tenth: Ends,
    /// Requests within both objectives per second of the trace's time.
    pub goodput_per_s: f64,
    /// Time to first token of what was completed.
    pub ttft_mean_s: f64,
    /// Half are below.
    pub ttft_p50_s: f64,
    /// 90 % are below.
    pub ttft_p90_s: f64,
    /// 99 % are below.
    pub ttft_p99_s: f64,
    /// Time between tokens of what was completed.
    pub tbt_mean_s: f64,
    /// Half are below.
    pub tbt_p50_s: f64,
    /// 90 % are below.
    pub tbt_p90_s: f64,
    /// 99 % are below.
    pub tbt_p99_s: f64,
    /// Tokens of prompts that need not be computed over all tokens of prompts that were.
    pub cache_hit_ratio: f64,
    /// Of it, from the prefill node's own cache.
    pub cache_hit_ratio_local: f64,
    /// Of it, from the prefill node's own SSD.
    pub cache_hit_ratio_ssd: f64,
    /// Of it, from other nodes.
    pub cache_hit_ratio_fetched: f64,
    /// Tokens of prompts that were computed.
    pub computed_tokens: u64,
    /// Requests that went on at another decode node.
    pub migrated: usize,
    /// Median of |predicted - measured| / measured time to first token.
    pub ttft_error_p50: f64,
    /// 90 % are below.
    pub ttft_error_p90: f64,
    /// The same of the time between tokens.
    pub tbt_error_p50: f64,
    /// The same.
    pub tbt_error_p90: f64,
    /// Seconds of work that wait at a prefill node, while requests come.
    pub prefill_load_mean: f64,
    /// Share of a decode node's blocks that requests hold or were promised, while requests come.
    pub decode_load_mean: f64,
    /// Tokens computed by the busiest prefill node over the mean.
    pub prefill_imbalance: f64,
}

fn share(part: f64, whole: f64) -> f64 {
    // An empty sum is -0.
    if whole > 0.0 { part / whole + 0.0 } else { 0.0 }
}

/// |predicted - measured| / measured, if both are known.
fn errors(times: impl Iterator<Item = (Option<Duration>, Option<Duration>)>) -> Spread {
    Spread::of(times.filter_map(|(predicted, measured)| {
        let predicted = predicted?.as_secs_f64();
        let measured = measured?.as_secs_f64();
        Some((predicted - measured).abs() / measured.max(1e-6))
    }))
}

/// Whether it was completed within both objectives.
fn is_met(record: &RequestRecord, options: &SimOptions) -> bool {
    let within = |time: Option<Duration>, slo: Option<Duration>| slo.zip(time).is_none_or(|(slo, time)| time <= slo);
    record.finished.is_some() && within(record.ttft, options.ttft_slo) && within(record.tbt, options.tbt_slo)
}

impl Ends {
    fn of(records: &[&RequestRecord], options: &SimOptions, weight: fn(&RequestRecord) -> f64) -> Self {
        let mut ends = Self::default();
        let mut all = 0.0;
        for record in records {
            let end = match (record.finished.is_some(), record.rejected) {
                (true, _) if is_met(record, options) => &mut ends.met,
                (true, _) => &mut ends.late,
                (false, true) => &mut ends.rejected,
                (false, false) => &mut ends.failed,
            };
            *end += weight(record);
            all += weight(record);
        }
        let Self { met, late, rejected, failed } = ends;
        let [met, late, rejected, failed] = [met, late, rejected, failed].map(|part| share(part, all));
        Self { met, late, rejected, failed }
    }
}

impl Summary {
    /// Of a run with these options.
    pub fn of(outcome: &Outcome, options: &SimOptions) -> Self {
        let records = outcome.counted(options.window);
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let count = |test: &dyn Fn(&RequestRecord) -> bool| records.iter().filter(|record| test(record)).count();
        let completed: Vec<_> = records.iter().filter(|record| record.finished.is_some()).collect();
        let ttft = Spread::of(completed.iter().filter_map(|record| seconds(record.ttft)));
        let tbt = Spread::of(completed.iter().filter_map(|record| seconds(record.tbt)));
        let prefilled: Vec<_> = records.iter().filter(|record| record.ttft.is_some()).collect();
        let tokens = |of: fn(&RequestRecord) -> u32| prefilled.iter().map(|record| f64::from(of(record))).sum::<f64>();
        let prompt = tokens(|record| record.prompt_tokens);
        let [local, ssd, fetched] =
            [tokens(|record| record.local_tokens), tokens(|record| record.ssd_tokens), tokens(|r| r.fetched_tokens)];
        let ttft_error = errors(prefilled.iter().map(|record| (record.predicted_ttft, record.ttft)));
        let tbt_error = errors(completed.iter().map(|record| (record.predicted_tbt, record.tbt)));
        let first = records.first().map(|r| r.arrived);
        let last = records.last().map(|r| r.arrived);
        let span = last.unwrap_or_default().saturating_sub(first.unwrap_or_default()).as_secs_f64();
        let mut longest = records.clone();
        longest.sort_by_key(|record| std::cmp::Reverse(record.prompt_tokens));
        longest.truncate(records.len().div_ceil(10));
        let met = count(&|record| is_met(record, options));
        let mut computed_by_node = vec![0.0; options.prefill];
        for record in &prefilled {
            if let Some(computed) = record.prefill.and_then(|node| computed_by_node.get_mut(node)) {
                *computed += f64::from(record.computed_tokens);
            }
        }
        let busiest = computed_by_node.iter().copied().fold(0.0, f64::max);
        let mean_computed = computed_by_node.iter().sum::<f64>() / options.prefill.max(1) as f64;
        Self {
            requests: records.len(),
            completed: completed.len(),
            met,
            late: completed.len() - met,
            rejected: count(&|record| record.rejected),
            failed: count(&|record| record.finished.is_none() && !record.rejected),
            by_requests: Ends::of(&records, options, |_| 1.0),
            by_prompt_tokens: Ends::of(&records, options, |record| f64::from(record.prompt_tokens)),
            longest_tenth: Ends::of(&longest, options, |_| 1.0),
            goodput_per_s: share(met as f64, span),
            ttft_mean_s: ttft.mean(),
            ttft_p50_s: ttft.quantile(0.5),
            ttft_p90_s: ttft.quantile(0.9),
            ttft_p99_s: ttft.quantile(0.99),
            tbt_mean_s: tbt.mean(),
            tbt_p50_s: tbt.quantile(0.5),
            tbt_p90_s: tbt.quantile(0.9),
            tbt_p99_s: tbt.quantile(0.99),
            cache_hit_ratio: share(local + ssd + fetched, prompt),
            cache_hit_ratio_local: share(local, prompt),
            cache_hit_ratio_ssd: share(ssd, prompt),
            cache_hit_ratio_fetched: share(fetched, prompt),
            computed_tokens: prefilled.iter().map(|record| u64::from(record.computed_tokens)).sum(),
            migrated: count(&|record| record.migrations > 0),
            ttft_error_p50: ttft_error.quantile(0.5),
            ttft_error_p90: ttft_error.quantile(0.9),
            tbt_error_p50: tbt_error.quantile(0.5),
            tbt_error_p90: tbt_error.quantile(0.9),
            prefill_load_mean: outcome.prefill_load_mean,
            decode_load_mean: outcome.decode_load_mean,
            prefill_imbalance: share(busiest, mean_computed),
        }
    }
}
