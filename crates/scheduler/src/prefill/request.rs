//! What a prefill node knows about one request.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, BlockId, DecodeTarget, FinishReason, GrantReply, KvTransfer, PrefillJob, TokenId, TokenLogprobs,
};

use super::fetch::Fetch;
use super::{PushId, PushReport, PushSpan};
use crate::config::ModelConfig;
use crate::queue::QueueItem;

/// A request that waits for its first chunk.
#[derive(Debug)]
pub(super) struct Queued {
    pub job: PrefillJob,
    /// Of the prompt's full blocks.
    pub hashes: Arc<[BlockHash]>,
    pub submitted: Instant,
    /// Its number among those submitted.
    pub turn: u64,
    /// Tokens that were cached when it came: what is reported as waiting leaves them out.
    pub cached_tokens: usize,
}

impl Queued {
    pub(super) fn item(&self) -> QueueItem {
        QueueItem { terms: self.job.terms, arrived: self.submitted, turn: self.turn, left: 1.0 }
    }
}

/// Whether the engine works on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InStep {
    No,
    Yes,
    /// It does, but the fetch failed under the step: what that gives for the request means nothing.
    Spoiled,
}

/// A request that holds blocks.
#[derive(Debug)]
pub(super) struct Active {
    pub job: PrefillJob,
    pub hashes: Arc<[BlockHash]>,
    pub blocks: Arc<Vec<BlockId>>,
    /// The prompt's tokens, as steps share them.
    pub tokens: Arc<Vec<TokenId>>,
    pub submitted: Instant,
    pub turn: u64,
    pub started: Instant,
    /// Tokens whose KV the node had cached when it started.
    pub locally_cached_tokens: usize,
    /// Tokens whose KV need not be computed: those cached, and those that come from another node.
    pub cached_tokens: usize,
    /// Tokens whose KV is in the arena, or on its way.
    pub num_computed_tokens: usize,
    /// Tokens whose KV is computed here: all, or those before what a decode node computes.
    pub end: usize,
    /// Leading blocks that are hashed.
    pub num_complete_blocks: usize,
    /// A prefix that comes from another node.
    pub fetch: Option<Fetch>,
    /// When the conductor last heard of its compute; `None` before that has begun.
    pub told: Option<Instant>,
    pub in_step: InStep,
    /// Its outcome is told; it stays only until its blocks are no longer in use.
    pub ended: bool,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub first_token: Option<TokenId>,
    /// `None` if the first token is the last.
    pub transfer: Option<Transfer>,
}

impl Active {
    /// Tokens of the prompt, and of the output so far.
    pub(super) fn num_tokens(&self) -> usize {
        self.job.tokens.len()
    }

    pub(super) fn is_in_step(&self) -> bool {
        self.in_step != InStep::No
    }

    /// What the step gives for it means nothing, if it is in one.
    pub(super) fn spoil_step(&mut self) {
        if self.is_in_step() {
            self.in_step = InStep::Spoiled;
        }
    }

    pub(super) fn remaining_tokens(&self) -> usize {
        self.end - self.num_computed_tokens
    }

    /// Last tokens of the prompt that the decode node computes.
    pub(super) fn partial_prefill_tokens(&self) -> usize {
        self.num_tokens() - self.end
    }

    /// Its first `tokens` tokens need not be computed, and no others are.
    pub(super) fn reset_to(&mut self, tokens: usize) {
        self.cached_tokens = tokens;
        self.num_computed_tokens = tokens;
    }

    pub(super) fn item(&self) -> QueueItem {
        let all = (self.end - self.cached_tokens).max(1);
        let left = self.remaining_tokens() as f64 / all as f64;
        QueueItem { terms: self.job.terms, arrived: self.submitted, turn: self.turn, left }
    }

    /// Whether the transfer engine may still read its blocks.
    pub(super) fn is_pushing(&self) -> bool {
        self.transfer.as_ref().is_some_and(|transfer| !transfer.inflight.is_empty())
    }

