//! One way to an owner: connecting, and waiting after failures.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use baton_types::NodeStart;
use tokio::net::TcpStream;
use tokio::time::timeout_at;

use super::carrier::AnyCarrier;
use super::lane::Connected;
use super::peer::Peer;
use crate::transport::net::rdma::{self, RdmaAddress};
use crate::transport::net::shm::{ShmAddress, ShmCarrier};
use crate::transport::net::tcp::TcpCarrier;
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{Hello, PROTOCOL_VERSION, Rejection, Reply};
use crate::{TransferError, TransportKind};

/// Pause after a first failed attempt; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// After as many refused attempts in a row, an owner is taken for gone.
const REFUSALS: u32 = 3;
/// The longest pause: a way that is back is found within it.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// One way to an owner.
pub(crate) struct Route {
    pub(crate) way: Way,
    /// Most lanes over it.
    pub(crate) max_lanes: usize,
    /// Held by who connects.
    pub(crate) attempts: tokio::sync::Mutex<Attempts>,
    /// Those of `attempts`.
    failures: Arc<AtomicU32>,
    /// There are others to the same owner.
    has_others: AtomicBool,
    /// It is being tried in the background; batches do not wait for that.
    pub(crate) probing: AtomicBool,
    /// One more connection is being opened in the background.
    pub(crate) opening: AtomicBool,
}

/// Where a route leads over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    Rdma(RdmaAddress),
    Shm(ShmAddress),
    Tcp(String),
}

/// Why an attempt to connect failed.
pub(crate) struct Failure {
    pub(crate) error: TransferError,
    /// No process listens there: the old one is gone, and what comes after it is another.
    pub(crate) refused: bool,
}

impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Self {
        Self { error, refused: false }
    }
}

/// What connecting has come to.
#[derive(Default)]
pub(crate) struct Attempts {
    /// Failures since something was last carried: a way that connects and does not carry is a
    /// failure, too.
    failures: Arc<AtomicU32>,
    /// Refused attempts, one after the other.
    refused: u32,
    last: Option<(Instant, TransferError)>,
    /// When another connection beside those that there are may be tried.
    another_after: Option<Instant>,
    /// Failures of that since the last success.
    another_failures: u32,
}

/// Something is going on until this is dropped, however that comes.
pub(crate) struct Busy<'a>(pub(super) &'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}

/// The pause after so many failures in a row.
fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST_PAUSE)
}

impl Attempts {
    pub(crate) fn connected(&mut self) {
        *self = Self { failures: Arc::clone(&self.failures), ..Self::default() };
    }

    pub(crate) fn failed(&mut self, Failure { error, refused }: Failure) {
        self.refused = if refused { self.refused.saturating_add(1) } else { 0 };
        self.failures.fetch_add(1, Relaxed);
        self.last = Some((baton_runtime::now(), error));
    }

    /// One more connection could not be had: no other is tried for a while. Those that have none
    /// are not concerned.
    pub(crate) fn no_more_for_now(&mut self) {
        self.another_failures = self.another_failures.saturating_add(1);
        self.another_after = Some(baton_runtime::now() + pause(self.another_failures));
    }

    /// Whether the owner is taken for gone, by what was seen after `moment`.
    pub(crate) fn is_gone(&self, moment: Instant) -> bool {
        self.refused >= REFUSALS && self.failed_after(moment).is_some()
    }

    /// When the next attempt may be made. No failure is remembered for longer than
    /// [`LONGEST_PAUSE`].
    pub(crate) fn next(&self) -> Option<Instant> {
        let (at, _) = self.last.as_ref()?;
        Some(*at + pause(self.failures.load(Relaxed)))
    }

    /// Whether an attempt may be made now.
    fn is_due(&self) -> bool {
        self.next().is_none_or(|next| next <= baton_runtime::now())
    }

    /// Whether no attempt at another connection has failed since the last success.
    pub(crate) fn another_is_first(&self) -> bool {
        self.another_failures == 0
    }

    /// Whether one for another connection may be.
    pub(crate) fn another_is_due(&self) -> bool {
        self.is_due() && self.another_after.is_none_or(|after| after <= baton_runtime::now())
    }

    /// The last failure, if it came after `moment`.
    pub(crate) fn failed_after(&self, moment: Instant) -> Option<TransferError> {
        self.last.as_ref().filter(|(at, _)| *at > moment).map(|(_, error)| error.clone())
    }

    /// The last failure, if its pause is not over.
    pub(crate) fn pausing(&self) -> Option<TransferError> {
        self.last.as_ref().filter(|_| !self.is_due()).map(|(_, error)| error.clone())
    }

    /// The last failure, if it came after `moment` or its pause is not over.
    pub(crate) fn failure_since(&self, moment: Instant) -> Option<TransferError> {
        self.failed_after(moment).or_else(|| self.pausing())
    }

    /// Makes the next attempt this caller's: others wait for another pause. The last failure, if
    /// there was one.
    pub(crate) fn take_turn(&mut self) -> Option<TransferError> {
        let (at, error) = self.last.as_mut()?;
        *at = baton_runtime::now();
        Some(error.clone())
    }
}

impl Route {
    pub(crate) fn new(way: Way, max_lanes: usize) -> Self {
        let attempts = Attempts::default();
        Self {
            way,
            max_lanes,
            failures: Arc::clone(&attempts.failures),
            attempts: tokio::sync::Mutex::new(attempts),
            has_others: AtomicBool::new(false),
            probing: AtomicBool::new(false),
            opening: AtomicBool::new(false),
        }
    }

