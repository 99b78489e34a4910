//! What every process of Baton needs around its work: clock, settings and the command line,
//! telemetry, supervised tasks, shutdown phases, and ports with limits.
//!
//! **Invariant**: only `clock` reads the machine's clock and randomness, and waits; only `tasks`
//! starts tasks.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod command;
pub mod serve;
pub mod settings;
pub mod telemetry;

mod clock;
mod log_filter;
mod memory;
mod shutdown;
mod tasks;

pub use baton_types::{error_chain, innermost};
pub use clock::{
    Clock, ManualClock, SystemClock, Waited, interval, new_generation, now, random_u64, sleep, sleep_until, within,
};
pub use memory::{available_memory, default_cache_bytes, model_bytes};
pub use shutdown::{Drain, Phase, Shutdown, Signals};
pub use tasks::{TaskFailure, TaskSet};
pub use telemetry::{
    GAP_BUCKETS, LATENCY_BUCKETS, LogFormat, METRICS, MetricDoc, MetricKind, Telemetry, count_from_zero,
};
