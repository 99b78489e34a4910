//! The gRPC services: they translate, and decide nothing.

mod cache;
mod cluster;
mod drain;
pub mod explain;
mod health;
mod inference;
mod load;
mod membership;
mod settings;

pub use cluster::ClusterService;
pub use health::HealthService;
pub use inference::InferenceService;
pub use membership::NodeRegistrationService;
