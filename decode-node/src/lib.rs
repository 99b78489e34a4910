//! The decode node: carries out what `baton_scheduler::DecodeCore` decides.
//!
//! **Invariant**: every effect that names an answer gets it exactly once; a block that a peer may
//! still write is not given to another request.

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
pub const ABOUT: &str = "Generate the tokens of a Baton cluster";

/// Serves until a signal, then drains.
pub fn run(Loaded { settings, .. }: Loaded<Settings>) -> anyhow::Result<()> {
    baton_worker::run::<role::DecodeRole>(settings)
}

/// Starts one among others in this process, for tests.
#[cfg(any(test, feature = "testing"))]
pub async fn start(world: &World, settings: Settings) -> TestNode {
    world.start::<role::DecodeRole>(settings).await
}
