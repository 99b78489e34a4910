//! The prefill node: carries out what `baton_scheduler::PrefillCore` decides.
//!
//! **Invariant**: every effect that names an answer gets it exactly once, whatever happens to the
//! peer. A block is not given back to the core while the transfer engine still reads it.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod metrics;
mod role;
#[cfg(test)]
mod tests;

pub use metrics::METRICS;

use baton_runtime::settings::Loaded;
use baton_worker::config::Settings;
#[cfg(any(test, feature = "testing"))]
use baton_worker::testing::{TestNode, World};

/// What the binary does.
pub const ABOUT: &str = "Compute prompts in a Baton cluster, and push their KV cache to decode nodes";

/// Serves until a signal, then drains.
pub fn run(Loaded { settings, .. }: Loaded<Settings>) -> anyhow::Result<()> {
    baton_worker::run::<role::PrefillRole>(settings)
}

/// Starts one among others in this process, for tests.
#[cfg(any(test, feature = "testing"))]
pub async fn start(world: &World, settings: Settings) -> TestNode {
    world.start::<role::PrefillRole>(settings).await
}
