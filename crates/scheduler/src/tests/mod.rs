//! Each core by itself, and both wired together by a fake shell, on virtual time, with seeds and faults.

mod decode;
mod engine;
mod fetch;
mod moves;
mod prefill;
mod random;
mod room;
pub(crate) mod world;
