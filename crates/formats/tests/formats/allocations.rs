//! An allocator that counts what the current thread holds, so that a test can bound what reading a
//! file costs.

#![allow(unsafe_code)] // a global allocator is unsafe by its trait

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: all calls go to the system's allocator unchanged; the counters are thread-local cells
// that need no allocation and have no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `pointer` came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The result of `work` and the most bytes it held at any moment beyond what was held before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, (PEAK.get() - before) as usize)
}

#[test]
fn allocation_peak_is_counted() {
    let (len, peak) = peak_of(|| {
        drop(vec![1_u8; 1000]);
        vec![1_u8; 10].len()
    });
    assert_eq!(len, 10);
    assert!((1000..1100).contains(&peak), "{peak}");
}
