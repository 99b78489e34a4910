//! The engine that computes on the CPU.

use std::fmt;
use std::str::FromStr;

use baton_formats::ModelFile;
use baton_types::{KvDtype, KvLayout};

use crate::arena::KvArena;
use crate::engine::{Engine, LayerSlice, ModelInfo, SequenceStep, StepObserver, check_batch, check_slice};
use crate::error::EngineError;
use crate::kernels::cpu::Products;
use crate::kernels::{Compute, Isa, Threads};
use crate::model::{Llama, ModelConfig, Workspace};

/// KV compatibility class: nodes whose results are bitwise the same. The instruction set shows only
/// if matrix tiles sum products of bfloat16, so it is not in the class otherwise. The number
/// changes with the order of any sum.
const KV_CLASS_F32: &str = "cpu-f32-3";
/// The same if matrices of bfloat16 take activations rounded to that, and attention is of such
/// numbers.
const KV_CLASS_BF16: &str = "cpu-bf16-2";
/// The same if quantized matrices take quantized activations.
const KV_CLASS_INT8: &str = "cpu-int8-3";
/// As [`KV_CLASS_BF16`], with matrix tiles.
const KV_CLASS_BF16_TILES: &str = "cpu-bf16-amx-2";
/// As [`KV_CLASS_INT8`], if attention goes by matrix tiles.
const KV_CLASS_INT8_TILES: &str = "cpu-int8-amx-2";
/// More threads than any machine has: a bound for a mistyped setting.
const MAX_THREADS: usize = 1024;
/// Most tokens of a block.
const MAX_BLOCK_TOKENS: u32 = 1024;

/// How much KV an engine keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvCapacity {
    /// Blocks.
    Blocks(u32),
    /// Bytes, of which the last that fill no block stay unused.
    Bytes(u64),
}

/// How products and attention are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ComputeDtype {
    /// As the file has the weights. Quantized ones take activations as 8-bit integers with a scale
    /// per 32; bfloat16 ones take them as bfloat16. With either, attention is of bfloat16 (unless
    /// the KV is kept in single precision). Others take them as they are.
    #[default]
    Auto,
    /// In single precision, for which weights become f32 when they are loaded: the reference, slow
    /// and large.
    F32,
}

impl ComputeDtype {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Auto, Self::F32];

    /// `auto` or `f32`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
        }
    }
}

impl fmt::Display for ComputeDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A name that no compute dtype has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}', expected auto or f32")]
pub struct UnknownComputeDtype(String);

impl FromStr for ComputeDtype {
    type Err = UnknownComputeDtype;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|compute_dtype| compute_dtype.as_str() == name);
        found.ok_or_else(|| UnknownComputeDtype(name.chars().take(80).collect()))
    }
}

/// How the CPU engine runs.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Threads, from 1.
    pub threads: usize,
    /// Type of stored keys and values.
    pub kv_dtype: KvDtype,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Size of the arena.
    pub kv_capacity: KvCapacity,
    /// Instruction set; all of a KV compatibility class give the same results. `None` is the one
    /// that `BATON_ISA` names, or the fastest.
    pub isa: Option<Isa>,
    /// Of products and attention.
    pub compute_dtype: ComputeDtype,
}

impl Default for CpuOptions {
    /// All cores, half-precision KV in 1 GiB, blocks of 16 tokens.
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            kv_dtype: KvDtype::F16,
            block_tokens: 16,
            kv_capacity: KvCapacity::Bytes(1 << 30),
            isa: None,
            compute_dtype: ComputeDtype::default(),
        }
    }
}

/// A model, its weights, and its arena.
pub struct CpuEngine {
    model: ModelInfo,
    arena: KvArena,
    llama: Llama,
    compute: Compute,
    workspace: Workspace,
}

