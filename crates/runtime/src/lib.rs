//! What every process of Baton needs around its work: clock, settings, telemetry, supervised tasks, shutdown phases, and the reason in an error.
//!
//! **Invariant**: only `clock` reads the machine's clock and randomness; only `tasks` starts tasks.

pub mod settings;
pub mod telemetry;

mod clock;
mod innermost;
mod shutdown;
mod tasks;

pub use clock::{Clock, ManualClock, SystemClock, new_generation, random_u64};
pub use innermost::innermost;
pub use shutdown::{Phase, Shutdown, Signals};
pub use tasks::{TaskFailure, TaskSet};
pub use telemetry::{GAP_BUCKETS, LATENCY_BUCKETS, LogFormat, METRICS, MetricDoc, MetricKind, Telemetry};
