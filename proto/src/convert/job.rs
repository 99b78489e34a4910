//! What conductors order: jobs, and where their KV goes and comes from.

use std::sync::Arc;

use baton_types as d;

use super::{InvalidMessage, MAX_ADDRESS, MAX_SALT, at_most, generation, key, limit, node_id, required, short};
use crate::v1 as w;

/// Most tokens that end an output: a message of a client has half as many entries.
const MAX_STOP_TOKEN_IDS: usize = 1 << 17;

impl From<&d::SamplingParams> for w::NodeSampling {
    fn from(s: &d::SamplingParams) -> Self {
        Self {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            seed: s.seed,
            max_tokens: s.max_tokens,
            stop_token_ids: s.stop_token_ids.clone(),
            logit_bias: s.logit_bias.iter().map(|&(token_id, bias)| w::LogitBias { token_id, bias }).collect(),
            min_tokens: s.min_tokens,
            bad_words: s.bad_words.iter().map(|ids| w::TokenIds { ids: ids.clone() }).collect(),
            grammar: s.grammar.as_deref().unwrap_or_default().to_owned(),
            logprobs: s.logprobs,
            prompt_logprobs: s.prompt_logprobs,
        }
    }
}

impl TryFrom<w::NodeSampling> for d::SamplingParams {
    type Error = InvalidMessage;

    fn try_from(s: w::NodeSampling) -> Result<Self, Self::Error> {
        at_most("stop_token_ids", s.stop_token_ids.len(), MAX_STOP_TOKEN_IDS)?;
        let params = Self {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            seed: s.seed,
            max_tokens: s.max_tokens,
            stop_token_ids: s.stop_token_ids,
            logit_bias: s.logit_bias.into_iter().map(|entry| (entry.token_id, entry.bias)).collect(),
            min_tokens: s.min_tokens,
            bad_words: s.bad_words.into_iter().map(|word| word.ids).collect(),
            grammar: Some(s.grammar).filter(|grammar| !grammar.is_empty()).map(Into::into),
            logprobs: s.logprobs,
            prompt_logprobs: s.prompt_logprobs,
        };
        let invalid = |error: d::InvalidSampling| InvalidMessage { field: error.field, found: error.to_string() };
        params.validate().map_err(invalid)?;
        Ok(params)
    }
}

impl From<&d::PrefillJob> for w::PrefillJob {
    fn from(job: &d::PrefillJob) -> Self {
        Self {
            key: Some(job.key.into()),
            tokens: job.tokens.to_vec(),
            output_tokens: job.output_tokens,
            is_migration: job.is_migration,
            partial_prefill_tokens: job.partial_prefill_tokens,
            sampling: Some(job.sampling.as_ref().into()),
            decode: job.decode.as_ref().map(Into::into),
            fetch: job.fetch.as_ref().map(Into::into),
            salt: job.salt.to_vec(),
            priority: job.terms.priority,
            queue: Some((&job.terms).into()),
            // Its conductor knows who leads.
            term: 0,
        }
    }
}

impl From<&d::DecodeTarget> for w::DecodeTarget {
    fn from(target: &d::DecodeTarget) -> Self {
        Self {
            node: target.node.to_string(),
            generation: target.generation.to_string(),
            address: target.address.clone(),
            tbt_s: target.tbt.map(|tbt| tbt.as_secs_f64()),
        }
    }
}

impl TryFrom<w::DecodeTarget> for d::DecodeTarget {
    type Error = InvalidMessage;

    fn try_from(target: w::DecodeTarget) -> Result<Self, Self::Error> {
        Ok(Self {
            node: node_id("decode.node", &target.node)?,
            generation: generation("decode.generation", &target.generation)?,
            address: short("decode.address", target.address, MAX_ADDRESS)?,
            tbt: target.tbt_s.map(|tbt| limit("decode.tbt_s", tbt)).transpose()?,
        })
    }
}

impl From<&d::Reselect> for w::ReselectCommand {
    fn from(reselect: &d::Reselect) -> Self {
        Self { key: Some(reselect.key.into()), decode: Some((&reselect.decode).into()) }
    }
}

