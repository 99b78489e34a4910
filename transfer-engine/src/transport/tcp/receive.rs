//! The owner's end of a connection: checks each span, receives it in place, accounts for it and answers.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::GrantId;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connections::{Connections, Registered};
use super::socket::{Cursor, read_exact, try_receive, write_all};
use super::wire::{Commit, Data, Frame, PREFIX_BYTES, PartId, Prefix, Reply};
use crate::engine::Host;
use crate::error::{Refusal, RefusalReason};
use crate::grant::{Admission, BatchKey, Grant, Trailer};

/// How often the writer of a long payload hears that it arrives.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Dropped payload is received in pieces of this size.
const SCRATCH_BYTES: usize = 16 << 10;

/// The part that the connection is in the middle of; a lane sends one after the other.
struct OpenPart {
    id: PartId,
    received: u64,
    /// It is answered, and what still comes of it is dropped.
    refused: bool,
}

/// One accepted connection, after its handshake.
pub(super) struct Receiver<'a> {
    host: &'a Host,
    stream: &'a TcpStream,
    connections: &'a Arc<Connections>,
    registered: &'a Registered,
    open: Option<OpenPart>,
    body: Vec<u8>,
    last_reply: Instant,
}

fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.into())
}

impl<'a> Receiver<'a> {
    pub(super) fn new(
        host: &'a Host,
        stream: &'a TcpStream,
        connections: &'a Arc<Connections>,
        registered: &'a Registered,
    ) -> Self {
        Self { host, stream, connections, registered, open: None, body: Vec::new(), last_reply: Instant::now() }
    }

