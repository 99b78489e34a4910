//! Processor time that a schema, or a mask, may take in all, whatever it is spent on.
//!
//! Work runs on a thread of its own, so the thread's time is the work's. What writes, compiles and
//! searches asks here whether there is any left. What makes a mask does not ask: it is cancelled.

use std::cell::{Cell, RefCell};
use std::fs;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use llguidance::CancellationHandle;
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};

use crate::GrammarError;

/// The nicest of Linux.
const LOWEST_PRIORITY: i32 = 19;
/// Stack of a thread: references that lead to each other take some KiB each, and a grammar of the
/// largest size has thousands.
const STACK_BYTES: usize = 256 << 20;
/// How often the time of a thread is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What a thread does that has no eye on the time, as another one sees it.
#[derive(Debug, Default)]
struct Watch {
    /// The thread; 0 before it runs.
    thread: AtomicI32,
    /// Ends what it does now.
    cancellation: Mutex<Option<CancellationHandle>>,
}

thread_local! {
    /// Of this thread; `None` if there is none.
    static BUDGET: Cell<Option<Duration>> = const { Cell::new(None) };
    static WATCH: RefCell<Option<Arc<Watch>>> = const { RefCell::new(None) };
}

/// Whether this thread has taken all that it may.
pub(crate) fn is_spent() -> bool {
    BUDGET.get().is_some_and(|budget| thread_time() > budget)
}

/// What this thread does next is cancelled once it has taken all that it may.
pub(crate) fn cancel_when_spent(cancellation: Option<CancellationHandle>) {
    WATCH.with_borrow(|watch| {
        if let Some(watch) = watch {
            *watch.cancellation.lock().unwrap_or_else(PoisonError::into_inner) = cancellation;
        }
    });
}

/// Does a work on a thread with a stack that is large enough, at the lowest priority and within a
/// budget of processor time. A panic is an error.
pub(crate) fn aside<T: Send>(
    budget: Duration,
    work: impl FnOnce() -> Result<T, GrammarError> + Send,
) -> Result<T, GrammarError> {
    let watch = Arc::new(Watch::default());
    let watched = Arc::clone(&watch);
    let (running, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let work = move || {
            let _running = running;
            lowest_priority();
            BUDGET.set(Some(budget));
            watched.thread.store(gettid().as_raw_nonzero().get(), Ordering::Release);
            WATCH.set(Some(watched));
            work()
        };
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work).map_err(|error| GrammarError::NoThread(error.to_string()))?;
        while ended.recv_timeout(LOOK_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
            watch.look(budget);
        }
        thread.join().unwrap_or_else(|_| Err(GrammarError::Invalid("the grammar cannot be compiled".to_owned())))
    })
}

impl Watch {
    fn look(&self, budget: Duration) {
        let cancellation = self.cancellation.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cancellation) = &*cancellation
            && time_of(self.thread.load(Ordering::Acquire)).is_some_and(|time| time > budget)
        {
            cancellation.cancel();
        }
    }
}

/// Processor time that another thread of this process has taken; `None` if the system does not say.
fn time_of(thread: i32) -> Option<Duration> {
    let times = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    Some(Duration::from_nanos(times.split(' ').next()?.parse().ok()?))
}

/// Processor time that this thread has taken.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Gives this thread the lowest priority: it takes what steps and answers leave of the processors.
pub fn lowest_priority() {
    // On Linux this is the calling thread's own, and any thread may lower it.
    let _ = setpriority_process(None, LOWEST_PRIORITY);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_that_has_spent_its_budget_is_cancelled() {
        let cancellation = CancellationHandle::default();
        let budget = Duration::from_millis(30);
        let took = aside(budget, || {
            assert!(!is_spent());
            cancel_when_spent(Some(cancellation.clone()));
            while !cancellation.is_cancelled() {
                std::hint::spin_loop();
            }
            assert!(is_spent());
            Ok(thread_time())
        });
        let took = took.unwrap();
        assert!(took > budget && took < Duration::from_secs(2), "{took:?}");
        assert!(!is_spent(), "only threads that have a budget spend it");
        assert!(aside::<()>(budget, || panic!("a bug of the library")).is_err());
    }
}
