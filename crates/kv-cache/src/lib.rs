//! Block pool, chained block hashes, prefix index and eviction. Sync: no clock, no IO; and pure,
//! but for the prefix index, which threads share.
//!
//! - [`BlockHasher`] chains hashes over the full blocks of a token sequence.
//! - [`BlockPool`] is a node's bookkeeping of its arena: who holds which block, what is cached,
//!   what is promised.
//! - [`EvictionKind`] names the orders in which its cached blocks are evicted.
//! - [`PrefixIndex`] is the conductor's picture of what every node holds, fed by the pools'
//!   [`KvEventBatch`]es.
//!
//! **Invariants**: every block is in exactly one state, and [`BlockPool::check_integrity_with`]
//! proves it against the holders' own lists. A block that a sequence holds, that a grant receives
//! into or that is quarantined is never evicted or allocated. A hash names at most one block of a
//! pool.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod event_log;
mod eviction;
mod hash;
mod pool;
mod prefix_index;

pub use event_log::KvEventBatch;
pub use eviction::EvictionKind;
pub use hash::BlockHasher;
pub use pool::{BlockPool, BlockState, IntegrityError, OutOfBlocks, PoolCounts, Reservation};
pub use prefix_index::{Applied, NodeSlot, PrefixIndex, PrefixMatches};
