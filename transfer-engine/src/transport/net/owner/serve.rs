//! The owner's end of reads: sends what a lease allows, or says whether it allowed what was read
//! without its help.

use std::io;
use std::sync::Arc;

use tokio::time::timeout;

use super::receiver::{Receiver, ended_in_transfer};
use crate::error::Refusal;
use crate::grant::{Grant, RemoteSpan};
use crate::transport::net::wire::payload::{Cursor, Outgoing};
use crate::transport::net::wire::{PartId, Read, Reply, put_payload};
use crate::{SegmentId, SpanPair, batch};

impl Receiver<'_> {
    /// Checks a read against its lease.
    fn lease(&self, read: &Read) -> Result<Arc<Grant>, Refusal> {
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

    /// Passes a segment's file.
    pub(crate) async fn on_map(&mut self, segment: SegmentId) -> io::Result<()> {
        let region = self.host.region(segment).ok();
        let file = region.as_deref().and_then(|region| region.shared_file());
        let bytes = file.and(region.as_ref()).map_or(0, |region| region.len() as u64);
        let mapped = Reply::Mapped { segment, bytes, address: 0, key: 0 }.encode();
        let written = timeout(self.host.config.progress_timeout, self.stream.write_with_file(&mapped, file)).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Sends the bytes of a read, frame by frame, each under a pass of the lease.
    pub(crate) async fn on_read(&mut self, read: Read) -> io::Result<()> {
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
