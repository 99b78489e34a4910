//! Wire to domain and back.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use baton_types as d;

use crate::v1 as w;

/// A message from the network does not have the form of what it stands for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {found}")]
pub struct InvalidMessage {
    /// The field of the message.
    pub field: &'static str,
    /// What is wrong with it.
    pub found: String,
}

impl InvalidMessage {
    /// Always [`d::ErrorKind::Invalid`].
    pub const fn kind(&self) -> d::ErrorKind {
        d::ErrorKind::Invalid
    }
}

impl From<InvalidMessage> for tonic::Status {
    fn from(error: InvalidMessage) -> Self {
        crate::status(error.kind(), error.to_string(), None)
    }
}

/// A field that must be there.
pub fn required<T>(field: &'static str, value: Option<T>) -> Result<T, InvalidMessage> {
    value.ok_or(InvalidMessage { field, found: "missing".into() })
}

fn parse<T: FromStr<Err = d::ParseIdError>>(field: &'static str, text: &str) -> Result<T, InvalidMessage> {
    text.parse().map_err(|error: d::ParseIdError| InvalidMessage { field, found: error.to_string() })
}

/// A node's name.
pub fn node_id(field: &'static str, text: &str) -> Result<d::NodeId, InvalidMessage> {
    parse(field, text)
}

/// A generation.
pub fn generation(field: &'static str, text: &str) -> Result<d::Generation, InvalidMessage> {
    parse(field, text)
}

/// A request's key.
pub fn key(value: Option<w::RequestKey>) -> Result<d::RequestKey, InvalidMessage> {
    required("key", value)?.try_into()
}

fn seconds(field: &'static str, value: f64) -> Result<Duration, InvalidMessage> {
    Duration::try_from_secs_f64(value).map_err(|error| InvalidMessage { field, found: format!("{value}: {error}") })
}

fn hash(field: &'static str, bytes: &[u8]) -> Result<d::BlockHash, InvalidMessage> {
    let found = || InvalidMessage { field, found: format!("{} bytes, but a block hash has 16", bytes.len()) };
    Ok(d::BlockHash(bytes.try_into().map_err(|_| found())?))
}

/// Hashes, 16 bytes each, one after the other.
pub fn hashes_to_bytes(hashes: &[d::BlockHash]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.0).collect()
}

/// The other way of [`hashes_to_bytes`].
pub fn hashes_from_bytes(field: &'static str, bytes: &[u8]) -> Result<Arc<[d::BlockHash]>, InvalidMessage> {
    bytes.chunks(16).map(|chunk| hash(field, chunk)).collect()
}

impl From<d::RequestKey> for w::RequestKey {
    fn from(key: d::RequestKey) -> Self {
        Self { request_id: key.request.to_string(), attempt: key.attempt.0 }
    }
}

impl TryFrom<w::RequestKey> for d::RequestKey {
    type Error = InvalidMessage;

    fn try_from(key: w::RequestKey) -> Result<Self, Self::Error> {
        Ok(Self { request: parse("request_id", &key.request_id)?, attempt: d::Attempt(key.attempt) })
    }
}

impl From<&d::KvLayout> for w::KvLayout {
    fn from(layout: &d::KvLayout) -> Self {
        Self {
            model_fingerprint: layout.fingerprint().to_string(),
            num_layers: layout.num_layers,
            num_kv_heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            block_tokens: layout.block_tokens,
            dtype: layout.dtype.as_str().into(),
            num_blocks: layout.num_blocks,
        }
    }
}

/// Largest of any extent of a layout that is believed.
const MAX_EXTENT: u32 = 1 << 28;

impl TryFrom<w::KvLayout> for d::KvLayout {
    type Error = InvalidMessage;

