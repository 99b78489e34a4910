//! How a prompt waits at a prefill node.

use std::time::Duration;

/// The terms on which a prompt waits in a prefill node's queue, fixed by the conductor when it is placed. All zero: first come, first served.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct QueueTerms {
    /// Larger goes first; 0 is ordinary.
    pub priority: i32,
    /// How long others may arrive and pass it.
    pub patience: Duration,
    /// After its arrival its first token is late; `None` where it never is, and for policies that serve the late like the others.
    pub deadline: Option<Duration>,
    /// What serving it in time is worth, in any unit.
    pub value: f64,
    /// After this long nobody who arrives later goes before it, whatever it is worth and whatever its priority. Zero: only priority passes it, and without bound.
    pub max_wait: Duration,
    /// To compute what is not cached, as predicted.
    pub compute: Duration,
}
