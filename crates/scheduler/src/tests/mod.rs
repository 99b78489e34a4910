//! Each core by itself. Together, with seeds and faults, they are in `crates/sim/tests/faults.rs`.

mod decode;
mod decode_tier;
pub(crate) mod engine;
mod fetch;
mod leases;
mod masks;
mod migration;
mod partial_prefill;
mod prefill;
mod room;
