//! The lanes to one owner: opened when needed, shared by batches, opened again after failures.

use std::cmp::Reverse;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{sleep_until, timeout_at};

use super::lane::{Lane, LaneEnd};
use super::socket::{prepare, read_exact, write_all};
use super::wire::{Hello, PREFIX_BYTES, PROTOCOL_VERSION, Prefix, Rejection, Reply, common_version};
use crate::TransferError;
use crate::engine::Host;
use crate::grant::Writer;

/// Attempts to connect on behalf of one batch.
const CONNECT_ATTEMPTS: u32 = 3;
/// Pause after a first failed attempt; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause: a peer that is back is found within it.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a batch waits for one more lane, where it has one.
const PATIENCE_FOR_ANOTHER: Duration = Duration::from_millis(50);

/// An owner, and where it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct PeerKey {
    pub(super) target: Writer,
    pub(super) address: String,
}

/// What connecting has come to.
#[derive(Default)]
struct Attempts {
    /// Failures since the last success.
    failures: u32,
    last: Option<(Instant, TransferError)>,
}

impl Attempts {
    fn failed(&mut self, error: TransferError) {
        self.failures = self.failures.saturating_add(1);
        self.last = Some((Instant::now(), error));
    }

    /// When the next attempt may be made.
    fn next(&self) -> Option<Instant> {
        let (at, _) = self.last.as_ref()?;
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.saturating_sub(1).min(16));
        Some(*at + pause.min(LONGEST_PAUSE))
    }
}

/// One owner that this engine writes to.
pub(super) struct Peer {
    pub(super) host: Arc<Host>,
    pub(super) key: PeerKey,
    /// Permits are bytes.
    pub(super) in_flight: Arc<Semaphore>,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Held by who connects.
    attempts: tokio::sync::Mutex<Attempts>,
    next_connection: Arc<AtomicU64>,
}

impl Peer {
    pub(super) fn new(host: Arc<Host>, key: PeerKey, next_connection: Arc<AtomicU64>) -> Self {
        let in_flight = Arc::new(Semaphore::new(host.config.max_bytes_in_flight_per_peer as usize));
        Self { host, key, in_flight, lanes: Mutex::default(), attempts: tokio::sync::Mutex::default(), next_connection }
    }

    pub(super) fn has_lanes(&self) -> bool {
        !self.lanes().is_empty()
    }