    fn try_from(layout: w::KvLayout) -> Result<Self, Self::Error> {
        let extent = |field, value: u32| {
            let found = || format!("{value}, but must be from 1 to {MAX_EXTENT}");
            if (1..=MAX_EXTENT).contains(&value) { Ok(value) } else { Err(InvalidMessage { field, found: found() }) }
        };
        let dtype =
            [d::KvDtype::F32, d::KvDtype::F16, d::KvDtype::Bf16].into_iter().find(|t| t.as_str() == layout.dtype);
        Ok(Self {
            model: parse::<d::ModelFingerprint>("layout.model_fingerprint", &layout.model_fingerprint)?.0,
            num_layers: extent("layout.num_layers", layout.num_layers)?,
            num_kv_heads: extent("layout.num_kv_heads", layout.num_kv_heads)?,
            head_dim: extent("layout.head_dim", layout.head_dim)?,
            block_tokens: extent("layout.block_tokens", layout.block_tokens)?,
            dtype: dtype
                .ok_or_else(|| InvalidMessage { field: "layout.dtype", found: format!("'{}'", layout.dtype) })?,
            num_blocks: extent("layout.num_blocks", layout.num_blocks)?,
        })
    }
}

impl From<&d::NodeProfile> for w::NodeProfile {
    fn from(p: &d::NodeProfile) -> Self {
        Self {
            prefill_base: p.prefill_base,
            prefill_per_token: p.prefill_per_token,
            prefill_per_token_pair: p.prefill_per_token_pair,
            decode_base: p.decode_base,
            decode_per_sequence: p.decode_per_sequence,
            decode_per_kv_token: p.decode_per_kv_token,
            max_waiting: p.max_waiting,
            max_running: p.max_running,
            chunk_tokens: p.chunk_tokens,
            transfer_bytes_per_s: p.transfer_bytes_per_s,
        }
    }
}

impl From<w::NodeProfile> for d::NodeProfile {
    /// Costs that are negative or not finite become 0: the models are fitted online anyway.
    fn from(p: w::NodeProfile) -> Self {
        let cost = |value: f64| if value.is_finite() && value > 0.0 { value } else { 0.0 };
        Self {
            prefill_base: cost(p.prefill_base),
            prefill_per_token: cost(p.prefill_per_token),
            prefill_per_token_pair: cost(p.prefill_per_token_pair),
            decode_base: cost(p.decode_base),
            decode_per_sequence: cost(p.decode_per_sequence),
            decode_per_kv_token: cost(p.decode_per_kv_token),
            max_waiting: p.max_waiting,
            max_running: p.max_running,
            chunk_tokens: p.chunk_tokens,
            transfer_bytes_per_s: cost(p.transfer_bytes_per_s),
        }
    }
}

impl From<&d::NodeInfo> for w::NodeInfo {
    fn from(info: &d::NodeInfo) -> Self {
        Self {
            name: info.node.to_string(),
            role: info.role.as_str().into(),
            generation: info.generation.to_string(),
            address: info.address.clone(),
            model: info.model.clone(),
            vocab_size: info.vocab_size,
            context_length: info.context_length,
            numerics: info.numerics.clone(),
            layout: Some((&info.layout).into()),
            profile: Some((&info.profile).into()),
            copies_prefixes: info.copies_prefixes,
        }
    }
}

impl TryFrom<w::NodeInfo> for d::NodeInfo {
    type Error = InvalidMessage;

    fn try_from(info: w::NodeInfo) -> Result<Self, Self::Error> {
        let role = match info.role.as_str() {
            "prefill" => d::NodeRole::Prefill,
            "decode" => d::NodeRole::Decode,
            other => return Err(InvalidMessage { field: "role", found: format!("'{other}'") }),
        };
        Ok(Self {
            node: node_id("name", &info.name)?,
            role,
            generation: generation("generation", &info.generation)?,
            address: info.address,
            model: info.model,
            vocab_size: info.vocab_size,
            context_length: info.context_length,
            numerics: info.numerics,
            layout: required("layout", info.layout)?.try_into()?,
            profile: info.profile.unwrap_or_default().into(),
            copies_prefixes: info.copies_prefixes,
        })
    }
}

