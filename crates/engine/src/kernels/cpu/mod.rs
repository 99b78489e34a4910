//! The operations that production runs.

mod attention;
mod kv_store;
mod matmul;
mod rms_norm;
mod rope;
mod softmax;
mod swiglu;
mod tile;

pub(crate) use attention::{AttentionScratch, AttentionShape, QueryTile, attention};
pub(crate) use kv_store::KvStore;
pub(crate) use matmul::{PackedMatrix, matmul};
pub(crate) use rms_norm::rms_norm;
pub(crate) use rope::{RopeTable, rope};
pub(crate) use softmax::{exp_weights, log_sum_exp};
pub(crate) use swiglu::swiglu;
