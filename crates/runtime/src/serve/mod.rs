//! Serves HTTP on a listener, within limits. They say how many connections there may be, how long
//! one may be silent, idle or slow, and what its headers may hold.
//!
//! A connection without a request is closed for a new one if there are too many, the one that has
//! waited longest first. So clients that only connect keep no other client out. Only if every
//! connection has a request is a new one closed at once: its client learns of it without waiting.

mod callers;
mod connections;
mod read_rate;
mod socket;

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tower_service::Service;

pub use callers::{Callers, Origins};
pub use connections::{Connections, connections_within_descriptors};
pub use socket::Socket;

use crate::{Phase, Shutdown, TaskSet};
use connections::{Backoff, Busy, Slot};
use read_rate::ReadRate;
use socket::{hung_up, linger};

/// Most headers of a request over HTTP/1.
const MAX_HEADERS: usize = 64;
/// Largest header section, bytes.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Bytes of a connection that wait to be read or written, HTTP/1: at least that of a header
/// section.
const BUFFER_BYTES: usize = 32 << 10;
/// Bytes of a stream that wait to be written, HTTP/2.
const SEND_BUFFER_BYTES: usize = 64 << 10;
/// Pings over HTTP/2 find peers that are gone.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// How long an idle connection that is being closed may take for a request that was on its way.
const LAST_REQUEST: Duration = Duration::from_secs(1);

/// How long a connection may take for its last answer when the process ends. Requests have ended by
/// then; what is still sent was never taken in.
const LAST_ANSWER: Duration = Duration::from_secs(2);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a port speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.
    Http1,
    /// HTTP/2, with prior knowledge: gRPC.
    Http2,
    /// Either, as the client begins.
    Both,
}

/// Bounds of each connection of a port.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Until the first request's header is there.
    pub first_request: Duration,
    /// Between requests.
    pub idle: Duration,
    /// How long the peer may read nothing of what is there for it.
    pub stall: Duration,
    /// Requests at once over one connection, HTTP/2.
    pub streams: u32,
    /// Bytes that one stream's peer may send ahead of their being read, HTTP/2; a connection's may
    /// send twice as many.
    pub window_bytes: u32,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            first_request: Duration::from_secs(10),
            // Longer than load balancers and clients keep theirs.
            idle: Duration::from_secs(120),
            stall: Duration::from_secs(60),
            streams: 1024,
            window_bytes: 128 << 10,
        }
    }
}

/// A listener and how it is served.
#[derive(Debug)]
pub struct Port {
    /// For the log.
    pub name: &'static str,
    /// Where connections come from.
    pub listener: TcpListener,
    /// What it speaks.
    pub protocol: Protocol,
    /// Bounds of each connection.
    pub limits: ConnectionLimits,
    /// Where its connections are counted.
    pub connections: Connections,
    /// Once it drains, peers are asked to go elsewhere with what they have not begun (HTTP/2:
    /// GOAWAY).
    pub leaves: Option<Shutdown>,
}

impl Port {
    /// Serves until `tasks` are cancelled.
    pub fn serve<S, B>(self, service: S, tasks: &TaskSet)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.serve_with(service, |socket| (socket, ()), tasks);
    }

    /// The same, with `wrap` around each connection; what it gives besides is an extension of the
    /// connection's requests.
    pub fn serve_with<S, B, W, T, X>(self, service: S, wrap: W, tasks: &TaskSet)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
        W: Fn(Socket) -> (T, X) + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        X: Clone + Send + Sync + 'static,
    {
        let end = tasks.clone();
        let tasks = tasks.clone();
        let builder = Arc::new(self.builder());
        let read_rate = Arc::new(ReadRate::new(crate::now()));
        end.clone().spawn(format!("{} server", self.name), async move {
            let mut accepting = Accepting::default();
            loop {
                let accepted = tokio::select! {
                    accepted = accepting.next(&self) => accepted,
                    () = end.cancelled() => return Ok::<(), Infallible>(()),
                };
                let Some((stream, slot)) = accepted else { continue };
                let (io, extension) = wrap(Socket::new(Arc::clone(&stream), self.limits.stall, Arc::clone(&read_rate)));
                let service = Counted { inner: service.clone(), slot: Arc::clone(&slot), extension };
                let connection = Connection {
                    stream,
                    slot,
                    limits: self.limits,
                    read_rate: Arc::clone(&read_rate),
                    watches: self.protocol == Protocol::Http1,
                    // One that comes later is told so by the answers to its requests.
                    leaves: self.leaves.clone().filter(|shutdown| shutdown.phase() < Phase::Draining),
                    end: end.clone(),
                };
                let builder = Arc::clone(&builder);
                tasks.spawn_request("connection", async move {
                    let served = builder.serve_connection(TokioIo::new(io), service);
                    connection.run(std::pin::pin!(served)).await;
                });
            }
        });
    }

    fn builder(&self) -> Builder<TokioExecutor> {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            // The connection's own time without a request covers its header.
            .header_read_timeout(None)
            .max_headers(MAX_HEADERS)
            .max_buf_size(BUFFER_BYTES);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.limits.streams)
            // Callers of a gateway that all leave at once are no attack. By default 20 of them end
            // the connection.
            .max_pending_accept_reset_streams(self.limits.streams as usize)
            .initial_stream_window_size(self.limits.window_bytes)
            .initial_connection_window_size(self.limits.window_bytes * 2)
            .max_header_list_size(MAX_HEADER_BYTES)
            .max_send_buf_size(SEND_BUFFER_BYTES)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        match self.protocol {
            Protocol::Http1 => builder.http1_only(),
            Protocol::Http2 => builder.http2_only(),
            Protocol::Both => builder,
        }
    }
}

