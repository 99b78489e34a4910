//! Page-aligned memory that the engine computes in and the transfer engine moves.
//!
//! A [`MemoryRegion`] is shared by threads and, through the network, by machines. Rust's borrow
//! rules cannot follow that, so a region gives raw spans only, through `unsafe` functions. Their
//! caller states which block-state rule keeps others off the bytes.
//!
//! **Invariant**: the region's address and length never change while a clone of its `Arc` lives;
//! its pages are zero at first.
//!
//! It also says what the system's allocator keeps of freed memory.

#![allow(unsafe_code)] // mmap, and spans of memory that other threads and machines write; see each SAFETY note

mod allocator;
mod mapping;
mod shared;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use allocator::{keep_little_freed_memory, return_freed_memory};
use mapping::Mapping;
pub use shared::{SharedView, ViewError};

/// A memory region could not be had, or a span lies outside it.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The operating system refused.
    #[error("cannot map {bytes} bytes of memory: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// Its error.
        source: io::Error,
    },
    /// The operating system has no memory to share.
    #[error("cannot make {bytes} bytes of shared memory: {source}")]
    Share {
        /// Bytes asked for.
        bytes: usize,
        /// Its error.
        source: io::Error,
    },
    /// Zero bytes asked for.
    #[error("a memory region must have at least one byte")]
    Empty,
}

/// Mapped memory, page-aligned and zeroed. Pages are committed when first touched.
#[derive(Debug)]
pub struct MemoryRegion {
    mapping: Mapping,
    /// Where other processes of the host can map it, read-only.
    file: Option<OwnedFd>,
}

impl MemoryRegion {
    /// Maps `len` zeroed bytes, which stay this process's own.
    pub fn allocate(len: usize) -> Result<Self, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping = Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, None);
        let mapping = mapping.map_err(|source| MemoryError::Map { bytes: len, source })?;
        Ok(Self { mapping, file: None })
    }

    /// Maps `len` zeroed bytes that other processes can be given to read. They are a memfd, sealed
    /// so that a receiver can neither write nor resize it.
    pub fn allocate_shared(len: usize) -> Result<Self, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let (mapping, file) = shared::create(len).map_err(|source| MemoryError::Share { bytes: len, source })?;
        Ok(Self { mapping, file: Some(file) })
    }

    /// Gives the file away that others can map the memory by: from now on no other process can be
    /// given it.
    pub fn take_shared_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    /// The memory as a file, if it was allocated to be shared.
    pub fn shared_file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Asks for huge pages, if the system has them. What is read from end to end is read a third
    /// faster, but each touch commits as much.
    pub fn advise_huge_pages(&self) {
        self.mapping.advise_huge_pages();
    }

    /// First byte of the region.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Bytes of the region.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether `range` lies inside the region.
    pub fn contains(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.len()
    }

    /// The bytes of `range`, for reading.
    ///
    /// # Panics
    /// If `range` lies outside the region.
    ///
    /// # Safety
    /// No thread and no remote writer may write these bytes while the slice lives.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        assert!(self.contains(&range), "span {range:?} outside a region of {} bytes", self.len());
        // SAFETY: inside the mapping (asserted), initialised (anonymous pages are zero), unaliased
        // by writers (caller).
        unsafe { std::slice::from_raw_parts(self.as_ptr().add(range.start), range.len()) }
    }

    /// The bytes of `range`, for writing.
    ///
    /// # Panics
    /// If `range` lies outside the region.
    ///
    /// # Safety
    /// No thread and no remote peer may read or write these bytes while the slice lives.
    #[allow(clippy::mut_from_ref)] // the region is shared by design; exclusion is the caller's promise
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(self.contains(&range), "span {range:?} outside a region of {} bytes", self.len());
        // SAFETY: inside the mapping (asserted), initialised, unaliased (caller).
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_region_is_zeroed_aligned_and_writable() {
        let region = MemoryRegion::allocate(10_000).unwrap();
        assert_eq!(region.as_ptr() as usize % 4096, 0);
        // SAFETY: one thread.
        unsafe {
            assert!(region.slice(0..10_000).iter().all(|&b| b == 0));
            region.slice_mut(9_999..10_000)[0] = 7;
            assert_eq!(region.slice(9_998..10_000), [0, 7]);
        }
        assert!(MemoryRegion::allocate(0).is_err());
        assert!(matches!(MemoryRegion::allocate(usize::MAX / 2), Err(MemoryError::Map { .. })));
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn span_outside_memory_region_panics() {
        let region = MemoryRegion::allocate(16).unwrap();
        // SAFETY: panics before any access.
        unsafe { region.slice(8..17) };
    }
}
