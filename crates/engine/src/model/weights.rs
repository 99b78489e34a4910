//! Reads a model's tensors into the form that the kernels take.

use std::collections::BTreeSet;
use std::ops::Range;

use baton_formats::{Dtype, ModelFile, QuantBlock, TensorView};
use baton_types::ModelFingerprint;

use super::config::ModelConfig;
use super::names::{Names, Part};
use crate::cpu::ComputeDtype;
use crate::error::EngineError;
use crate::kernels::cpu::{Matrix, MatrixPart, PackedMatrix, Products, QuantizedMatrix, WeightShape};
use crate::kernels::{Threads, WeightMemory};

/// Hears which share of a model is loaded, from 0 to 1.
pub(crate) type Progress<'a> = dyn FnMut(f32) + 'a;

/// Weights of one layer. Matrices are `outputs x inputs`.
pub(crate) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Q, K and V, one below the other: `(heads + 2 kv_heads) head_dim x hidden`. Rows of Q and K
    /// are in halves order.
    pub qkv: Matrix,
    pub qkv_bias: Option<Vec<f32>>,
    pub output: Matrix,
    pub output_bias: Option<Vec<f32>>,
    pub feed_forward_norm: Vec<f32>,
    /// Gate, then up: `2 feed_forward x hidden`.
    pub gate_up: Matrix,
    pub down: Matrix,
}

/// All weights.
pub(crate) struct Weights {
    /// `None` if the head is the embedding, too.
    pub embedding: Option<Matrix>,
    pub layers: Vec<Layer>,
    pub output_norm: Vec<f32>,
    pub head: Matrix,
    /// Of the coarsest of its matrices.
    pub products: Products,
    pub fingerprint: ModelFingerprint,
}

impl Weights {
    /// Reads and checks every tensor of the model.
    ///
    /// # Errors
    /// A tensor is missing, has another shape than the hyperparameters say, or belongs to no part
    /// of the model.
    pub fn load(
        file: &ModelFile,
        config: &ModelConfig,
        compute_dtype: ComputeDtype,
        threads: &Threads,
        progress: &mut Progress<'_>,
    ) -> Result<Self, EngineError> {
        let mut loader = Loader::new(file, config, threads, progress);
        loader.compute_dtype = compute_dtype;
        let head_name = loader.names.weight(Part::Head, 0);
        let tied = config.tied_head.unwrap_or_else(|| !file.contains(&head_name));
        let vocabulary = config.vocab_size;
        // The largest matrices first: what of the file is in memory beside its packed form is least
        // when little else is packed.
        let first = loader.matrix(&[plain(Part::Embedding, vocabulary)], 0, config.hidden)?;
        let (embedding, head) = if tied {
            (None, first)
        } else {
            (Some(first), loader.matrix(&[plain(Part::Head, vocabulary)], 0, config.hidden)?)
        };
        let layers: Vec<_> = (0..config.num_layers).map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?;
        warn_of_missing_biases(config, &layers);
        let output_norm = loader.vector(&loader.names.weight(Part::OutputNorm, 0), config.hidden)?;
        let fingerprint = loader.finish()?;
        let products = matrices(&layers).chain([&head]).map(Matrix::products).max().unwrap_or(Products::Single);
        Ok(Self { embedding, layers, output_norm, head, products, fingerprint })
    }

    /// The matrix whose rows are the tokens' embeddings.
    pub fn embedding(&self) -> &Matrix {
        self.embedding.as_ref().unwrap_or(&self.head)
    }
}

/// Some rows of a fused matrix: one tensor of the file.
#[derive(Clone, Copy)]
struct Rows {
    part: Part,
    rows: usize,
    /// Size of the heads whose rows the file keeps in interleaved order.
    interleaved: Option<usize>,
}

fn plain(part: Part, rows: usize) -> Rows {
    Rows { part, rows, interleaved: None }
}

impl Rows {
    /// Row of the tensor that is to be row `row` of this part. GGUF's `llama` has pair i of a head
    /// in rows 2 i and 2 i + 1; the kernels want it in i and i + half.
    fn source(&self, row: usize) -> usize {
        let Some(dim) = self.interleaved else { return row };
        let head = row / dim;
        let at = row % dim;
        head * dim + 2 * (at % (dim / 2)) + at / (dim / 2)
    }
}

struct Loader<'a, 'p> {
    file: &'a ModelFile,
    config: &'a ModelConfig,
    names: Names,
    compute_dtype: ComputeDtype,
    threads: &'a Threads,
    memory: WeightMemory,
    progress: &'a mut Progress<'p>,
    loaded_bytes: u64,
    used: BTreeSet<String>,
    hasher: blake3::Hasher,
}

