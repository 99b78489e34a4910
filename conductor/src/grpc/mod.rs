//! The gRPC services: they translate, and decide nothing.

mod cache;
mod cluster;
mod explain;
mod health;
mod inference;
mod load;

pub use cluster::ClusterService;
pub use health::HealthService;
pub use inference::InferenceService;
