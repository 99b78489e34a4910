//! The report of runs for programs.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::args::SimulateArgs;
use super::runs::Run;
use super::workload::Workload;
use crate::policy::SimPlacement;
use crate::record::Sample;
use crate::summary::Summary;

/// One run: its figures, the floor, and what was played.
#[derive(Debug, Serialize)]
struct RunJson<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    /// Mean time to first token with an infinite cache and no queue.
    floor_ttft_mean_s: f64,
    options: OptionsJson<'a>,
}

#[derive(Debug, Serialize)]
struct OptionsJson<'a> {
    trace: &'a str,
    model_profile: &'a str,
    prefill: usize,
    decode: usize,
    placement: &'static str,
    admission: &'static str,
    eviction: &'static str,
    balancing_threshold: Option<f64>,
    speed: f64,
    ttft_slo_ms: Option<f64>,
    tbt_slo_ms: Option<f64>,
    max_wait_ms: Option<f64>,
    queue_timeout_s: f64,
    max_overtaken_s: f64,
    seed: u64,
    jitter_s: f64,
    duration_s: Option<f64>,
    window: &'static str,
    cache_blocks: Option<u32>,
    ssd_blocks: u32,
    block_tokens: u32,
    split_prompts: bool,
    replicate_prefixes: usize,
    kill_every_s: Option<f64>,
    fcfs: bool,
}

/// The object of one run, with its load over time; of several, an object that lists them.
pub(crate) fn report(args: &SimulateArgs, workload: &Workload, runs: &[Run]) -> serde_json::Result<Value> {
    let several = args.compare.is_some() || args.curve.is_some();
    match runs {
        [run] if !several => single(args, workload, run),
        _ => Ok(json!({ "runs": runs_json(args, workload, runs)? })),
    }
}

fn single(args: &SimulateArgs, workload: &Workload, run: &Run) -> serde_json::Result<Value> {
    let mut report = run_json(args, workload, run)?;
    report["load"] = run.samples.iter().map(load).collect();
    Ok(report)
}

/// The cluster at one moment, in the units of the mean loads.
fn load(sample: &Sample) -> Value {
    json!({ "t_s": sample.at_s, "prefill": sample.prefill_load, "decode": sample.decode_load })
}

pub(crate) fn runs_json(args: &SimulateArgs, workload: &Workload, runs: &[Run]) -> serde_json::Result<Vec<Value>> {
    runs.iter().map(|run| run_json(args, workload, run)).collect()
}

fn run_json(args: &SimulateArgs, workload: &Workload, run: &Run) -> serde_json::Result<Value> {
    let floor_ttft_mean_s = workload.floor_ttft_mean_s;
    serde_json::to_value(RunJson { summary: &run.summary, floor_ttft_mean_s, options: options(args, workload, run) })
}

fn options<'a>(args: &SimulateArgs, workload: &'a Workload, run: &Run) -> OptionsJson<'a> {
    let options = &run.setting.options;
    let baton = match options.placement {
        SimPlacement::BatonWith(config) => Some(config),
        _ => None,
    };
    OptionsJson {
        trace: &workload.name,
        model_profile: &workload.profile.name,
        prefill: options.prefill,
        decode: options.decode,
        placement: options.placement.as_str(),
        admission: options.admission.as_str(),
        eviction: run.setting.options.eviction.as_str(),
        balancing_threshold: balancing_threshold(options.placement),
        speed: options.speed,
        ttft_slo_ms: options.ttft_slo.map(millis),
        tbt_slo_ms: options.tbt_slo.map(millis),
        max_wait_ms: options.max_wait.map(millis),
        queue_timeout_s: options.queue_timeout.as_secs_f64(),
        max_overtaken_s: options.max_overtaken.as_secs_f64(),
        seed: options.seed,
        jitter_s: workload.jitter.as_secs_f64(),
        duration_s: args.duration.map(|duration| duration.as_secs_f64()),
        window: args.counted().as_str(),
        cache_blocks: options.cache_blocks,
        ssd_blocks: options.ssd_blocks,
        fcfs: baton.is_some_and(|config| !config.reorders),
        block_tokens: options.block_tokens,
        split_prompts: options.split_prompts,
        replicate_prefixes: options.replicas,
        kill_every_s: options.kill_every.map(|every| every.as_secs_f64()),
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn balancing_threshold(placement: SimPlacement) -> Option<f64> {
    match placement {
        SimPlacement::Mooncake { balancing_threshold } => Some(balancing_threshold),
        _ => None,
    }
}
