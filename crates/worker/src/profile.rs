//! The start-up profile: a few steps on an empty arena seed the conductor's cost models.

use baton_engine::{Engine, EngineError, LogitsWanted, SequenceStep, StepObserver};
use baton_types::{BlockId, NodeProfile};

use crate::config::Settings;

/// Tokens of the longer of the two prompts that are measured.
const LONG: usize = 96;
/// Tokens of the shorter one.
const SHORT: usize = 16;
/// Tokens before those that tell what attention takes: enough to be seen beside the rest.
const FAR: usize = 1024;

struct Quiet;

impl StepObserver for Quiet {
    fn kv_ready(&mut self, _layer: u32) {}
    fn logits(&mut self, _sequence: usize, _position: u32, _logits: &[f32]) {}
}

/// Measures the engine. Its blocks are free: whatever the steps leave in them is overwritten before
/// it is read.
pub fn profile(engine: &mut dyn Engine, settings: &Settings) -> Result<NodeProfile, EngineError> {
    let layout = engine.arena().layout().clone();
    let room = (layout.num_blocks as usize * layout.block_tokens as usize).min(engine.model().context_length as usize);
    let short = SHORT.min(room);
    let long = LONG.min(room);
    seconds(engine, 0, short)?; // warms caches and pages
    let t_short = seconds(engine, 0, short)?;
    let t_long = seconds(engine, 0, long)?;
    let t_one = seconds(engine, long as u32 - 1, 1)?;
    // What is before these is whatever the blocks hold: it takes as long as a prompt. As many rows
    // as the longer prompt has, since a few rows take longer each.
    let far = FAR.min(room - long);
    let t_far = seconds(engine, far as u32, long)?;
    let t_far_one = seconds(engine, (far + long) as u32 - 1, 1)?;
    let per_pair = ((t_far - t_long) / (far * long).max(1) as f64).max(0.0);
    let per_kv_token = ((t_far_one - t_one) / far.max(1) as f64).max(0.0);
    let per_token =
        if long > short { ((t_long - t_short) / (long - short) as f64).max(0.0) } else { t_long / long as f64 };
    Ok(NodeProfile {
        prefill_base: (t_short - per_token * short as f64).max(0.0),
        prefill_per_token: per_token,
        prefill_per_token_pair: per_pair,
        decode_base: (t_one - per_token).max(t_one * 0.5),
        decode_per_sequence: per_token.min(t_one * 0.5),
        decode_per_kv_token: per_kv_token,
        max_waiting: settings.max_waiting,
        max_running: settings.max_running,
        chunk_tokens: 0,
        transfer_bytes_per_s: 0.0,
    })
}

fn seconds(engine: &mut dyn Engine, start: u32, tokens: usize) -> Result<f64, EngineError> {
    let blocks = engine.arena().layout().blocks_for(start as usize + tokens) as u32;
    let table: Vec<_> = (0..blocks).map(BlockId).collect();
    let tokens = vec![0; tokens];
    let step = SequenceStep { tokens: &tokens, start, block_table: &table, logits: LogitsWanted::Last };
    // What compute takes, so the machine's clock.
    let began = baton_runtime::now();
    engine.step(&[step], &mut Quiet)?;
    Ok(began.elapsed().as_secs_f64())
}
