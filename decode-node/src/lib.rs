//! The decode node: carries out what `baton_scheduler::DecodeCore` decides.
//!
//! **Invariant**: every effect that names an answer gets it exactly once; a block that a peer may still write is not given to anybody else.

mod metrics;
mod role;

pub use metrics::METRICS;

use baton_types::NodeRole;
use baton_worker::config::Settings;

/// Serves until a signal, then drains.
pub fn run(settings: Settings) -> anyhow::Result<()> {
    baton_worker::run::<role::DecodeRole>(NodeRole::Decode, METRICS, settings, role::DecodeRole::new)
}
