//! What became of each request.

use std::time::Duration;

use serde::Serialize;

use crate::trace::TraceRequest;

/// What became of one request. Times are virtual, from the start of the trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestRecord {
    /// When it came.
    pub arrived: Duration,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens of its answer.
    pub output_tokens: u32,
    /// Tokens of the prompt that the prefill node had.
    pub local_tokens: u32,
    /// Tokens of the prompt that came from another node.
    pub fetched_tokens: u32,
    /// Tokens of the prompt that came from the node's SSD.
    pub ssd_tokens: u32,
    /// Tokens of the prompt that were computed.
    pub computed_tokens: u32,
    /// Index of the prefill node, once placed.
    pub prefill: Option<usize>,
    /// Index of the decode node, once placed.
    pub decode: Option<usize>,
    /// Predicted when it was placed.
    pub predicted_ttft: Option<Duration>,
    /// Predicted when it was placed.
    pub predicted_tbt: Option<Duration>,
    /// Time to first token.
    pub ttft: Option<Duration>,
    /// Mean of the longest tenth of the gaps; none if there is one token only.
    pub tbt: Option<Duration>,
    /// Whether it was refused: nothing was done for it.
    pub rejected: bool,
    /// Whether its client left.
    pub aborted: bool,
    /// Why it was taken in and not served to its end.
    pub failed: Option<String>,
    /// How often it went on at another decode node.
    pub migrations: u32,
    /// When its last token came.
    pub finished: Option<Duration>,
}

/// Most tokens of an answer that are asked for.
pub const MAX_ANSWER_TOKENS: u32 = 2048;

impl RequestRecord {
    /// A request that is still to come, if the trace is played so many times as fast as recorded.
    pub fn arriving(request: &TraceRequest, speed: f64) -> Self {
        Self {
            arrived: request.timestamp.div_f64(speed),
            prompt_tokens: request.input_length,
            output_tokens: request.output_length.clamp(1, MAX_ANSWER_TOKENS),
            local_tokens: 0,
            fetched_tokens: 0,
            ssd_tokens: 0,
            computed_tokens: 0,
            prefill: None,
            decode: None,
            predicted_ttft: None,
            predicted_tbt: None,
            ttft: None,
            tbt: None,
            rejected: false,
            aborted: false,
            failed: None,
            migrations: 0,
            finished: None,
        }
    }
}