    /// Why the first token drawn is the last one, if it is.
    pub(super) fn finish(&self, token: TokenId, context_length: u32) -> Option<FinishReason> {
        if self.job.sampling.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        let full = self.num_tokens() + 1 >= context_length as usize;
        (self.transfer.is_none() || full).then_some(FinishReason::Length)
    }
}

/// The right to write, as far as it has come.
#[derive(Debug)]
pub(super) enum GrantState {
    Requested,
    /// The conductor says who is asked next.
    Refused,
    Granted(GrantReply),
    /// Given back, or never needed.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandoffState {
    NotSent,
    Sent,
    Accepted,
}

/// A request's KV on its way to the decode node.
#[derive(Debug)]
pub(super) struct Transfer {
    pub target: DecodeTarget,
    pub grant: GrantState,
    /// Whether another decode node was asked before this one.
    pub was_reselected: bool,
    pub handoff: HandoffState,
    /// Layers of runs of blocks that are final and not pushed yet.
    ready: VecDeque<(u32, Range<usize>)>,
    /// Runs of blocks of each layer that were ever ready: what is computed a second time is not
    /// pushed again. A few: the prefix cached, the one fetched, and what was computed.
    told: BTreeMap<u32, Vec<Range<usize>>>,
    /// Bytes of each batch in the transfer engine.
    pub inflight: BTreeMap<PushId, u64>,
    /// Batches so far.
    num_pushes: u32,
    /// Layers that were pushed whole, from the first one on.
    pushed_layers: u32,
    acked_bytes: u64,
    first_start: Option<Instant>,
    last_ack: Option<Instant>,
    transport: String,
    /// When each acknowledged batch was, and its bytes. At most one batch per layer and chunk.
    acks: Vec<(Instant, u64)>,
    compute_ended: Option<Instant>,
}

