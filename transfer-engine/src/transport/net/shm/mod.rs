//! Payload by the owner's own copy out of the writer's shared memory.
//!
//! The connection is a Unix socket between two processes of one host and user. The writer passes its segments as sealed memfds and sends COPY frames where
//! tcp sends payload; the owner maps the segments read-only, checks the grant and copies. Nobody but the owner ever writes its memory, so a grant that has
//! ended is fenced once the owner's own copies have stopped.
//!
//! **When the writer changes its mind**: the owner cannot be stopped from reading, so it is kept from believing what it read. The writer has a page of slots
//! that the owner maps, too. A part is sent with a slot and a token, which stands in the slot as long as the part is wanted; the owner looks again after its
//! copies, before it accounts for the part. A batch that is over clears its slots first and is over then: whatever is copied later is thrown away.

mod address;
mod copy;
mod slots;
mod views;

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

pub(super) use address::{Listener, ShmAddress, check_user, listen};
pub(super) use slots::Armed;
pub(super) use views::{ViewCache, Views, copy_in};

use slots::Slots;

use super::lane::LaneTask;
use super::part::Part;
use super::wire::{Frame, MAX_FRAME_SPANS, put_commit, put_copy};
use crate::{SegmentId, TransportKind, batch};

/// The writer's end of a lane: what the owner has been given to read.
pub(super) struct Source {
    slots: Arc<Slots>,
    announced: Mutex<HashSet<SegmentId>>,
}

impl Source {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { slots: Arc::new(Slots::new()?), announced: Mutex::default() })
    }

    /// True for the first call with a segment.
    fn announce(&self, segment: SegmentId) -> bool {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner).insert(segment)
    }
}

/// Passes the page of slots: the first frame of the lane.
pub(super) async fn send_slots(lane: &LaneTask, source: &Source) -> io::Result<()> {
    let mut frame = Vec::new();
    Frame::Slots { bytes: source.slots.bytes() }.encode(&mut frame);
    lane.stream.write_with_file(&frame, source.slots.file()).await
}

/// Sends what the owner needs to fetch a part, with its trailer. False: its batch is over, and the peer knows it.
pub(super) async fn send_part(lane: &LaneTask, source: &Source, part: &Part, mut head: Vec<u8>) -> io::Result<bool> {
    if !part.spans.is_empty() && source.announce(part.source_segment) {
        let Some(file) = part.source.shared_file() else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the memory was not allocated to be shared"));
        };
        lane.stream.write_all(&std::mem::take(&mut head)).await?;
        let mut frame = Vec::new();
        Frame::Source { source: part.source_segment, bytes: part.source.len() as u64 }.encode(&mut frame);
        lane.stream.write_with_file(&frame, Some(file)).await?;
    }
    let Some(armed) = source.slots.arm(&part.gate).await else { return lane.give_up(part, false).await };
    let place = armed.place();
    if let Some(sending) = lane.sent().get_mut(&part.id) {
        sending.armed = Some(armed);
    }
    for spans in part.spans.chunks(MAX_FRAME_SPANS) {
        put_copy(&mut head, &part.target(), part.source_segment, place, spans);
    }
    put_commit(&mut head, &part.trailer());
    lane.stream.write_all(&head).await?;
    lane.touch();
    lane.host.metrics.of(TransportKind::Shm).bytes_out.increment(batch::total(&part.spans));
    Ok(true)
}
