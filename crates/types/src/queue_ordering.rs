//! How a prompt waits at a prefill node.

use std::time::Duration;

/// The terms on which a prompt waits in a prefill node's queue. The conductor fixes them at
/// placement: what it plans with is what the node obeys. By default first come, first served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueOrdering {
    /// Larger goes first; 0 is ordinary.
    pub priority: i32,
    /// How long others may arrive and pass it.
    pub patience: Duration,
    /// After this long no prompt that arrives later goes before it, whatever its priority. Zero:
    /// only priority passes it, and without bound.
    pub max_overtaken: Duration,
    /// After this long in the queue without room it fails.
    pub timeout: Duration,
    /// To compute what is not cached, as predicted.
    pub compute: Duration,
}

impl QueueOrdering {
    /// [`QueueOrdering::max_overtaken`] of a cluster, unless set otherwise.
    pub const MAX_OVERTAKEN: Duration = Duration::from_secs(30);
    /// [`QueueOrdering::timeout`], unless set otherwise.
    pub const TIMEOUT: Duration = Duration::from_secs(60);
}

impl Default for QueueOrdering {
    fn default() -> Self {
        Self {
            priority: 0,
            patience: Duration::ZERO,
            max_overtaken: Duration::ZERO,
            timeout: Self::TIMEOUT,
            compute: Duration::ZERO,
        }
    }
}