impl From<&d::Load> for w::Load {
    fn from(load: &d::Load) -> Self {
        Self {
            running: load.running,
            waiting: load.waiting,
            queued_tokens: load.queued_tokens,
            kv_tokens: load.kv_tokens,
            blocks_total: load.blocks_total,
            blocks_used: load.blocks_used,
            blocks_cached: load.blocks_cached,
            blocks_reserved: load.blocks_reserved,
            prefix_queries: load.prefix_queries,
            prefix_hits: load.prefix_hits,
            prefix_hits_ssd: load.prefix_hits_ssd,
            prefix_hits_fetched: load.prefix_hits_fetched,
            preemptions: load.preemptions,
            takes_sequences: load.takes_sequences,
            blocks_ssd: load.blocks_ssd,
            step: load
                .step
                .map(|step| w::StepProgress { elapsed_s: step.elapsed.as_secs_f64(), left_s: step.left.as_secs_f64() }),
            blocks_cold: load.blocks_cold,
            draining: load.draining,
        }
    }
}

impl TryFrom<w::Load> for d::Load {
    type Error = InvalidMessage;

    fn try_from(load: w::Load) -> Result<Self, Self::Error> {
        let progress = |step: w::StepProgress| -> Result<_, Self::Error> {
            let elapsed = seconds("step.elapsed_s", step.elapsed_s)?;
            Ok(d::StepProgress { elapsed, left: seconds("step.left_s", step.left_s)? })
        };
        Ok(Self {
            running: load.running,
            waiting: load.waiting,
            queued_tokens: load.queued_tokens,
            kv_tokens: load.kv_tokens,
            blocks_total: load.blocks_total,
            blocks_used: load.blocks_used,
            blocks_cached: load.blocks_cached,
            blocks_reserved: load.blocks_reserved,
            prefix_queries: load.prefix_queries,
            prefix_hits: load.prefix_hits,
            prefix_hits_ssd: load.prefix_hits_ssd,
            prefix_hits_fetched: load.prefix_hits_fetched,
            preemptions: load.preemptions,
            takes_sequences: load.takes_sequences,
            blocks_ssd: load.blocks_ssd,
            step: load.step.map(progress).transpose()?,
            blocks_cold: load.blocks_cold,
            draining: load.draining,
        })
    }
}

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
            logprobs: s.logprobs,
            prompt_logprobs: s.prompt_logprobs,
        }
    }
}

impl TryFrom<w::NodeSampling> for d::SamplingParams {
    type Error = InvalidMessage;

    fn try_from(s: w::NodeSampling) -> Result<Self, Self::Error> {
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
            sampling: Some(job.sampling.as_ref().into()),
            decode: job.decode.as_ref().map(Into::into),
            fetch: job.fetch.as_ref().map(Into::into),
            salt: job.salt.to_vec(),
            priority: job.terms.priority,
            queue: Some((&job.terms).into()),
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
            address: target.address,
            tbt: target.tbt_s.map(|tbt| seconds("decode.tbt_s", tbt)).transpose()?,
        })
    }
}

impl From<&d::Redirect> for w::RedirectCommand {
    fn from(redirect: &d::Redirect) -> Self {
        Self { key: Some(redirect.key.into()), decode: Some((&redirect.decode).into()) }
    }
}

impl TryFrom<w::RedirectCommand> for d::Redirect {
    type Error = InvalidMessage;

    fn try_from(redirect: w::RedirectCommand) -> Result<Self, Self::Error> {
        Ok(Self { key: key(redirect.key)?, decode: required("decode", redirect.decode)?.try_into()? })
    }
}

impl w::NodeLostCommand {
    /// That start of a node is gone.
    pub fn new(node: &d::NodeId, start: d::Generation) -> Self {
        Self { node: node.to_string(), generation: start.to_string() }
    }

