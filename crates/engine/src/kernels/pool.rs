//! Helper threads that wait for work by spinning for a while, then asleep.
//!
//! A forward pass has hundreds of parallel operations of some 10 us each. Waking a thread takes as
//! long as one of them, so a helper keeps looking for the next one before it sleeps.
//!
//! ```text
//! entry: | epoch (32) | entered (31) | open (1) |
//!
//! caller:  opens the entry for the next epoch, wakes sleepers, works, closes it, waits until all who entered have left
//! helper:  sees a new epoch: enters, if the entry is open, works, leaves
//! ```
//!
//! The caller waits only for helpers that have entered. One that the system does not run, or that
//! wakes late, does not hold the caller up.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};
use std::{hint, io};

use super::affinity::{own_cores, stay_on};

/// How long a helper looks for work before it sleeps: longer than what a step does on one thread.
const SPIN: Duration = Duration::from_micros(100);
/// Looks between two looks at the clock.
const LOOKS: u32 = 64;
/// Looks of a caller that waits for the last helper before it lets others run: the helper may be
/// without a core.
const CALLER_LOOKS: u32 = 4096;

const OPEN: u64 = 1;
const ENTERED: u64 = 2;
const EPOCH: u64 = 1 << 32;

/// Work of one operation; called with the worker's number, from 1 for helpers.
type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// Helper threads; they end when it is dropped.
pub(super) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held by the caller whose operation runs.
    busy: Mutex<()>,
}

struct Shared {
    entry: AtomicU64,
    /// Helpers that have left since the entry was opened.
    left: AtomicU64,
    /// Whether a job has panicked in a helper.
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Whether each helper sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    job: UnsafeCell<Option<*const Job<'static>>>,
}

// SAFETY: `job` is written only while the entry is closed and all helpers have left, and read only
// by helpers that have entered; the entry's orderings put one before the other. What it points to
// is `Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Pool {
    /// Starts `helpers` threads.
    pub fn new(helpers: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            entry: AtomicU64::new(0),
            left: AtomicU64::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            job: UnsafeCell::new(None),
        });
        let mut pool = Self { shared, helpers: Vec::new(), busy: Mutex::new(()) };
        let cores = own_cores(helpers + 1);
        for helper in 0..helpers {
            let shared = Arc::clone(&pool.shared);
            let core = cores.as_ref().map(|cores| cores[helper + 1]);
            let run = move || {
                if let Some(core) = core {
                    stay_on(core);
                }
                shared.help(helper);
            };
            pool.helpers.push(thread::Builder::new().name(format!("engine-{helper}")).spawn(run)?);
        }
        Ok(pool)
    }

    /// Runs `job(worker)` on the caller's thread, as worker 0, and on the helpers that come before
    /// that has ended; returns when all have ended.
    ///
    /// # Panics
    /// If the job has panicked.
    pub fn run(&self, job: &Job<'_>) {
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let job: *const Job<'_> = job;
        // SAFETY: only the lifetime is changed; helpers read it between entering and leaving, and
        // `Closing` waits for that, panic or not. The entry is closed and all helpers have left, so
        // no helper reads it now.
        unsafe { *shared.job.get() = Some(std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job)) };
        shared.left.store(0, Ordering::Relaxed);
        let epoch = (shared.entry.load(Ordering::Relaxed) / EPOCH).wrapping_add(1) as u32;
        shared.entry.store((u64::from(epoch) * EPOCH) | OPEN, Ordering::SeqCst);
        let closing = Closing(shared);
        for (helper, asleep) in self.helpers.iter().zip(&shared.asleep) {
            if asleep.load(Ordering::SeqCst) {
                wake(helper.thread(), asleep);
            }
        }
        // SAFETY: the caller's reference lives as long as this call.
        unsafe { (*job)(0) };
        drop(closing);
        assert!(!shared.panicked.load(Ordering::Relaxed), "an operation has panicked in a helper thread");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in &self.helpers {
            helper.thread().unpark();
        }
        for helper in self.helpers.drain(..) {
            // One that has panicked has said so.
            let _ = helper.join();
        }
    }
}

fn wake(thread: &Thread, asleep: &AtomicBool) {
    asleep.store(false, Ordering::Relaxed);
    thread.unpark();
}

