//! Transfers of a mock node take as long as those of the model: each waits until the modelled link
//! would have carried it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_profile::Link;
use baton_runtime::Clock;
use baton_transfer_engine::{Batch, BatchReport, CancelHandle, TransferError};
use futures::future::{BoxFuture, FutureExt};
use tokio_util::sync::CancellationToken;

/// Which way bytes go over a node's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the node: pushes.
    Send,
    /// To the node: fetches.
    Receive,
}

/// The link of a node, which sends and receives at the same time. The real bytes move at the end of
/// their time, so that the peer does not see them earlier.
#[derive(Debug, Clone)]
pub struct LinkPacer {
    /// Each way.
    links: [Link; 2],
}

impl LinkPacer {
    /// A link that is free. A modelled transfer is `scale` times as large as the real one: the
    /// model's KV of a token over the mock's.
    ///
    /// # Panics
    /// If the bandwidth over the scale is not positive: a profile was not checked.
    pub fn new(bytes_per_s: f64, scale: f64, latency: Duration) -> Self {
        let link = Link::new(bytes_per_s / scale, latency);
        Self { links: [link.clone(), link] }
    }

    /// Takes the link for so many real bytes; when they would have arrived.
    pub fn reserve(&mut self, now: Instant, direction: Direction, bytes: u64) -> Instant {
        self.links[direction as usize].reserve(now, bytes)
    }
}

/// Ends a batch from elsewhere, whether it has begun or not.
#[derive(Debug, Clone)]
pub enum PacedCancel {
    /// It has begun.
    Batch(CancelHandle),
    /// It may wait for its time.
    Waiting(CancellationToken),
}

impl PacedCancel {
    /// As [`Batch::cancel`].
    pub fn cancel(&self) {
        match self {
            Self::Batch(batch) => batch.cancel(),
            Self::Waiting(cancelled) => cancelled.cancel(),
        }
    }
}

/// A batch that begins at once, or at the time that [`LinkPacer::reserve`] gave.
pub fn paced(
    clock: &Arc<dyn Clock>,
    due: Option<Instant>,
    begin: impl FnOnce() -> Batch + Send + 'static,
) -> (BoxFuture<'static, Result<BatchReport, TransferError>>, PacedCancel) {
    let Some(due) = due else {
        let batch = begin();
        let cancel = PacedCancel::Batch(batch.cancel_handle());
        return (batch.boxed(), cancel);
    };
    // Reports are in the machine's time, which the transfer engine keeps.
    let cancelled = CancellationToken::new();
    let started = baton_runtime::now();
    let waited = clock.sleep_until(due);
    let cancel = PacedCancel::Waiting(cancelled.clone());
    let later = async move {
        tokio::select! {
            () = waited => {}
            () = cancelled.cancelled() => return Err(TransferError::Cancelled),
        }
        let mut batch = begin();
        let ended = tokio::select! {
            ended = &mut batch => Some(ended),
            () = cancelled.cancelled() => None,
        };
        let result = match ended {
            Some(result) => result,
            None => {
                batch.cancel();
                batch.await
            }
        };
        result.map(|report| BatchReport { started, ..report })
    };
    (later.boxed(), cancel)
}

#[cfg(test)]
mod tests {
    use baton_runtime::ManualClock;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn paced_transfer_cancelled_before_its_time_never_begins() {
        let clock: Arc<dyn Clock> = Arc::new(ManualClock::default());
        let due = Some(clock.now() + 600 * SECOND);
        let (batch, cancel) = paced(&clock, due, || unreachable!("it was cancelled"));
        cancel.cancel();
        assert!(matches!(batch.await, Err(TransferError::Cancelled)));
    }

    #[test]
    fn link_pacer_counts_bytes_as_the_models_in_each_direction() {
        let now = Instant::now();
        // 64 bytes stand for 320 KiB.
        let mut link = LinkPacer::new(5120.0 * 64.0, 5120.0, SECOND);
        assert_eq!(link.reserve(now, Direction::Send, 64), now + 2 * SECOND);
        assert_eq!(link.reserve(now, Direction::Receive, 64), now + 2 * SECOND, "the other way is free");
    }
}