    fn lanes(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane to send over: the one with the least to do, or a new one where all have much to do. `fresh`: only lanes opened after that moment will do.
    pub(super) async fn lane(self: &Arc<Self>, fresh: Option<Instant>) -> Result<Arc<Lane>, TransferError> {
        let (best, may_open) = self.best(fresh);
        let Some(best) = best else { return self.open_or_wait(fresh).await };
        if may_open && best.load() >= self.host.config.stripe_bytes {
            // Where somebody connects already, or nobody can, this one does as well.
            if let Ok(mut attempts) = self.attempts.try_lock()
                && attempts.next().is_none_or(|next| next <= Instant::now())
            {
                return Ok(self.open_another(&mut attempts).await.unwrap_or(best));
            }
        }
        Ok(best)
    }

    fn best(&self, fresh: Option<Instant>) -> (Option<Arc<Lane>>, bool) {
        let lanes = self.lanes();
        let usable = |lane: &&Arc<Lane>| lane.is_open() && fresh.is_none_or(|moment| lane.opened > moment);
        // Among equals the one opened first, so that the others become idle and close.
        let best = lanes.iter().filter(usable).max_by_key(|lane| (Reverse(lane.load()), Reverse(lane.id))).cloned();
        (best, lanes.len() < self.host.config.lanes_per_peer)
    }

    /// Connects, or shares what somebody who connects at the same time gets: a lane or an error.
    async fn open_or_wait(self: &Arc<Self>, fresh: Option<Instant>) -> Result<Arc<Lane>, TransferError> {
        let asked = Instant::now();
        let limit = asked + self.host.config.connect_timeout;
        let mut attempts = self.attempts.lock().await;
        if let (Some(lane), _) = self.best(fresh) {
            return Ok(lane);
        }
        if let Some((_, error)) = attempts.last.as_ref().filter(|(at, _)| *at > asked) {
            return Err(error.clone());
        }
        let mut attempt = 1;
        loop {
            if let Some(next) = attempts.next() {
                sleep_until(next.min(limit).into()).await;
            }
            match self.open(&mut attempts).await {
                Ok(lane) => return Ok(lane),
                // What another attempt would not change.
                Err(error @ (TransferError::StaleGeneration { .. } | TransferError::Incompatible { .. })) => {
                    return Err(error);
                }
                Err(error) if attempt == CONNECT_ATTEMPTS || Instant::now() >= limit => return Err(error),
                Err(_) => attempt += 1,
            }
        }
    }

    /// One attempt to connect. It takes at most half of the time that all may take, so that a handshake that is lost is not the end.
    async fn open(self: &Arc<Self>, attempts: &mut Attempts) -> Result<Arc<Lane>, TransferError> {
        let (id, limit) =
            (self.next_connection.fetch_add(1, Relaxed), Instant::now() + self.host.config.connect_timeout / 2);
        let connected = timeout_at(limit.into(), self.connect(id)).await;
        let connected = connected.unwrap_or_else(|_| Err(self.unreachable(io::ErrorKind::TimedOut.into())));
        match connected {
            Ok(stream) => {
                self.host.metrics.connects_ok.increment(1);
                *attempts = Attempts::default();
                Ok(self.start(stream, id))
            }
            Err(error) => {
                self.host.metrics.connects_failed.increment(1);
                tracing::debug!(node = %self.key.target.node, address = self.key.address, %error, "cannot connect");
                attempts.failed(error.clone());
                Err(error)
            }
        }
    }

    /// Opens one more lane, if that is a matter of moments.
    async fn open_another(self: &Arc<Self>, attempts: &mut Attempts) -> Option<Arc<Lane>> {
        match tokio::time::timeout(PATIENCE_FOR_ANOTHER, self.open(attempts)).await {
            Ok(lane) => lane.ok(),
            Err(_) => {
                attempts.failed(self.unreachable(io::ErrorKind::TimedOut.into()));
                None
            }
        }
    }

    fn start(self: &Arc<Self>, stream: TcpStream, id: u64) -> Arc<Lane> {
        let (lane, task) = Lane::new(Arc::clone(&self.host), stream, id);
        self.lanes().push(Arc::clone(&lane));
        let peer = Arc::clone(self);
        self.host.tasks.spawn_request("transfer lane", async move {
            let end = task.run().await;
            peer.lanes().retain(|lane| lane.id != id);
            if !matches!(end, LaneEnd::Idle | LaneEnd::Closing) {
                tracing::info!(node = %peer.key.target.node, address = peer.key.address, ?end, "a transfer connection failed");
            }
        });
        lane
    }

    fn unreachable(&self, error: io::Error) -> TransferError {
        let PeerKey { target, address } = self.key.clone();
        TransferError::PeerUnreachable { node: target.node, address, reason: error.to_string() }
    }

    async fn connect(&self, id: u64) -> Result<TcpStream, TransferError> {
        let unreachable = |error| self.unreachable(error);
        let stream = TcpStream::connect(&self.key.address).await.map_err(unreachable)?;
        prepare(&stream).map_err(unreachable)?;
        let (writer, target) = (self.host.writer(), self.key.target.clone());
        let hello = Hello { version: PROTOCOL_VERSION, connection: id, writer, target };
        write_all(&stream, &hello.encode()).await.map_err(unreachable)?;
        match read_reply(&stream).await.map_err(unreachable)? {
            Reply::Welcome { version } if common_version(PROTOCOL_VERSION, version) == Some(version) => Ok(stream),
            Reply::Reject(rejection) => Err(self.rejected(rejection)),
            other => Err(self.incompatible(format!("it answers the handshake with {other:?}"))),
        }
    }

    fn incompatible(&self, reason: String) -> TransferError {
        TransferError::Incompatible { node: self.key.target.node.clone(), reason }
    }

    fn rejected(&self, rejection: Rejection) -> TransferError {
        let stale = |writer: Writer, found| TransferError::StaleGeneration {
            node: writer.node,
            expected: writer.generation,
            found,
        };
        match rejection {
            Rejection::StaleTarget(found) => stale(self.key.target.clone(), found),
            Rejection::StaleWriter(found) => stale(self.host.writer(), found),
            Rejection::Version(version) => {
                self.incompatible(format!("its version is {version}, and this node's {PROTOCOL_VERSION}"))
            }
            Rejection::WrongNode(name) => self.unreachable(io::Error::other(format!("node {name} listens there"))),
            Rejection::Full => self.unreachable(io::Error::other("it takes no more connections")),
            Rejection::InUse => self.unreachable(io::Error::other("it says that a connection of this number is open")),
        }
    }
}

async fn read_reply(stream: &TcpStream) -> io::Result<Reply> {
    let invalid = |error: super::wire::WireError| io::Error::new(io::ErrorKind::InvalidData, error.0);
    let mut prefix = [0; PREFIX_BYTES];
    if !read_exact(stream, &mut prefix).await? {
        return Err(io::Error::other("the peer closed the connection in the handshake"));
    }
    let prefix = Prefix::decode(prefix).map_err(invalid)?;
    let mut body = vec![0; prefix.body];
    read_exact(stream, &mut body).await?;
    Reply::decode(prefix, &body).map_err(invalid)
}
