//! A mapping of memory, and its end.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;

/// Mappings of as many bytes begin where huge pages may.
const HUGE_PAGE: usize = 2 << 20;

/// Mapped pages between two guard pages, unmapped when this is dropped. An access past an end stops
/// the process, instead of writing over something else. Address and length never change.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// All that is mapped, with the pages around.
    around: (NonNull<u8>, usize),
}

// SAFETY: plain memory without thread affinity; all access to its bytes goes through raw pointers,
// whose users answer for exclusion.
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
        let page = page_bytes();
        let align = if len < HUGE_PAGE { page } else { HUGE_PAGE };
        let reserved = len.checked_next_multiple_of(page).and_then(|len| len.checked_add(align + page));
        let reserved = reserved.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { map(std::ptr::null_mut(), reserved, libc::PROT_NONE, nothing, -1) }?;
        // From here on it ends with this value.
        let mut mapping = Self { base: start, len, around: (start, reserved) };
        let first = (start.as_ptr() as usize + page).next_multiple_of(align) - start.as_ptr() as usize;
        let at = start.as_ptr().wrapping_add(first);
        // SAFETY: inside what was just reserved, of which no other code knows yet.
        mapping.base = unsafe { map(at.cast(), len, protection, flags | libc::MAP_FIXED, file.unwrap_or(-1)) }?;
        Ok(mapping)
    }

    pub(crate) fn advise_huge_pages(&self) {
        // SAFETY: this mapping. Advice only: without huge pages, or a kernel that knows them, all
        // stays as it is.
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
        let (start, len) = self.around;
        // SAFETY: start and len are those of the mapping, and nothing borrows from it any more.
        let rc = unsafe { libc::munmap(start.as_ptr().cast(), len) };
        debug_assert_eq!(rc, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// # Safety
/// With `MAP_FIXED`, nothing uses what is mapped at `at`.
unsafe fn map(
    at: *mut libc::c_void,
    len: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    file: RawFd,
) -> io::Result<NonNull<u8>> {
    // SAFETY: the caller's promise.
    let base = unsafe { libc::mmap(at, len, protection, flags, file, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))
}

fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(len: usize) -> Mapping {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Mapping::new(len, libc::PROT_READ | libc::PROT_WRITE, flags, None).unwrap()
    }

    /// Whether a child that writes there ends by a signal.
    fn dies(at: *mut u8) -> bool {
        // SAFETY: the child writes, which is the test, and ends without returning to it.
        unsafe {
            let child = libc::fork();
            assert!(child >= 0);
            if child == 0 {
                at.write_volatile(1);
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            libc::WIFSIGNALED(status)
        }
    }

    #[test]
    fn access_past_either_end_of_a_mapping_faults() {
        let page = page_bytes();
        for pages in [1, 3, HUGE_PAGE / page, HUGE_PAGE / page + 5] {
            let mapping = mapped(pages * page);
            let first = mapping.as_ptr();
            let len = mapping.len();
            assert!(dies(first.wrapping_sub(1)) && dies(first.wrapping_add(len)), "{pages} pages");
            assert!(!dies(first) && !dies(first.wrapping_add(len - 1)), "{pages} pages");
        }
    }

    #[test]
    fn large_mapping_begins_at_a_huge_page_boundary() {
        assert_eq!(mapped(100).as_ptr() as usize % page_bytes(), 0);
        assert_eq!(mapped(HUGE_PAGE).as_ptr() as usize % HUGE_PAGE, 0);
        assert_eq!(mapped(5 * HUGE_PAGE + 1).as_ptr() as usize % HUGE_PAGE, 0);
    }

    #[test]
    fn mapping_more_memory_than_there_is_is_an_error() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        for len in [usize::MAX, usize::MAX - 4096, 1 << 62] {
            assert!(Mapping::new(len, libc::PROT_READ, flags, None).is_err(), "{len}");
        }
    }
}