    /// Serves frames until the writer closes. A frame that breaks the protocol ends the connection, with the reason.
    pub(super) async fn run(&mut self) -> io::Result<()> {
        let result = self.serve().await;
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
            match frame {
                Frame::Data(data) => self.on_data(data).await?,
                Frame::Commit(commit) => self.on_commit(commit).await?,
                Frame::Cancel { batch, grant } => self.on_cancel(batch, grant),
                Frame::Fence { connection } => self.on_fence(connection).await?,
            }
        }
        Ok(())
    }

    /// The next frame's head; `None` when the writer has closed between frames.
    async fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        let mut prefix = [0; PREFIX_BYTES];
        if !read_exact(self.stream, &mut prefix).await? {
            return Ok(None);
        }
        let prefix = Prefix::decode(prefix).map_err(|error| invalid(error.0))?;
        self.body.resize(prefix.body, 0);
        let whole = timeout(self.patience(), read_exact(self.stream, &mut self.body)).await;
        whole.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        Frame::decode(prefix, &self.body).map(Some).map_err(|error| invalid(error.0))
    }

    /// The writer has given up before, and only its connection is left.
    fn patience(&self) -> Duration {
        self.host.config.progress_timeout * 2
    }

    fn key(&self, batch: u64) -> BatchKey {
        BatchKey { writer: self.registered.writer().clone(), batch }
    }

    async fn on_data(&mut self, data: Data) -> io::Result<()> {
        let bytes = data.payload_bytes();
        if self.open.as_ref().is_none_or(|open| open.id != data.id) {
            self.open = Some(OpenPart { id: data.id, received: 0, refused: false });
        }
        if self.open.as_ref().is_some_and(|open| open.refused) {
            return self.drop_payload(bytes).await;
        }
        let admitted = self.host.grants.find(data.grant).and_then(|grant| {
            let admission =
                grant.admit(&self.key(data.id.batch), data.id.part, data.segment, &data.spans, Instant::now())?;
            Ok((grant, admission))
        });
        match admitted {
            Ok((grant, Admission::Land)) => self.land(&grant, &data).await?,
            Ok((_, Admission::Duplicate)) => self.drop_payload(bytes).await?,
            Err(refusal) => {
                self.refuse(data.id, refusal).await?;
                self.drop_payload(bytes).await?;
            }
        }
        if let Some(open) = &mut self.open {
            open.received += bytes;
        }
        Ok(())
    }

    /// Receives a payload where it belongs. The gate is passed for each piece that is there, never while waiting: a fence takes effect at once, in mid-frame
    /// too, and the rest is dropped.
    async fn land(&mut self, grant: &Grant, data: &Data) -> io::Result<()> {
        let spans = data.spans.iter().map(|span| (span.offset as usize, span.len as usize));
        let mut cursor = Cursor::new(&grant.region, spans);
        while !cursor.is_done() {
            let landed = match grant.gate.enter() {
                Some(_pass) => try_receive(self.stream, &grant.region, &mut cursor),
                None => {
                    let refusal =
                        Refusal::new(RefusalReason::Revoked, format!("grant {} has ended in mid-transfer", grant.id.0));
                    self.refuse(data.id, refusal).await?;
                    return self.drop_payload(cursor.remaining() as u64).await;
                }
            };
            match landed {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => self.on_progress(bytes).await?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable(grant).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for bytes, or for the grant's end.
    async fn readable(&self, grant: &Grant) -> io::Result<()> {
        let ready = async {
            tokio::select! {
                ready = self.stream.readable() => ready,
                () = grant.gate.closed() => Ok(()),
            }
        };
        timeout(self.patience(), ready).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    async fn on_progress(&mut self, landed: usize) -> io::Result<()> {
        self.host.metrics.bytes_in.increment(landed as u64);
        if self.last_reply.elapsed() >= PROGRESS_INTERVAL {
            self.reply(&Reply::Progress).await?;
        }
        // Other connections' tasks get their turn.
        tokio::task::coop::consume_budget().await;
        Ok(())
    }

    async fn drop_payload(&mut self, mut bytes: u64) -> io::Result<()> {
        let mut scratch = vec![0; SCRATCH_BYTES.min(bytes as usize)];
        while bytes > 0 {
            let piece = scratch.len().min(bytes as usize);
            let read = timeout(self.patience(), read_exact(self.stream, &mut scratch[..piece])).await;
            if !read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            bytes -= piece as u64;
        }
        Ok(())
    }

    async fn refuse(&mut self, id: PartId, refusal: Refusal) -> io::Result<()> {
        self.host.metrics.refusals.increment(1);
        tracing::debug!(writer = %self.registered.writer().node, reason = %refusal.reason, refusal.message, "refused");
        if let Some(open) = &mut self.open {
            open.refused = true;
        }
        self.reply(&Reply::Refuse(id, refusal)).await
    }

    async fn on_commit(&mut self, commit: Commit) -> io::Result<()> {
        let open = self.open.take().filter(|open| open.id == commit.id);
        if open.as_ref().is_some_and(|open| open.refused) {
            return Ok(());
        }
        let received = open.map_or(0, |open| open.received);
        if received != commit.bytes {
            let PartId { batch, part } = commit.id;
            return Err(invalid(format!(
                "part {part} of batch {batch} has {} bytes, but {received} came",
                commit.bytes
            )));
        }
        let trailer = Trailer { part: commit.id.part, parts: commit.parts, bytes: commit.bytes, tag: commit.tag };
        match self.account(&commit, &trailer).await {
            Ok(()) => self.reply(&Reply::Ack(commit.id)).await,
            Err(refusal) => self.refuse(commit.id, refusal).await,
        }
    }

    async fn account(&self, commit: &Commit, trailer: &Trailer) -> Result<(), Refusal> {
        let grant = self.host.grants.find(commit.grant)?;
        self.host.grants.commit(&grant, &self.key(commit.id.batch), commit.segment, trailer).await
    }

    fn on_cancel(&mut self, batch: u64, grant: GrantId) {
        self.open.take_if(|open| open.id.batch == batch);
        // A grant that has ended takes nothing any more, cancelled or not.
        if let Ok(grant) = self.host.grants.find(grant) {
            grant.cancel(&self.key(batch));
        }
    }

    async fn on_fence(&mut self, connection: u64) -> io::Result<()> {
        if connection == self.registered.connection() {
            return Err(invalid("a connection cannot fence itself"));
        }
        self.connections.fence(self.registered.writer(), connection).await;
        Ok(())
    }

    async fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        self.last_reply = Instant::now();
        let written = timeout(self.host.config.progress_timeout, write_all(self.stream, &reply.encode())).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}
