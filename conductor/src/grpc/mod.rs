//! The gRPC services: they translate, and decide nothing.

mod cluster;
mod explain;
mod inference;

pub use cluster::ClusterService;
pub use inference::InferenceService;
