//! The prefill node: carries out what `baton_scheduler::PrefillCore` decides.
//!
//! **Invariant**: every effect that names an answer gets it exactly once, whatever happens to the peer; a block is not given back to the core while the transfer
//! engine still reads it.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod metrics;
mod role;

pub use metrics::METRICS;

use baton_types::NodeRole;
use baton_worker::config::Settings;

/// Serves until a signal, then drains.
pub fn run(settings: Settings) -> anyhow::Result<()> {
    baton_worker::run::<role::PrefillRole>(NodeRole::Prefill, METRICS, settings, role::PrefillRole::new)
}
