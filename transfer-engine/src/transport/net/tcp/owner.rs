//! The owner's end of a TCP lane: receives payload in place, and sends what a lease allows.

use std::io;
use std::time::Instant;

use tokio::time::{timeout, timeout_at};

use crate::grant::{Grant, RemoteSpan};
use crate::transport::net::owner::receiver::{Fate, Receiver, ended_in_transfer};
use crate::transport::net::wire::payload::{Cursor, Outgoing};
use crate::transport::net::wire::{Data, Frame, PartId, Read, Reply, put_payload};
use crate::{SpanPair, batch};

impl Receiver<'_> {
    pub(crate) async fn on_tcp_frame(&mut self, frame: Frame) -> io::Result<()> {
        match frame {
            Frame::Data(data) => self.on_data(data).await,
            Frame::Read(read) => self.on_read(read).await,
            _ => Err(self.misplaced()),
        }
    }

    async fn on_data(&mut self, data: Data) -> io::Result<()> {
        let bytes = data.payload_bytes();
        match self.admit(&data.target, &data.spans, None).await? {
            Fate::Lands(grant) => self.land(&grant, &data).await?,
            Fate::Dropped => self.drop_payload(bytes).await?,
        }
        self.count(bytes);
        Ok(())
    }

    /// Receives a payload where it belongs. A pass is taken for each piece that is there, never
    /// while waiting. So a fence takes effect at once, in mid-frame too, and the rest is dropped.
    async fn land(&mut self, grant: &Grant, data: &Data) -> io::Result<()> {
        let spans = data.spans.iter().map(|span| (span.offset as usize, span.len as usize));
        let mut cursor = Cursor::new(&grant.region, spans);
        let limit = self.payload_limit(cursor.remaining() as u64);
        while !cursor.is_done() {
            let landed = match grant.fence.enter() {
                Some(_pass) => self.incoming.try_receive(self.stream, &grant.region, &mut cursor, 0),
                None => {
                    self.refuse(data.target.id, ended_in_transfer(grant)).await?;
                    return self.drop_payload(cursor.remaining() as u64).await;
                }
            };
            match landed {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => self.on_progress(bytes).await?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable(grant, limit, cursor.remaining()).await?
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for bytes, or for the grant's end.
    async fn readable(&mut self, grant: &Grant, limit: Instant, missing: usize) -> io::Result<()> {
        let limit = limit.min(baton_runtime::now() + self.patience());
        let ready = async {
            tokio::select! {
                ready = self.incoming.wait_for_payload(self.stream, missing) => ready,
                () = grant.fence.closed() => Ok(()),
            }
        };
        timeout_at(limit.into(), ready).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Sends the bytes of a read, frame by frame, each under a pass of the lease.
    async fn on_read(&mut self, read: Read) -> io::Result<()> {
        let id = read.target.id;
        let lease = match self.lease(&read) {
            Ok(lease) => lease,
            Err(refusal) => return self.refuse(id, refusal).await,
        };
        let wanted = |span: &RemoteSpan| SpanPair { local_offset: span.offset, remote_offset: 0, len: span.len.into() };
        let spans: Vec<_> = read.spans.iter().map(wanted).collect();
        for spans in batch::cut(&spans, self.host.config.frame_bytes.into(), usize::MAX) {
            if !self.send_payload(&lease, id, &spans).await? {
                return self.refuse(id, ended_in_transfer(&lease)).await;
            }
        }
        self.reply(&Reply::Ack(id)).await
    }

    /// False: the lease has ended; what was begun is sent to its end, from a copy made at once.
    async fn send_payload(&mut self, lease: &Grant, id: PartId, spans: &[SpanPair]) -> io::Result<bool> {
        let Some(pass) = lease.fence.enter() else { return Ok(false) };
        let bytes = batch::total(spans);
        let mut head = Vec::new();
        put_payload(&mut head, id, bytes as u32);
        let payload =
            Cursor::new(&lease.region, spans.iter().map(|span| (span.local_offset as usize, span.len as usize)));
        let mut frame = Outgoing { head: &head, region: &lease.region, payload, tail: &[] };
        while !frame.is_done() {
            match frame.try_send(self.stream) {
                Ok(_) => tokio::task::coop::consume_budget().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let ready = async {
                        tokio::select! {
                            ready = self.stream.writable() => ready.map(|()| true),
                            () = lease.fence.closed() => Ok(false),
                        }
                    };
                    let waited = timeout(self.patience(), ready).await;
                    if !waited.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?? {
                        break;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.metrics().bytes_out.increment(bytes);
        let rest = if frame.is_done() { Vec::new() } else { frame.copy_rest() };
        let whole = rest.is_empty();
        drop(pass);
        let written = timeout(self.patience(), self.stream.write_all(&rest)).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        Ok(whole)
    }
}
