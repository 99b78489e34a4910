//! The graph of a Llama-like model.
//!
//! ```text
//! x = embedding[tokens]
//! each layer:  q, k, v = Wqkv norm(x) (+ bias);  rotate q, k;  K, V to the arena      -> kv_ready
//!              x += Wo attention(q)
//!              x += Wdown (silu(gate) * up),  gate, up = Wgate_up norm(x)
//! logits = Whead norm(x), of the rows that are wanted: behind its keys and values, the last layer has no others either
//! ```

use std::ops::Range;

use baton_formats::ModelFile;
use baton_types::KvDtype;

use super::config::ModelConfig;
use super::weights::{Layer, Progress, Weights};
use crate::arena::KvArena;
use crate::cpu::ComputeDtype;
use crate::engine::{LayerSlice, LogitsWanted, SequenceStep, StepObserver};
use crate::error::EngineError;
use crate::kernels::cpu::{
    Attention, AttentionPrecision, AttentionScratch, AttentionShape, Inputs, KvStore, Matrix, Products, QueryTile,
    RopeTable, Target, attention, gated, linear, rms_norm, rope, swiglu,
};
use crate::kernels::{Compute, Rows, Threads};
use crate::sampler::check_finite;

/// Rows of logits computed at once: a prompt's logits are never all in memory.
const LOGIT_ROWS: usize = 32;

/// A model in memory.
pub(crate) struct Llama {
    config: ModelConfig,
    weights: Weights,
}

/// Buffers of a step, kept from one to the next; they grow to the most rows seen.
pub(crate) struct Workspace {
    hidden: Rows,
    inputs: Inputs,
    /// Of the matrix that follows gate and up.
    gated: Inputs,
    qkv: Rows,
    attended: Rows,
    gate_up: Rows,
    logits: Rows,
    rope: RopeTable,
    /// Of slices: one sequence's rows, step after step.
    slice_rope: RopeTable,
    attention: AttentionScratch,
}

/// One step over a batch.
struct Step<'a> {
    compute: &'a Compute,
    batch: &'a [SequenceStep<'a>],
    arena: &'a KvArena,
    llama: &'a Llama,
    config: &'a ModelConfig,
    /// Of each row: which sequence, and where in it.
    positions: Vec<(usize, usize)>,
    /// Rows whose logits are wanted.
    wanted: Vec<usize>,
}

impl Llama {
    /// Loads the weights.
    ///
    /// # Errors
    /// As [`Weights::load`].
    pub fn load(
        file: &ModelFile,
        config: ModelConfig,
        compute_dtype: ComputeDtype,
        threads: &Threads,
        progress: &mut Progress<'_>,
    ) -> Result<Self, EngineError> {
        let weights = Weights::load(file, &config, compute_dtype, threads, progress)?;
        Ok(Self { config, weights })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    fn attention_shape(&self, arena: &KvArena, layer: usize) -> AttentionShape {
        let config = &self.config;
        let dtype = arena.layout().dtype;
        // Attention is exact if products are, or if KV is kept in single precision.
        let precision = match self.weights.products {
            Products::Rounded | Products::Quantized if dtype != KvDtype::F32 => AttentionPrecision::Rounded,
            Products::Single | Products::Rounded | Products::Quantized => AttentionPrecision::Single,
        };
        AttentionShape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            dtype,
            window: config.windows[layer],
            precision,
        }
    }

    /// Empty buffers for this model's steps.
    pub fn workspace(&self, compute: &Compute, arena: &KvArena) -> Workspace {
        let config = &self.config;
        let shape = self.attention_shape(arena, 0);
        let widest = config.hidden.max(config.q_width()).max(config.feed_forward);
        Workspace {
            hidden: Rows::new(config.hidden),
            inputs: Inputs::new(&compute.threads, widest),
            gated: Inputs::new(&compute.threads, config.feed_forward),
            qkv: Rows::new(config.q_width() + 2 * config.kv_width()),
            attended: Rows::new(config.q_width()),
            gate_up: Rows::new(2 * config.feed_forward),
            logits: Rows::new(config.vocab_size),
            rope: RopeTable::new(config.rope_frequencies.clone()),
            slice_rope: RopeTable::new(config.rope_frequencies.clone()),
            attention: AttentionScratch::new(&shape, compute.threads.count()),
        }
    }