    /// The node, and which start of it.
    pub fn into_domain(self) -> Result<(d::NodeId, d::Generation), InvalidMessage> {
        Ok((node_id("node", &self.node)?, generation("generation", &self.generation)?))
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
            address: source.address,
            tokens: source.tokens,
        })
    }
}

impl From<&d::PrefixCopy> for w::CopyPrefixCommand {
    fn from(copy: &d::PrefixCopy) -> Self {
        Self {
            key: Some(copy.key.into()),
            source: Some((&copy.source).into()),
            block_hashes: hashes_to_bytes(&copy.block_hashes),
        }
    }
}

impl w::CopyPrefixCommand {
    /// The order, as one of `conductor`, whose session it came in on.
    pub fn into_domain(self, conductor: d::ConductorId) -> Result<d::PrefixCopy, InvalidMessage> {
        if self.block_hashes.is_empty() {
            return Err(InvalidMessage { field: "block_hashes", found: "empty".into() });
        }
        Ok(d::PrefixCopy {
            key: key(self.key)?,
            conductor,
            source: required("source", self.source)?.try_into()?,
            block_hashes: hashes_from_bytes("block_hashes", &self.block_hashes)?,
        })
    }
}

impl From<&d::QueueTerms> for w::QueueTerms {
    fn from(terms: &d::QueueTerms) -> Self {
        Self {
            patience_s: terms.patience.as_secs_f64(),
            deadline_s: terms.deadline.map(|deadline| deadline.as_secs_f64()),
            value: terms.value,
            max_wait_s: terms.max_wait.as_secs_f64(),
            compute_s: terms.compute.as_secs_f64(),
        }
    }
}

impl w::QueueTerms {
    fn into_domain(self, priority: i32) -> Result<d::QueueTerms, InvalidMessage> {
        if !self.value.is_finite() || self.value < 0.0 {
            return Err(InvalidMessage { field: "queue.value", found: self.value.to_string() });
        }
        Ok(d::QueueTerms {
            priority,
            patience: wait("queue.patience_s", self.patience_s)?,
            deadline: self.deadline_s.map(|deadline| wait("queue.deadline_s", deadline)).transpose()?,
            value: self.value,
            max_wait: wait("queue.max_wait_s", self.max_wait_s)?,
            compute: wait("queue.compute_s", self.compute_s)?,
        })
    }
}

/// A time in a queue. A year is as good as for ever, and adds to any clock.
fn wait(field: &'static str, value: f64) -> Result<Duration, InvalidMessage> {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Ok(seconds(field, value)?.min(YEAR))
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
        Ok(d::PrefillJob {
            key: key(self.key)?,
            conductor,
            tokens: self.tokens.into(),
            output_tokens: self.output_tokens,
            sampling: Arc::new(required("sampling", self.sampling)?.try_into()?),
            decode: self.decode.map(TryInto::try_into).transpose()?,
            fetch: self.fetch.map(TryInto::try_into).transpose()?,
            salt: self.salt.into(),
            terms: w::QueueTerms::into_domain(self.queue.unwrap_or_default(), self.priority)?,
        })
    }
}

impl From<&d::TokenLogprobs> for w::TokenLogprobs {
    fn from(l: &d::TokenLogprobs) -> Self {
        let top = l.top.iter().map(|t| w::TopLogprob { token_id: t.token, logprob: t.logprob });
        Self { logprob: l.logprob, top: top.collect() }
    }
}

impl From<w::TokenLogprobs> for d::TokenLogprobs {
    fn from(l: w::TokenLogprobs) -> Self {
        let top = l.top.into_iter().map(|t| d::TopLogprob { token: t.token_id, logprob: t.logprob });
        Self { logprob: l.logprob, top: top.collect() }
    }
}

impl From<&d::KvTransfer> for w::KvTransfer {
    fn from(t: &d::KvTransfer) -> Self {
        Self {
            bytes: t.bytes,
            transport: t.transport.clone(),
            seconds: t.elapsed.as_secs_f64(),
            exposed_seconds: t.exposed.as_secs_f64(),
            bytes_at_compute_end: t.bytes_at_compute_end,
        }
    }
}

