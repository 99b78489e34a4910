//! The owner's end of reads: sends what a lease allows, or says whether it allowed what was read without its help.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout;

use super::payload::{Cursor, Outgoing};
use super::receive::{Receiver, ended_in_transfer};
use super::wire::{PartId, Read, Reply, put_payload};
use crate::SegmentId;
use crate::error::Refusal;
use crate::grant::{Grant, RemoteSpan};

impl Receiver<'_> {
    /// Checks a read against its lease.
    fn lease(&self, read: &Read) -> Result<Arc<Grant>, Refusal> {
        let lease = self.host.grants.find(read.target.grant)?;
        lease.admit_read(self.registered.writer(), read.target.segment, &read.spans, Instant::now())?;
        Ok(lease)
    }

    /// Says whether the lease covered what was read and has lived until now.
    pub(super) async fn on_check(&mut self, read: Read) -> io::Result<()> {
        match self.lease(&read) {
            Ok(_) => self.reply(&Reply::Ack(read.target.id)).await,
            Err(refusal) => self.refuse(read.target.id, refusal).await,
        }
    }

    /// Passes a segment's file.
    pub(super) async fn on_map(&mut self, segment: SegmentId) -> io::Result<()> {
        let region = self.host.region(segment).ok();
        let file = region.as_deref().and_then(|region| region.shared_file());
        let bytes = file.and(region.as_ref()).map_or(0, |region| region.len() as u64);
        self.stream.write_with_file(&Reply::Mapped { segment, bytes, address: 0, key: 0 }.encode(), file).await
    }

    /// Sends the bytes of a read, frame by frame, each under a pass of the lease.
    pub(super) async fn on_read(&mut self, read: Read) -> io::Result<()> {
        let id = read.target.id;
        let lease = match self.lease(&read) {
            Ok(lease) => lease,
            Err(refusal) => return self.refuse(id, refusal).await,
        };
        for spans in frames(&read.spans, self.host.config.frame_bytes) {
            if !self.send_payload(&lease, id, &spans).await? {
                return self.refuse(id, ended_in_transfer(&lease)).await;
            }
        }
        self.reply(&Reply::Ack(id)).await
    }

    /// False: the lease has ended; what was begun is sent to its end, from a copy made at once.
    async fn send_payload(&mut self, lease: &Grant, id: PartId, spans: &[(usize, usize)]) -> io::Result<bool> {
        let Some(pass) = lease.gate.enter() else { return Ok(false) };
        let bytes: usize = spans.iter().map(|(_, len)| len).sum();
        let mut head = Vec::new();
        put_payload(&mut head, id, bytes as u32);
        let payload = Cursor::new(&lease.region, spans.iter().copied());
        let mut frame = Outgoing { head: &head, region: &lease.region, payload, tail: &[] };
        while !frame.is_done() {
            match frame.try_send(self.stream) {
                Ok(_) => tokio::task::coop::consume_budget().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let ready = async {
                        tokio::select! {
                            ready = self.stream.writable() => ready.map(|()| true),
                            () = lease.gate.closed() => Ok(false),
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
        self.metrics().bytes_out.increment(bytes as u64);
        let rest = if frame.is_done() { Vec::new() } else { frame.copy_rest() };
        let whole = rest.is_empty();
        drop(pass);
        let written = timeout(self.patience(), self.stream.write_all(&rest)).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        Ok(whole)
    }
}

/// Cuts spans into frames.
fn frames(spans: &[RemoteSpan], frame_bytes: u32) -> Vec<Vec<(usize, usize)>> {
    let (mut frames, mut frame, mut room) = (Vec::new(), Vec::new(), frame_bytes as usize);
    for span in spans {
        let (mut offset, mut len) = (span.offset as usize, span.len as usize);
        while len > 0 {
            let piece = len.min(room);
            frame.push((offset, piece));
            (offset, len, room) = (offset + piece, len - piece, room - piece);
            if room == 0 {
                frames.push(std::mem::take(&mut frame));
                room = frame_bytes as usize;
            }
        }
    }
    if !frame.is_empty() {
        frames.push(frame);
    }
    frames
}
