//! The gRPC services: they translate, and decide nothing.

mod cluster;
mod inference;

pub use cluster::ClusterService;
pub use inference::InferenceService;
