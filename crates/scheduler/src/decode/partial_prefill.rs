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
use std::time::Instant;

use baton_types::{ErrorKind, FinishReason, GrantRequest, Refused, RequestKey};

use super::DecodeCore;
use super::batch::Events;
use super::sequence::{Origin, Phase, Sequence};
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
    /// Layers that a partial prefill can go through now: of the prefill node's part they are here.
    fn next_layers(&self, num_layers: u32) -> Option<Range<u32>> {
        let grant = self.grant()?;
        // The last layer's step draws.
        let end = if self.awaits_mask { num_layers.saturating_sub(1) } else { num_layers };
        let layers = grant.partial_prefill.as_ref()?.layers..grant.whole_layers(num_layers).min(end);
        let is_on = matches!(self.phase, Phase::Receiving | Phase::Running);
        (is_on && !layers.is_empty()).then_some(layers)
    }

    fn has_begun(&self) -> bool {
        self.partial_prefill().is_some_and(|partial_prefill| partial_prefill.layers > 0)
    }
}

impl DecodeCore {
    /// The partial prefill that was asked for, if this node computes it. So many leading blocks are
    /// cached.
    pub(super) fn accept_partial_prefill(&self, request: &GrantRequest, cached: usize) -> Option<PartialPrefill> {
        let block_tokens = self.config.model.block_tokens();
        let from = request.tokens().checked_sub(request.partial_prefill_tokens as usize)?;
        let is_asked =
            request.partial_prefill_tokens > 0 && from.is_multiple_of(block_tokens) && !request.is_other_class;
        let is_worth_it = from > cached * block_tokens;
        (is_asked && is_worth_it).then(|| PartialPrefill { from, layers: 0, hidden: Vec::new() })
    }

    /// Drops those that are over.
    pub(super) fn prune_partial_prefills(&mut self) {
        let mut keys = std::mem::take(&mut self.partial_prefills);
        keys.retain(|key| self.live_grant(*key).is_some_and(|grant| grant.partial_prefill.is_some()));
        self.partial_prefills = keys;
    }

    /// The next layers of the oldest partial prefill that can get on.
    pub(super) fn next_slice(&mut self) -> Option<StepSlice> {
        self.prune_partial_prefills();
        let num_layers = self.config.model.layout.num_layers;
        let has_begun = |key: &&RequestKey| self.sequences.get(key).is_some_and(Sequence::has_begun);
        let can_go_on =
            |key: &&RequestKey| self.sequences.get(key).is_some_and(|it| it.next_layers(num_layers).is_some());
        let begun = self.partial_prefills.iter().filter(has_begun);
        let may_begin = begun.clone().count() < MAX_BEGUN || !begun.clone().any(|key| can_go_on(&key));
        let key = *self.partial_prefills.iter().filter(|key| may_begin || has_begun(key)).find(can_go_on)?;
        let sequence = self.sequences.get_mut(&key)?;
        let layers = sequence.next_layers(num_layers)?;
        let tokens = sequence.remaining_tokens();
        let part = sequence.step_sequence(key, tokens);
        let most = slice_layers(self.config.prompt_budget as u32, num_layers, tokens as u32);
        let partial_prefill = sequence.grant_mut()?.partial_prefill.as_mut()?;
        Some(StepSlice {
            sequence: part,
            layers: layers.start..layers.end.min(layers.start + most),
            hidden: std::mem::take(&mut partial_prefill.hidden),
        })
    }

    /// Takes in what a step gave for its slice; tells why the first token is the last one, if it
    /// is.
    pub(super) fn on_slice_done(
        &mut self,
        now: Instant,
        slice: &RunningSlice,
        result: Result<Option<StepOutput>, &Refused>,
        events: &mut Events,
    ) -> Option<FinishReason> {
        let key = slice.key;
        if self.release_ended(key) {
            return None;
        }
        let is_last = slice.layers.end == self.config.model.layout.num_layers;
        let output = self.check_output(key, is_last, result)?;
        let sequence = self.sequences.get_mut(&key)?;
        let Origin::Granted(grant) = &mut sequence.origin else { return None };
        let Some((token, logprobs)) = output.sampled else {
            let partial_prefill = grant.partial_prefill.as_mut()?;
            partial_prefill.layers = slice.layers.end;
            partial_prefill.hidden = output.hidden;
            self.tell_progress(now, key);
            return None;
        };
        if !grant.is_complete() {
            let arrived = grant.arrived_bytes;
            let expected = grant.expected_bytes;
            let message = format!("all layers were said to be here with {arrived} of {expected} bytes");
            self.fail(key, Refused { kind: ErrorKind::DataLoss, message });
            return None;
        }
        grant.partial_prefill = None;
        sequence.kv.num_computed_tokens = sequence.lengths.given_tokens;
        self.complete_blocks(key);
        self.on_token(key, token, logprobs, events)
    }
}

impl From<&StepSlice> for RunningSlice {
    fn from(slice: &StepSlice) -> Self {
        Self { key: slice.sequence.key, layers: slice.layers.clone() }
    }
}
