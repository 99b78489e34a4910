//! Model graphs, kernels and the sampler: computes tokens over paged K and V.
//!
//! **Invariant**: a row's logits are bitwise the same whatever the batch, the chunk boundaries, the
//! threads, and whether prefill or decode computes it.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod arena;
mod cpu;
mod engine;
mod error;
mod kernels;
mod mock;
mod model;
mod philox;
mod sampler;

pub use arena::KvArena;
pub use cpu::{ComputeDtype, CpuEngine, CpuOptions, KvCapacity, UnknownComputeDtype};
pub use engine::{Engine, LayerSlice, LogitsWanted, ModelInfo, SequenceStep, StepObserver, check_batch, check_slice};
pub use error::EngineError;
pub use kernels::Isa;
pub use mock::{MOCK_VOCAB_SIZE, MockAnswers, MockEngine, MockOptions};
pub use sampler::{Sampled, logprobs, sample};

#[cfg(target_endian = "big")]
compile_error!("KV blocks cross the wire as the machine's own bytes, and machines are little-endian");
