//! What a request asks, and what its nodes are told of it.

use std::sync::Arc;
use std::time::Duration;

use baton_types::{
    BlockHash, ConductorId, FetchSource, NodeId, PrefillJob, QueueOrdering, RequestId, RequestKey, SamplingParams, Slo,
    Tbt, TokenId, Ttft,
};

use super::Assignment;
use crate::placement::PlacementRequest;

/// A request that was checked: what is the same in every attempt.
#[derive(Debug, Clone)]
pub struct RequestJob {
    /// The request.
    pub request: RequestId,
    /// Whose it is.
    pub conductor: ConductorId,
    /// The prompt.
    pub tokens: Arc<[TokenId]>,
    /// How to draw.
    pub sampling: Arc<SamplingParams>,
    /// Chained hashes of the prompt's full blocks.
    pub block_hashes: Arc<[BlockHash]>,
    /// Its objectives, from its arrival on.
    pub slo: Slo,
    /// How long it may take, from its arrival on.
    pub timeout: Duration,
    /// Larger goes first; 0 is ordinary.
    pub priority: i32,
    /// Another answer to the same prompt was taken in with this one, and these nodes hold it; else
    /// empty.
    pub first_completion_nodes: Vec<NodeId>,
}

impl RequestJob {
    /// Whether more than one token is wanted, so that a decode node is needed.
    pub fn wants_decode(&self) -> bool {
        self.sampling.max_tokens > 1
    }

    /// Whether the prompt is computed whole, whatever is cached: each of its positions is asked
    /// about.
    pub fn bypasses_cache(&self) -> bool {
        self.sampling.prompt_logprobs.is_some()
    }

    /// Whether a request that finished was within its objectives; those that it does not have count
    /// as met.
    pub fn is_met_by(&self, ttft: Duration, tbt: Option<Tbt>) -> bool {
        self.slo.ttft.is_none_or(|limit| Ttft(ttft) <= limit)
            && self.slo.tbt.zip(tbt).is_none_or(|(limit, tbt)| tbt <= limit)
    }

    /// Whether an attempt is of what was taken in already, and is not refused by prediction any
    /// more.
    fn is_admitted(&self, key: RequestKey) -> bool {
        key.attempt.0 > 0 || !self.first_completion_nodes.is_empty()
    }

    /// What is asked of the cluster after `output_tokens` of the output, `waited` after the
    /// request's arrival. Its objectives count from there. What was accepted has none any more.
    pub fn placement_request<'a>(
        &'a self,
        key: RequestKey,
        output_tokens: u32,
        exclude: &'a [NodeId],
        waited: Duration,
    ) -> PlacementRequest<'a> {
        let max_tokens = self.sampling.max_tokens.saturating_sub(output_tokens);
        PlacementRequest {
            key,
            // The output is computed with the prompt. Who had its blocks is gone.
            prompt_tokens: self.tokens.len() as u32 + output_tokens,
            block_hashes: &self.block_hashes,
            max_tokens,
            wants_decode: max_tokens > 1,
            slo: if self.is_admitted(key) { Slo::default() } else { self.slo },
            is_admitted: self.is_admitted(key),
            waited,
            max_wait: None,
            priority: self.priority,
            bypass_cache: self.bypasses_cache() && output_tokens == 0,
            exclude,
            // If one of those is lost, the policy finds who holds most.
            first_completion_nodes: if key.attempt.0 == 0 { &self.first_completion_nodes } else { &[] },
            output_tokens,
        }
    }

    /// The job as its prefill node gets it, which has so much time left, after these tokens of the
    /// output.
    pub(super) fn prefill_job(
        &self,
        key: RequestKey,
        output: &[TokenId],
        to: &Assignment,
        left: Duration,
    ) -> PrefillJob {
        let partial_prefill_tokens = if to.target.is_some() { to.placement.partial_prefill_tokens } else { 0 };
        let decode = to.target.clone();
        let fetch = to.source.clone();
        let mut terms = to.placement.terms;
        terms.timeout = terms.timeout.min(left);
        PrefillJob { decode, partial_prefill_tokens, fetch, terms, ..self.after(key, output) }
    }

    /// The job as another decode node gets it, which is to go on after these tokens of the output.
    pub(super) fn migrated(&self, key: RequestKey, output: &[TokenId], source: Option<FetchSource>) -> PrefillJob {
        PrefillJob { is_migration: true, fetch: source, ..self.after(key, output) }
    }

    fn after(&self, key: RequestKey, output: &[TokenId]) -> PrefillJob {
        let tokens = match output {
            [] => Arc::clone(&self.tokens),
            _ => self.tokens.iter().chain(output).copied().collect(),
        };
        PrefillJob {
            key,
            conductor: self.conductor,
            tokens,
            output_tokens: output.len() as u32,
            is_migration: false,
            sampling: Arc::clone(&self.sampling),
            decode: None,
            partial_prefill_tokens: 0,
            fetch: None,
            salt: Arc::from([]),
            terms: QueueOrdering::default(),
        }
    }
}