/// Closes the entry when it is dropped, and waits for those inside.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let entered = (self.0.entry.fetch_and(!OPEN, Ordering::AcqRel) % EPOCH) / ENTERED;
        let mut looks = 0;
        while self.0.left.load(Ordering::Acquire) < entered {
            looks += 1;
            if looks < CALLER_LOOKS { hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

/// Counts a helper out when it is dropped, panic or not.
struct Leaving<'a>(&'a Shared);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.panicked.store(true, Ordering::Relaxed);
        }
        self.0.left.fetch_add(1, Ordering::Release);
    }
}

impl Shared {
    fn help(&self, helper: usize) {
        let mut seen = 0;
        while let Some(epoch) = self.next_epoch(helper, seen) {
            seen = epoch;
            if self.enter(epoch) {
                let leaving = Leaving(self);
                // SAFETY: inside the entry, the job is there and lives.
                if let Some(job) = unsafe { *self.job.get() } {
                    // SAFETY: as above.
                    unsafe { (*job)(helper + 1) };
                }
                drop(leaving);
            }
        }
    }

    /// Waits for another epoch than `seen`; `None` at the end.
    #[allow(clippy::disallowed_methods)] // how long to spin is no decision
    fn next_epoch(&self, helper: usize, seen: u64) -> Option<u64> {
        let mut deadline = Instant::now() + SPIN;
        loop {
            for _ in 0..LOOKS {
                let epoch = self.entry.load(Ordering::Relaxed) / EPOCH;
                if epoch != seen {
                    return Some(epoch);
                }
                hint::spin_loop();
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            if Instant::now() >= deadline {
                self.sleep(helper, seen);
                deadline = Instant::now() + SPIN;
            }
        }
    }

    fn sleep(&self, helper: usize, seen: u64) {
        let asleep = &self.asleep[helper];
        asleep.store(true, Ordering::SeqCst);
        // A caller stores the entry and then looks who sleeps; this is the other way round, so one
        // of the two sees the other.
        if self.entry.load(Ordering::SeqCst) / EPOCH == seen && !self.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        asleep.store(false, Ordering::Relaxed);
    }

    /// Whether the entry of this epoch is still open, and the helper inside.
    fn enter(&self, epoch: u64) -> bool {
        let mut entry = self.entry.load(Ordering::Relaxed);
        while entry / EPOCH == epoch && entry % 2 == OPEN {
            match self.entry.compare_exchange_weak(entry, entry + ENTERED, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) => entry = found,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Runs tasks 0..count, each once.
    fn drain(pool: &Pool, count: usize) -> usize {
        let next = AtomicUsize::new(0);
        let done = AtomicUsize::new(0);
        pool.run(&|_| {
            while next.fetch_add(1, Ordering::Relaxed) < count {
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        done.into_inner()
    }

    #[test]
    fn thread_pool_runs_many_short_operations_to_their_end() {
        for helpers in [1, 3] {
            let pool = Pool::new(helpers).unwrap();
            for round in 0..20_000 {
                assert_eq!(drain(&pool, round % 7), round % 7);
            }
        }
    }

    #[test]
    fn thread_pool_wakes_sleeping_helpers() {
        let pool = Pool::new(1).unwrap();
        for _ in 0..20 {
            let deadline = Instant::now() + Duration::from_secs(20);
            while !pool.shared.asleep[0].load(Ordering::SeqCst) {
                assert!(Instant::now() < deadline, "nothing burns when idle");
                thread::sleep(SPIN);
            }
            // The caller stays until the helper has come.
            let came = AtomicBool::new(false);
            pool.run(&|worker| {
                if worker == 1 {
                    came.store(true, Ordering::SeqCst);
                }
                while !came.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn thread_pool_passes_a_helper_panic_to_the_caller() {
        let pool = Pool::new(1).unwrap();
        let came = AtomicBool::new(false);
        let caller = std::panic::AssertUnwindSafe(|| {
            pool.run(&|worker| {
                if worker == 1 {
                    came.store(true, Ordering::SeqCst);
                    panic!("on purpose");
                }
                while !came.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            });
        });
        assert!(std::panic::catch_unwind(caller).is_err());
    }
}
