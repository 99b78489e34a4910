//! What a run amounts to.

use std::time::Duration;

use serde::Serialize;

use crate::cluster::Outcome;
use crate::options::SimOptions;
use crate::record::RequestRecord;
use crate::spread::Spread;

/// What a run amounts to, over the requests of its window. Times in seconds, shares 0 to 1.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Requests that arrived.
    pub requests: usize,
    /// Of them, those that got all their tokens.
    pub completed: usize,
    /// Of them, those that were refused.
    pub rejected: usize,
    /// Of them, those that were taken in and not served to their end.
    pub failed: usize,
    /// Completed, and not within both objectives.
    pub late: usize,
    /// Completed within both objectives.
    pub slo_met: usize,
    /// Share of all requests that this is.
    pub slo_met_share: f64,
    /// The same, each request weighted by its tokens (prompt and answer).
    pub slo_met_token_share: f64,
    /// Completed within the objective of the time to first token.
    pub ttft_met: usize,
    /// Completed within the objective of the time between tokens.
    pub tbt_met: usize,
    /// Share of the longest tenth of prompts that met both.
    pub slo_met_share_longest_tenth: f64,
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
    /// Mean of the decode load over the window's time.
    pub decode_load_mean: f64,
    /// Its standard deviation.
    pub decode_load_swing: f64,
    /// Mean of the prefill load.
    pub prefill_load_mean: f64,
    /// Its standard deviation.
    pub prefill_load_swing: f64,
    /// Tokens computed by the busiest prefill node over the mean.
    pub prefill_imbalance: f64,
}

fn share(part: f64, whole: f64) -> f64 {
    // An empty sum is -0.
    if whole > 0.0 { part / whole + 0.0 } else { 0.0 }
}

/// |predicted - measured| / measured, where both are known.
fn errors(times: impl Iterator<Item = (Option<Duration>, Option<Duration>)>) -> Spread {
    Spread::of(times.filter_map(|(predicted, measured)| {
        let (predicted, measured) = (predicted?.as_secs_f64(), measured?.as_secs_f64());
        Some((predicted - measured).abs() / measured.max(1e-6))
    }))
}

impl Summary {
    /// Of a run with these options.
    pub fn of(outcome: &Outcome, options: &SimOptions) -> Self {
        let records = outcome.counted(options.window);
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        // What has no objective meets it.
        let within =
            |time: Option<Duration>, slo: Option<Duration>| slo.zip(time).is_none_or(|(slo, time)| time <= slo);
        let ttft_met = |record: &RequestRecord| record.finished.is_some() && within(record.ttft, options.ttft_slo);
        let tbt_met = |record: &RequestRecord| record.finished.is_some() && within(record.tbt, options.tbt_slo);
        let met = |record: &RequestRecord| ttft_met(record) && tbt_met(record);
        let tokens = |record: &RequestRecord| f64::from(record.prompt_tokens + record.output_tokens);
        let count = |test: &dyn Fn(&RequestRecord) -> bool| records.iter().filter(|record| test(record)).count();
        let completed: Vec<_> = records.iter().filter(|record| record.finished.is_some()).collect();
        let ttft = Spread::of(completed.iter().filter_map(|record| seconds(record.ttft)));
        let tbt = Spread::of(completed.iter().filter_map(|record| seconds(record.tbt)));
        let prefilled: Vec<_> = records.iter().filter(|record| record.ttft.is_some()).collect();
        let prompt: f64 = prefilled.iter().map(|record| f64::from(record.prompt_tokens)).sum();
        let local: f64 = prefilled.iter().map(|record| f64::from(record.local_tokens)).sum();
        let ssd: f64 = prefilled.iter().map(|record| f64::from(record.ssd_tokens)).sum();
        let fetched: f64 = prefilled.iter().map(|record| f64::from(record.fetched_tokens)).sum();
        let ttft_error = errors(prefilled.iter().map(|record| (record.predicted_ttft, record.ttft)));
        let tbt_error = errors(completed.iter().map(|record| (record.predicted_tbt, record.tbt)));
        let (first, last) = (records.first().map(|r| r.arrived), records.last().map(|r| r.arrived));
        let (first, last) = (first.unwrap_or_default().as_secs_f64(), last.unwrap_or_default().as_secs_f64());
        let samples: Vec<_> = outcome.samples.iter().filter(|s| s.at_s >= first && s.at_s <= last).collect();
        let decode_load = Spread::of(samples.iter().map(|sample| sample.decode_load));
        let prefill_load = Spread::of(samples.iter().map(|sample| sample.prefill_load));
        let mut by_length = records.clone();
        by_length.sort_by_key(|record| std::cmp::Reverse(record.prompt_tokens));
        by_length.truncate(records.len().div_ceil(10));
        let longest_met = by_length.iter().filter(|record| met(record)).count();
        let slo_met = count(&met);
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
            rejected: count(&|record| record.rejected),
            failed: count(&|record| record.failed.is_some()),
            late: completed.len() - slo_met,
            slo_met,
            slo_met_share: share(slo_met as f64, records.len() as f64),
            slo_met_token_share: share(
                records.iter().filter(|record| met(record)).map(|record| tokens(record)).sum(),
                records.iter().map(|record| tokens(record)).sum(),
            ),
            ttft_met: count(&ttft_met),
            tbt_met: count(&tbt_met),
            slo_met_share_longest_tenth: share(longest_met as f64, by_length.len() as f64),
            goodput_per_s: share(slo_met as f64, last - first),
            ttft_mean_s: ttft.mean(),
            ttft_p50_s: ttft.quantile(0.5),
            ttft_p90_s: ttft.quantile(0.9),
            ttft_p99_s: ttft.quantile(0.99),
            tbt_mean_s: tbt.mean(),
            tbt_p50_s: tbt.quantile(0.5),
            tbt_p90_s: tbt.quantile(0.9),
            tbt_p99_s: tbt.quantile(0.99),
            cache_hit_ratio: share(local + ssd + fetched, prompt),
            cache_hit_ratio_ssd: share(ssd, prompt),
            cache_hit_ratio_local: share(local, prompt),
            cache_hit_ratio_fetched: share(fetched, prompt),
            computed_tokens: prefilled.iter().map(|record| u64::from(record.computed_tokens)).sum(),
            migrated: count(&|record| record.migrations > 0),
            ttft_error_p50: ttft_error.quantile(0.5),
            ttft_error_p90: ttft_error.quantile(0.9),
            tbt_error_p50: tbt_error.quantile(0.5),
            tbt_error_p90: tbt_error.quantile(0.9),
            decode_load_mean: decode_load.mean(),
            decode_load_swing: decode_load.deviation(),
            prefill_load_mean: prefill_load.mean(),
            prefill_load_swing: prefill_load.deviation(),
            prefill_imbalance: share(busiest, mean_computed),
        }
    }
}
