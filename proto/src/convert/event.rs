//! What nodes tell conductors: events of requests, timelines, prefix events.

use std::borrow::Cow;

use baton_types as d;

use super::{InvalidMessage, count, cut, hash, key, required, seconds, short, total};
use crate::transfer::MAX_TRANSPORT;
use crate::v1 as w;

impl From<&d::TokenLogprobs> for w::TokenLogprobs {
    fn from(l: &d::TokenLogprobs) -> Self {
        let top = l.top.iter();
        let top = top.map(|t| w::TopLogprob { token_id: t.token, logprob: t.logprob, ..Default::default() });
        Self { logprob: l.logprob, top: top.collect(), ..Default::default() }
    }
}

impl w::TokenLogprobs {
    /// The bytes of the sampled token.
    pub fn bytes(&self) -> &[u8] {
        if self.token_bytes.is_empty() { self.text.as_bytes() } else { &self.token_bytes }
    }
}

impl w::TopLogprob {
    /// The bytes of the token.
    pub fn bytes(&self) -> &[u8] {
        if self.token_bytes.is_empty() { self.text.as_bytes() } else { &self.token_bytes }
    }
}

/// A token's `text` and `token_bytes`, which is empty if the text shows all of them.
pub fn token_text(bytes: &[u8]) -> (String, Vec<u8>) {
    match String::from_utf8_lossy(bytes) {
        Cow::Borrowed(text) => (text.to_owned(), Vec::new()),
        Cow::Owned(text) => (text, bytes.to_vec()),
    }
}

impl From<w::TokenLogprobs> for d::TokenLogprobs {
    fn from(l: w::TokenLogprobs) -> Self {
        // No request asks for more.
        let top = l.top.into_iter().take(d::MAX_TOP_LOGPROBS as usize);
        let top = top.map(|t| d::TopLogprob { token: t.token_id, logprob: t.logprob });
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
            bytes: total("kv_transfer.bytes", t.bytes)?,
            transport: short("kv_transfer.transport", t.transport, MAX_TRANSPORT)?,
            elapsed: seconds("kv_transfer.seconds", t.seconds)?,
            exposed: seconds("kv_transfer.exposed_seconds", t.exposed_seconds)?,
            bytes_at_compute_end: total("kv_transfer.bytes_at_compute_end", t.bytes_at_compute_end)?,
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
            migrations: t.migrations,
            migrated: (t.migrations > 0).then(|| (&t.migrated).into()),
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
        Self { kind: kind.unwrap_or(d::ErrorKind::Internal), message: cut(&failure.message).to_owned() }
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
            tokens: count("fetched.tokens", report.tokens)?,
            bytes: total("fetched.bytes", report.bytes)?,
            transport: short("fetched.transport", report.transport, MAX_TRANSPORT)?,
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
            d::PrefillEvent::Progress { tokens } => Event::Progress(w::PrefillProgress { tokens: *tokens }),
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
            d::PrefillEvent::HandedOff(transfer) => Event::HandedOff(transfer.into()),
            d::PrefillEvent::Failed(refused) => Event::Failed(refused.into()),
            d::PrefillEvent::DecodeFailed(refused) => Event::DecodeFailed(refused.into()),
            d::PrefillEvent::GrantRefused(refused) => Event::GrantRefused(refused.into()),
        };
        Self { key: Some(key.into()), event: Some(event) }
    }

    /// The request and what happened to it. If the latter cannot be read, the request has failed:
    /// it cannot go on as if nothing had been said.
    pub fn into_domain(self) -> Result<(d::RequestKey, d::PrefillEvent), InvalidMessage> {
        let event = prefill_event(self.event).unwrap_or_else(|error| d::PrefillEvent::Failed(unreadable(&error)));
        Ok((key(self.key)?, event))
    }
}

fn unreadable(error: &InvalidMessage) -> d::Refused {
    d::Refused { kind: d::ErrorKind::Internal, message: format!("an event of the node cannot be read: {error}") }
}

fn prefill_event(event: Option<w::prefill_event::Event>) -> Result<d::PrefillEvent, InvalidMessage> {
    use w::prefill_event::Event;
    Ok(match required("event", event)? {
        Event::Started(s) => d::PrefillEvent::Started {
            queue: seconds("started.queue_s", s.queue_s)?,
            cached_tokens: count("started.cached_tokens", s.cached_tokens)?,
        },
        Event::Progress(progress) => d::PrefillEvent::Progress { tokens: count("progress.tokens", progress.tokens)? },
        Event::FirstToken(t) => d::PrefillEvent::FirstToken {
            token: t.token,
            logprobs: t.logprobs.map(Into::into),
            prompt_logprobs: t.prompt_logprobs.into_iter().map(Into::into).collect(),
            finish: finish_from_wire(&t.finish_reason)?,
            compute: seconds("first_token.compute_s", t.compute_s)?,
        },
        Event::Fetched(report) => d::PrefillEvent::Fetched(report.try_into()?),
        Event::HandedOff(transfer) => d::PrefillEvent::HandedOff(transfer.try_into()?),
        Event::Failed(failure) => d::PrefillEvent::Failed(failure.into()),
        Event::DecodeFailed(failure) => d::PrefillEvent::DecodeFailed(failure.into()),
        Event::GrantRefused(failure) => d::PrefillEvent::GrantRefused(failure.into()),
    })
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

    /// The request and what happened to it, as [`w::PrefillEvent::into_domain`].
    pub fn into_domain(self) -> Result<(d::RequestKey, d::DecodeEvent), InvalidMessage> {
        let event = decode_event(self.event).unwrap_or_else(|error| d::DecodeEvent::Failed(unreadable(&error)));
        Ok((key(self.key)?, event))
    }
}

fn decode_event(event: Option<w::decode_event::Event>) -> Result<d::DecodeEvent, InvalidMessage> {
    use w::decode_event::Event;
    Ok(match required("event", event)? {
        Event::Token(t) => d::DecodeEvent::Token {
            index: t.index,
            token: t.token,
            logprobs: t.logprobs.map(Into::into),
            finish: finish_from_wire(&t.finish_reason)?,
            queue: t.queue_s.map(|s| seconds("token.queue_s", s)).transpose()?,
        },
        Event::Failed(failure) => d::DecodeEvent::Failed(failure.into()),
    })
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
