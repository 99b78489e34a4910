//! The writer's end of a TCP lane.

use std::io;
use std::sync::Arc;

use crate::batch::{self, Op};
use crate::fence_guard::Pass;
use crate::transport::net::wire::incoming::Incoming;
use crate::transport::net::wire::payload::{Cursor, Outgoing};
use crate::transport::net::wire::{MAX_FRAME_SPANS, PartId, put_commit, put_data, put_read};
use crate::transport::net::writer::carrier::Carrier;
use crate::transport::net::writer::lane::LaneTask;
use crate::transport::net::writer::part::{Carried, CarriedPart, Part, Sending};

/// The connection itself carries the payload.
pub(crate) struct TcpCarrier;

impl Carrier for TcpCarrier {
    async fn carry_part(&self, lane: &LaneTask, part: &Part, head: Vec<u8>) -> io::Result<Carried> {
        match part.op {
            Op::Write => send_part(lane, part, head).await,
            Op::Read => ask(lane, part, head).await,
        }
    }

    /// Receives bytes of a part that is read, where they belong. Those of a batch that is over are
    /// dropped.
    async fn land(&self, lane: &LaneTask, incoming: &mut Incoming, id: PartId, bytes: usize) -> io::Result<()> {
        // Out of the map while bytes are waited for: the lock is not held meanwhile.
        let Some((part, mut cursor)) = take_landing(lane, id) else { return lane.drop_payload(incoming, bytes).await };
        if bytes > cursor.remaining() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "more bytes than were asked for"));
        }
        let end = cursor.remaining() - bytes;
        while cursor.remaining() > end {
            let received = match part.fence.enter() {
                Some(_pass) => incoming.try_receive(&lane.stream, &part.local, &mut cursor, end),
                None => return lane.drop_payload(incoming, cursor.remaining() - end).await,
            };
            match received {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => {
                    lane.touch();
                    lane.host.metrics.of(lane.kind()).bytes_in.increment(received as u64);
                    tokio::task::coop::consume_budget().await;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::select! {
                    ready = incoming.wait_for_payload(&lane.stream, cursor.remaining() - end) => ready?,
                    () = part.fence.closed() => {}
                },
                Err(error) => return Err(error),
            }
        }
        if let Some(sending) = lane.sent().get_mut(&id) {
            sending.in_hand = CarriedPart::Landing(cursor);
        }
        Ok(())
    }

    fn may_acknowledge(&self, sending: &Sending) -> bool {
        sending.part.op == Op::Write
            || matches!(&sending.in_hand, CarriedPart::Landing(cursor) if cursor.is_done())
            // Of a batch that is over, nothing lands.
            || sending.part.fence.enter().is_none()
    }
}

/// Sends a part with its trailer.
async fn send_part(lane: &LaneTask, part: &Part, mut head: Vec<u8>) -> io::Result<Carried> {
    let mut tail = Vec::new();
    put_commit(&mut tail, &part.trailer());
    let frames = batch::cut(&part.spans, u64::from(lane.host.config.frame_bytes), MAX_FRAME_SPANS);
    let last = frames.len().saturating_sub(1);
    for (i, spans) in frames.iter().enumerate() {
        let Some(pass) = part.fence.enter() else { return lane.give_up(part, i > 0).await };
        let source = spans.iter().map(|span| (span.local_offset as usize, span.len as usize));
        put_data(&mut head, &part.target(), spans);
        let frame = Outgoing {
            head: &head,
            region: &part.local,
            payload: Cursor::new(&part.local, source),
            tail: if i == last { &tail } else { &[] },
        };
        if !send_frame(lane, part, frame, pass).await? {
            return lane.give_up(part, true).await;
        }
        lane.host.metrics.of(lane.kind()).bytes_out.increment(batch::total(spans));
        head.clear();
    }
    if frames.is_empty() {
        head.append(&mut tail);
        lane.stream.write_all(&head).await?;
    }
    Ok(Carried::Sent)
}

/// Sends a frame from the source. False: the batch was over in mid-frame. The rest of the frame has
/// been sent from a copy, so that the source was free at once. What follows the payload has not
/// been sent.
async fn send_frame(lane: &LaneTask, part: &Part, mut frame: Outgoing<'_>, pass: Pass<'_>) -> io::Result<bool> {
    while !frame.is_done() {
        match frame.try_send(&lane.stream) {
            Ok(_) => {
                lane.touch();
                tokio::task::coop::consume_budget().await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::select! {
                ready = lane.stream.writable() => ready?,
                () = part.fence.closed() => break,
            },
            Err(error) => return Err(error),
        }
    }
    if frame.payload_is_done() {
        drop(pass);
        write(lane, frame.tail).await?;
        return Ok(true);
    }
    let rest = frame.copy_rest();
    drop(pass);
    write(lane, &rest).await?;
    Ok(false)
}

async fn write(lane: &LaneTask, bytes: &[u8]) -> io::Result<()> {
    // In pieces, so that slow progress is progress.
    for piece in bytes.chunks(64 << 10) {
        lane.stream.write_all(piece).await?;
        lane.touch();
    }
    Ok(())
}

/// Asks for the bytes of a part that is read.
async fn ask(lane: &LaneTask, part: &Part, mut head: Vec<u8>) -> io::Result<Carried> {
    let spans = part.spans.iter().map(|span| (span.local_offset as usize, span.len as usize));
    let landing = Cursor::new(&part.local, spans);
    if let Some(sending) = lane.sent().get_mut(&part.id) {
        sending.in_hand = CarriedPart::Landing(landing);
    }
    put_read(&mut head, &part.target(), &part.spans);
    lane.stream.write_all(&head).await?;
    Ok(Carried::Sent)
}

fn take_landing(lane: &LaneTask, id: PartId) -> Option<(Arc<Part>, Cursor)> {
    let mut sent = lane.sent();
    let sending = sent.get_mut(&id)?;
    match std::mem::replace(&mut sending.in_hand, CarriedPart::Nothing) {
        CarriedPart::Landing(cursor) => Some((Arc::clone(&sending.part), cursor)),
        other => {
            sending.in_hand = other;
            None
        }
    }
}
