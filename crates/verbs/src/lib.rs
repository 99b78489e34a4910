//! A small safe layer over RDMA verbs: what one-sided writes and reads between registered memory of
//! two machines need, and no more.
//!
//! ```text
//!   Device -> Context -> ProtectionDomain -> MemoryRegistration     (memory the device may touch)
//!                     -> CompletionChannel -> CompletionQueue       (what became of work requests)
//!   ProtectionDomain + CompletionQueue -> QueuePair                 (a reliable connection to one other queue pair)
//!   WorkRequests -> QueuePair::post                                 (many writes and reads with one call)
//! ```
//!
//! It has no runtime of its own: a `CompletionChannel` is a nonblocking file descriptor, and the
//! caller waits for it.
//!
//! **Invariants**
//! - Each object keeps alive what it is made of, so they may be dropped in any order.
//! - A work request names a span that lies inside its registration; a wrong remote span is found by
//!   the peer's device.
//! - After `QueuePair::to_error`, once a receive of that queue pair has completed as flushed,
//!   nothing that comes over it lands in memory any more.
//! - Everything queued is bounded by the depths given at creation.
//!
//! Without the feature `ibverbs` only what needs no device is there: the choice of devices and
//! addresses, and the check of locked memory.

mod error;
mod gid;
mod memlock;
mod select;

#[cfg(feature = "ibverbs")]
mod completion;
#[cfg(feature = "ibverbs")]
mod device;
#[cfg(feature = "ibverbs")]
mod domain;
#[cfg(feature = "ibverbs")]
mod queue_pair;
#[cfg(feature = "ibverbs")]
mod work;

pub use error::VerbsError;
pub use gid::{Gid, GidEntry, GidKind, choose_gid};
pub use memlock::{MemlockStatus, check_memlock};
pub use select::{DeviceFilter, by_numa_distance};

#[cfg(feature = "ibverbs")]
pub use completion::{Completion, CompletionChannel, CompletionQueue, CompletionStatus, MAX_EVENTS, Opcode};
#[cfg(feature = "ibverbs")]
pub use device::{Context, Device, LinkLayer, Mtu, PortInfo, PortState};
#[cfg(feature = "ibverbs")]
pub use domain::{Access, MemoryRegistration, ProtectionDomain};
#[cfg(feature = "ibverbs")]
pub use queue_pair::{Endpoint, Path, QueuePair, QueuePairConfig, QueuePairState, Retries};
#[cfg(feature = "ibverbs")]
pub use work::{LocalSpan, PostError, RemoteSpan, WorkRequests};
