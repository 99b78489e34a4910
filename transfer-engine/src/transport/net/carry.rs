//! One batch over the lanes to its peer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;

use super::part::{LaneEnd, Outcome, Part, Sending};
use super::peer::{Peer, Wanted};
use super::route::Route;
use super::wire::{MAX_FRAME_SPANS, PartId};
use crate::batch::Op;
use crate::grant::MAX_PARTS;
use crate::path::InFlight;
use crate::transport::Job;
use crate::{Priority, TransferError, TransportKind, batch};

/// Lanes tried for one part that has not begun: one may end just when it is chosen, but not for ever.
const LANE_CHOICES: u32 = 16;

/// A part that is to be sent.
struct Attempt {
    part: Arc<Part>,
    /// Lanes that it failed on.
    failed: Vec<u64>,
    /// When the last of them ended, and over which route: others of that may have ended with it, unnoticed, but not those opened since.
    fresh: Option<(Instant, Arc<Route>)>,
}

/// Carries a batch. Dropping it leaves parts with lanes, which stop as the batch's gate is closed.
pub(super) async fn carry(peer: Arc<Peer>, job: Job) -> Result<TransportKind, TransferError> {
    let (outcomes, mut heard) = mpsc::unbounded_channel();
    let mut attempts: VecDeque<_> = parts(&job, peer.host.config.part_bytes())?.into();
    let parts: Vec<_> = attempts.iter().map(|attempt| Arc::clone(&attempt.part)).collect();
    // What a part failed on before, by its index.
    let mut failed = vec![Vec::new(); parts.len()];
    let mut open = parts.len();
    // A batch has at least one part, so that this is overwritten.
    let mut carried_by = TransportKind::Tcp;
    while open > 0 {
        let outcome = match heard.try_recv() {
            Ok(outcome) => outcome,
            Err(_) => match attempts.pop_front() {
                Some(attempt) => {
                    send(&peer, attempt, &outcomes).await?;
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
            Outcome::Lost(loss) => {
                let lanes = &mut failed[loss.part as usize];
                lanes.extend(loss.begun.then_some(loss.lane));
                check_retry(&peer, lanes.len(), loss.end)?;
                peer.stats.on_retry(u64::from(loss.begun));
                let (part, failed) = (Arc::clone(&parts[loss.part as usize]), lanes.clone());
                attempts.push_back(Attempt { part, failed, fresh: Some((loss.at, loss.route)) });
            }
        }
    }
    peer.stats.on_batch(carried_by);
    Ok(carried_by)
}

/// Cuts a batch into parts. One without spans has one part without bytes.
fn parts(job: &Job, part_bytes: u64) -> Result<Vec<Attempt>, TransferError> {
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
        priority: job.priority,
        local: Arc::clone(&job.local),
        local_segment: job.local_segment,
        gate: Arc::clone(&job.gate),
        bytes: batch::total(&spans),
        spans,
    };
    let parts = (0..parts).zip(groups).map(part);
    Ok(parts.map(|part| Attempt { part: Arc::new(part), failed: Vec::new(), fresh: None }).collect())
}

fn check_retry(peer: &Peer, failures: usize, end: LaneEnd) -> Result<(), TransferError> {
    match end {
        LaneEnd::Closing => Err(TransferError::Closed),
        LaneEnd::Protocol(message) => Err(TransferError::Protocol(message)),
        LaneEnd::Failed(reason) if failures > peer.host.config.retries as usize => {
            Err(TransferError::ConnectionLost { node: peer.target.node.clone(), reason })
        }
        LaneEnd::Failed(_) | LaneEnd::Idle => Ok(()),
    }
}

/// Gives a part to a lane, as soon as its bytes may be in flight.
async fn send(
    peer: &Arc<Peer>,
    attempt: Attempt,
    outcomes: &mpsc::UnboundedSender<Outcome>,
) -> Result<(), TransferError> {
    let Attempt { part, failed, fresh } = attempt;
    let bytes = part.bytes;
    // A part larger than all that may be in flight (of a batch so large that its parts must be) waits for everything else. The limit fits into 32 bits (checked
    // with the configuration).
    let permit = Arc::clone(&peer.in_flight)
        .acquire_many_owned(bytes.min(peer.host.config.max_bytes_in_flight_per_peer) as u32)
        .await
        .map_err(|_| TransferError::Closed)?;
    let _in_flight = (permit, InFlight::new(&peer.stats, bytes));
    let wanted = Wanted { fresh, shared: part.op == Op::Read || part.local.shared_file().is_some() };
    let mut sending = Sending {
        part,
        fences: failed,
        outcome: outcomes.clone(),
        _in_flight,
        bulk: None,
        load: None,
        armed: None,
        landing: None,
    };
    for _ in 0..LANE_CHOICES {
        let lane = peer.lane(&wanted).await?;
        if sending.part.op == Op::Read && lane.version < 2 {
            let reason = format!("its version is {}, which cannot be read from", lane.version);
            return Err(TransferError::Incompatible { node: peer.target.node.clone(), reason });
        }
        if sending.part.priority == Priority::Bulk && sending.bulk.is_none() {
            // Last, so that nobody waits for one who waits himself.
            sending.bulk = Some(peer.host.priorities.bulk().await.ok_or(TransferError::Closed)?);
        }
        match lane.send(sending).await {
            Ok(()) => return Ok(()),
            Err(back) => sending = back,
        }
    }
    let reason = "its connections end as soon as they are open".into();
    Err(TransferError::ConnectionLost { node: peer.target.node.clone(), reason })
}
