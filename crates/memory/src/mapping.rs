//! A mapping of memory, and its end.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;

/// Mapped pages, unmapped when this is dropped. Address and length never change.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory without thread affinity; all access to its bytes goes through raw pointers, whose users answer for exclusion.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, of a file or of nothing, at an address of the kernel's choice.
    pub(crate) fn new(
        len: usize,
        protection: libc::c_int,
        flags: libc::c_int,
        file: Option<RawFd>,
    ) -> io::Result<Self> {
        // SAFETY: a mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.unwrap_or(-1), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::<u8>::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))?;
        Ok(Self { base, len })
    }

    pub(crate) fn advise_huge_pages(&self) {
        // SAFETY: this mapping. Advice only: without huge pages, or a kernel that knows them, all stays as it is.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping, and nobody borrows from it any more.
        let rc = unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert_eq!(rc, 0, "munmap: {}", io::Error::last_os_error());
    }
}
