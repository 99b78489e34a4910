//! Each core by itself, and both wired together by a fake shell, on virtual time, with seeds and faults.

mod copy;
mod decode;
mod decode_tier;
mod engine;
mod fetch;
mod leases;
mod moves;
mod prefill;
mod random;
mod room;
mod tails;
pub(crate) mod world;
