//! What a node asks of an engine.

use std::ops::Range;

use baton_types::{BlockId, KvLayout, ModelFingerprint, TokenId};

use crate::arena::KvArena;
use crate::error::EngineError;

/// What a node needs to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its name, as the file gives it.
    pub name: String,
    /// `llama`, `qwen2`, `mistral`, `mock`.
    pub architecture: String,
    /// Tokens of its vocabulary.
    pub vocab_size: u32,
    /// Most tokens of prompt and output together.
    pub context_length: u32,
    /// Layers that keep K and V.
    pub num_layers: u32,
    /// Hash of architecture, hyperparameters and weights.
    pub fingerprint: ModelFingerprint,
    /// Results are bitwise the same on nodes of one class (sums of bfloat16 below the smallest
    /// normal f32 apart).
    pub kv_class: String,
}

/// Of which rows logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogitsWanted {
    /// Of none: a chunk in the middle of a prompt.
    #[default]
    None,
    /// Of the last row.
    Last,
    /// Of every row: log-probabilities of the prompt.
    All,
}

/// One sequence's part of a step.
#[derive(Debug, Clone)]
pub struct SequenceStep<'a> {
    /// The tokens to compute; at least one.
    pub tokens: &'a [TokenId],
    /// Position of `tokens[0]`. K and V of every position before it are in the arena.
    pub start: u32,
    /// The sequence's blocks, in order; they cover `start + tokens.len()` positions.
    pub block_table: &'a [BlockId],
    /// Of which of these rows logits are wanted.
    pub logits: LogitsWanted,
}

/// Some consecutive layers of a forward pass over the next tokens of one sequence. K and V of the
/// positions before them need to be in the arena in these layers alone.
#[derive(Debug)]
pub struct LayerSlice<'a> {
    /// The sequence's tokens. Their logits are given with the last layer.
    pub sequence: SequenceStep<'a>,
    /// Which layers.
    pub layers: Range<u32>,
    /// Carries the pass from one slice to the next: empty before layer 0, left alone between, empty
    /// again after the last layer.
    pub hidden: &'a mut Vec<f32>,
}

/// Hears what a step yields, while it runs.
pub trait StepObserver {
    /// K and V of this layer are in the arena for every row of the step, and will not change. The
    /// layer's attention has not begun: a push of the layer overlaps with it.
    fn kv_ready(&mut self, layer: u32);

    /// K and V of this layer are about to be read at positions before the step's. Returns once they
    /// are in the arena. It also returns once it is known that the step's result will not count for
    /// sequences without them. If they come from elsewhere, layer by layer, this waits.
    fn await_prefix(&mut self, _layer: u32) {}

    /// Every layer is computed; the output head follows.
    fn layers_done(&mut self) {}

    /// Logits of one row, `[vocab_size]`, of the sequence of that index in the batch.
    fn logits(&mut self, sequence: usize, position: u32, logits: &[f32]);
}

/// Runs a model over paged sequences.
pub trait Engine: Send {
    /// The model.
    fn model(&self) -> &ModelInfo;

    /// Where K and V live.
    fn arena(&self) -> &KvArena;

    /// One forward pass over the next tokens of several sequences. A row's logits do not depend on
    /// the other rows, on how a prompt is cut into chunks, or on the number of threads.
    fn step(&mut self, batch: &[SequenceStep<'_>], observer: &mut dyn StepObserver) -> Result<(), EngineError>;

    /// A part of the layers of a forward pass over one sequence: the same bits as [`Self::step`]
    /// gives.
    fn step_layers(&mut self, slice: LayerSlice<'_>, observer: &mut dyn StepObserver) -> Result<(), EngineError>;
}

/// Checks what every engine relies on; the error names the sequence and the numbers.
pub fn check_batch(batch: &[SequenceStep<'_>], model: &ModelInfo, layout: &KvLayout) -> Result<(), EngineError> {
    for (index, sequence) in batch.iter().enumerate() {
        let invalid = |problem: String| Err(EngineError::Invalid(format!("sequence {index}: {problem}")));
        if sequence.tokens.is_empty() {
            return invalid("no tokens".into());
        }
        let end = sequence.start as usize + sequence.tokens.len();
        if end > model.context_length as usize {
            return invalid(format!("{end} positions, but the context holds {}", model.context_length));
        }
        if layout.blocks_for(end) > sequence.block_table.len() {
            return invalid(format!("{end} positions, but its {} blocks are too few", sequence.block_table.len()));
        }
        if let Some(block) = sequence.block_table.iter().find(|block| block.0 >= layout.num_blocks) {
            return invalid(format!("block {} of {}", block.0, layout.num_blocks));
        }
        if let Some(token) = sequence.tokens.iter().find(|&&token| token >= model.vocab_size) {
            return invalid(format!("token {token}, but the vocabulary has {}", model.vocab_size));
        }
    }
    Ok(())
}

/// The same for a part of the layers. `hidden_size`: numbers of a token between two layers.
pub fn check_slice(
    slice: &LayerSlice<'_>,
    hidden_size: usize,
    model: &ModelInfo,
    layout: &KvLayout,
) -> Result<(), EngineError> {
    let LayerSlice { sequence, layers, hidden } = slice;
    check_batch(std::slice::from_ref(sequence), model, layout)?;
    if layers.is_empty() || layers.end > model.num_layers {
        return Err(EngineError::Invalid(format!("layers {layers:?} of {}", model.num_layers)));
    }
    let expected = if layers.start == 0 { 0 } else { sequence.tokens.len() * hidden_size };
    if hidden.len() != expected {
        let problem = format!("{} hidden numbers before layer {}, not {expected}", hidden.len(), layers.start);
        return Err(EngineError::Invalid(problem));
    }
    Ok(())
}
