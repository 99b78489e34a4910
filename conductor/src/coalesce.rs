//! Writes to clients wait for the tasks that are ready to run, so that what those have to say goes with them.
//!
//! A decode node's step is one message with a token for each of its streams. The runtime runs a task that was just woken before all others, so the first stream's token would be on the wire, in a write of its own,
//! before the second stream's was looked at: a system call a token, which costs more than all else that is done for it. Where nothing else is ready the wait is over at once.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

/// A connection whose writes wait as the module says: once for all that is written up to the next flush.
#[derive(Debug)]
pub struct Coalesced<T> {
    inner: T,
    /// Whether the others had their turn.
    waited: bool,
}

impl<T> Coalesced<T> {
    fn new(inner: T) -> Self {
        Self { inner, waited: false }
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
        self.waited = false;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

impl Connected for Coalesced<TcpStream> {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

/// The connections of a listener.
pub fn coalesced(incoming: TcpIncoming) -> impl Stream<Item = io::Result<Coalesced<TcpStream>>> {
    futures::StreamExt::map(incoming, |connection| connection.map(Coalesced::new))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
    async fn a_write_waits_for_those_who_are_ready_and_no_longer() {
        let (inner, mut peer) = tokio::io::duplex(64);
        let writes = Arc::new(AtomicUsize::new(0));
        let mut connection = Coalesced::new(Counted { inner, writes: Arc::clone(&writes) });
        let seen = Arc::clone(&writes);
        let mut others = tokio::task::JoinSet::new();
        others.spawn(async move { seen.load(Ordering::Relaxed) });
        connection.write_all(b"one").await.unwrap();
        connection.write_all(b"two").await.unwrap();
        assert_eq!(others.join_next().await.unwrap().unwrap(), 0, "the other task ran before the first write");
        connection.flush().await.unwrap();
        let mut buf = [0; 6];
        peer.read_exact(&mut buf).await.unwrap();
        assert_eq!((&buf, writes.load(Ordering::Relaxed)), (b"onetwo", 2));
    }
}
