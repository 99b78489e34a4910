//! A model file in memory: mapped, or given.

#![allow(unsafe_code)] // mapping a file is unsafe by nature; see the SAFETY note

use std::fs::File;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

use crate::FormatError;

/// The bytes of a file.
pub(crate) enum Bytes {
    /// Those of a file, which come to memory when they are read.
    Mapped(Mmap),
    /// Those that a process has in memory.
    Given(Box<dyn AsRef<[u8]> + Send + Sync>),
}

impl Bytes {
    pub fn all(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Given(bytes) => bytes.as_ref().as_ref(),
        }
    }

    /// Some of them, if they are that, need not stay in this process's memory.
    pub fn release(&self, part: &[u8]) {
        let Self::Mapped(map) = self else { return };
        let offset = (part.as_ptr() as usize).wrapping_sub(map.as_ptr() as usize);
        if offset.checked_add(part.len()).is_some_and(|end| end <= map.len()) {
            // SAFETY: a read-only map of a file: what is read again comes from the file again, the
            // same.
            let released = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, part.len()) };
            debug_assert!(released.is_ok(), "{released:?}");
        }
    }
}

/// Whether these are the bytes of a Git LFS pointer: the text that stands for a file that was not
/// fetched (`docs/spec.md` of git-lfs).
pub fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/spec/")
}

/// What to do about a Git LFS pointer.
pub const LFS_POINTER: &str = "a Git LFS pointer in place of the file: `git lfs pull` fetches it";

pub(crate) fn refuse_lfs_pointer(path: &Path, bytes: &[u8]) -> Result<(), FormatError> {
    if is_lfs_pointer(bytes) {
        return Err(FormatError::invalid(path, "content", LFS_POINTER, "a model file"));
    }
    Ok(())
}

/// Maps a regular file, read-only.
///
/// # Errors
///
/// The file cannot be opened or mapped, is a Git LFS pointer, or is no regular file (opening a pipe
/// would wait for its writer).
pub(crate) fn map_file(path: &Path) -> Result<Bytes, FormatError> {
    let about = std::fs::metadata(path).map_err(FormatError::io(path))?;
    if !about.is_file() {
        let found = if about.is_dir() { "a folder" } else { "a special file" };
        return Err(FormatError::invalid(path, "model file", found, "a regular file"));
    }
    let file = File::open(path).map_err(FormatError::io(path))?;
    // SAFETY: the map is read-only and is used as bytes only, for which any content is valid. The
    // operator is asked not to change the file while it is open (crate documentation): weights are
    // files that are replaced, not written in place. It gains that a model's bytes are shared by
    // the processes of a machine and never copied.
    let map = unsafe { Mmap::map(&file) }.map_err(FormatError::io(path))?;
    refuse_lfs_pointer(path, &map)?;
    Ok(Bytes::Mapped(map))
}