impl TryFrom<w::ReselectCommand> for d::Reselect {
    type Error = InvalidMessage;

    fn try_from(reselect: w::ReselectCommand) -> Result<Self, Self::Error> {
        Ok(Self { key: key(reselect.key)?, decode: required("decode", reselect.decode)?.try_into()? })
    }
}

impl w::NodeLostCommand {
    /// That start of a node is gone.
    pub fn new(node: &d::NodeId, start: d::Generation) -> Self {
        Self { node: node.to_string(), generation: start.to_string() }
    }

    /// The node, and which start of it.
    pub fn into_domain(self) -> Result<d::NodeStart, InvalidMessage> {
        let generation = generation("generation", &self.generation)?;
        Ok(d::NodeStart { node: node_id("node", &self.node)?, generation })
    }
}

impl From<&d::FetchSource> for w::FetchSource {
    fn from(source: &d::FetchSource) -> Self {
        Self {
            node: source.node.to_string(),
            generation: source.generation.to_string(),
            address: source.address.clone(),
            tokens: source.tokens,
        }
    }
}

impl TryFrom<w::FetchSource> for d::FetchSource {
    type Error = InvalidMessage;

    fn try_from(source: w::FetchSource) -> Result<Self, Self::Error> {
        Ok(Self {
            node: node_id("fetch.node", &source.node)?,
            generation: generation("fetch.generation", &source.generation)?,
            address: short("fetch.address", source.address, MAX_ADDRESS)?,
            tokens: source.tokens,
        })
    }
}

impl From<&d::QueueOrdering> for w::QueueOrdering {
    fn from(terms: &d::QueueOrdering) -> Self {
        Self {
            overtake_window_s: terms.patience.as_secs_f64(),
            max_overtaken_s: terms.max_overtaken.as_secs_f64(),
            timeout_s: terms.timeout.as_secs_f64(),
            compute_s: terms.compute.as_secs_f64(),
        }
    }
}

impl w::QueueOrdering {
    /// The terms, with the priority that is told beside them.
    pub fn into_domain(self, priority: i32) -> Result<d::QueueOrdering, InvalidMessage> {
        let timeout = limit("queue.timeout_s", self.timeout_s)?;
        if timeout.is_zero() {
            return Err(InvalidMessage { field: "queue.timeout_s", found: "0, but must be more".to_owned() });
        }
        Ok(d::QueueOrdering {
            priority,
            patience: limit("queue.overtake_window_s", self.overtake_window_s)?,
            max_overtaken: limit("queue.max_overtaken_s", self.max_overtaken_s)?,
            timeout,
            compute: limit("queue.compute_s", self.compute_s)?,
        })
    }
}

impl w::PrefillJob {
    /// The job, as a job of `conductor`, whose session it came in on.
    pub fn into_domain(self, conductor: d::ConductorId) -> Result<d::PrefillJob, InvalidMessage> {
        if self.tokens.is_empty() {
            return Err(InvalidMessage { field: "tokens", found: "empty".into() });
        }
        if self.output_tokens as usize >= self.tokens.len() {
            let found = format!("{} of {} tokens, but there must be a prompt", self.output_tokens, self.tokens.len());
            return Err(InvalidMessage { field: "output_tokens", found });
        }
        if self.partial_prefill_tokens as usize >= self.tokens.len() {
            let found =
                format!("{} of {} tokens, but some must come before", self.partial_prefill_tokens, self.tokens.len());
            return Err(InvalidMessage { field: "partial_prefill_tokens", found });
        }
        Ok(d::PrefillJob {
            key: key(self.key)?,
            conductor,
            tokens: self.tokens.into(),
            output_tokens: self.output_tokens,
            is_migration: self.is_migration,
            partial_prefill_tokens: self.partial_prefill_tokens,
            sampling: Arc::new(required("sampling", self.sampling)?.try_into()?),
            decode: self.decode.map(TryInto::try_into).transpose()?,
            fetch: self.fetch.map(TryInto::try_into).transpose()?,
            salt: short("salt", self.salt, MAX_SALT)?.into(),
            terms: required("queue", self.queue)?.into_domain(self.priority)?,
        })
    }
}
