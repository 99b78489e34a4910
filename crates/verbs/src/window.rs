//! Keys for part of a registration.

#![allow(unsafe_code)] // calls into libibverbs; see each SAFETY note

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ffi;

use crate::{MemoryRegistration, VerbsError};

/// A memory window of type 2: once bound through a queue pair
/// ([`WorkRequests::bind_window`](crate::WorkRequests::bind_window)), its key gives the peer a
/// range of a registration and no more, until it is invalidated.
///
/// A window is free, bound, and after invalidation free again. Each binding has a key of its own,
/// in turn; after 256 bindings they repeat. On some devices (those of type 2B) the key is good on
/// the queue pair it was bound through only. Soft-RoCE (Linux 6.1) checks key, rights and queue
/// pair, but not the window's range: there, a bound window opens the whole registration.
pub struct MemoryWindow {
    raw: NonNull<ffi::ibv_mw>,
    key: u32,
    registration: Arc<MemoryRegistration>,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for MemoryWindow {}
// SAFETY: as above.
unsafe impl Sync for MemoryWindow {}

impl MemoryWindow {
    /// A free window on a registration, which must have
    /// [`Access::window_bind`](crate::Access::window_bind).
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] where the device has none
    /// ([`Context::has_memory_windows`](crate::Context::has_memory_windows)).
    pub fn new(registration: &Arc<MemoryRegistration>) -> Result<Self, VerbsError> {
        let domain = registration.domain();
        let context = domain.context();
        let unsupported =
            || VerbsError::Unsupported { device: context.name().into(), what: "memory windows of type 2" };
        if !context.has_memory_windows() {
            return Err(unsupported());
        }
        // SAFETY: the device is open.
        let allocate = unsafe { (*context.raw()).ops.alloc_mw }.ok_or_else(unsupported)?;
        // SAFETY: the domain lives, and the registration, which the window keeps, keeps it.
        let raw = unsafe { allocate(domain.raw(), ffi::IBV_MW_TYPE_2) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_alloc_mw", context.name()))?;
        // SAFETY: the window was just made.
        let key = unsafe { raw.as_ref().rkey };
        Ok(Self { raw, key, registration: registration.clone() })
    }

    pub(crate) fn raw(&self) -> *mut ffi::ibv_mw {
        self.raw.as_ptr()
    }

    /// What its bindings are ranges of.
    pub fn registration(&self) -> &Arc<MemoryRegistration> {
        &self.registration
    }

    /// The key of the latest binding, or of none yet.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// The key of the next binding: the lowest byte is the user's, and must differ from the one
    /// before (ibv_inc_rkey(3)).
    pub(crate) fn next_key(&mut self) -> u32 {
        // Drivers find the window by the key it has in the library's record, which is up to the
        // user for type 2. SAFETY: the record lives as long as the window, and is reached through
        // `&mut self` only.
        unsafe { (*self.raw()).rkey = self.key };
        self.key = (self.key & !0xff) | (self.key.wrapping_add(1) & 0xff);
        self.key
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // SAFETY: the function was there when the window was made by its counterpart; a window that
        // is still bound is unbound by this.
        let rc = unsafe { (*self.registration.domain().context().raw()).ops.dealloc_mw.map(|f| f(self.raw())) };
        debug_assert_eq!(rc, Some(0), "ibv_dealloc_mw");
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryWindow({:#x} of {:?})", self.key, self.registration)
    }
}