impl TryFrom<w::KvTransfer> for d::KvTransfer {
    type Error = InvalidMessage;

    fn try_from(t: w::KvTransfer) -> Result<Self, Self::Error> {
        Ok(Self {
            bytes: t.bytes,
            transport: t.transport,
            elapsed: seconds("kv_transfer.seconds", t.seconds)?,
            exposed: seconds("kv_transfer.exposed_seconds", t.exposed_seconds)?,
            bytes_at_compute_end: t.bytes_at_compute_end,
        })
    }
}

impl From<&d::Timeline> for w::Timeline {
    fn from(t: &d::Timeline) -> Self {
        Self {
            placement_s: t.placement.as_secs_f64(),
            prefill_queue_s: t.prefill_queue.as_secs_f64(),
            prefill_compute_s: t.prefill_compute.as_secs_f64(),
            ttft_s: t.ttft.as_secs_f64(),
            kv_transfer: Some((&t.kv_transfer).into()),
            decode_queue_s: t.decode_queue.as_secs_f64(),
            total_s: t.total.as_secs_f64(),
            prefix_fetch: t.prefix_fetch.as_ref().map(Into::into),
            moves: t.moves,
            moved: (t.moves > 0).then(|| (&t.moved).into()),
        }
    }
}

impl From<&d::Usage> for w::Usage {
    fn from(u: &d::Usage) -> Self {
        Self { prompt_tokens: u.prompt_tokens, completion_tokens: u.completion_tokens, cached_tokens: u.cached_tokens }
    }
}

impl From<&d::Refused> for w::Failure {
    fn from(refused: &d::Refused) -> Self {
        Self { kind: refused.kind.as_str().into(), message: refused.message.clone() }
    }
}

impl From<w::Failure> for d::Refused {
    /// A kind of a later version is a bug here, not there: `Internal`.
    fn from(failure: w::Failure) -> Self {
        let kind = d::ErrorKind::ALL.into_iter().find(|kind| kind.as_str() == failure.kind);
        Self { kind: kind.unwrap_or(d::ErrorKind::Internal), message: failure.message }
    }
}

fn finish_to_wire(finish: Option<d::FinishReason>) -> String {
    finish.map(|finish| finish.as_str().into()).unwrap_or_default()
}

fn finish_from_wire(text: &str) -> Result<Option<d::FinishReason>, InvalidMessage> {
    match text {
        "" => Ok(None),
        "stop" => Ok(Some(d::FinishReason::Stop)),
        "length" => Ok(Some(d::FinishReason::Length)),
        other => Err(InvalidMessage { field: "finish_reason", found: format!("'{other}'") }),
    }
}

