//! Each core by itself. Together, with seeds and faults, they are in `crates/sim/tests/faults.rs`.

mod copy;
mod decode;
mod decode_tier;
pub(crate) mod engine;
mod fetch;
mod leases;
mod moves;
mod prefill;
mod room;
mod tails;
