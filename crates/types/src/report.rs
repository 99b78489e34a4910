//! What a request's owner is told: log-probabilities, usage and the timeline.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// Why an output ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the model's context length.
    Length,
}

impl FinishReason {
    /// Every reason.
    pub const ALL: [Self; 2] = [Self::Stop, Self::Length];

    /// `stop` or `length`, as in OpenAI's API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// One alternative at a position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability, from the unmodified logits.
    pub logprob: f32,
}

/// Log-probabilities at one position, from the model's unmodified distribution (before penalties
/// and temperature).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token that was taken; `None` at the end of a prompt, as none is taken yet.
    pub logprob: Option<f32>,
    /// The most probable tokens, best first; ties by smaller token id.
    pub top: Vec<TopLogprob>,
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Tokens of the prompt whose KV the prefill node did not have to compute.
    pub cached_tokens: u32,
}

/// The handoff of a request's KV from the prefill to the decode node.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct KvTransfer {
    /// Bytes of the blocks pushed: layers x blocks x block bytes. Blocks that the decode node
    /// already had cached are not in it.
    pub bytes: u64,
    /// The transport that finished it; empty if nothing moved.
    pub transport: String,
    /// From the first push to the last acknowledgement.
    pub elapsed: Duration,
    /// The part of it after the last layer's compute ended: what the client waits for.
    pub exposed: Duration,
    /// Bytes acknowledged by the decode node when the last layer's compute ended.
    pub bytes_at_compute_end: u64,
}

/// Where a request's time went, as durations since its arrival unless said otherwise.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Timeline {
    /// In the frontend: template, tokenizing, placement.
    pub placement: Duration,
    /// Wait in the prefill node's queue.
    pub prefill_queue: Duration,
    /// From the first chunk's start to the first token.
    pub prefill_compute: Duration,
    /// Time to first token, measured at the frontend.
    pub ttft: Duration,
    /// The handoff.
    pub kv_transfer: KvTransfer,
    /// Wait at the decode node from the handoff to its first step.
    pub decode_queue: Duration,
    /// From arrival to the end.
    pub total: Duration,
    /// A prefix that the prefill node fetched from another node; `None` if none came.
    pub prefix_fetch: Option<KvTransfer>,
    /// How often the request migrated because its decode node had no room for it, or was on its way
    /// out.
    pub migrations: u32,
    /// What those nodes fetched, in all.
    pub migrated: KvTransfer,
}
