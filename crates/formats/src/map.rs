//! The memory map of a model file.

#![allow(unsafe_code)] // mapping a file is unsafe by nature; see the SAFETY note

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::FormatError;

/// Maps a regular file, read-only.
///
/// # Errors
///
/// The file cannot be opened or mapped, or is no regular file (opening a pipe would wait for its writer).
pub(crate) fn map_file(path: &Path) -> Result<Mmap, FormatError> {
    let about = std::fs::metadata(path).map_err(FormatError::io(path))?;
    if !about.is_file() {
        let found = if about.is_dir() { "a folder" } else { "a special file" };
        return Err(FormatError::invalid(path, "model file", found, "a regular file"));
    }
    let file = File::open(path).map_err(FormatError::io(path))?;
    // SAFETY: the map is private and read-only and is used as bytes only, for which any content is valid. That nobody changes the file while it is open is
    // asked of the operator (crate documentation): weights are files that are replaced, not written in place. It gains that a model's bytes are shared by the
    // processes of a machine and never copied.
    unsafe { Mmap::map(&file) }.map_err(FormatError::io(path))
}
