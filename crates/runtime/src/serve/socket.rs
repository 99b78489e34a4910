//! A connection's bytes.

use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::read_rate::ReadRate;

/// How often is looked for the end of a peer that has sent more than is read.
const UNREAD_POLL: Duration = Duration::from_secs(1);

/// How long a connection is read on after its last answer, while something comes. At the read_rate
/// of a port, 16 bodies of 64 MiB take four seconds.
const LINGER: Duration = Duration::from_secs(30);
/// And how long without anything.
const LINGER_IDLE: Duration = Duration::from_secs(1);
/// Bytes that a connection reads before it waits for the others: who sends little never waits.
const BYTES_AT_ONCE: usize = 64 << 10;

/// A TCP connection that is read at its port's read_rate. It fails if its peer reads nothing for
/// too long while there is something to read.
#[derive(Debug)]
pub struct Socket {
    stream: Arc<TcpStream>,
    stall_timeout: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    read_rate: Arc<ReadRate>,
    /// Bytes since it waited.
    read: usize,
    waits: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    pub(super) fn new(stream: Arc<TcpStream>, stall_timeout: Duration, read_rate: Arc<ReadRate>) -> Self {
        Self { stream, stall_timeout, stalled: None, read_rate, read: 0, waits: None }
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if self.stream.poll_write_ready(cx)?.is_pending() {
                return self.poll_stalled(cx);
            }
            match write(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    self.stalled = None;
                    return Poll::Ready(written);
                }
            }
        }
    }

    /// Fails when the peer has not read for too long.
    fn poll_stalled(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let timeout = self.stall_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(crate::sleep(timeout)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, format!("the peer read nothing for {timeout:?}"))))
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(waits) = &mut self.waits {
            ready!(waits.as_mut().poll(cx));
            self.waits = None;
        }
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read_buf(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(bytes) => {
                    self.read += bytes;
                    let until = self.read_rate.read(bytes, crate::now()).filter(|_| self.read > BYTES_AT_ONCE);
                    if let Some(until) = until {
                        self.read = 0;
                        self.waits = Some(Box::pin(crate::sleep_until(until)));
                    }
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.stream).shutdown(Shutdown::Write))
    }
}

/// Resolves when the peer has closed its side while `is_busy`. The server itself sees that only
/// when it has read all that came before. It does not read a request that waits behind another one.
pub(super) async fn hung_up(stream: &TcpStream, is_busy: impl Fn() -> bool) {
    loop {
        match stream.ready(Interest::READABLE).await {
            Ok(ready) if ready.is_read_closed() && is_busy() => return,
            // What is there is about to be read, or belongs to a later request.
            Ok(_) => crate::sleep(UNREAD_POLL).await,
            Err(_) => return,
        }
    }
}

/// Reads on for a little while after the last answer. What a peer still sends when its connection
/// closes makes the system drop the answer, too.
pub(super) async fn linger(stream: &TcpStream, read_rate: &ReadRate) {
    let mut unread = vec![0; 16 << 10];
    let reading = async {
        while let Ok(Ok(())) = tokio::time::timeout(LINGER_IDLE, stream.readable()).await {
            match stream.try_read(&mut unread) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return,
                Ok(bytes) => {
                    if let Some(until) = read_rate.read(bytes, crate::now()) {
                        crate::sleep_until(until).await;
                    }
                }
            }
        }
    };
    // Time is up: then so be it.
    let _ = tokio::time::timeout(LINGER, reading).await;
}