impl From<&d::FetchReport> for w::PrefixFetched {
    fn from(report: &d::FetchReport) -> Self {
        Self {
            tokens: report.tokens,
            bytes: report.bytes,
            transport: report.transport.clone(),
            seconds: report.elapsed.as_secs_f64(),
            failure: report.failure.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<w::PrefixFetched> for d::FetchReport {
    type Error = InvalidMessage;

    fn try_from(report: w::PrefixFetched) -> Result<Self, Self::Error> {
        Ok(Self {
            tokens: report.tokens,
            bytes: report.bytes,
            transport: report.transport,
            elapsed: seconds("fetched.seconds", report.seconds)?,
            failure: report.failure.map(Into::into),
        })
    }
}

impl w::PrefillEvent {
    /// An event about a request.
    pub fn from_domain(key: d::RequestKey, event: &d::PrefillEvent) -> Self {
        use w::prefill_event::Event;
        let event = match event {
            d::PrefillEvent::Started { queue, cached_tokens } => {
                Event::Started(w::PrefillStarted { queue_s: queue.as_secs_f64(), cached_tokens: *cached_tokens })
            }
            d::PrefillEvent::FirstToken { token, logprobs, prompt_logprobs, finish, compute } => {
                Event::FirstToken(w::FirstToken {
                    token: *token,
                    logprobs: logprobs.as_ref().map(Into::into),
                    prompt_logprobs: prompt_logprobs.iter().map(Into::into).collect(),
                    finish_reason: finish_to_wire(*finish),
                    compute_s: compute.as_secs_f64(),
                })
            }
            d::PrefillEvent::Fetched(report) => Event::Fetched(report.into()),
            d::PrefillEvent::HandedOver(transfer) => Event::HandedOver(transfer.into()),
            d::PrefillEvent::Failed(refused) => Event::Failed(refused.into()),
            d::PrefillEvent::DecodeFailed(refused) => Event::DecodeFailed(refused.into()),
            d::PrefillEvent::GrantRefused(refused) => Event::GrantRefused(refused.into()),
            d::PrefillEvent::Copied(report) => Event::Copied(report.into()),
        };
        Self { key: Some(key.into()), event: Some(event) }
    }

    /// The request and what happened to it.
    pub fn into_domain(self) -> Result<(d::RequestKey, d::PrefillEvent), InvalidMessage> {
        use w::prefill_event::Event;
        let event = match required("event", self.event)? {
            Event::Started(s) => d::PrefillEvent::Started {
                queue: seconds("started.queue_s", s.queue_s)?,
                cached_tokens: s.cached_tokens,
            },
            Event::FirstToken(t) => d::PrefillEvent::FirstToken {
                token: t.token,
                logprobs: t.logprobs.map(Into::into),
                prompt_logprobs: t.prompt_logprobs.into_iter().map(Into::into).collect(),
                finish: finish_from_wire(&t.finish_reason)?,
                compute: seconds("first_token.compute_s", t.compute_s)?,
            },
            Event::Fetched(report) => d::PrefillEvent::Fetched(report.try_into()?),
            Event::HandedOver(transfer) => d::PrefillEvent::HandedOver(transfer.try_into()?),
            Event::Failed(failure) => d::PrefillEvent::Failed(failure.into()),
            Event::DecodeFailed(failure) => d::PrefillEvent::DecodeFailed(failure.into()),
            Event::GrantRefused(failure) => d::PrefillEvent::GrantRefused(failure.into()),
            Event::Copied(report) => d::PrefillEvent::Copied(report.try_into()?),
        };
        Ok((key(self.key)?, event))
    }
}

impl w::DecodeEvent {
    /// An event about a request.
    pub fn from_domain(key: d::RequestKey, event: &d::DecodeEvent) -> Self {
        use w::decode_event::Event;
        let event = match event {
            d::DecodeEvent::Token { index, token, logprobs, finish, queue } => Event::Token(w::DecodedToken {
                index: *index,
                token: *token,
                logprobs: logprobs.as_ref().map(Into::into),
                finish_reason: finish_to_wire(*finish),
                queue_s: queue.map(|queue| queue.as_secs_f64()),
            }),
            d::DecodeEvent::Failed(refused) => Event::Failed(refused.into()),
        };
        Self { key: Some(key.into()), event: Some(event) }
    }

    /// The request and what happened to it.
    pub fn into_domain(self) -> Result<(d::RequestKey, d::DecodeEvent), InvalidMessage> {
        use w::decode_event::Event;
        let event = match required("event", self.event)? {
            Event::Token(t) => d::DecodeEvent::Token {
                index: t.index,
                token: t.token,
                logprobs: t.logprobs.map(Into::into),
                finish: finish_from_wire(&t.finish_reason)?,
                queue: t.queue_s.map(|s| seconds("token.queue_s", s)).transpose()?,
            },
            Event::Failed(failure) => d::DecodeEvent::Failed(failure.into()),
        };
        Ok((key(self.key)?, event))
    }
}

impl From<&d::KvEvent> for w::KvEvent {
    fn from(event: &d::KvEvent) -> Self {
        use w::kv_event::Event;
        let event = match event {
            d::KvEvent::Stored { hash, parent } => Event::Stored(w::KvStored {
                hash: hash.0.to_vec(),
                parent: parent.map(|parent| parent.0.to_vec()).unwrap_or_default(),
            }),
            d::KvEvent::Removed { hash } => Event::Removed(hash.0.to_vec()),
            d::KvEvent::Cleared => Event::Cleared(true),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<w::KvEvent> for d::KvEvent {
    type Error = InvalidMessage;

    fn try_from(event: w::KvEvent) -> Result<Self, Self::Error> {
        use w::kv_event::Event;
        Ok(match required("event", event.event)? {
            Event::Stored(s) => Self::Stored {
                hash: hash("stored.hash", &s.hash)?,
                parent: if s.parent.is_empty() { None } else { Some(hash("stored.parent", &s.parent)?) },
            },
            Event::Removed(bytes) => Self::Removed { hash: hash("removed", &bytes)? },
            Event::Cleared(_) => Self::Cleared,
        })
    }
}

impl TryFrom<w::GrantRequest> for d::GrantRequest {
    type Error = InvalidMessage;

    fn try_from(request: w::GrantRequest) -> Result<Self, Self::Error> {
        Ok(Self {
            key: key(request.key)?,
            prefill: node_id("prefill_node", &request.prefill_node)?,
            prefill_generation: generation("prefill_generation", &request.prefill_generation)?,
            prompt_tokens: request.prompt_tokens,
            block_hashes: hashes_from_bytes("block_hashes", &request.block_hashes)?,
            max_tokens: request.max_tokens,
            tbt: request.tbt_s.map(|tbt| seconds("tbt_s", tbt)).transpose()?,
            // Whoever receives it knows its own class.
            is_foreign: false,
        })
    }
}

impl TryFrom<w::LeaseRequest> for d::LeaseRequest {
    type Error = InvalidMessage;

    fn try_from(request: w::LeaseRequest) -> Result<Self, Self::Error> {
        if request.block_hashes.is_empty() {
            return Err(InvalidMessage { field: "block_hashes", found: "empty".into() });
        }
        Ok(Self {
            key: key(request.key)?,
            reader: node_id("reader_node", &request.reader_node)?,
            reader_generation: generation("reader_generation", &request.reader_generation)?,
            block_hashes: hashes_from_bytes("block_hashes", &request.block_hashes)?,
        })
    }
}

impl TryFrom<w::ReleaseLeaseRequest> for d::LeaseRelease {
    type Error = InvalidMessage;

    fn try_from(request: w::ReleaseLeaseRequest) -> Result<Self, Self::Error> {
        let reader = match request.reader_node.is_empty() {
            true => None,
            false => Some((
                node_id("reader_node", &request.reader_node)?,
                generation("reader_generation", &request.reader_generation)?,
            )),
        };
        Ok(Self { lease: d::GrantId(request.lease), reader })
    }
}

impl From<&d::Handover> for w::Handover {
    fn from(h: &d::Handover) -> Self {
        Self {
            key: Some(h.key.into()),
            conductor_id: h.conductor.to_string(),
            grant: h.grant.0,
            prompt: h.prompt.to_vec(),
            first_token: h.first_token,
            sampling: Some(h.sampling.as_ref().into()),
            expected_bytes: h.expected_bytes,
            salt: h.salt.to_vec(),
        }
    }
}

impl TryFrom<w::Handover> for d::Handover {
    type Error = InvalidMessage;

    fn try_from(h: w::Handover) -> Result<Self, Self::Error> {
        Ok(Self {
            key: key(h.key)?,
            conductor: parse("conductor_id", &h.conductor_id)?,
            grant: d::GrantId(h.grant),
            prompt: h.prompt.into(),
            first_token: h.first_token,
            sampling: Arc::new(required("sampling", h.sampling)?.try_into()?),
            expected_bytes: h.expected_bytes,
            salt: h.salt.into(),
        })
    }
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