/// Takes connections from a listener.
#[derive(Default)]
struct Accepting {
    backoff: Backoff,
    refused: Backoff,
}

impl Accepting {
    /// The next connection that there is room for. Can be dropped: what it has accepted is given
    /// back at once.
    async fn next(&mut self, port: &Port) -> Option<(Arc<TcpStream>, Arc<Slot>)> {
        let name = port.name;
        let connections = port.connections.open();
        let stream = match port.listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if is_of_the_peer(&error) => return None,
            Err(error) => {
                let (wait, warn) = self.backoff.on_failure(crate::now());
                if warn {
                    tracing::warn!(port = name, connections, %error, "cannot accept connections");
                }
                port.connections.close_longest_idle();
                crate::sleep(wait).await;
                return None;
            }
        };
        self.backoff.on_success();
        let now = crate::now();
        let Some(slot) = port.connections.enter(now) else {
            if self.refused.on_failure(now).1 {
                tracing::warn!(port = name, connections, "too many connections with requests: new ones are closed");
            }
            return None;
        };
        // Without it a token waits up to 40 ms for an acknowledgement.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        Some((Arc::new(stream), slot))
    }
}

/// Whether an error of accepting is one connection's alone.
fn is_of_the_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// A connection that is served.
struct Connection {
    stream: Arc<TcpStream>,
    slot: Arc<Slot>,
    limits: ConnectionLimits,
    read_rate: Arc<ReadRate>,
    /// Whether its end is looked for beside the server.
    watches: bool,
    leaves: Option<Shutdown>,
    end: TaskSet,
}

type Served<'a, T, S> = Pin<&'a mut hyper_util::server::conn::auto::Connection<'a, TokioIo<T>, S, TokioExecutor>>;

impl Connection {
    async fn run<T, S, B>(self, mut served: Served<'_, T, S>)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: hyper::service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
        S::Future: Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let mut ending = false;
        let mut timed_out = false;
        let mut idle = std::pin::pin!(self.idle_too_long());
        let mut over = std::pin::pin!(async {
            self.end.cancelled().await;
            crate::sleep(LAST_ANSWER).await;
        });
        let mut leaves = std::pin::pin!(async {
            match &self.leaves {
                Some(shutdown) => shutdown.wait_for(Phase::Draining).await,
                None => std::future::pending().await,
            }
        });
        let mut hung_up = std::pin::pin!(hung_up(&self.stream, || self.slot.is_busy()));
        loop {
            tokio::select! {
                result = served.as_mut() => {
                    match result {
                        Ok(()) => self.linger().await,
                        Err(error) => tracing::debug!(error = crate::error_chain(&*error), "connection failed"),
                    }
                    return;
                }
                () = self.slot.closed() => return,
                had_request = &mut idle, if !timed_out => {
                    if !had_request {
                        return;
                    }
                    // A request that is on its way is still served.
                    timed_out = true;
                    ending = true;
                    served.as_mut().graceful_shutdown();
                }
                () = crate::sleep(LAST_REQUEST), if timed_out && !self.slot.is_busy() => return,
                () = &mut hung_up, if self.watches => return,
                () = &mut over => return,
                () = &mut leaves, if !ending => {
                    ending = true;
                    served.as_mut().graceful_shutdown();
                }
                () = self.end.cancelled(), if !ending => {
                    ending = true;
                    served.as_mut().graceful_shutdown();
                }
            }
        }
    }

    /// Lets the peer have the last answer, unless its place is needed.
    async fn linger(&self) {
        tokio::select! {
            () = linger(&self.stream, &self.read_rate) => {}
            () = self.slot.closed() => {}
            () = self.end.cancelled() => {}
        }
    }

    /// Resolves when it has had no request for too long; whether it ever had one.
    async fn idle_too_long(&self) -> bool {
        let mut wait = self.limits.first_request;
        loop {
            crate::sleep(wait).await;
            let now = crate::now();
            wait = match self.slot.idle() {
                None => self.limits.idle,
                Some((since, had_request)) => {
                    let limit = if had_request { self.limits.idle } else { self.limits.first_request };
                    let left = (since + limit).saturating_duration_since(now);
                    if left.is_zero() {
                        return had_request;
                    }
                    left
                }
            };
        }
    }
}

/// A service whose connection is busy while it has requests.
#[derive(Clone)]
struct Counted<S, X> {
    inner: S,
    slot: Arc<Slot>,
    extension: X,
}

impl<S, B, X> hyper::service::Service<Request<Incoming>> for Counted<S, X>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    X: Clone + Send + Sync + 'static,
{
    type Response = Response<Tracked<B>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let busy = self.slot.busy();
        request.extensions_mut().insert(self.extension.clone());
        let mut inner = self.inner.clone();
        Box::pin(async move {
            std::future::poll_fn(|cx| inner.poll_ready(cx)).await?;
            let response = inner.call(request).await?;
            Ok(response.map(|body| Tracked { body, _busy: busy }))
        })
    }
}

pin_project_lite::pin_project! {
    /// A response's body; its connection is busy until its end.
    struct Tracked<B> {
        #[pin]
        body: B,
        _busy: Busy,
    }
}

impl<B: Body> Body for Tracked<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        self.project().body.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
