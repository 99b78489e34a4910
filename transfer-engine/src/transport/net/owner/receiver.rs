//! The owner's end of a connection: checks each span, receives it in place, accounts for it and
//! answers.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::GrantId;
use futures::future::BoxFuture;
use tokio::sync::mpsc::Permit;
use tokio::time::{timeout, timeout_at};

use super::connections::{Connections, Registered};
use crate::TransportKind;
use crate::engine::Host;
use crate::error::{Refusal, RefusalReason};
use crate::grant::{Admission, Arrival, BatchKey, Grant, RemoteSpan, Trailer};
use crate::metrics::KindMetrics;
use crate::transport::net::rdma::Landing;
use crate::transport::net::shm::Views;
use crate::transport::net::wire::incoming::{DROPPED_AT_ONCE, Incoming};
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{Commit, Frame, PartId, Place, Read, Reply, Target};

/// How often the writer of a long payload hears that it arrives.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// The slowest that a payload may come, bytes per second, besides the time for silence.
const SLOWEST: u64 = 64 << 10;

/// In progress timeouts: the writer has given up before, and only its connection is left.
const PATIENCE: u32 = 2;

/// The part that the connection is in the middle of; a lane sends one after the other.
struct OpenPart {
    id: PartId,
    received: u64,
    /// It is answered, and what still comes of it is dropped.
    refused: bool,
    /// Where its writer says that it is still wanted (shm).
    place: Option<Place>,
}

/// One accepted connection, after its handshake.
pub(crate) struct Receiver<'a> {
    pub(crate) host: &'a Host,
    pub(crate) stream: &'a Stream,
    kind: TransportKind,
    pub(crate) connections: &'a Arc<Connections>,
    pub(crate) registered: &'a Registered,
    open: Option<OpenPart>,
    /// What the writer has passed (shm).
    pub(crate) views: Views,
    pub(crate) incoming: Incoming,
    last_reply: Instant,
}

/// What may become of bytes that come.
pub(crate) enum Fate {
    Lands(Arc<Grant>),
    /// They are refused, or have landed before.
    Dropped,
}

pub(crate) fn ended_in_transfer(grant: &Grant) -> Refusal {
    Refusal::new(RefusalReason::Revoked, format!("grant {} has ended in mid-transfer", grant.id.0))
}

pub(crate) fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

impl<'a> Receiver<'a> {
    pub(crate) fn new(
        host: &'a Host,
        stream: &'a Stream,
        kind: TransportKind,
        connections: &'a Arc<Connections>,
        registered: &'a Registered,
    ) -> Self {
        let incoming = Incoming::new(host.config.progress_timeout * PATIENCE);
        let views = Views::default();
        let last_reply = baton_runtime::now();
        Self { host, stream, kind, connections, registered, open: None, views, incoming, last_reply }
    }

    pub(crate) fn metrics(&self) -> &KindMetrics {
        self.host.metrics.of(self.kind)
    }

