//! The gRPC services: they translate, and decide nothing.

mod cache;
mod cluster;
mod drain;
pub mod explain;
mod health;
mod inference;
mod intake;
mod load;
mod membership;
mod settings;
mod wire;

pub use cluster::ClusterService;
pub use health::HealthService;
pub use inference::InferenceService;
pub use intake::{Intake, take_in};
pub use membership::NodeRegistrationService;