impl<'a, 'p> Loader<'a, 'p> {
    fn new(file: &'a ModelFile, config: &'a ModelConfig, threads: &'a Threads, progress: &'a mut Progress<'p>) -> Self {
        let mut hasher = blake3::Hasher::new();
        // Everything that changes what a KV block means, but not the model's name.
        let nameless = ModelConfig { name: String::new(), ..config.clone() };
        hasher.update(format!("{nameless:?}").as_bytes());
        let names = Names::of(file);
        let compute_dtype = ComputeDtype::default();
        let memory = WeightMemory::new();
        Self {
            file,
            config,
            names,
            compute_dtype,
            threads,
            memory,
            progress,
            loaded_bytes: 0,
            used: BTreeSet::new(),
            hasher,
        }
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, EngineError> {
        let config = self.config;
        let hidden = config.hidden;
        let feed_forward = config.feed_forward;
        let interleaved = config.interleaved_rope.then_some(config.head_dim);
        let qkv = [
            Rows { part: Part::Query, rows: config.q_width(), interleaved },
            Rows { part: Part::Key, rows: config.kv_width(), interleaved },
            plain(Part::Value, config.kv_width()),
        ];
        let norm = |part| self.names.weight(part, layer);
        let attention_norm = norm(Part::AttentionNorm);
        let feed_forward_norm = norm(Part::FeedForwardNorm);
        Ok(Layer {
            attention_norm: self.vector(&attention_norm, hidden)?,
            qkv: self.matrix(&qkv, layer, hidden)?,
            qkv_bias: self.bias(&qkv, layer)?,
            output: self.matrix(&[plain(Part::Output, hidden)], layer, config.q_width())?,
            output_bias: self.bias(&[plain(Part::Output, hidden)], layer)?,
            feed_forward_norm: self.vector(&feed_forward_norm, hidden)?,
            gate_up: self.matrix(&[plain(Part::Gate, feed_forward), plain(Part::Up, feed_forward)], layer, hidden)?,
            down: self.matrix(&[plain(Part::Down, hidden)], layer, feed_forward)?,
        })
    }

    fn matrix(&mut self, parts: &[Rows], layer: usize, columns: usize) -> Result<Matrix, EngineError> {
        let mut tensors = Vec::new();
        for part in parts {
            let name = self.names.weight(part.part, layer);
            tensors.push((*part, self.tensor(&name, &[part.rows, columns])?));
        }
        let runs: Vec<_> = tensors.chunk_by(|(_, a), (_, b)| a.dtype == b.dtype).collect();
        let parts = if self.compute_dtype != ComputeDtype::F32 && can_stay_quantized(&runs, columns) {
            runs.into_iter().map(|run| self.quantized(run, columns)).collect::<Result<_, _>>()?
        } else {
            vec![self.expanded(&tensors, columns)?]
        };
        for (_, tensor) in &tensors {
            // What was packed is not kept twice.
            self.file.release(tensor);
            self.count(tensor);
        }
        Ok(Matrix::new(parts))
    }

    /// Tensors, one below the other, as f32 or, the same numbers, as the file's halves.
    fn expanded(&self, tensors: &[(Rows, TensorView<'_>)], columns: usize) -> Result<MatrixPart, EngineError> {
        let read = |range: Range<usize>, to: &mut [f32]| {
            range.zip(to.chunks_exact_mut(columns)).try_for_each(|(row, to)| {
                let (tensor, row) = source(tensors, row);
                Ok(tensor.dequantize_rows(row..row + 1, to)?)
            })
        };
        let first = tensors[0].1.dtype;
        // Halves, if all of them are of one kind: the same numbers in half the memory.
        let element = match first.quant_format() {
            // Products with bfloat16 weights round the activations.
            None if first == Dtype::BF16 && self.compute_dtype == ComputeDtype::F32 => Dtype::F32,
            None if tensors.iter().all(|(_, tensor)| tensor.dtype == first) => first,
            _ => Dtype::F32,
        };
        let shape = WeightShape { outputs: rows(tensors), inputs: columns };
        Ok(MatrixPart::Float(PackedMatrix::pack(self.threads, &self.memory, element, shape, read)?))
    }

    /// Tensors of one quantized type, one below the other.
    fn quantized(&self, tensors: &[(Rows, TensorView<'_>)], columns: usize) -> Result<MatrixPart, EngineError> {
        let read = |row: usize, to: &mut [QuantBlock]| {
            let (tensor, row) = source(tensors, row);
            Ok(tensor.row_quants(row, to)?)
        };
        let dtype = tensors[0].1.dtype;
        let shape = WeightShape { outputs: rows(tensors), inputs: columns };
        Ok(MatrixPart::Quantized(QuantizedMatrix::pack(self.threads, &self.memory, dtype, shape, read)?))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        let tensor = self.tensor(name, &[len])?;
        let mut values = vec![0.0; len];
        tensor.dequantize(&mut values)?;
        self.count(&tensor);
        Ok(values)
    }

    /// The biases of fused rows: `None` if no part has one, zeros for a part that has none.
    fn bias(&mut self, parts: &[Rows], layer: usize) -> Result<Option<Vec<f32>>, EngineError> {
        let mut bias = Vec::new();
        let mut any = false;
        for part in parts {
            let name = self.names.bias(part.part, layer);
            if self.file.contains(&name) {
                let values = self.vector(&name, part.rows)?;
                bias.extend((0..part.rows).map(|row| values[part.source(row)]));
                any = true;
            } else {
                bias.resize(bias.len() + part.rows, 0.0);
            }
        }
        Ok(any.then_some(bias))
    }

    /// Tells that a tensor is in its place.
    fn count(&mut self, tensor: &TensorView<'_>) {
        self.loaded_bytes += tensor.data.len() as u64;
        (self.progress)((self.loaded_bytes as f32 / self.file.total_bytes() as f32).min(1.0));
    }

    /// A tensor of this shape; hashed and marked as used.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<TensorView<'a>, EngineError> {
        let tensor = self.file.tensor(name)?;
        if tensor.shape != shape {
            let found = &tensor.shape;
            return Err(EngineError::Model(format!("tensor {name} has shape {found:?}, but must have {shape:?}")));
        }
        self.hasher.update(format!("{name} {:?} {shape:?}", tensor.dtype).as_bytes()).update(tensor.data);
        self.used.insert(name.to_owned());
        Ok(tensor)
    }

    /// Nothing may be left over: a tensor that no part asked for means another graph than this one.
    fn finish(self) -> Result<ModelFingerprint, EngineError> {
        let all: Vec<String> = match self.file {
            ModelFile::Gguf(file) => file.tensors().map(|tensor| tensor.name.to_owned()).collect(),
            ModelFile::Safetensors(file) => file.names().map(str::to_owned).collect(),
        };
        if let Some(name) = all.iter().find(|name| !self.used.contains(*name) && !self.names.is_spare(name)) {
            let architecture = &self.config.architecture;
            return Err(EngineError::Model(format!("tensor {name:?} is no part of a {architecture} model")));
        }
        (self.progress)(1.0);
        let mut fingerprint = [0; 8];
        self.hasher.finalize_xof().fill(&mut fingerprint);
        Ok(ModelFingerprint(u64::from_le_bytes(fingerprint)))
    }
}

/// Qwen2 has biases for Q, K and V in every layer. Files without them load, in `transformers` too,
/// and what comes out is often nonsense.
fn warn_of_missing_biases(config: &ModelConfig, layers: &[Layer]) {
    let without = layers.iter().filter(|layer| layer.qkv_bias.is_none()).count();
    if config.architecture == "qwen2" && without > 0 {
        tracing::warn!(
            without,
            layers = layers.len(),
            "a qwen2 model without biases of Q, K and V in some layers: zeros are used; was it converted whole?"
        );
    }
}

fn matrices(layers: &[Layer]) -> impl Iterator<Item = &Matrix> {
    layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down])
}

/// Rows of all of some tensors.
fn rows(tensors: &[(Rows, TensorView<'_>)]) -> usize {
    tensors.iter().map(|(part, _)| part.rows).sum()
}

/// Whether each run of tensors of one type can be a quantized part. Its rows must be whole blocks,
/// and the next one must begin at a vector.
fn can_stay_quantized(runs: &[&[(Rows, TensorView<'_>)]], columns: usize) -> bool {
    let last = runs.len() - 1;
    runs.iter().enumerate().all(|(index, run)| {
        Matrix::stays_quantized(run[0].1.dtype, columns) && (index == last || Matrix::can_follow(rows(run)))
    })
}

/// The tensor and its row that are row `row` of the fused matrix.
fn source<'t, 'a>(tensors: &'t [(Rows, TensorView<'a>)], mut row: usize) -> (&'t TensorView<'a>, usize) {
    for (part, tensor) in tensors {
        if row < part.rows {
            return (tensor, part.source(row));
        }
        row -= part.rows;
    }
    unreachable!("a row beyond the matrix")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rope_rows_become_halves() {
        let part = Rows { part: Part::Query, rows: 8, interleaved: Some(4) };
        // A head's rows in the file: pair 0 (a, b), pair 1 (a, b).
        assert_eq!((0..8).map(|row| part.source(row)).collect::<Vec<_>>(), [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(plain(Part::Value, 8).source(5), 5);
    }
}