    /// Serves frames until the writer closes. A frame that breaks the protocol ends the connection,
    /// with the reason.
    pub(crate) async fn run(&mut self, landing: &mut Option<Landing>) -> io::Result<()> {
        let result = match self.kind {
            TransportKind::Rdma => self.serve_rdma(landing).await,
            _ => self.serve().await,
        };
        if let Err(error) = result.as_ref().map_err(|error| error.to_string()) {
            tracing::debug!(writer = %self.registered.writer().node, error, "closing a transfer connection");
        }
        match result {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                self.reply(&Reply::Fault(error.to_string())).await?;
                Err(error)
            }
            result => result,
        }
    }

    async fn serve(&mut self) -> io::Result<()> {
        while let Some(frame) = self.next_frame().await? {
            // Other connections' tasks get their turn, whatever this one sends.
            tokio::task::coop::consume_budget().await;
            self.registered.touch();
            match frame {
                Frame::Commit(commit) => self.on_commit(commit).await?,
                Frame::Cancel { batch, grant } => self.on_cancel(batch, grant),
                Frame::Fence { connection } => self.fence(connection)?.await,
                // Each kind of connection has its own frames for the bytes.
                other => match self.kind {
                    TransportKind::Tcp => self.on_tcp_frame(other).await?,
                    TransportKind::Shm => self.on_shm_frame(other).await?,
                    TransportKind::Rdma | TransportKind::Fake => return Err(self.misplaced()),
                },
            }
        }
        Ok(())
    }

    /// What a frame of another kind of connection is answered with.
    pub(crate) fn misplaced(&self) -> io::Error {
        invalid(format!("a frame that has no place on a connection over {}", self.kind))
    }

    /// The next frame's head; `None` when the writer has closed between frames. May be dropped
    /// while it waits.
    pub(crate) async fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        let Some((prefix, body)) = self.incoming.next(self.stream).await? else { return Ok(None) };
        Ok(Some(Frame::decode(prefix, body)?))
    }

    pub(crate) fn patience(&self) -> Duration {
        self.host.config.progress_timeout * PATIENCE
    }

    pub(crate) fn key(&self, batch: u64) -> BatchKey {
        BatchKey { writer: self.registered.writer().clone(), batch }
    }

    /// Opens a part, or goes on with it, and checks its spans.
    pub(crate) async fn admit(
        &mut self,
        target: &Target,
        spans: &[RemoteSpan],
        place: Option<Place>,
    ) -> io::Result<Fate> {
        if self.open.as_ref().is_none_or(|open| open.id != target.id) {
            self.open = Some(OpenPart { id: target.id, received: 0, refused: false, place });
        }
        if self.open.as_ref().is_some_and(|open| open.refused) {
            return Ok(Fate::Dropped);
        }
        if self.open.as_ref().is_some_and(|open| open.place != place) {
            return Err(invalid("a part that changes its slot"));
        }
        let key = self.key(target.id.batch);
        let admitted = self.host.grants.find(target.grant).and_then(|grant| {
            let admission = grant.admit(&key, target.id.part, target.segment, spans, baton_runtime::now())?;
            Ok((grant, admission))
        });
        match admitted {
            Ok((grant, Admission::Land)) => Ok(Fate::Lands(grant)),
            Ok((_, Admission::Duplicate)) => Ok(Fate::Dropped),
            // Its writer has missed the answer.
            Err(_) if self.host.grants.has_arrived(target.grant, &key) => Ok(Fate::Dropped),
            Err(refusal) => {
                self.refuse(target.id, refusal).await?;
                Ok(Fate::Dropped)
            }
        }
    }

    /// Counts bytes of the open part that came.
    pub(crate) fn count(&mut self, bytes: u64) {
        if let Some(open) = &mut self.open {
            open.received += bytes;
        }
    }

    /// When a payload must be here: a trickle is as bad as none.
    pub(crate) fn payload_limit(&self, bytes: u64) -> Instant {
        baton_runtime::now() + self.patience() + Duration::from_secs(bytes / SLOWEST)
    }

    /// Says that a payload moves, now and then.
    pub(crate) async fn on_progress(&mut self, landed: usize) -> io::Result<()> {
        self.metrics().bytes_in.increment(landed as u64);
        self.registered.touch_in_payload();
        if self.last_reply.elapsed() >= PROGRESS_INTERVAL {
            self.reply(&Reply::Progress).await?;
        }
        // Other connections' tasks get their turn.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }

    pub(crate) async fn drop_payload(&mut self, mut bytes: u64) -> io::Result<()> {
        let limit = self.payload_limit(bytes);
        while bytes > 0 {
            let piece = bytes.min(DROPPED_AT_ONCE as u64);
            let soon = limit.min(baton_runtime::now() + self.patience());
            let dropped = timeout_at(soon.into(), self.incoming.drop_all(self.stream, piece as usize)).await;
            dropped.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
            bytes -= piece;
        }
        Ok(())
    }

    pub(crate) async fn refuse(&mut self, id: PartId, refusal: Refusal) -> io::Result<()> {
        self.metrics().refusals.increment(1);
        tracing::debug!(writer = %self.registered.writer().node, reason = %refusal.reason, refusal.message, "refused");
        if let Some(open) = &mut self.open {
            open.refused = true;
        }
        self.reply(&Reply::Refuse(id, refusal)).await
    }

    async fn on_commit(&mut self, commit: Commit) -> io::Result<()> {
        let id = commit.target.id;
        let open = self.open.take().filter(|open| open.id == id);
        if open.as_ref().is_some_and(|open| open.refused) {
            return Ok(());
        }
        let received = open.as_ref().map_or(0, |open| open.received);
        if received != commit.bytes {
            let PartId { batch, part } = id;
            return Err(invalid(format!(
                "part {part} of batch {batch} has {} bytes, but {received} came",
                commit.bytes
            )));
        }
        if let Some(place) = open.and_then(|open| open.place)
            && !self.views.is_wanted(place)
        {
            // Its writer gave it up while it was copied. The answer frees what the part still holds
            // there.
            let refusal = Refusal::new(RefusalReason::BatchCancelled, "its writer gave the batch up");
            return self.refuse(id, refusal).await;
        }
        let room = self.host.grants.room().await;
        self.settle(room, commit).await
    }

    /// Accounts for a part whose bytes are here, and answers.
    pub(crate) async fn settle(&mut self, room: Option<Permit<'_, Arrival>>, commit: Commit) -> io::Result<()> {
        let id = commit.target.id;
        let trailer = Trailer { part: id.part, parts: commit.parts, bytes: commit.bytes, tag: commit.tag };
        let Target { grant, segment, .. } = commit.target;
        match self.host.grants.commit(room, grant, &self.key(id.batch), segment, &trailer) {
            Ok(()) => self.reply(&Reply::Ack(id)).await,
            Err(refusal) => self.refuse(id, refusal).await,
        }
    }

    /// Checks a read against its lease.
    pub(crate) fn lease(&self, read: &Read) -> Result<Arc<Grant>, Refusal> {
        let lease = self.host.grants.find(read.target.grant)?;
        lease.admit_read(self.registered.writer(), read.target.segment, &read.spans, baton_runtime::now())?;
        Ok(lease)
    }

    /// Says whether the lease covered what was read and has lived until now.
    pub(crate) async fn on_check(&mut self, read: Read) -> io::Result<()> {
        match self.lease(&read) {
            Ok(_) => self.reply(&Reply::Ack(read.target.id)).await,
            Err(refusal) => self.refuse(read.target.id, refusal).await,
        }
    }

    pub(crate) fn on_cancel(&mut self, batch: u64, grant: GrantId) {
        self.open.take_if(|open| open.id.batch == batch);
        // A grant that has ended takes nothing any more, cancelled or not.
        if let Ok(grant) = self.host.grants.find(grant) {
            grant.cancel(&self.key(batch));
        }
    }

    /// Closes another connection of the writer. The future resolves once nothing of it can land.
    pub(crate) fn fence(&self, connection: u64) -> io::Result<BoxFuture<'static, ()>> {
        if connection == self.registered.connection() {
            return Err(invalid("a connection cannot fence itself"));
        }
        let connections = Arc::clone(self.connections);
        let writer = self.registered.writer().clone();
        Ok(Box::pin(async move { connections.fence(&writer, connection).await }))
    }

    pub(crate) async fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        self.last_reply = baton_runtime::now();
        let written = timeout(self.host.config.progress_timeout, self.stream.write_all(&reply.encode())).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}