impl CpuEngine {
    /// Loads a model. `progress` hears the share that is done, from 0 to 1.
    ///
    /// # Errors
    /// An option is out of range, the file is damaged, of a model that this engine does not run, or
    /// there is no memory.
    pub fn load(file: &ModelFile, options: &CpuOptions, progress: &mut dyn FnMut(f32)) -> Result<Self, EngineError> {
        let range = |field, problem| EngineError::Options { field, problem };
        if !(1..=MAX_THREADS).contains(&options.threads) {
            return Err(range("threads", format!("{}, but must be from 1 to {MAX_THREADS}", options.threads)));
        }
        if !(1..=MAX_BLOCK_TOKENS).contains(&options.block_tokens) {
            let problem = format!("{}, but must be from 1 to {MAX_BLOCK_TOKENS}", options.block_tokens);
            return Err(range("block_tokens", problem));
        }
        let threads = Threads::new(options.threads).map_err(|error| range("threads", error.to_string()))?;
        let isa = match options.isa {
            Some(isa) => isa,
            None => Isa::from_environment().map_err(|problem| range("BATON_ISA", problem))?,
        };
        let config = ModelConfig::read(file)?;
        let mut layout = layout(&config, options)?;
        let llama = Llama::load(file, config, options.compute_dtype, &threads, progress)?;
        layout.model = llama.weights().fingerprint.0;
        let arena = KvArena::allocate(layout)?;
        let compute = Compute { isa, threads };
        let workspace = llama.workspace(&compute, &arena);
        Ok(Self { model: info(&llama, isa), arena, llama, compute, workspace })
    }

    /// The instruction set that it runs with.
    pub fn isa(&self) -> Isa {
        self.compute.isa
    }
}

fn info(llama: &Llama, isa: Isa) -> ModelInfo {
    let config = llama.config();
    let kv_class = match llama.weights().products {
        Products::Single => KV_CLASS_F32,
        Products::Rounded if isa.has_tiles() => KV_CLASS_BF16_TILES,
        Products::Rounded => KV_CLASS_BF16,
        Products::Quantized if isa.has_tiles() => KV_CLASS_INT8_TILES,
        Products::Quantized => KV_CLASS_INT8,
    };
    ModelInfo {
        name: config.name.clone(),
        architecture: config.architecture.clone(),
        vocab_size: config.vocab_size as u32,
        context_length: config.context_length,
        num_layers: config.num_layers as u32,
        fingerprint: llama.weights().fingerprint,
        kv_class: kv_class.to_owned(),
    }
}

/// The arena's layout; the model's fingerprint is not known yet.
fn layout(config: &ModelConfig, options: &CpuOptions) -> Result<KvLayout, EngineError> {
    let mut layout = KvLayout {
        model: 0,
        num_layers: config.num_layers as u32,
        num_kv_heads: config.kv_heads as u32,
        head_dim: config.head_dim as u32,
        block_tokens: options.block_tokens,
        dtype: options.kv_dtype,
        num_blocks: 1,
    };
    let block_bytes = layout.block_bytes_all_layers() as u64;
    let blocks = match options.kv_capacity {
        KvCapacity::Blocks(blocks) => u64::from(blocks),
        KvCapacity::Bytes(bytes) => bytes / block_bytes,
    };
    let most = (isize::MAX as u64 / block_bytes).min(u64::from(u32::MAX));
    if !(1..=most).contains(&blocks) {
        let problem = format!("{blocks} blocks of {block_bytes} bytes, but must be from 1 to {most}");
        return Err(EngineError::Options { field: "kv_capacity", problem });
    }
    layout.num_blocks = blocks as u32;
    Ok(layout)
}

impl Engine for CpuEngine {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn arena(&self) -> &KvArena {
        &self.arena
    }

    fn step(&mut self, batch: &[SequenceStep<'_>], observer: &mut dyn StepObserver) -> Result<(), EngineError> {
        check_batch(batch, &self.model, self.arena.layout())?;
        self.llama.forward(&self.compute, &self.arena, &mut self.workspace, batch, observer)
    }

    fn step_layers(&mut self, slice: LayerSlice<'_>, observer: &mut dyn StepObserver) -> Result<(), EngineError> {
        check_slice(&slice, self.llama.config().hidden, &self.model, self.arena.layout())?;
        self.llama.forward_layers(&self.compute, &self.arena, &mut self.workspace, slice, observer)
    }
}
