//! Moves bytes between registered memory of two nodes.
//!
//! A node [registers](TransferEngine::register) its memory and gives peers a [`SegmentDescriptor`]
//! of it. It [grants](TransferEngine::grant) a peer certain ranges. The peer
//! [writes](TransferEngine::write) a batch of spans there, straight from its own registered memory.
//! The owner hears of each complete batch through its [`ArrivalReceiver`].
//!
//! ```text
//!   writer                                        owner
//!     |   <- descriptor, grant id (by any way) -    |  register(), grant()
//!     |                                             |
//!   write()  ------- spans, trailer ----------->    |  every span checked, bytes land in place
//!     |                                             |  Arrival::Batch
//!   report   <------------ ack ------------------   |
//! ```
//!
//! **Invariants**
//! - A batch is complete when every byte is visible in the owner's memory and acknowledged; never
//!   when the bytes merely left. Each complete batch is one [`Arrival::Batch`], which is queued at
//!   the owner before the writer hears of the completion, retries or not.
//! - No byte lands outside the ranges of a live grant, from any peer but its writer, or from an
//!   older generation.
//! - Once [`TransferEngine::revoke`] resolves, or [`Arrival::GrantExpired`] is received, no byte
//!   lands under that grant again.
//! - Once a [`Batch`] resolves, whatever the result, its local spans are not read again.
//! - Bytes that a failed connection still carries never land after a retry of them has begun: the
//!   owner closes the old connection first.
//! - Everything queued is bounded; a peer that failed is tried again, for ever.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![cfg_attr(test, allow(clippy::single_range_in_vec_init))] // a grant of one range is a list of one range

mod batch;
mod config;
mod engine;
mod error;
mod fence_guard;
mod grant;
mod metrics;
mod path;
mod segment;
#[cfg(test)]
mod tests;
mod transport;

pub use batch::{Batch, BatchOptions, BatchReport, CancelHandle, SpanPair};
pub use config::TransferConfig;
pub use engine::TransferEngine;
pub use error::{RefusalReason, TransferError};
pub use grant::{Arrival, ArrivalReceiver, GrantSpec};
pub use metrics::METRICS;
pub use path::PathReport;
pub use segment::{SegmentDescriptor, SegmentId, TransportAddress, TransportChoice, TransportKind};
pub use transport::fake::{FakeFaults, FakeNetwork};
#[doc(hidden)]
pub use transport::net::fuzz;
