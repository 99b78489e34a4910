//! Model files (GGUF, safetensors) as untrusted input.
//!
//! A model file is mapped into memory, its header is read and checked once, and tensors are handed
//! out as views of the mapped bytes. Quantized tensors become `f32` through [`dequantize`], which
//! equals the reference package `gguf` bit for bit.
//!
//! **Invariant**: what a reader returned has been checked. A view's bytes lie in its file, fit its
//! shape and type, and overlap no other tensor. Whatever a file claims, reading it never panics and
//! never allocates more than a small multiple of the file.
//!
//! A model file must not be changed while it is open: the map shows the change, and a file that
//! becomes shorter ends the process.

mod dequantize;
mod dtype;
mod error;
mod gguf;
mod map;
mod model_file;
mod name;
mod safetensors;
mod tensor;

pub use dequantize::{QUANTS, QuantBlock, QuantFormat, dequantize, quants};
pub use dtype::Dtype;
pub use error::FormatError;
pub use gguf::{Array, FromValue, Gguf, Metadata, Value};
pub use map::{LFS_POINTER, is_lfs_pointer};
pub use model_file::ModelFile;
pub use name::model_name;
pub use safetensors::Safetensors;
pub use tensor::TensorView;
