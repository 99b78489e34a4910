//! Memory that a device may touch.

#![allow(unsafe_code)] // calls into libibverbs; see each SAFETY note

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use baton_memory::MemoryRegion;
use ibverbs_sys as ffi;

use crate::{Context, VerbsError, check_memlock};

/// Registrations and queue pairs that may work together.
pub struct ProtectionDomain {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A new one on an open device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the device is open.
        let raw = unsafe { ffi::ibv_alloc_pd(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_alloc_pd", context.name()))?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    pub(crate) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: made by ibv_alloc_pd; what was made in it holds an Arc of this and is gone.
        let rc = unsafe { ffi::ibv_dealloc_pd(self.raw()) };
        debug_assert_eq!(rc, 0, "ibv_dealloc_pd {}", self.context.name());
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProtectionDomain({})", self.context.name())
    }
}

/// What may be done to registered memory. Reading it locally is always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// This machine's device may write: the target of reads, and required for `remote_write`.
    pub local_write: bool,
    /// Peers may write.
    pub remote_write: bool,
    /// Peers may read.
    pub remote_read: bool,
}

impl Access {
    /// Written and read by peers, and the target of local reads.
    pub const ALL: Self = Self { local_write: true, remote_write: true, remote_read: true };

    pub(crate) fn flags(self) -> u32 {
        let flag = |set: bool, flag: ffi::ibv_access_flags| if set { flag.0 } else { 0 };
        flag(self.local_write || self.remote_write, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
            | flag(self.remote_write, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE)
            | flag(self.remote_read, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ)
    }
}

/// Memory that a device may touch, pinned until this is dropped.
///
/// The device does not know Rust's borrows: what posts work requests, and what gives the
/// remote key away, says which rule keeps others off the bytes. A work request that is under way
/// when its registration is dropped ends with an error; the device does not touch the memory after.
pub struct MemoryRegistration {
    raw: NonNull<ffi::ibv_mr>,
    address: u64,
    len: usize,
    domain: Arc<ProtectionDomain>,
    _region: Arc<MemoryRegion>,
}

// SAFETY: libibverbs may be called from any thread; the keys do not change.
unsafe impl Send for MemoryRegistration {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegistration {}

impl MemoryRegistration {
    /// Registers a whole region.
    ///
    /// # Errors
    /// [`VerbsError::MemlockTooLow`] where the process may not lock that much memory.
    pub fn register(
        domain: &Arc<ProtectionDomain>,
        region: &Arc<MemoryRegion>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let len = region.len();
        check_memlock(len as u64)?;
        let base = region.as_ptr();
        // SAFETY: the mapping has `len` bytes and lives as long as the Arc that the registration
        // keeps.
        let raw = unsafe { ffi::ibv_reg_mr(domain.raw(), base.cast(), len, access.flags() as i32) };
        let raw = NonNull::new(raw).ok_or_else(|| Self::refused("ibv_reg_mr", domain, len))?;
        Ok(Self { raw, address: base as u64, len, domain: domain.clone(), _region: region.clone() })
    }

    fn refused(operation: &'static str, domain: &ProtectionDomain, len: usize) -> VerbsError {
        VerbsError::last(operation, format!("{len} bytes of {}", domain.context.name()))
    }

    pub(crate) fn raw(&self) -> *mut ffi::ibv_mr {
        self.raw.as_ptr()
    }

    /// Key for work requests of this machine.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the library's record lives as long as the registration, and its keys are written
        // once.
        unsafe { (*self.raw()).lkey }
    }

    /// Key that peers use; the whole registration can be reached with it.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw()).rkey }
    }

    /// Address of the first byte, for peers.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Fails where the span is not inside.
    pub(crate) fn check(&self, offset: usize, len: usize) -> Result<(), VerbsError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(VerbsError::OutsideRegistration {
                offset: offset as u64,
                len: len as u64,
                registered: self.len as u64,
            }),
        }
    }
}

impl Drop for MemoryRegistration {
    fn drop(&mut self) {
        // SAFETY: made by ibv_reg_mr.
        let rc = unsafe { ffi::ibv_dereg_mr(self.raw()) };
        debug_assert_eq!(rc, 0, "ibv_dereg_mr {}", self.domain.context.name());
    }
}

impl fmt::Debug for MemoryRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegistration({}, {} bytes at {:#x})", self.domain.context.name(), self.len, self.address)
    }
}
