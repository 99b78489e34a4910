//! Answers: outputs of requests, put together as an API wants them.

use baton_proto::v1;

use crate::common::StreamOptions;
use crate::error::{ErrorForm, Failure, FieldNames};
use crate::warnings::Warnings;

/// What one body asks for.
pub struct Call {
    /// The requests that serve it, one or more.
    pub requests: Vec<v1::GenerateRequest>,
    /// Whether the answer comes as a stream.
    pub streams: bool,
    /// What the API calls the fields of these requests.
    pub fields: FieldNames,
    /// Puts the answer together.
    pub answer: Box<dyn Answer>,
    /// What was left out of the requests, beside what [`crate::read`] told.
    pub warnings: Warnings,
    /// Bytes of kept responses that the requests have, beside those of the body.
    pub referred_bytes: usize,
}

impl Call {
    pub(crate) fn new(
        requests: Vec<v1::GenerateRequest>,
        streams: bool,
        fields: FieldNames,
        answer: Box<dyn Answer>,
    ) -> Self {
        Self { requests, streams, fields, answer, warnings: Warnings::default(), referred_bytes: 0 }
    }
}

/// One event of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Its name, in the APIs whose events have one.
    pub event: Option<&'static str>,
    /// JSON, or the end of the stream.
    pub data: String,
}

impl Chunk {
    /// The end of a stream in OpenAI's older APIs.
    pub(crate) fn done() -> Self {
        Self { event: None, data: "[DONE]".to_owned() }
    }
}

/// Puts the answer to a [`Call`] together.
pub trait Answer: Send {
    /// Takes in an output of request number `index` of the call; returns the events that a stream
    /// sends for it.
    fn take(&mut self, index: usize, response: v1::GenerateResponse) -> Vec<Chunk>;
    /// What a stream sends once all of its requests have ended.
    fn last(&mut self) -> Vec<Chunk>;
    /// What a stream sends instead, if it ends before.
    fn failed(&mut self, failure: &Failure) -> Chunk;
    /// Whether every answer has its end. What stops before is not whole.
    fn is_whole(&self) -> bool;
    /// The whole answer as JSON, once all requests have ended.
    fn body(&mut self) -> String;
}

/// What every answer of OpenAI's older APIs has.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) created: u64,
    /// Events are sent, and nothing is kept.
    pub(crate) streams: bool,
    pub(crate) options: StreamOptions,
}

impl Head {
    pub(crate) fn new(created: u64, stream: Option<StreamOptions>) -> Self {
        let options = stream.unwrap_or_default();
        Self { id: String::new(), model: String::new(), created, streams: stream.is_some(), options }
    }

    pub(crate) fn failed(failure: &Failure) -> Chunk {
        ErrorForm::OpenAi.event(failure)
    }
}
