//! What goes first.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Lets urgent batches pass. Of all bulk batches of an engine, one part at a time is under way.
/// None begins while an urgent batch is under way.
///
/// An urgent batch thus finds at most one part of
/// [`stripe_bytes`](crate::TransferConfig::stripe_bytes) in its way. A bulk batch may wait until
/// its deadline.
pub(crate) struct Priorities {
    urgent: AtomicUsize,
    idle: Notify,
    bulk: Arc<Semaphore>,
}

impl Default for Priorities {
    fn default() -> Self {
        Self { urgent: AtomicUsize::new(0), idle: Notify::new(), bulk: Arc::new(Semaphore::new(1)) }
    }
}

/// An urgent batch is under way.
pub(crate) struct Urgent(Arc<Priorities>);

impl Priorities {
    /// From this call on no part of a bulk batch begins.
    pub(crate) fn urgent(self: &Arc<Self>) -> Urgent {
        self.urgent.fetch_add(1, SeqCst);
        Urgent(Arc::clone(self))
    }

    /// Waits until a part of a bulk batch may begin; it ends when the permit is dropped.
    pub(crate) async fn bulk(&self) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.bulk).acquire_owned().await.ok()?;
        loop {
            let mut idle = std::pin::pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.urgent.load(SeqCst) == 0 {
                return Some(permit);
            }
            idle.await;
        }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        if self.0.urgent.fetch_sub(1, SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn bulk_parts_go_one_by_one_and_only_while_nothing_is_urgent() {
        let priorities = Arc::new(Priorities::default());
        let soon = Duration::from_millis(5);
        let first = priorities.bulk().await.unwrap();
        assert!(tokio::time::timeout(soon, priorities.bulk()).await.is_err(), "one part at a time");
        let a = priorities.urgent();
        let b = priorities.urgent();
        drop(first);
        let mut next = Box::pin(priorities.bulk());
        assert!(tokio::time::timeout(soon, &mut next).await.is_err());
        drop(a);
        assert!(tokio::time::timeout(soon, &mut next).await.is_err());
        drop(b);
        assert!(next.await.is_some());
    }
}
