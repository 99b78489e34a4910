//! What the system's allocator keeps of memory that was freed. Glibc has a heap for each of up to
//! eight threads a core, and by default each may keep 64 MiB once a large piece was freed.

/// Most heaps: threads share them.
#[cfg(target_env = "gnu")]
const HEAPS: libc::c_int = 4;
/// A heap gives back what is free at its end beyond this, bytes.
#[cfg(target_env = "gnu")]
const KEPT_BYTES: libc::c_int = 1 << 20;
/// Pieces of more bytes are in no heap, and go back at once.
#[cfg(target_env = "gnu")]
const OWN_MAPPING_BYTES: libc::c_int = 1 << 20;

/// Has the allocator keep little of what is freed. To be called before other threads start.
pub fn keep_little_freed_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, HEAPS),
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES),
        // Set, it does not grow by what is freed.
        (libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES),
    ] {
        // SAFETY: glibc checks both numbers, and ignores what it does not know.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives free pages of all heaps back to the system. Takes milliseconds, and other threads wait for
/// a heap meanwhile.
pub fn return_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
