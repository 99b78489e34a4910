//! The operations that production runs.

mod attention;
mod kv_store;
mod largest;
mod linear;
mod matmul;
mod product_buffers;
mod quantize;
mod quantized;
mod quantized_matrix;
mod rms_norm;
mod rope;
mod rounded;
mod row_buffers;
mod softmax;
mod swiglu;
mod tile;
mod unrolled;

pub(crate) use attention::{Attention, AttentionPrecision, AttentionScratch, AttentionShape, QueryTile, attention};
pub(crate) use kv_store::KvStore;
pub(crate) use largest::largest;
pub(crate) use linear::{Inputs, Matrix, MatrixPart, Products, Target, WeightShape, gated, linear};
pub(crate) use matmul::PackedMatrix;
pub(crate) use quantized_matrix::QuantizedMatrix;
pub(crate) use rms_norm::rms_norm;
pub(crate) use rope::{RopeTable, rope};
pub(crate) use softmax::{exp_weights, log_sum_exp};
pub(crate) use swiglu::swiglu;
