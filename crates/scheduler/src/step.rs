//! What a node's engine is asked to do, and what it answers. The same for both kinds of node.

use std::ops::Range;
use std::sync::Arc;

use baton_types::{BlockId, Refused, RequestKey, SamplingParams, TokenId, TokenLogprobs};

/// One call of the engine. Ascending within a node's generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

/// Which rows of a sequence's part of a step need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LogitsWanted {
    /// None: the prompt goes on in a later chunk.
    None,
    /// The last row: a token is drawn from it.
    Last,
    /// Every row, for the log-probabilities of the prompt; a token is drawn from the last one if
    /// [`StepSequence::is_last_chunk`].
    All,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSequence {
    /// Whose it is.
    pub key: RequestKey,
    /// The prompt and the output so far. Shared with the core, which appends in place once the step
    /// is over and this is not held any more.
    pub tokens: Arc<Vec<TokenId>>,
    /// How many of `tokens` are the prompt; the rest is the output, and its length is the index of
    /// the token to draw.
    pub prompt_tokens: usize,
    /// Positions to compute. The KV of those before is in the arena. Starts on a block boundary in
    /// prefill.
    pub range: Range<usize>,
    /// Blocks of positions 0 to at least `range.end`; shared in the same way.
    pub block_table: Arc<Vec<BlockId>>,
    /// Rows that need logits.
    pub logits: LogitsWanted,
    /// Prefill: the prompt's last, partial block, and the first of its token slots that nothing is
    /// written to. Each layer's slots from there on are zeroed when the layer is ready and before
    /// it is pushed.
    pub zero_tail: Option<(BlockId, u32)>,
    /// How to draw.
    pub sampling: Arc<SamplingParams>,
    /// Whether a token is drawn from the last row. Always so in decode.
    pub is_last_chunk: bool,
    /// Prefill: the KV of positions before `range` is still coming in, layer by layer; each layer's
    /// attention waits for it.
    pub awaits_prefix: bool,
}

impl StepSequence {
    /// Sum over its rows of the tokens that each attends to, itself included.
    pub fn attended_tokens(&self) -> u64 {
        // Positions a..b attend to a + 1 up to b tokens.
        let up_to = |n: usize| (n as u64 * (n as u64 + 1)) / 2;
        up_to(self.range.end) - up_to(self.range.start)
    }
}

/// Some layers of one sequence's part, of which the other layers are in steps before and after.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSlice {
    /// The whole part; its logits are those of the last slice.
    pub sequence: StepSequence,
    /// Which layers.
    pub layers: Range<u32>,
    /// What the slice before gave ([`StepOutput::hidden`]); empty for the first one.
    pub hidden: Vec<f32>,
}

/// One step: at most one is in flight per node.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPlan {
    /// Names it in the answers.
    pub id: StepId,
    /// Those that go through all layers. With the slice never empty.
    pub sequences: Vec<StepSequence>,
    /// Decode: the end of a prompt, layer by layer behind the prefill node that computes its
    /// beginning.
    pub slice: Option<StepSlice>,
}

impl StepPlan {
    /// Rows that go through all layers: prompt tokens in prefill, sequences and prompt tokens in
    /// decode.
    pub fn rows(&self) -> u32 {
        self.sequences.iter().map(|sequence| sequence.range.len() as u32).sum()
    }

    /// Of them, those of prompts in decode.
    pub fn prompt_rows(&self) -> u32 {
        self.rows() - self.sequences.iter().filter(|sequence| sequence.range.len() == 1).count() as u32
    }

    /// Sum over the rows of the tokens that each attends to, itself included.
    pub fn attended_tokens(&self) -> u64 {
        self.sequences.iter().map(StepSequence::attended_tokens).sum()
    }
}

/// What a step gave for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// Whose it is.
    pub key: RequestKey,
    /// The token drawn, with its log-probabilities if asked for; `None` if the prompt goes on in a
    /// later chunk or slice, or the mask is late.
    pub sampled: Option<(TokenId, Option<TokenLogprobs>)>,
    /// One per row with [`LogitsWanted::All`], else empty. Entry `i` is the distribution after row
    /// `i`, with the log-probability of the prompt's next token.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Of a slice that is not the last: what the next one takes. Else empty.
    pub hidden: Vec<f32>,
    /// Why no token could be drawn; the other sequences of the step are well.
    pub failed: Option<Refused>,
    /// Decode: whether the mask of its grammar was not ready in time. The last row is computed
    /// again once it is.
    pub is_mask_late: bool,
}
