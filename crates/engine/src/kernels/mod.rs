//! Kernels: the operations of a forward pass.
//!
//! `reference` holds each operation as its formula reads; `cpu` holds what production runs, under
//! the same names. The operations of `cpu` are written once over sixteen floats
//! ([`lanes::F32x16`]), integer dot products ([`dots::Dots`]) or pairs ([`pairs::Pairs`]), and
//! compiled for each instruction set.
//!
//! **Invariant**: the order in which an output's terms are added depends on the model's shapes and
//! the row's position alone, and every multiply-add is fused. So instruction sets, blocking,
//! threads and the other rows of a batch do not change a bit of it. Matrix tiles ([`amx`]) have an
//! order of their own, as fixed as the other.

#![allow(unsafe_code)] // vector intrinsics, raw rows shared by threads; see each SAFETY note

mod affinity;
mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
pub(crate) mod cpu;
mod dots;
#[cfg(test)]
mod guarded;
mod isa;
mod lanes;
mod pairs;
mod pool;
#[cfg(test)]
pub(crate) mod reference;
mod rows;
mod threads;

pub(crate) use aligned::{AlignedBuf, AlignedBytes, WeightBytes, WeightMemory};
pub use isa::Isa;
pub(crate) use rows::{RowShape, Rows, SharedRows};
pub(crate) use threads::Threads;

/// What computes.
pub(crate) struct Compute {
    pub isa: Isa,
    pub threads: Threads,
}
