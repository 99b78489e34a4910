//! Model files of all kinds: valid, damaged and hostile.

mod allocations;
mod dequantize;
mod folder;
mod gguf;
mod gguf_fuzz;
mod gguf_writer;
mod model_file;
mod mutations;
mod safetensors;
mod smollm2;

use baton_formats::FormatError;

/// Asserts that a file is refused with an error that has each of `parts`.
#[track_caller]
fn assert_refused<T>(result: Result<T, FormatError>, parts: &[&str]) {
    let message = result.err().expect("the file should be refused").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
