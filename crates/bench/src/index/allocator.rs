//! Counts what is allocated, while it is asked to.

#![allow(unsafe_code)] // an allocator is unsafe by its signature

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

static ON: AtomicBool = AtomicBool::new(false);
static BYTES: AtomicIsize = AtomicIsize::new(0);

/// What malloc keeps before each allocation, bytes (glibc on 64 bits).
const HEADER_BYTES: isize = 8;

/// The system's allocator, which counts for `baton bench index`. Other commands pay for a load of a
/// flag per call.
#[derive(Debug)]
pub struct CountingAllocator;

/// Bytes allocated during `work` and not freed in it, by all threads, as malloc rounds them and
/// with what it keeps for each. 0 if [`CountingAllocator`] is not the program's.
pub fn allocated<T>(work: impl FnOnce() -> T) -> (T, usize) {
    BYTES.store(0, Ordering::SeqCst);
    ON.store(true, Ordering::SeqCst);
    let result = work();
    ON.store(false, Ordering::SeqCst);
    (result, usize::try_from(BYTES.load(Ordering::SeqCst)).unwrap_or(0))
}

fn count(pointer: *mut u8, sign: isize) {
    if ON.load(Ordering::Relaxed) && !pointer.is_null() {
        // SAFETY: the callers pass what `System` allocated with malloc and has not freed yet.
        let usable = unsafe { libc::malloc_usable_size(pointer.cast()) };
        BYTES.fetch_add(sign * (usable as isize + HEADER_BYTES), Ordering::Relaxed);
    }
}

// SAFETY: every call goes to `System` as it came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`.
        let pointer = unsafe { System.alloc(layout) };
        count(pointer, 1);
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        count(pointer, 1);
        pointer
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(pointer, -1);
        // SAFETY: the caller keeps the contract of `realloc`.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        count(if moved.is_null() { pointer } else { moved }, 1);
        moved
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(pointer, -1);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) };
    }
}
