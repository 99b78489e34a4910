//! Fuzzing of everything untrusted that Baton reads: one [`Target`] for each kind of input, and two
//! drivers over the same list.
//!
//! - `tests/fuzz.rs` changes the seeds of each target at random, a fixed number of times from a
//!   fixed seed (`make test`).
//! - `libfuzzer/` lets libFuzzer search for inputs that reach new code (`scripts/fuzz.sh`, `make
//!   test-long`).
//!
//! Both run every file of `findings/TARGET/` first: inputs that once broke something.
//!
//! **Invariant**: an input ends a target in bounded time and memory, and never by a panic.

mod bounds;
mod driver;
mod input;
mod mutate;
mod targets;

pub use bounds::{CountingAllocator, Limits, live_bytes, peak_bytes};
pub use driver::{Options, Report, Watched, findings, fuzz};
pub use mutate::{Mutator, Random};
pub use targets::TARGETS;

/// Something that reads untrusted bytes.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, and that of its folder of findings.
    pub name: &'static str,
    /// Reads an input, and uses what it has read.
    pub read: fn(&[u8]),
    /// Valid inputs, to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// What such inputs are made of.
    pub words: &'static [&'static str],
    /// Longest input, bytes.
    pub max_bytes: usize,
    /// What one input may cost.
    pub limits: Limits,
    /// Inputs of a short run: two seconds on a slow core.
    pub short_run: u32,
}
