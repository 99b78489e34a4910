//! Memory between guard pages: a kernel under test that reads or writes beyond an operand ends its
//! process.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// Whether this thread's elements lie at the end of their pages; in turn if it is not said.
    static AT_END: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Runs a test twice: with all operands that this thread makes right after a guard page, and right
/// before one.
pub(super) fn on_both_sides(test: impl Fn()) {
    for at_end in [false, true] {
        AT_END.set(Some(at_end));
        test();
        AT_END.set(None);
    }
}

/// Elements right before a guard page, or right after one.
pub(super) struct Guarded<T> {
    mapping: *mut u8,
    mapped: usize,
    first: *mut u8,
    count: usize,
    elements: PhantomData<T>,
}

// SAFETY: owned memory without thread affinity; references to its elements follow those to it.
unsafe impl<T: Send> Send for Guarded<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Guarded<T> {}

impl<T: Copy> Guarded<T> {
    /// Zeroed elements, of a type for which zeros are a value.
    pub fn zeroed(count: usize) -> Self {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let in_turn = || TURN.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        Self::at(count, AT_END.get().unwrap_or_else(in_turn))
    }

    /// A copy of some elements.
    pub fn copy_of(elements: &[T]) -> Self {
        let copy = Self::zeroed(elements.len());
        // SAFETY: as many elements, of memory that nothing else uses.
        unsafe { copy.first.cast::<T>().copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        copy
    }

    fn at(count: usize, at_end: bool) -> Self {
        // SAFETY: asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let bytes = count * size_of::<T>();
        let open = bytes.next_multiple_of(page);
        let none = libc::PROT_NONE;
        let mapped = open + 2 * page;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped, none, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let mapping = mapping.cast::<u8>();
        let inner = mapping.wrapping_add(page);
        if open > 0 {
            // SAFETY: the mapping's inner pages.
            let rc = unsafe { libc::mprotect(inner.cast(), open, libc::PROT_READ | libc::PROT_WRITE) };
            assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        }
        let first = if at_end { inner.wrapping_add(open - bytes) } else { inner };
        assert!(first.cast::<T>().is_aligned());
        Self { mapping, mapped, first, count, elements: PhantomData }
    }

    pub fn as_ptr(&self) -> *const T {
        self.first.cast()
    }

    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.first.cast()
    }
}

impl<T> Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many elements, which are values whatever their bits (see `zeroed`).
        unsafe { std::slice::from_raw_parts(self.first.cast(), self.count) }
    }
}

impl<T> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.first.cast(), self.count) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping made above, which nothing borrows from any more.
        unsafe { libc::munmap(self.mapping.cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a child that runs this ends by a signal.
    fn dies(work: impl FnOnce()) -> bool {
        // SAFETY: the child touches memory and ends, without returning to the test.
        unsafe {
            let child = libc::fork();
            assert!(child >= 0);
            if child == 0 {
                work();
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            libc::WIFSIGNALED(status)
        }
    }

    #[test]
    fn read_beyond_guarded_memory_faults() {
        let [a, b] = [true, false].map(|at_end| Guarded::<[u8; 64]>::at(3, at_end));
        // SAFETY: the last element of one, and the first of the other; what lies beyond is read by
        // a child.
        unsafe {
            assert_eq!((*a.as_ptr().add(2), *b.as_ptr()), ([0; 64], [0; 64]));
            assert!(dies(|| {
                std::hint::black_box(a.as_ptr().add(3).cast::<u8>().read_volatile());
            }));
            assert!(dies(|| {
                std::hint::black_box(b.as_ptr().cast::<u8>().wrapping_sub(1).read_volatile());
            }));
            assert!(!dies(|| {
                std::hint::black_box(b.as_ptr().cast::<u8>().read_volatile());
            }));
        }
    }
}