    /// One forward pass. The batch has been checked.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`] if a wanted row's logits are no numbers.
    pub fn forward(
        &self,
        compute: &Compute,
        arena: &KvArena,
        workspace: &mut Workspace,
        batch: &[SequenceStep<'_>],
        observer: &mut dyn StepObserver,
    ) -> Result<(), EngineError> {
        let step = self.over(compute, arena, batch);
        workspace.begin(&compute.threads, batch);
        step.embed(workspace);
        step.compute_layers(0..self.config.num_layers as u32, workspace, observer);
        observer.layers_done();
        self.logits(&step, workspace, observer)
    }

    /// A part of the layers over one sequence: [`crate::Engine::step_layers`], whose checks have
    /// been made.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_layers(
        &self,
        compute: &Compute,
        arena: &KvArena,
        workspace: &mut Workspace,
        LayerSlice { sequence, layers, hidden }: LayerSlice<'_>,
        observer: &mut dyn StepObserver,
    ) -> Result<(), EngineError> {
        let batch = std::slice::from_ref(&sequence);
        let step = self.over(compute, arena, batch);
        std::mem::swap(&mut workspace.rope, &mut workspace.slice_rope);
        workspace.begin(&compute.threads, batch);
        match layers.start {
            0 => step.embed(workspace),
            _ => hidden.chunks_exact(self.config.hidden).enumerate().for_each(|(row, values)| {
                workspace.hidden.row_mut(row).copy_from_slice(values);
            }),
        }
        step.compute_layers(layers.clone(), workspace, observer);
        std::mem::swap(&mut workspace.rope, &mut workspace.slice_rope);
        hidden.clear();
        if layers.end < self.config.num_layers as u32 {
            (0..workspace.hidden.rows()).for_each(|row| hidden.extend_from_slice(workspace.hidden.row(row)));
            return Ok(());
        }
        observer.layers_done();
        self.logits(&step, workspace, observer)
    }

    fn over<'a>(&'a self, compute: &'a Compute, arena: &'a KvArena, batch: &'a [SequenceStep<'a>]) -> Step<'a> {
        let rows_of = |(index, sequence): (usize, &SequenceStep<'_>)| {
            (sequence.start as usize..).take(sequence.tokens.len()).map(move |position| (index, position))
        };
        let positions = batch.iter().enumerate().flat_map(rows_of).collect();
        Step { compute, batch, arena, llama: self, config: &self.config, positions, wanted: wanted_rows(batch) }
    }

    fn logits(
        &self,
        step: &Step<'_>,
        workspace: &mut Workspace,
        observer: &mut dyn StepObserver,
    ) -> Result<(), EngineError> {
        let Workspace { hidden, inputs, logits, .. } = workspace;
        for (tile, rows) in step.wanted.chunks(LOGIT_ROWS).enumerate() {
            let head = &self.weights.head;
            let norm = &self.weights.output_norm;
            step.fill_with_norm(inputs, head, norm, rows.len(), |row| hidden.row(tile * LOGIT_ROWS + row));
            linear(step.compute, inputs, head, logits, Target::Set);
            for (row, &wanted) in rows.iter().enumerate() {
                check_finite(step.compute.isa, logits.row(row))?;
                let (sequence, position) = step.positions[wanted];
                observer.logits(sequence, position as u32, logits.row(row));
            }
        }
        Ok(())
    }
}

