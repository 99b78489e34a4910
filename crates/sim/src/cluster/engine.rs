//! The engine of a node: no model, time from the profile, tokens from a hash.

use std::time::{Duration, Instant};

use baton_profile::{StepCost, step_noise};
use baton_scheduler::{RequestKey, StepOutput, StepPlan, StepSequence};
use baton_types::{RequestId, TokenId};

use super::wire::StepReport;
use crate::Random;

/// Token ids are below it.
pub(super) const VOCABULARY: u32 = 1 << 31;

/// Token `index` of a request's output, whichever node draws it.
pub(super) fn output_token(request: RequestId, index: usize) -> TokenId {
    let seed = (request.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64;
    (Random::new(seed).next_u64() >> 33) as TokenId
}

/// The step that is being computed.
#[derive(Debug)]
pub(super) struct Running {
    pub plan: StepPlan,
    pub began: Instant,
    /// Of the whole step.
    pub time: Duration,
    /// Of it, that of the slice.
    slice: Duration,
    /// The layer that begins next.
    pub layer: u32,
    /// Prefixes that are still coming in.
    pub awaited: Vec<RequestKey>,
    /// Those that the step has given up, or that failed under it.
    pub late: Vec<RequestKey>,
    /// Since when it waits for prefixes; `None` if it computes.
    pub waiting_since: Option<Instant>,
    /// For prefixes, so far.
    pub waited: Duration,
}

/// Times of a node's steps.
#[derive(Debug)]
pub(super) struct Engine {
    cost: StepCost,
    num_layers: u32,
    noise: Random,
}

impl Engine {
    pub(super) fn new(cost: StepCost, num_layers: u32, seed: u64) -> Self {
        Self { cost, num_layers, noise: Random::new(seed) }
    }

    fn time(&mut self, rows: u64, attended: u64) -> f64 {
        let noise = &mut self.noise;
        self.cost.seconds(rows, attended) * step_noise(self.cost.noise, &mut || noise.unit())
    }

    /// Begins a step.
    pub(super) fn begin(&mut self, now: Instant, plan: StepPlan) -> Running {
        let whole = if plan.sequences.is_empty() { 0.0 } else { self.time(plan.rows().into(), plan.attended_tokens()) };
        let slice = plan.slice.as_ref().map_or(0.0, |slice| {
            let part = slice.layers.len() as f64 / f64::from(self.num_layers);
            self.time(slice.sequence.range.len() as u64, slice.sequence.attended_tokens()) * part
        });
        let awaits = |sequence: &&StepSequence| sequence.awaits_prefix;
        let awaited = plan.sequences.iter().filter(awaits).map(|sequence| sequence.key).collect();
        Running {
            plan,
            began: now,
            time: Duration::from_secs_f64(whole + slice),
            slice: Duration::from_secs_f64(slice),
            layer: 0,
            awaited,
            late: Vec::new(),
            waiting_since: None,
            waited: Duration::ZERO,
        }
    }
}

impl Running {
    /// When this layer may begin, after what it has waited for prefixes so far.
    pub(super) fn layer_due(&self, layer: u32, num_layers: u32) -> Instant {
        self.began + self.waited + self.time.mul_f64(f64::from(layer) / f64::from(num_layers))
    }

    /// What the conductor is told of it.
    pub(super) fn report(&self, now: Instant, num_layers: u32) -> StepReport {
        let elapsed = (now - self.began).saturating_sub(self.waited + self.slice);
        let slice = self.plan.slice.as_ref().map(|slice| {
            let part = slice.layers.len() as f64 / f64::from(num_layers);
            let sequence = &slice.sequence;
            (sequence.range.len() as u32, sequence.attended_tokens(), self.slice.as_secs_f64() / part)
        });
        StepReport {
            rows: self.plan.rows(),
            attended_tokens: self.plan.attended_tokens(),
            prompt_rows: self.plan.prompt_rows(),
            seconds: elapsed.as_secs_f64(),
            slice,
        }
    }

    /// What it gives.
    pub(super) fn outputs(&self, num_layers: u32) -> Vec<StepOutput> {
        let output = |sequence: &StepSequence, draws: bool, hidden: Vec<f32>| StepOutput {
            key: sequence.key,
            sampled: (draws && sequence.is_last_chunk).then(|| {
                let token = output_token(sequence.key.request, sequence.range.end - sequence.prompt_tokens);
                // Without its prefix a sequence gives nonsense.
                (if self.late.contains(&sequence.key) { token ^ 1 } else { token }, None)
            }),
            prompt_logprobs: Vec::new(),
            hidden,
            failed: None,
            is_mask_late: false,
        };
        let whole = self.plan.sequences.iter().map(|sequence| output(sequence, true, Vec::new()));
        // A slice's hidden numbers are opaque to the cores.
        let slice =
            self.plan.slice.iter().map(|slice| output(&slice.sequence, slice.layers.end == num_layers, Vec::new()));
        whole.chain(slice).collect()
    }
}
