//! The writer's end of a lane over shared memory.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_memory::SharedView;
use tokio::sync::Notify;

use super::COPY_STEP;
use super::slots::Slots;
use super::views::copy_in;
use crate::batch::Op;
use crate::engine::MAX_SEGMENTS;
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{Frame, MAX_FRAME_SPANS, Reply, put_check, put_commit, put_copy};
use crate::transport::net::writer::carrier::Carrier;
use crate::transport::net::writer::lane::LaneTask;
use crate::transport::net::writer::part::{Carried, CarriedPart, Part, too_short};
use crate::{SegmentId, batch};

/// Most segments of an owner.
const MAX_MAPPED: usize = MAX_SEGMENTS;

/// The writer's end of a lane: what the owner has been given to read.
pub(crate) struct ShmCarrier {
    slots: Arc<Slots>,
    announced: Mutex<HashSet<SegmentId>>,
    /// The owner's segments, for reads. `None`: it has none of that name to share.
    mapped: Mutex<HashMap<SegmentId, Option<Arc<SharedView>>>>,
    /// Another one came.
    came: Notify,
}

impl ShmCarrier {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            slots: Arc::new(Slots::new()?),
            announced: Mutex::default(),
            mapped: Mutex::default(),
            came: Notify::new(),
        })
    }

    /// True for the first call with a segment.
    fn announce(&self, segment: SegmentId) -> bool {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner).insert(segment)
    }

    fn mapped(&self) -> MutexGuard<'_, HashMap<SegmentId, Option<Arc<SharedView>>>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_mapped(&self, stream: &Stream, segment: SegmentId, bytes: u64) -> Result<(), String> {
        let mut mapped = self.mapped();
        if mapped.len() >= MAX_MAPPED || mapped.contains_key(&segment) {
            return Err(format!("segment {segment} for the second time, or one of more than {MAX_MAPPED}"));
        }
        let view = match bytes {
            0 => None,
            _ => {
                let file = stream.take_file().ok_or("MAPPED without a file")?;
                let view =
                    SharedView::map(file.as_fd(), bytes).map_err(|error| format!("segment {segment}: {error}"))?;
                Some(Arc::new(view))
            }
        };
        mapped.insert(segment, view);
        drop(mapped);
        self.came.notify_waiters();
        Ok(())
    }

    /// The owner's segment; asks for it the first time.
    async fn view(&self, lane: &LaneTask, segment: SegmentId) -> io::Result<Arc<SharedView>> {
        let mut asked = false;
        loop {
            let mut came = pin!(self.came.notified());
            came.as_mut().enable();
            match self.mapped().get(&segment) {
                Some(Some(view)) => return Ok(Arc::clone(view)),
                Some(None) => {
                    return Err(io::Error::new(io::ErrorKind::Unsupported, "the owner cannot share the segment"));
                }
                None => {}
            }
            if !std::mem::replace(&mut asked, true) {
                lane.send_frame(&Frame::Map { segment }).await?;
            }
            came.await;
        }
    }

    /// Sends what the owner needs to fetch a part, with its trailer.
    async fn send_part(&self, lane: &LaneTask, part: &Part, mut head: Vec<u8>) -> io::Result<Carried> {
        let Some(file) = part.local.shared_file() else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the local memory was not allocated to be shared"));
        };
        if !part.spans.is_empty() && self.announce(part.local_segment) {
            lane.stream.write_all(&std::mem::take(&mut head)).await?;
            let mut frame = Vec::new();
            Frame::Source { source: part.local_segment, bytes: part.local.len() as u64 }.encode(&mut frame);
            lane.stream.write_with_file(&frame, Some(file)).await?;
        }
        let Some(armed) = self.slots.arm(&part.fence).await else { return lane.give_up(part, false).await };
        let place = armed.place();
        if let Some(sending) = lane.sent().get_mut(&part.id) {
            sending.in_hand = CarriedPart::Armed(armed);
        }
        for spans in part.spans.chunks(MAX_FRAME_SPANS) {
            put_copy(&mut head, &part.target(), part.local_segment, place, spans);
        }
        put_commit(&mut head, &part.trailer());
        lane.stream.write_all(&head).await?;
        lane.touch();
        lane.host.metrics.of(lane.kind()).bytes_out.increment(batch::total(&part.spans));
        Ok(Carried::Sent)
    }

    /// Reads a part: copies it out of the owner's memory, and asks the owner whether the lease has
    /// lived through that.
    async fn read_part(&self, lane: &LaneTask, part: &Part, mut head: Vec<u8>) -> io::Result<Carried> {
        let view = self.view(lane, part.segment).await?;
        for span in &part.spans {
            if span.remote_offset.checked_add(span.len).is_none_or(|end| end > view.len() as u64) {
                return lane.refuse(part, too_short(part.segment));
            }
            let mut from = span.remote_offset as usize;
            let mut to = span.local_offset as usize;
            let mut len = span.len as usize;
            while len > 0 {
                let step = len.min(COPY_STEP);
                let Some(_pass) = part.fence.enter() else { return Ok(Carried::Over) };
                copy_in(&view, from, &part.local, to, step);
                from += step;
                to += step;
                len -= step;
                lane.touch();
                tokio::task::coop::consume_budget().await;
            }
        }
        lane.host.metrics.of(lane.kind()).bytes_in.increment(part.bytes);
        put_check(&mut head, &part.target(), &part.spans);
        lane.stream.write_all(&head).await?;
        Ok(Carried::Sent)
    }
}

impl Carrier for ShmCarrier {
    /// Passes the page of slots: the first frame of the lane.
    async fn begin(&self, lane: &LaneTask) -> io::Result<()> {
        let mut frame = Vec::new();
        Frame::Slots { bytes: self.slots.bytes() }.encode(&mut frame);
        let file = self.slots.take_file();
        lane.stream.write_with_file(&frame, file.as_ref().map(AsFd::as_fd)).await
    }

    async fn carry_part(&self, lane: &LaneTask, part: &Part, head: Vec<u8>) -> io::Result<Carried> {
        match part.op {
            Op::Write => self.send_part(lane, part, head).await,
            Op::Read => self.read_part(lane, part, head).await,
        }
    }

    fn on_reply(&self, lane: &LaneTask, reply: Reply) -> Result<(), String> {
        match reply {
            Reply::Mapped { segment, bytes, .. } => self.on_mapped(&lane.stream, segment, bytes),
            other => Err(format!("{other:?} has no place on a connection over {}", lane.kind())),
        }
    }
}
