//! Bounds of one input: live bytes and time. What breaks them ends the process, because nothing
//! else stops it safely.

#![allow(unsafe_code)] // a global allocator is unsafe by its trait

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::process::abort;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, Once, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Live bytes of the process, and the most since [`Watch::input`].
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Most live bytes that are allowed.
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);
/// The watch counts the whole process, so there is one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// What one input may cost.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes allocated at any moment beyond those allocated before.
    pub bytes: usize,
    /// The same, for each byte of the input.
    pub bytes_per_byte: usize,
    /// Generous, since others use the machine too.
    pub time: Duration,
}

impl Limits {
    /// Most bytes for an input.
    pub fn bytes_for(&self, input: &[u8]) -> usize {
        self.bytes + self.bytes_per_byte * input.len()
    }
}

/// Counts the bytes that the process holds. To be the global allocator of what fuzzes.
#[derive(Debug, Default)]
pub struct CountingAllocator;

/// Bytes that the process holds, if [`CountingAllocator`] is its allocator.
pub fn live_bytes() -> usize {
    LIVE.load(Relaxed)
}

/// What `run` returns, and the most bytes that the process held meanwhile beyond those before.
pub fn peak_bytes<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = live_bytes();
    PEAK.store(before, Relaxed);
    let value = run();
    (value, PEAK.load(Relaxed).saturating_sub(before))
}

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed).wrapping_add(bytes);
    PEAK.fetch_max(live, Relaxed);
    if live > MOST.load(Relaxed) {
        // What is written below may allocate.
        let most = MOST.swap(usize::MAX, Relaxed);
        end(format_args!("{bytes} bytes are asked for, which is {} bytes over the limit", live - most));
    }
}

fn shrink(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

/// Ends the process. The input is in the driver's file, or libFuzzer writes it down.
fn end(problem: std::fmt::Arguments<'_>) -> ! {
    // Not by `eprintln`, which the test harness keeps to itself.
    let _ = writeln!(std::io::stderr(), "fuzz: {problem}");
    abort();
}

// SAFETY: all calls go to the system's allocator unchanged; the counters are atomics. If a limit is
// broken, the process ends instead of returning.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: `pointer` came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may exist for a moment, and the old one is counted until the new one is there.
        grow(size);
        // SAFETY: `pointer` came from `System` with this layout, and the caller's promises about
        // `size` are passed on.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        shrink(if moved.is_null() { size } else { layout.size() });
        moved
    }
}

/// When the current input began, in milliseconds since the watch did, and 1 more; 0: none is being
/// read.
static BEGAN: AtomicU64 = AtomicU64::new(0);

/// Watches over inputs, one after the other, until it is dropped.
pub(crate) struct Watch {
    limits: Limits,
    began: std::time::Instant,
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _alone: std::sync::MutexGuard<'static, ()>,
}

/// What an input has cost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
}

/// What the last panic of an input said. Many are caught where they belong, and must not fill a
/// log.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Keeps what panics of inputs say for [`last_panic`]. `RUST_BACKTRACE` shows them at once.
fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let shows = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // A backtrace takes memory that is not the input's, and tables of symbols stay.
            let most = MOST.swap(usize::MAX, Relaxed);
            let live = live_bytes();
            *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string();
            if shows || BEGAN.load(Relaxed) == 0 {
                before(panic);
            }
            MOST.store(most.saturating_add(live_bytes().saturating_sub(live)), Relaxed);
        }));
    });
}

/// What the last panic said, in one line.
pub(crate) fn last_panic() -> String {
    LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner).replace('\n', " ")
}

impl Watch {
    pub(crate) fn new(limits: Limits) -> Self {
        keep_panics();
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let began = baton_runtime::now();
        let (end, ended) = mpsc::channel();
        let most = limits.time;
        let thread = std::thread::spawn(move || {
            while ended.recv_timeout(most / 10) == Err(mpsc::RecvTimeoutError::Timeout) {
                check_time(began.elapsed(), most);
            }
        });
        Self { limits, began, end: Some(end), thread: Some(thread), _alone: alone }
    }

    /// Runs `read` on an input, within the limits.
    pub(crate) fn input(&self, input: &[u8], read: impl FnOnce()) -> Cost {
        let before = LIVE.load(Relaxed);
        let began = baton_runtime::now();
        PEAK.store(before, Relaxed);
        MOST.store(before + self.limits.bytes_for(input), Relaxed);
        BEGAN.store((began - self.began).as_millis() as u64 + 1, Relaxed);
        // Put back in any case: a panic is told about after this.
        let _restore = Restore;
        read();
        Cost { bytes: PEAK.load(Relaxed).saturating_sub(before), time: began.elapsed() }
    }
}

struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        BEGAN.store(0, Relaxed);
        MOST.store(usize::MAX, Relaxed);
    }
}

fn check_time(now: Duration, most: Duration) {
    let Some(began) = BEGAN.load(Relaxed).checked_sub(1) else { return };
    let took = now.saturating_sub(Duration::from_millis(began));
    if took > most {
        end(format_args!("an input takes more than {most:?}"));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // It does nothing that could panic.
            let _ = thread.join();
        }
    }
}
