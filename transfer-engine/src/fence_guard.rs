//! A fence guard that closes once, and tells when the last holder of a pass has left.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const CLOSED: usize = 1 << (usize::BITS - 1);

/// Guards memory that has another owner after a moment in time: a grant's ranges after the fence, a
/// batch's source after its end.
///
/// A task that touches the memory holds a [`Pass`]. After [`FenceGuard::close`] no new pass is
/// given, and [`FenceGuard::drained`] resolves when the last one is back.
///
/// If another process touches the memory, it cannot hold a pass: closing runs what ends its access.
#[derive(Default)]
pub(crate) struct FenceGuard {
    /// Passes out; the top bit is set once the guard is closed.
    state: AtomicUsize,
    left: Notify,
    closed: CancellationToken,
    on_close: Mutex<Vec<OnClose>>,
}

type OnClose = Box<dyn FnOnce() + Send>;

impl fmt::Debug for FenceGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceGuard").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The right to touch what the guard protects, until it is dropped.
#[derive(Debug)]
pub(crate) struct Pass<'a>(&'a FenceGuard);

/// A pass that keeps its guard: for tasks that touch the memory later than the call.
#[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
#[derive(Debug)]
pub(crate) struct OwnedPass(Arc<FenceGuard>);

impl Drop for OwnedPass {
    fn drop(&mut self) {
        drop(Pass(&self.0));
    }
}

impl FenceGuard {
    /// A pass that keeps the guard, unless it is closed.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
    pub(crate) fn enter_owned(self: &Arc<Self>) -> Option<OwnedPass> {
        let pass = self.enter()?;
        // Given back by the owned one instead.
        let _ = std::mem::ManuallyDrop::new(pass);
        Some(OwnedPass(Arc::clone(self)))
    }

    /// A pass, unless the guard is closed.
    pub(crate) fn enter(&self) -> Option<Pass<'_>> {
        let counted = |state: usize| (state & CLOSED == 0).then_some(state + 1);
        self.state.fetch_update(SeqCst, SeqCst, counted).ok().map(|_| Pass(self))
    }

    /// Closes. True for the call that did it.
    pub(crate) fn close(&self) -> bool {
        let first = self.state.fetch_or(CLOSED, SeqCst) & CLOSED == 0;
        // Under the lock, and by every call: once any of them returns, all have run.
        let mut on_close = self.on_close.lock().unwrap_or_else(PoisonError::into_inner);
        on_close.drain(..).for_each(|run| run());
        drop(on_close);
        self.closed.cancel();
        // For tasks that wait for a guard without passes out.
        self.left.notify_waiters();
        first
    }

    /// Has `run` run when the guard closes; at once if it is closed.
    pub(crate) fn on_close(&self, run: impl FnOnce() + Send + 'static) {
        let mut on_close = self.on_close.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed() { run() } else { on_close.push(Box::new(run)) }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(SeqCst) & CLOSED != 0
    }

    /// Resolves when the guard is closed; passes may be out still.
    pub(crate) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Resolves when the guard is closed and no pass is out.
    pub(crate) async fn drained(&self) {
        loop {
            let mut left = std::pin::pin!(self.left.notified());
            // Registered before the state is read, so that a pass given back in between is not
            // missed.
            left.as_mut().enable();
            if self.state.load(SeqCst) == CLOSED {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.0.state.fetch_sub(1, SeqCst) == CLOSED + 1 {
            self.0.left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn closed_fence_guard_waits_for_passes_that_are_out() {
        let fence = FenceGuard::default();
        let (first, second) = (fence.enter().unwrap(), fence.enter().unwrap());
        assert!(fence.close() && !fence.close());
        assert!(fence.is_closed() && fence.enter().is_none());
        fence.closed().await;
        drop(first);
        assert!(tokio::time::timeout(Duration::from_millis(5), fence.drained()).await.is_err());
        drop(second);
        fence.drained().await;
    }

    #[test]
    fn closing_a_fence_guard_runs_its_callbacks_once() {
        let fence = FenceGuard::default();
        let ran = Arc::new(AtomicUsize::new(0));
        let count = || {
            let ran = Arc::clone(&ran);
            move || {
                ran.fetch_add(1, SeqCst);
            }
        };
        fence.on_close(count());
        assert_eq!(ran.load(SeqCst), 0);
        fence.close();
        fence.close();
        assert_eq!(ran.load(SeqCst), 1);
        fence.on_close(count());
        assert_eq!(ran.load(SeqCst), 2);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn drained_fence_guard_has_no_pass_out() {
        for _ in 0..200 {
            let fence = Arc::new(FenceGuard::default());
            let inside = Arc::new(AtomicUsize::new(0));
            let users: Vec<_> = (0..2)
                .map(|_| {
                    let fence = Arc::clone(&fence);
                    let inside = Arc::clone(&inside);
                    std::thread::spawn(move || {
                        while let Some(pass) = fence.enter() {
                            inside.fetch_add(1, SeqCst);
                            std::hint::spin_loop();
                            inside.fetch_sub(1, SeqCst);
                            drop(pass);
                        }
                    })
                })
                .collect();
            fence.close();
            tokio::time::timeout(Duration::from_secs(5), fence.drained()).await.expect("drains");
            assert_eq!(inside.load(SeqCst), 0);
            users.into_iter().for_each(|user| user.join().unwrap());
        }
    }
}
