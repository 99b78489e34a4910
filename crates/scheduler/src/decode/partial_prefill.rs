//! Partial prefill: this node computes the last part of a prompt while a prefill node computes the
//! first.
//!
//! ```text
//!   prefill node:  first part, layer 0 ─▶ layer 1 ─▶ layer 2 ─▶ ...            handoff with the grant, without a token
//!                             └ push       └ push     └ push
//!   here:                 last part, layer 0 ─▶ layer 1 ─▶ layer 2 ─▶ ... ─▶ the first token; the sequence joins the batch
//! ```
//!
//! The last part attends to the first, so its layers follow the first part's as they arrive. Both
//! nodes compute at the same time, and the first part's KV is where it is needed anyway. A step of
//! the mixed batch takes the last part through a few layers, not a few tokens through all of them.
//! A chunk could not begin before the first part's last layer is here. The layers of a step are as
//! many as cost a part of what a chunk of [`crate::DecodeConfig::prompt_budget`] tokens does.
//!
//! If the sequence is preempted before its first token, all of the prompt is computed here, in
//! chunks, like any other that has lost its blocks.

use std::ops::Range;

use baton_types::{ErrorKind, FinishReason, GrantRequest, Refused, RequestKey};

use super::batch::Events;
use super::{DecodeCore, Phase, Sequence};
use crate::step::{StepOutput, StepSlice};

/// As many may have begun before another one does, if one of them can go on: each keeps its tokens'
/// hidden numbers. The others wait, as the conductor expects when it plans partial prefills. If
/// this node took no more than it can begin, prefill nodes would have to compute whole prompts,
/// which is not in their plans.
const MAX_BEGUN: usize = 4;

/// Slices to the cost of a chunk: they have next to no fixed cost of their own, so streams need not
/// wait for long ones.
const SLICES_PER_CHUNK: u32 = 4;

/// Layers that a step takes a partial prefill through, in a mixed batch whose chunks of prompts
/// have `chunk_tokens` tokens.
pub(crate) fn slice_layers(chunk_tokens: u32, num_layers: u32, partial_prefill_tokens: u32) -> u32 {
    let most = chunk_tokens.saturating_mul(num_layers) / partial_prefill_tokens.saturating_mul(SLICES_PER_CHUNK).max(1);
    most.clamp(1, num_layers)
}

/// How far one is.
#[derive(Debug)]
pub(super) struct PartialPrefill {
    /// Its first token; those before it come from the prefill node.
    from: usize,
    /// Layers that are computed.
    layers: u32,
    /// Its numbers between two layers, while the engine does not have them.
    hidden: Vec<f32>,
}

impl PartialPrefill {
    pub(super) fn new(from: usize) -> Self {
        Self { from, layers: 0, hidden: Vec::new() }
    }

    pub(super) fn from(&self) -> usize {
        self.from
    }
}

/// The slice of a step.
#[derive(Debug)]
pub(super) struct RunningSlice {
    pub key: RequestKey,
    layers: Range<u32>,
}

impl Sequence {
    /// Layers of the prefill node's part that are here whole, the first so many.
    fn head_layers(&self, num_layers: u32) -> u32 {
        if self.phase != Phase::Granted {
            return num_layers;
        }
        let in_order = self.pushes.iter().zip(0..).take_while(|(push, number)| push.number() == *number);
        in_order.last().map_or(0, |(push, _)| push.layers().min(num_layers))
    }
}

impl DecodeCore {
    /// The first token of the part that is computed here, if this node computes the partial prefill
    /// that was asked for. `held` leading blocks are in the cache.
    pub(super) fn accept_partial_prefill(&self, request: &GrantRequest, held: usize) -> Option<usize> {
        let block_tokens = self.config.model.block_tokens();
        let from = request.tokens().checked_sub(request.partial_prefill_tokens as usize)?;
        let is_asked =
            request.partial_prefill_tokens > 0 && from.is_multiple_of(block_tokens) && !request.is_other_class;
        let is_worth_it = from > held * block_tokens;
        (is_asked && is_worth_it).then_some(from)
    }

    /// Drops those that are over.
    pub(super) fn prune_tails(&mut self) {
        let sequences = &self.sequences;
        self.tails.retain(|key| sequences.get(key).is_some_and(|it| it.tail.is_some() && !it.ended));
    }

    /// The next layers of the oldest partial prefill that can get on.
    pub(super) fn next_slice(&mut self) -> Option<StepSlice> {
        self.prune_tails();
        let num_layers = self.config.model.layout.num_layers;
        let has_begun = |key: &&RequestKey| {
            self.sequences.get(key).and_then(|it| it.tail.as_ref()).is_some_and(|tail| tail.layers > 0)
        };
        let can_go_on = |key: &&RequestKey| {
            let Some(sequence) = self.sequences.get(key) else { return false };
            let is_on = matches!(sequence.phase, Phase::Granted | Phase::Running) && sequence.handed_off.is_some();
            let behind = |tail: &PartialPrefill| tail.layers < sequence.head_layers(num_layers);
            is_on && !sequence.in_step && sequence.tail.as_ref().is_some_and(behind)
        };
        let begun = || self.tails.iter().filter(has_begun);
        let may_begin = begun().count() < MAX_BEGUN || !begun().any(|key| can_go_on(&key));
        let key = *self.tails.iter().filter(|key| may_begin || has_begun(key)).find(can_go_on)?;
        let sequence = self.sequences.get_mut(&key)?;
        let tokens = sequence.given_tokens - sequence.tail.as_ref()?.from;
        let here = sequence.head_layers(num_layers);
        let part = sequence.step_sequence(key, tokens)?;
        let most = slice_layers(self.config.prompt_budget as u32, num_layers, tokens as u32);
        sequence.in_step = true;
        let tail = sequence.tail.as_mut()?;
        let layers = tail.layers..here.min(tail.layers + most);
        Some(StepSlice { sequence: part, layers, hidden: std::mem::take(&mut tail.hidden) })
    }

    /// Takes in what a step gave for its slice; tells why the first token is the last one, if it
    /// is.
    pub(super) fn on_slice_done(
        &mut self,
        RunningSlice { key, layers }: &RunningSlice,
        result: Result<Option<StepOutput>, &Refused>,
        events: &mut Events,
    ) -> Option<FinishReason> {
        let key = *key;
        let sequence = self.sequences.get_mut(&key).expect("a sequence in a step stays until the step is over");
        sequence.in_step = false;
        if sequence.ended {
            self.release_if_unused(key);
            return None;
        }
        let is_last = layers.end == self.config.model.layout.num_layers;
        let output = self.check_output(key, is_last, result)?;
        let sequence = self.sequences.get_mut(&key)?;
        let Some((token, logprobs)) = output.sampled else {
            if let Some(tail) = &mut sequence.tail {
                tail.layers = layers.end;
                tail.hidden = output.hidden;
            }
            return None;
        };
        if sequence.phase == Phase::Granted {
            let arrived = sequence.arrived_bytes;
            let expected = sequence.expected_bytes;
            let message = format!("all layers were said to be here with {arrived} of {expected} bytes");
            self.fail(key, Refused { kind: ErrorKind::DataLoss, message });
            return None;
        }
        sequence.tail = None;
        sequence.num_computed_tokens = sequence.given_tokens;
        self.complete_blocks(key);
        self.on_token(key, token, logprobs, events)
    }
}

impl From<&StepSlice> for RunningSlice {
    fn from(slice: &StepSlice) -> Self {
        Self { key: slice.sequence.key, layers: slice.layers.clone() }
    }
}
