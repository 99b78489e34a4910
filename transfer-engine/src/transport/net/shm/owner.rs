//! The owner's end of a lane over shared memory: maps what the writer passes, and copies.

use std::io;

use tokio::time::timeout;

use super::COPY_STEP;
use super::views::copy_in;
use crate::SegmentId;
use crate::grant::Grant;
use crate::transport::net::owner::receiver::{Fate, Receiver, ended_in_transfer, invalid};
use crate::transport::net::wire::{Copy, Frame, Reply};

impl Receiver<'_> {
    pub(crate) async fn on_shm_frame(&mut self, frame: Frame) -> io::Result<()> {
        match frame {
            Frame::Copy(copy) => self.on_copy(copy).await,
            Frame::Check(read) => self.on_check(read).await,
            Frame::Map { segment } => self.on_map(segment).await,
            Frame::Slots { bytes } => self.views.on_slots(self.stream, bytes).map_err(invalid),
            Frame::Source { source, bytes } => {
                let cache = &self.connections.views;
                let writer = self.registered.writer();
                self.views.on_source(self.stream, cache, writer, source, bytes).map_err(invalid)
            }
            _ => Err(self.misplaced()),
        }
    }

    async fn on_copy(&mut self, copy: Copy) -> io::Result<()> {
        let spans: Vec<_> = copy.spans.iter().map(|span| span.to).collect();
        let landing = self.admit(&copy.target, &spans, Some(copy.place)).await?;
        if let Fate::Lands(grant) = landing {
            self.copy(&grant, &copy).await?;
        }
        self.count(spans.iter().map(|span| u64::from(span.len)).sum());
        Ok(())
    }

    /// Copies spans out of the writer's memory, step by step: a fence takes effect after the step
    /// under way.
    async fn copy(&mut self, grant: &Grant, copy: &Copy) -> io::Result<()> {
        let view = self.views.source(copy.source, &copy.spans).map_err(invalid)?;
        for span in &copy.spans {
            let mut from = span.from as usize;
            let mut to = span.to.offset as usize;
            let mut len = span.to.len as usize;
            while len > 0 {
                let step = len.min(COPY_STEP);
                let Some(pass) = grant.fence.enter() else {
                    return self.refuse(copy.target.id, ended_in_transfer(grant)).await;
                };
                copy_in(&view, from, &grant.region, to, step);
                drop(pass);
                from += step;
                to += step;
                len -= step;
                self.on_progress(step).await?;
            }
        }
        Ok(())
    }

    /// Passes a segment's file.
    async fn on_map(&mut self, segment: SegmentId) -> io::Result<()> {
        let region = self.host.region(segment).ok();
        let file = region.as_deref().and_then(|region| region.shared_file());
        let bytes = file.and(region.as_ref()).map_or(0, |region| region.len() as u64);
        let mapped = Reply::Mapped { segment, bytes, address: 0, key: 0 }.encode();
        let written = timeout(self.host.config.progress_timeout, self.stream.write_with_file(&mapped, file)).await;
        written.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}
