//! Writes to clients wait for the tasks that are ready to run, so that what those have to say goes
//! with them.
//!
//! A decode node's step is one message with a token for each of its streams. The runtime runs a
//! task that was just woken before all others. So the first stream's token would be on the wire, in
//! a write of its own, before the second stream's was looked at. That is a system call a token,
//! which costs more than all else that is done for it. If nothing else is ready, the wait is over
//! at once.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use baton_runtime::Clock;
use metrics::Histogram;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// When the tokens came from their nodes that are on their way to one client's connection. Bounded
/// by what HTTP/2 takes from the streams before it is written.
#[derive(Debug, Clone, Default)]
pub struct Unwritten(Arc<Mutex<Vec<Instant>>>);

impl Unwritten {
    /// A token goes to the connection.
    pub fn push(&self, heard: Instant) {
        self.lock().push(heard);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Instant>> {
        // Times stay times.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection whose writes wait as the module says: once for all that is written up to the next
/// flush. It measures how long tokens were in the conductor's hands.
#[derive(Debug)]
pub struct Coalesced<T> {
    inner: T,
    /// Whether the others had their turn.
    waited: bool,
    unwritten: Unwritten,
    relayed: Histogram,
    clock: Arc<dyn Clock>,
}

impl<T> Coalesced<T> {
    /// Around a connection, and what its requests tell it. `relayed` is told how long tokens took
    /// from their node to the operating system.
    pub fn new(inner: T, relayed: Histogram, clock: Arc<dyn Clock>) -> (Self, Unwritten) {
        let unwritten = Unwritten::default();
        (Self { inner, waited: false, unwritten: unwritten.clone(), relayed, clock }, unwritten)
    }

    fn on_written(&self) {
        let now = self.clock.now();
        for heard in self.unwritten.lock().drain(..) {
            self.relayed.record(now.saturating_duration_since(heard));
        }
    }

    /// Lets every task that is ready run once.
    fn poll_others(&mut self, cx: &Context<'_>) -> Poll<()> {
        if self.waited {
            return Poll::Ready(());
        }
        self.waited = true;
        // A task that wakes itself goes to the end of the queue.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Coalesced<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Coalesced<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_others(cx));
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_others(cx));
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
        if std::mem::take(&mut self.waited) {
            self.on_written();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use baton_runtime::SystemClock;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Counts what the connection under it is asked to write.
    struct Counted {
        inner: tokio::io::DuplexStream,
        writes: Arc<AtomicUsize>,
    }

    impl AsyncWrite for Counted {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.writes.fetch_add(1, Ordering::Relaxed);
            Pin::new(&mut self.inner).poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_shutdown(cx)
        }
    }

    #[tokio::test]
    async fn coalesced_write_waits_only_for_tasks_that_are_ready() {
        let (inner, mut peer) = tokio::io::duplex(64);
        let writes = Arc::new(AtomicUsize::new(0));
        let counted = Counted { inner, writes: Arc::clone(&writes) };
        let (mut connection, unwritten) = Coalesced::new(counted, Histogram::noop(), Arc::new(SystemClock));
        unwritten.push(Instant::now());
        let seen = Arc::clone(&writes);
        let mut others = tokio::task::JoinSet::new();
        others.spawn(async move { seen.load(Ordering::Relaxed) });
        connection.write_all(b"one").await.unwrap();
        connection.write_all(b"two").await.unwrap();
        assert_eq!(others.join_next().await.unwrap().unwrap(), 0, "the other task ran before the first write");
        assert_eq!(connection.unwritten.lock().len(), 1);
        connection.flush().await.unwrap();
        assert!(connection.unwritten.lock().is_empty(), "it is written");
        let mut buf = [0; 6];
        peer.read_exact(&mut buf).await.unwrap();
        assert_eq!((&buf, writes.load(Ordering::Relaxed)), (b"onetwo", 2));
    }
}
