//! Memory that other processes of the host may read.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::mapping::Mapping;

/// No process can resize or unseal it, and no mapping made from now on can write it.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

/// A memfd of `len` bytes and the only writable mapping of it there will ever be.
pub(crate) fn create(len: usize) -> io::Result<(Mapping, OwnedFd)> {
    // SAFETY: the name is a C string; the call makes a new file descriptor and touches no memory.
    let fd = check(unsafe { libc::memfd_create(c"baton-kv".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
    // SAFETY: just made, and owned by nothing else.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let size = libc::off_t::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    // SAFETY: plain system call on a descriptor that is open.
    check(unsafe { libc::ftruncate(fd, size) })?;
    let mapping = map(fd, len, libc::PROT_READ | libc::PROT_WRITE)?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) })?;
    Ok((mapping, file))
}

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

fn map(fd: RawFd, len: usize, protection: libc::c_int) -> io::Result<Mapping> {
    Mapping::new(len, protection, libc::MAP_SHARED, Some(fd))
}

/// A file from another process cannot be read as shared memory.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// Its owner could take pages away while they are read.
    #[error("the shared memory is not sealed against shrinking")]
    NotSealed,
    /// It has fewer bytes than its owner says.
    #[error("the shared memory has {actual} bytes, not {claimed}")]
    Length {
        /// Bytes it has.
        actual: u64,
        /// Bytes its owner says.
        claimed: u64,
    },
    /// The operating system refused.
    #[error("cannot map shared memory: {0}")]
    Map(#[from] io::Error),
}

/// Another process's [`MemoryRegion`](crate::MemoryRegion), mapped read-only. Its bytes change
/// under the reader's eyes, so they are only ever copied out.
#[derive(Debug)]
pub struct SharedView(Mapping);

impl SharedView {
    /// Maps a file received from elsewhere, which is untrusted. It must be sealed and as long as
    /// claimed, so that no read of it can fault.
    pub fn map(file: BorrowedFd<'_>, claimed: u64) -> Result<Self, ViewError> {
        let fd = file.as_raw_fd();
        // SAFETY: plain system call; anything but a memfd answers with an error.
        let seals = check(unsafe { libc::fcntl(fd, libc::F_GET_SEALS) }).map_err(|_| ViewError::NotSealed)?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(ViewError::NotSealed);
        }
        // SAFETY: a stat of zeros is a valid value, and is written by the call.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a live stat.
        check(unsafe { libc::fstat(fd, &raw mut stat) })?;
        let actual = stat.st_size as u64;
        if actual < claimed || claimed == 0 {
            return Err(ViewError::Length { actual, claimed });
        }
        let len = usize::try_from(claimed).map_err(|_| ViewError::Length { actual, claimed })?;
        Ok(Self(map(fd, len, libc::PROT_READ)?))
    }

    /// First byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::MemoryRegion;

    #[test]
    fn shared_view_shows_owner_writes_and_cannot_change_them() {
        let region = MemoryRegion::allocate_shared(10_000).unwrap();
        let file = region.shared_file().unwrap();
        let view = SharedView::map(file, 10_000).unwrap();
        // SAFETY: one thread; the view is read through a volatile pointer.
        unsafe {
            assert_eq!(view.as_ptr().add(9_999).read_volatile(), 0);
            region.slice_mut(9_999..10_000)[0] = 7;
            assert_eq!(view.as_ptr().add(9_999).read_volatile(), 7);
        }
        let writable = map(file.as_raw_fd(), 10_000, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(writable.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // SAFETY: plain system call on an open descriptor.
        assert!(check(unsafe { libc::ftruncate(file.as_raw_fd(), 1) }).is_err());
    }

    #[test]
    fn shared_view_of_short_or_unsealed_file_is_refused() {
        let region = MemoryRegion::allocate_shared(5_000).unwrap();
        assert!(matches!(
            SharedView::map(region.shared_file().unwrap(), 5_001),
            Err(ViewError::Length { actual: 5_000, claimed: 5_001 })
        ));
        let plain = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(matches!(SharedView::map(plain.as_fd(), 10), Err(ViewError::NotSealed)));
        // SAFETY: makes a descriptor, which the next line owns.
        let unsealed = unsafe { libc::memfd_create(c"x".as_ptr(), libc::MFD_ALLOW_SEALING) };
        // SAFETY: just made.
        let unsealed = unsafe { OwnedFd::from_raw_fd(unsealed) };
        assert!(matches!(SharedView::map(unsealed.as_fd(), 10), Err(ViewError::NotSealed)));
    }

    #[test]
    fn private_memory_region_has_no_shared_file() {
        assert!(MemoryRegion::allocate(1).unwrap().shared_file().is_none());
    }
}
