//! Replays traces of requests against a cluster on virtual time. Pure but for reading files: no
//! clock, no tasks, and randomness from a seed only.
//!
//! - [`Trace`] is what clients asked, and when, in the format of Mooncake's traces.
//! - [`simulate`] plays one against a cluster of production's cores: `RequestCore`, `Cluster`,
//!   `PrefillCore` and `DecodeCore` decide. Messages, network, engines and SSDs are models of a
//!   [`ModelProfile`]. [`Summary`] says what it amounts to.
//! - [`simulate_leaders`] elects one of several conductors to place for all, while etcd, networks
//!   and processes fail.
//! - [`Random`] is the source of all that is drawn.
//!
//! **Invariant**: the same trace, options and seed give the same result, to the last bit.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod bounds;
mod cluster;
mod command;
mod event;
mod faults;
mod leaders;
mod named;
mod options;
mod policy;
mod record;
mod spread;
mod summary;
mod trace;

pub use baton_profile::{ModelProfile, ProfileError};
pub use baton_types::Random;
pub use cluster::{Outcome, simulate};
pub use command::{Compare, Curve, SimulateArgs, SimulateError, run};
pub use faults::FaultKind;
pub use leaders::{LeaderFault, LeadersOutcome, simulate_leaders};
pub use options::{Feature, SimOptions, Window};
pub use policy::{SimAdmission, SimPlacement};
pub use record::{MAX_ANSWER_TOKENS, RequestRecord};
pub use spread::Spread;
pub use summary::{Ends, Summary};
pub use trace::{BLOCK_TOKENS, MAX_BLOCK_TOKENS, Trace, TraceError, TraceRequest};
