//! A prefill and a decode core wired together by a fake shell, on virtual time, with seeds and faults.

mod engine;
mod random;
mod world;
