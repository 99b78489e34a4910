//! One batch over the lanes to its peer.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::part::{CarriedPart, LaneEnd, Loss, Outcome, Part, Sending};
use super::peer::{Peer, Wanted};
use crate::batch::Op;
use crate::grant::MAX_PARTS;
use crate::path::InFlight;
use crate::transport::Job;
use crate::transport::net::wire::{MAX_FRAME_SPANS, PartId};
use crate::{TransferError, TransportKind, batch};

/// Lanes tried for one part that has not begun: one may end just when it is chosen, but not for
/// ever.
const LANE_CHOICES: u32 = 16;

/// Losses of one part, begun or not: lanes that end as soon as they are open are a failure, too.
const MAX_LOSSES: u32 = 64;

/// A part, and what it has been through.
struct PartState {
    part: Arc<Part>,
    /// Lanes that it failed on.
    failed: Vec<u64>,
    /// How often it was lost, whether or not it was begun.
    losses: u32,
    wanted: Wanted,
}

/// Carries a batch. Dropping it leaves parts with lanes, which stop as the batch's fence guard is
/// closed.
pub(crate) async fn carry_in_parts(peer: Arc<Peer>, job: Job) -> Result<TransportKind, TransferError> {
    let (outcomes, mut heard) = mpsc::unbounded_channel();
    let wanted = Wanted { fresh: None, without: without(&peer, &job) };
    let new = |part| PartState { part, failed: Vec::new(), losses: 0, wanted: wanted.clone() };
    let mut parts: Vec<_> = parts(&job, peer.host.config.part_bytes())?.into_iter().map(new).collect();
    let mut to_send: VecDeque<_> = (0..parts.len()).collect();
    let mut open = parts.len();
    // A batch has at least one part, so that this is overwritten.
    let mut carried_by = TransportKind::Tcp;
    while open > 0 {
        let outcome = match heard.try_recv() {
            Ok(outcome) => outcome,
            Err(_) => match to_send.pop_front() {
                Some(part) => {
                    send(&peer, &parts[part], &outcomes).await?;
                    continue;
                }
                // This function holds a sender too, so that the channel never ends.
                None => heard.recv().await.ok_or(TransferError::Closed)?,
            },
        };
        match outcome {
            Outcome::Acknowledged { by, bytes } => {
                open -= 1;
                carried_by = by;
                peer.stats.on_acknowledged(by, bytes);
            }
            Outcome::Refused(refusal) => return Err(refusal.into()),
            Outcome::Unable { part, by, reason } => {
                parts[part as usize].wanted.without.push((by, reason));
                to_send.push_back(part as usize);
            }
            Outcome::Lost(loss) => {
                let part = loss.part as usize;
                parts[part].on_loss(&peer, loss)?;
                to_send.push_back(part);
            }
        }
    }
    peer.stats.on_batch(carried_by);
    Ok(carried_by)
}

/// What cannot carry a batch, and why: known beforehand.
fn without(peer: &Peer, job: &Job) -> Vec<(TransportKind, String)> {
    let mut without = Vec::new();
    if job.op == Op::Write && job.local.shared_file().is_none() {
        without.push((TransportKind::Shm, "the local memory was not allocated to be shared".into()));
    }
    if peer.host.rdma.get().is_some_and(|devices| !devices.has(job.local_segment)) {
        without.push((TransportKind::Rdma, "the local memory is not registered with the devices".into()));
    }
    without
}

impl PartState {
    /// Whether and how the part is sent again.
    fn on_loss(&mut self, peer: &Peer, loss: Loss) -> Result<(), TransferError> {
        self.losses += 1;
        self.failed.extend(loss.begun.then_some(loss.lane));
        match loss.end {
            LaneEnd::Closing => return Err(TransferError::Closed),
            LaneEnd::Protocol(message) => return Err(TransferError::Protocol(message)),
            LaneEnd::Failed(reason)
                if self.failed.len() > peer.host.config.retries as usize || self.losses > MAX_LOSSES =>
            {
                return Err(TransferError::ConnectionLost { node: peer.owner.node.clone(), reason });
            }
            LaneEnd::Failed(_) | LaneEnd::Idle => {}
        }
        peer.stats.on_retry(u64::from(loss.begun));
        self.wanted.fresh = Some((loss.at, loss.route));
        Ok(())
    }
}

/// Cuts a batch into parts. One without spans has one part without bytes.
fn parts(job: &Job, part_bytes: u64) -> Result<Vec<Arc<Part>>, TransferError> {
    let part_bytes = part_bytes.max(batch::total(&job.spans).div_ceil(u64::from(MAX_PARTS) / 2));
    // A read is asked for in one frame.
    let max_spans = if job.op == Op::Read { MAX_FRAME_SPANS } else { usize::MAX };
    let mut groups = batch::cut(&job.spans, part_bytes, max_spans);
    if groups.is_empty() {
        groups.push(Vec::new());
    }
    let too_many = || TransferError::invalid("spans", format!("{} parts, but at most {MAX_PARTS} go", groups.len()));
    let parts = u32::try_from(groups.len()).ok().filter(|parts| *parts <= MAX_PARTS).ok_or_else(too_many)?;
    let part = |(part, spans): (u32, Vec<_>)| Part {
        op: job.op,
        id: PartId { batch: job.batch, part },
        parts,
        grant: job.grant,
        segment: job.segment,
        tag: job.tag,
        local: Arc::clone(&job.local),
        local_segment: job.local_segment,
        fence: Arc::clone(&job.fence),
        bytes: batch::total(&spans),
        spans,
    };
    Ok((0..parts).zip(groups).map(|group| Arc::new(part(group))).collect())
}

/// Gives a part to a lane, as soon as its bytes may be in flight.
async fn send(
    peer: &Arc<Peer>,
    state: &PartState,
    outcomes: &mpsc::UnboundedSender<Outcome>,
) -> Result<(), TransferError> {
    let part = &state.part;
    let bytes = state.part.bytes;
    // A part larger than all that may be in flight (of a batch so large that its parts must be)
    // waits for everything else. The limit fits into 32 bits (checked with the configuration).
    let permit = Arc::clone(&peer.in_flight)
        .acquire_many_owned(bytes.min(peer.host.config.max_bytes_in_flight_per_peer) as u32)
        .await
        .map_err(|_| TransferError::Closed)?;
    let _in_flight = (permit, InFlight::new(&peer.stats, bytes));
    let mut sending = Box::new(Sending {
        part: Arc::clone(part),
        fences: state.failed.clone(),
        outcome: outcomes.clone(),
        _in_flight,
        load: None,
        in_hand: CarriedPart::Nothing,
    });
    for _ in 0..LANE_CHOICES {
        let lane = peer.lane(&state.wanted).await?;
        match lane.send(sending).await {
            Ok(()) => return Ok(()),
            Err(back) => sending = back,
        }
    }
    let reason = "its connections end as soon as they are open".into();
    Err(TransferError::ConnectionLost { node: peer.owner.node.clone(), reason })
}
