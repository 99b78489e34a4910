//! What both node kinds share: sessions with conductors, registration, the engine's thread, the
//! loop, and the way up and down.
//!
//! `prefill-node` and `decode-node` give a [`Role`] to [`run`]. Everything that happens reaches the
//! role as an [`Input`], on one task.
//!
//! **Invariants**: the loop never waits for anything but its inputs; a conductor's session is the
//! lifeline of its requests.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod config;

mod background;
mod engine_thread;
mod engine_watch;
mod fetch;
mod http;
mod input;
mod layer_barrier;
mod lease_desk;
mod masks;
mod metrics;
mod mock;
mod node;
mod node_core;
mod node_loop;
mod pacer;
mod peers;
mod profile;
mod readiness;
mod register;
mod remote;
mod service;
mod sessions;
mod shell;
mod ssd;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transfer;

pub use engine_thread::{AwaitedPrefix, EngineEvent, EngineThread, StepDone};
pub use fetch::FetchEvent;
pub use input::{GrantAnswer, Input, IntegrityReport};
pub use layer_barrier::{LayerBarrier, LayerBarrierKeeper, layer_barrier};
pub use lease_desk::LeaseAnswer;
pub use metrics::METRICS;
pub use node::{NodeParts, core_refused, run};
pub use node_core::NodeCore;
pub use node_loop::{NodeLoop, Role};
pub use pacer::{Direction, LinkPacer, PacedCancel, paced};
pub use peers::{Peers, refused};
pub use readiness::{Readiness, Ready};
pub use remote::RemoteArena;
pub use sessions::Sessions;
pub use shell::NodeShell;
pub use ssd::{Ssd, SsdEvent};