impl Transfer {
    /// How far it is.
    pub(super) fn stage(&self) -> &'static str {
        match (&self.grant, self.handoff, self.num_pushes) {
            (_, HandoffState::Sent | HandoffState::Accepted, _) => "handing_off",
            (GrantState::Granted(_), HandoffState::NotSent, 0) => "granted",
            (GrantState::Granted(_), HandoffState::NotSent, _) => "pushing",
            (GrantState::Requested | GrantState::Refused | GrantState::Gone, HandoffState::NotSent, _) => "computing",
        }
    }

    /// A transfer whose grant is being asked for.
    pub(super) fn new(target: DecodeTarget) -> Self {
        Self {
            target,
            grant: GrantState::Requested,
            was_reselected: false,
            handoff: HandoffState::NotSent,
            ready: VecDeque::new(),
            told: BTreeMap::new(),
            inflight: BTreeMap::new(),
            num_pushes: 0,
            pushed_layers: 0,
            acked_bytes: 0,
            first_start: None,
            last_ack: None,
            transport: String::new(),
            acks: Vec::new(),
            compute_ended: None,
        }
    }

    /// One layer of these blocks is final.
    pub(super) fn on_ready(&mut self, layer: u32, blocks: Range<usize>) {
        let told = self.told.entry(layer).or_default();
        let new = without(blocks, told);
        for run in &new {
            match told.iter_mut().find(|known| known.end == run.start) {
                Some(known) => known.end = run.end,
                None => told.push(run.clone()),
            }
        }
        self.ready.extend(new.into_iter().map(|run| (layer, run)));
    }

    /// The next batch, at most `max` spans, of what is ready and not cached at the decode node.
    /// Empty while there is no grant.
    pub(super) fn take_spans(&mut self, blocks: &[BlockId], max: usize) -> Vec<PushSpan> {
        let GrantState::Granted(grant) = &self.grant else { return Vec::new() };
        let held = grant.cached_blocks as usize;
        let mut spans = Vec::new();
        while spans.len() < max {
            let Some((layer, run)) = self.ready.pop_front() else { break };
            let start = run.start.max(held);
            let end = run.end.min(start + max - spans.len());
            if end < run.end {
                self.ready.push_front((layer, end.max(start)..run.end));
            }
            spans.extend((start..end).map(|block| PushSpan {
                layer,
                source: blocks[block],
                destination: grant.blocks[block - held],
            }));
        }
        spans.sort_by_key(|span| span.layer);
        spans
    }

    /// Names the batch of what was taken last; `blocks` are pushed in all, or cached at the decode
    /// node.
    pub(super) fn next_push(&mut self, blocks: usize) -> PushId {
        while let Some(told) = self.told.get(&self.pushed_layers)
            && without(0..blocks, told).is_empty()
            && !self.ready.iter().any(|(layer, _)| *layer == self.pushed_layers)
        {
            self.pushed_layers += 1;
        }
        self.num_pushes += 1;
        PushId::new(self.num_pushes - 1, self.pushed_layers)
    }

    /// Of each chunk; the last one's counts.
    pub(super) fn on_compute_ended(&mut self, now: Instant) {
        self.compute_ended = Some(now);
    }

    /// Bytes whose acknowledgement was here when the last layer's compute ended, whenever it was
    /// taken in.
    fn bytes_at_compute_end(&self) -> u64 {
        let early = |&&(at, _): &&(Instant, u64)| self.compute_ended.is_some_and(|ended| at <= ended);
        self.acks.iter().filter(early).map(|(_, bytes)| bytes).sum()
    }

    pub(super) fn on_acked(&mut self, report: &PushReport) {
        self.acked_bytes += report.bytes;
        self.acks.push((report.completed, report.bytes));
        self.first_start = Some(self.first_start.map_or(report.started, |first| first.min(report.started)));
        self.last_ack = Some(self.last_ack.map_or(report.completed, |last| last.max(report.completed)));
        self.transport.clone_from(&report.transport);
    }

    /// Whether the decode node has the sequence and every byte of it that comes from here.
    pub(super) fn is_complete(&self, model: &ModelConfig) -> bool {
        let GrantState::Granted(grant) = &self.grant else { return false };
        let is_pushed = self.inflight.is_empty() && self.acked_bytes >= model.bytes(grant.blocks.len());
        self.handoff == HandoffState::Accepted && is_pushed
    }

    pub(super) fn acked_bytes(&self) -> u64 {
        self.acked_bytes
    }

    pub(super) fn report(&self) -> KvTransfer {
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        KvTransfer {
            bytes: self.acked_bytes,
            transport: self.transport.clone(),
            elapsed: between(self.first_start, self.last_ack),
            exposed: between(self.compute_ended, self.last_ack),
            bytes_at_compute_end: self.bytes_at_compute_end(),
        }
    }
}

/// What is left of `run` without what lies in `others`.
fn without(run: Range<usize>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    let outside = |piece: Range<usize>, other: &Range<usize>| {
        let before = piece.start..piece.end.min(other.start.max(piece.start));
        let after = piece.start.max(other.end.min(piece.end))..piece.end;
        if other.start >= piece.end || other.end <= piece.start { vec![piece] } else { vec![before, after] }
    };
    others.iter().fold(vec![run], |pieces: Vec<Range<usize>>, other| {
        pieces.into_iter().flat_map(|piece| outside(piece, other)).filter(|piece| !piece.is_empty()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_block_ranges_are_queued_for_push_once() {
        assert_eq!(without(0..10, &[2..4, 6..12]), [0..2, 4..6]);
        assert_eq!(without(3..5, &[0..4, 4..9]), []);
        assert_eq!(without(3..8, &[0..3, 5..6, 8..9]), [3..5, 6..8]);
        let mut transfer = Transfer::new(crate::tests::engine::target());
        transfer.on_ready(0, 0..2);
        // The chunk after a prefix that is still coming, then the prefix, then all of it once more.
        transfer.on_ready(0, 5..7);
        transfer.on_ready(0, 2..5);
        transfer.on_ready(0, 2..7);
        transfer.on_ready(1, 2..7);
        assert_eq!(transfer.ready, [(0, 0..2), (0, 5..7), (0, 2..5), (1, 2..7)]);
    }
}
