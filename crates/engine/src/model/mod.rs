//! Models: what a file says of its hyperparameters, its weights in the form that the kernels take,
//! and the graph.

mod config;
mod gguf_config;
mod hf_config;
mod llama;
mod names;
mod rope_scaling;
mod weights;

pub(crate) use config::ModelConfig;
pub(crate) use llama::{Llama, Workspace};