    /// A connection over it has failed: if there are other ways, they are taken until this one has
    /// been tried again.
    pub(crate) fn on_failure(&self, owner: &NodeStart, reason: &str) {
        if self.has_others.load(Relaxed)
            // Who connects just now will find out.
            && let Ok(mut attempts) = self.attempts.try_lock()
        {
            attempts.failed(self.unreachable(owner, io::Error::other(reason.to_owned())).into());
        }
    }

    /// Something was acknowledged.
    pub(crate) fn on_carried(&self) {
        // Mostly there is nothing to write, and many lanes look.
        if self.failures.load(Relaxed) > 0 {
            self.failures.store(0, Relaxed);
        }
    }

    pub(crate) fn set_has_others(&self) {
        self.has_others.store(true, Relaxed);
    }

    pub(crate) fn kind(&self) -> TransportKind {
        match self.way {
            Way::Rdma(_) => TransportKind::Rdma,
            Way::Shm(_) => TransportKind::Shm,
            Way::Tcp(_) => TransportKind::Tcp,
        }
    }

    fn address(&self) -> String {
        match &self.way {
            Way::Rdma(address) => address.to_string(),
            Way::Shm(address) => address.to_string(),
            Way::Tcp(address) => address.clone(),
        }
    }

    /// One attempt, with its handshake. It takes at most half of the time that all may take, so
    /// that a handshake that is lost is not the end.
    pub(crate) async fn connect(&self, peer: &Peer, id: u64) -> Result<Connected, Failure> {
        let limit = baton_runtime::now() + peer.host.config.connect_timeout / 2;
        let connected = timeout_at(limit.into(), self.greeted(peer, id)).await;
        connected.unwrap_or_else(|_| Err(self.unreachable(&peer.owner, io::ErrorKind::TimedOut.into()).into()))
    }

    async fn greeted(&self, peer: &Peer, id: u64) -> Result<Connected, Failure> {
        let unreachable = |error| self.unreachable(&peer.owner, error);
        let refused = |error: io::Error| {
            // A socket that has gone from its folder has no owner, either.
            let refused = matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound);
            Failure { error: unreachable(error), refused }
        };
        let stream = self.open().await.map_err(refused)?;
        let writer = peer.host.writer();
        let owner = peer.owner.clone();
        let hello = Hello { version: PROTOCOL_VERSION, connection: id, writer, owner, transport: self.kind() };
        stream.write_all(&hello.encode()).await.map_err(unreachable)?;
        match read_reply(&stream).await.map_err(unreachable)? {
            Reply::Welcome { version: PROTOCOL_VERSION } => {
                let carrier = self.carrier(peer, &stream).await.map_err(unreachable)?;
                Ok(Connected { stream, carrier })
            }
            Reply::Reject(rejection) => Err(self.rejected(peer, rejection).into()),
            other => Err(incompatible(peer, format!("it answers the handshake with {other:?}")).into()),
        }
    }

    async fn open(&self) -> io::Result<Stream> {
        match &self.way {
            Way::Rdma(address) => Stream::tcp(TcpStream::connect(address.control()).await?),
            Way::Shm(address) => Ok(Stream::unix(address.connect().await?)),
            Way::Tcp(address) => Stream::tcp(TcpStream::connect(address).await?),
        }
    }

    async fn carrier(&self, peer: &Peer, stream: &Stream) -> io::Result<Box<dyn AnyCarrier>> {
        match &self.way {
            Way::Tcp(_) => Ok(Box::new(TcpCarrier)),
            Way::Shm(_) => Ok(Box::new(ShmCarrier::new()?)),
            Way::Rdma(address) => {
                let devices = peer.host.rdma.get().ok_or_else(|| io::Error::other("no RDMA devices here"))?;
                Ok(Box::new(rdma::connect(devices, address, stream).await?))
            }
        }
    }

    pub(crate) fn unreachable(&self, owner: &NodeStart, error: io::Error) -> TransferError {
        TransferError::PeerUnreachable { node: owner.node.clone(), address: self.address(), reason: error.to_string() }
    }

    fn rejected(&self, peer: &Peer, rejection: Rejection) -> TransferError {
        let stale = |writer: NodeStart, found| TransferError::StaleGeneration {
            node: writer.node,
            expected: writer.generation,
            found,
        };
        let unreachable = |reason: String| self.unreachable(&peer.owner, io::Error::other(reason));
        match rejection {
            Rejection::StaleOwner(found) => stale(peer.owner.clone(), found),
            Rejection::StaleWriter(found) => stale(peer.host.writer(), found),
            Rejection::Version(version) => {
                incompatible(peer, format!("its version is {version}, and this node's {PROTOCOL_VERSION}"))
            }
            Rejection::WrongNode(name) => unreachable(format!("node {name} listens there")),
            Rejection::Full => unreachable("it takes no more connections".into()),
            Rejection::InUse => unreachable("it says that a connection of this number is open".into()),
            Rejection::Transport => unreachable(format!("it does not take bytes over {} there", self.kind())),
        }
    }
}

fn incompatible(peer: &Peer, reason: String) -> TransferError {
    TransferError::Incompatible { node: peer.owner.node.clone(), reason }
}

pub(crate) async fn read_reply(stream: &Stream) -> io::Result<Reply> {
    let closed = || io::Error::other("the peer closed the connection in the handshake");
    let (prefix, body) = stream.read_frame().await?.ok_or_else(closed)?;
    Ok(Reply::decode(prefix, &body)?)
}
