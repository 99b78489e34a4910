//! What became of each request.

use std::time::Duration;

use serde::Serialize;

/// Where a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectStage {
    /// At its arrival: nothing was done for it.
    Arrival,
    /// When its prompt was computed: in vain.
    AfterPrefill,
}

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
    /// Mean of the longest tenth of the gaps; none where there is one token only.
    pub tbt: Option<Duration>,
    /// Where it was refused.
    pub rejected: Option<RejectStage>,
    /// When its last token came.
    pub finished: Option<Duration>,
}

/// The cluster at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// Virtual seconds from the start of the trace.
    pub at_s: f64,
    /// Work that waits at the prefill nodes over the objective of the time to first token, the mean of the nodes.
    pub prefill_load: f64,
    /// Blocks that sequences hold or wait for over those that there are, the mean of the decode nodes.
    pub decode_load: f64,
}
