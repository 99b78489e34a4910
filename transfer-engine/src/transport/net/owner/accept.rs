//! Takes connections in.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::connections::{Connections, Registered};
use super::receiver::Receiver;
use crate::TransportKind;
use crate::engine::Host;
use crate::metrics::GaugeGuard;
use crate::transport::net::shm::{Listener, check_user};
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{Hello, MAGIC, PROTOCOL_VERSION, Rejection, Reply};

/// Wait after an error of accept(2), which is mostly that of having no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Longest wait for the place of a connection that is being ended.
const PLACE_WAIT: Duration = Duration::from_millis(500);

/// Connections whose handshake is not done. One more ends the oldest. An honest peer is done within
/// a round trip, so silent peers only push each other out.
const MAX_HANDSHAKES: usize = 256;

/// Handshakes under way, oldest first.
#[derive(Default)]
struct Handshakes(Mutex<VecDeque<CancellationToken>>);

impl Handshakes {
    fn begin(&self) -> CancellationToken {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that are done have cancelled their own.
        all.retain(|one| !one.is_cancelled());
        if all.len() >= MAX_HANDSHAKES
            && let Some(oldest) = all.pop_front()
        {
            oldest.cancel();
        }
        let handshake = CancellationToken::new();
        all.push_back(handshake.clone());
        handshake
    }
}

/// Connections being served, and how many may be.
#[derive(Clone)]
pub(crate) struct Acceptor {
    host: Arc<Host>,
    connections: Arc<Connections>,
    handshakes: Arc<Handshakes>,
    places: Arc<Semaphore>,
}

impl Acceptor {
    pub(crate) fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    pub(crate) fn new(host: &Arc<Host>) -> Self {
        let places = Arc::new(Semaphore::new(host.config.max_connections));
        Self { host: Arc::clone(host), connections: Arc::default(), handshakes: Arc::default(), places }
    }

    /// Accepts until the engine is closed.
    pub(crate) async fn tcp(self, listener: TcpListener) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.host.closed.cancelled() => return,
            };
            match accepted.and_then(|(stream, peer)| Ok((Stream::tcp(stream)?, peer))) {
                Ok((stream, peer)) => self.start(stream, TransportKind::Tcp, Some(peer)),
                Err(error) => pause(&error).await,
            }
        }
    }

    /// The same for processes of this host.
    pub(crate) async fn shm(self, listener: Listener) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.socket.accept() => accepted,
                () = self.host.closed.cancelled() => return,
            };
            match accepted.and_then(|(stream, _)| check_user(&stream).map(|()| stream)) {
                Ok(stream) => self.start(Stream::unix(stream), TransportKind::Shm, None),
                Err(error) => pause(&error).await,
            }
        }
    }

    fn start(&self, stream: Stream, kind: TransportKind, peer: Option<SocketAddr>) {
        let acceptor = self.clone();
        let handshake = self.handshakes.begin();
        self.host.tasks.spawn_request("transfer connection", async move {
            tokio::select! {
                result = acceptor.serve(stream, kind, handshake) => {
                    if let Err(error) = result {
                        tracing::debug!(?peer, %kind, %error, "a transfer connection ended");
                    }
                }
                () = acceptor.host.closed.cancelled() => {}
            }
        });
    }

    pub(crate) async fn serve(
        &self,
        stream: Stream,
        listener: TransportKind,
        handshake: CancellationToken,
    ) -> io::Result<()> {
        let _open = GaugeGuard::new(&self.host.metrics.of(listener).connections_in, 1.0);
        let registered = tokio::select! {
            greeted = timeout(self.host.config.connect_timeout, self.greet(&stream, listener)) => greeted,
            () = handshake.cancelled() => return Err(io::Error::other("pushed out by newer connections")),
        };
        handshake.cancel();
        let Some((kind, registered, _place)) = registered.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??
        else {
            return Ok(());
        };
        let mut receiver = Receiver::new(&self.host, &stream, kind, &self.connections, &registered);
        // Dropping the receiver ends all landing: it holds a pass only within a call that does not
        // wait. `registered` is dropped after it, and tells so.
        let mut landing = None;
        let result = tokio::select! {
            result = receiver.run(&mut landing) => result,
            () = registered.killed() => Ok(()),
        };
        if let Some(landing) = landing {
            landing.fence().await;
        }
        result
    }

    /// The handshake. `None`: the connection is not taken, and the writer knows why.
    async fn greet(
        &self,
        stream: &Stream,
        listener: TransportKind,
    ) -> io::Result<Option<(TransportKind, Registered, OwnedSemaphorePermit)>> {
        let hello = read_hello(stream).await?;
        match self.judge(listener, &hello).await {
            Ok((registered, place)) => {
                stream.write_all(&Reply::Welcome { version: PROTOCOL_VERSION }.encode()).await?;
                Ok(Some((hello.transport, registered, place)))
            }
            Err(rejection) => {
                tracing::info!(writer = %hello.writer.node, ?rejection, "a transfer connection is refused");
                stream.write_all(&Reply::Reject(rejection).encode()).await?;
                Ok(None)
            }
        }
    }

    async fn judge(
        &self,
        listener: TransportKind,
        hello: &Hello,
    ) -> Result<(Registered, OwnedSemaphorePermit), Rejection> {
        let is_missing = hello.transport == TransportKind::Rdma && self.host.rdma.get().is_none();
        if is_missing || hello.transport.listener() != Some(listener) {
            return Err(Rejection::Transport);
        }
        if hello.version != PROTOCOL_VERSION {
            return Err(Rejection::Version(PROTOCOL_VERSION));
        }
        let config = &self.host.config;
        if hello.owner.node != config.node {
            return Err(Rejection::WrongNode(config.node.to_string()));
        }
        if hello.owner.generation != config.generation {
            return Err(Rejection::StaleOwner(config.generation));
        }
        let place = self.place().await.ok_or(Rejection::Full)?;
        Ok((self.connections.register(&hello.writer, hello.connection)?, place))
    }

    /// A place among those served; if there is none, that of the one idle for longest.
    async fn place(&self) -> Option<OwnedSemaphorePermit> {
        let free = Arc::clone(&self.places).try_acquire_owned().ok();
        if free.is_some() || !self.connections.end_idlest() {
            return free;
        }
        // It ends at once; another peer may take its place, but then another one's comes.
        timeout(PLACE_WAIT, Arc::clone(&self.places).acquire_owned()).await.ok()?.ok()
    }
}

async fn pause(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a transfer connection");
    baton_runtime::sleep(ACCEPT_PAUSE).await;
}

async fn read_hello(stream: &Stream) -> io::Result<Hello> {
    let not_ours = || io::Error::new(io::ErrorKind::InvalidData, "not a transfer connection");
    let mut magic = [0; MAGIC.len()];
    if !stream.read_exact(&mut magic).await? || magic != MAGIC {
        return Err(not_ours());
    }
    let (prefix, body) = stream.read_frame().await?.ok_or_else(not_ours)?;
    Ok(Hello::decode(prefix, &body)?)
}
