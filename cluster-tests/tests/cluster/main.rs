//! Scenarios over the real binaries. One test binary, so that what they share is compiled and
//! linked once.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
#![allow(clippy::unwrap_used)] // helpers of tests

mod abandoned;
mod apis;
mod asking_again;
mod bad_input;
mod bench_engine;
mod bench_serve;
mod bench_transfer;
mod chaos;
mod decode_room;
mod dependencies;
mod docs;
mod drain;
mod election;
mod engine_stalls;
mod estimates;
mod etcd;
mod floods;
mod frontends;
mod leaders;
mod limits;
mod links;
mod memory;
mod migration;
mod mock_cluster;
mod model_cluster;
mod official_clients;
mod open_limits;
mod operator;
mod other_answers;
mod overload;
mod pages;
mod partial_prefill;
mod pauses;
mod prefix_fetch;
mod prompts_at_decode;
mod rolling;
mod settings;
mod ssd_tier;
mod storm;
mod structured_output;
mod transports;
mod up;