/// The step's rows whose logits are wanted.
fn wanted_rows(batch: &[SequenceStep<'_>]) -> Vec<usize> {
    let mut wanted = Vec::new();
    let mut first_row = 0;
    for sequence in batch {
        let end = first_row + sequence.tokens.len();
        wanted.extend(first_row + unwanted(sequence)..end);
        first_row = end;
    }
    wanted
}

/// A sequence's first rows, whose logits are not wanted.
fn unwanted(sequence: &SequenceStep<'_>) -> usize {
    match sequence.logits {
        LogitsWanted::None => sequence.tokens.len(),
        LogitsWanted::Last => sequence.tokens.len() - 1,
        LogitsWanted::All => 0,
    }
}

impl Workspace {
    /// Makes room for the rows of a step: tokens of the first sequence, then of the next.
    fn begin(&mut self, threads: &Threads, batch: &[SequenceStep<'_>]) {
        let rows_of = |sequence: &SequenceStep<'_>| sequence.start..sequence.start + sequence.tokens.len() as u32;
        let positions: Vec<_> = batch.iter().flat_map(rows_of).collect();
        self.hidden.resize(positions.len());
        self.rope.set_positions(threads, &positions);
    }
}

impl Step<'_> {
    fn embed(&self, workspace: &mut Workspace) {
        let embedding = self.llama.weights.embedding();
        workspace.hidden.for_each(&self.compute.threads, |row, values| {
            let (sequence, position) = self.positions[row];
            let SequenceStep { tokens, start, .. } = self.batch[sequence];
            embedding.copy_row(tokens[position - start as usize] as usize, values);
        });
    }

    fn compute_layers(&self, layers: Range<u32>, workspace: &mut Workspace, observer: &mut dyn StepObserver) {
        for index in layers {
            let layer = &self.llama.weights.layers[index as usize];
            self.keys_and_values(index, layer, workspace);
            observer.kv_ready(index);
            observer.await_prefix(index);
            let last = index + 1 == self.config.num_layers as u32;
            if last {
                workspace.hidden.keep(&self.wanted);
                workspace.qkv.keep(&self.wanted);
            }
            if workspace.hidden.rows() > 0 {
                self.attend(index, layer, last, workspace);
                self.feed_forward(layer, workspace);
            }
        }
    }

    /// Queries into the workspace, keys and values into the arena.
    fn keys_and_values(&self, index: u32, layer: &Layer, workspace: &mut Workspace) {
        let Workspace { hidden, inputs, qkv, rope: table, .. } = workspace;
        let compute = self.compute;
        self.fill_with_norm(inputs, &layer.qkv, &layer.attention_norm, hidden.rows(), |row| hidden.row(row));
        linear(compute, inputs, &layer.qkv, qkv, Target::Set);
        let q_width = self.config.q_width();
        let kv_width = self.config.kv_width();
        let store = KvStore::new(self.arena, index);
        qkv.for_each(&compute.threads, |row, values| {
            if let Some(bias) = &layer.qkv_bias {
                add(values, bias);
            }
            rope(compute.isa, &mut values[..q_width + kv_width], table.row(row));
            let (k, v) = values[q_width..].split_at(kv_width);
            let (sequence, position) = self.positions[row];
            store.write(compute.isa, self.batch[sequence].block_table, position, k, v);
        });
    }

    /// `wanted`: the workspace has the rows alone whose logits are wanted.
    fn attend(&self, index: u32, layer: &Layer, wanted: bool, workspace: &mut Workspace) {
        let Workspace { hidden, inputs, qkv, attended, attention: scratch, .. } = workspace;
        let compute = self.compute;
        let shape = self.llama.attention_shape(self.arena, index as usize);
        let operands = Attention { shape: &shape, store: KvStore::new(self.arena, index), q: qkv };
        attention(compute, operands, &self.query_tiles(shape.tile_tokens(), wanted), attended, scratch);
        inputs.fill_from(compute, &layer.output, attended);
        linear(compute, inputs, &layer.output, hidden, Target::Add);
        if let Some(bias) = &layer.output_bias {
            hidden.for_each(&compute.threads, |_, values| add(values, bias));
        }
    }

    fn query_tiles(&self, tokens: usize, wanted: bool) -> Vec<QueryTile<'_>> {
        let mut tiles = Vec::new();
        let mut row = 0;
        for sequence in self.batch {
            let len = sequence.tokens.len();
            for first in (if wanted { unwanted(sequence) } else { 0 }..len).step_by(tokens) {
                let tokens = tokens.min(len - first);
                let position = sequence.start as usize + first;
                let block_table = sequence.block_table;
                tiles.push(QueryTile { row, position, tokens, block_table });
                row += tokens;
            }
        }
        tiles
    }

    fn feed_forward(&self, layer: &Layer, workspace: &mut Workspace) {
        let Workspace { hidden, inputs, gated: down_inputs, gate_up, .. } = workspace;
        let compute = self.compute;
        self.fill_with_norm(inputs, &layer.gate_up, &layer.feed_forward_norm, hidden.rows(), |row| hidden.row(row));
        if !gated(compute, inputs, &layer.gate_up, &layer.down, down_inputs) {
            linear(compute, inputs, &layer.gate_up, gate_up, Target::Set);
            down_inputs.fill(compute, &layer.down, gate_up.rows(), |row, to| {
                let (gate, up) = gate_up.row(row).split_at(self.config.feed_forward);
                swiglu(compute.isa, gate, up, to);
            });
        }
        linear(compute, down_inputs, &layer.down, hidden, Target::Add);
    }

    /// Some rows, normalised, as the inputs of a matrix.
    fn fill_with_norm<'x>(
        &self,
        inputs: &mut Inputs,
        w: &Matrix,
        norm: &[f32],
        rows: usize,
        x: impl Fn(usize) -> &'x [f32] + Sync,
    ) {
        let compute = self.compute;
        inputs.fill(compute, w, rows, |row, to| {
            rms_norm(compute.isa, x(row), norm, self.config.norm_eps, to);
        });
    }
}

fn add(to: &mut [f32], x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
}
