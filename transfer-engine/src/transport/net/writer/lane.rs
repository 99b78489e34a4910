//! The writer's end of a connection: sends one part after the other and hears what became of them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::NodeStart;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::carrier::{AnyCarrier, Carrier, FollowUp};
use super::part::{Carried, LaneEnd, LaneLoad, Loss, Outcome, Part, Sending};
use super::peer::Peer;
use super::route::Route;
use crate::TransportKind;
use crate::engine::Host;
use crate::error::Refusal;
use crate::metrics::GaugeGuard;
use crate::transport::net::wire::incoming::{DROPPED_AT_ONCE, Incoming};
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{Frame, PartId, Reply, put_check, put_fence};

/// Parts that wait for a lane; who wants to add one waits in front of it.
const QUEUED_PARTS: usize = 128;

/// Parts sent and not answered; an owner takes four times as many.
const MAX_UNANSWERED: usize = 1024;
/// How often room is looked for if there is none.
const ROOM_INTERVAL: Duration = Duration::from_micros(200);

/// A connection whose handshake is done.
pub(crate) struct Connected {
    pub(crate) stream: Stream,
    pub(crate) carrier: Box<dyn AnyCarrier>,
}

/// A lane, as those who use it see it.
pub(crate) struct Lane {
    /// The connection's number.
    pub(crate) id: u64,
    pub(crate) opened: Instant,
    pub(crate) kind: TransportKind,
    pub(crate) route: Arc<Route>,
    /// Cancelled to end it from outside.
    end: CancellationToken,
    /// Boxed, as a channel keeps room for many.
    queue: mpsc::Sender<Box<Sending>>,
    /// Bytes given to the lane and not yet resolved.
    load: AtomicU64,
}

impl Lane {
    /// A lane over a connection whose handshake is done, and what runs it.
    pub(crate) fn new(peer: &Peer, route: Arc<Route>, stream: Stream, id: u64) -> (Arc<Self>, LaneTask) {
        let (queue, waiting) = mpsc::channel(QUEUED_PARTS);
        let kind = route.kind();
        let opened = baton_runtime::now();
        let end = CancellationToken::new();
        let lane = Arc::new(Self { id, opened, kind, route, end, queue, load: AtomicU64::new(0) });
        let task = LaneTask {
            host: Arc::clone(&peer.host),
            owner: peer.owner.clone(),
            stream,
            lane: Arc::clone(&lane),
            waiting,
            sent: Mutex::default(),
            activity: AtomicU64::new(0),
        };
        (lane, task)
    }

    pub(crate) fn add_load(&self, bytes: u64) {
        self.load.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn sub_load(&self, bytes: u64) {
        self.load.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn load(&self) -> u64 {
        self.load.load(Relaxed)
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.queue.is_closed()
    }

    /// Closes the connection, whatever is under way: it is sent again elsewhere.
    pub(crate) fn end(&self) {
        self.end.cancel();
    }

    /// Queues a part, or gives it back if the lane has ended.
    pub(crate) async fn send(self: &Arc<Self>, mut sending: Box<Sending>) -> Result<(), Box<Sending>> {
        sending.load = Some(LaneLoad::new(self, &sending.part));
        self.queue.send(sending).await.map_err(|error| error.0)
    }
}

/// For how long a lane was seen to have work. One that had none for long, and has just been given
/// some, has not stood still.
#[derive(Default)]
struct Work {
    since: Option<Duration>,
}

impl Work {
    /// What it was at a time, since the lane was opened, and for how long; `None` while it has no
    /// work.
    fn seen(&mut self, at: Duration, busy: bool) -> Option<Duration> {
        self.since = busy.then(|| self.since.unwrap_or(at));
        self.since.map(|since| at - since)
    }
}

/// Runs a lane.
pub(crate) struct LaneTask {
    pub(crate) host: Arc<Host>,
    owner: NodeStart,
    pub(crate) stream: Stream,
    lane: Arc<Lane>,
    waiting: mpsc::Receiver<Box<Sending>>,
    /// Parts that were begun and have no outcome yet.
    sent: Mutex<HashMap<PartId, Box<Sending>>>,
    /// When something last moved, in microseconds since the lane was opened.
    activity: AtomicU64,
}

impl LaneTask {
    /// Sends until the lane ends. Every part given to it has had its outcome then.
    pub(crate) async fn run<C: Carrier>(mut self, mut carrier: C) -> LaneEnd {
        let _open = GaugeGuard::new(&self.host.metrics.of(self.lane.kind).connections_out, 1.0);
        let (_, closed) = mpsc::channel(1);
        let mut waiting = std::mem::replace(&mut self.waiting, closed);
        let mut follow_ups = carrier.follow_ups();
        let end = tokio::select! {
            end = self.hear(&carrier) => end,
            end = self.send(&carrier, &mut waiting, &mut follow_ups) => end,
            end = carrier.completions(&self) => end,
            end = self.watch() => end,
            () = self.lane.end.cancelled() => LaneEnd::Failed("closed on demand".into()),
            () = self.host.closed.cancelled() => LaneEnd::Closing,
        };
        waiting.close();
        if let LaneEnd::Failed(reason) = &end
            && !self.host.closed.is_cancelled()
        {
            self.lane.route.on_failure(&self.owner, reason);
        }
        let lane = Arc::clone(&self.lane);
        let at = baton_runtime::now();
        let sent = std::mem::take(&mut *self.sent());
        // Closed before a batch hears of the loss: a retry finds it so. With the carrier goes what
        // still reads or writes local memory.
        drop(self.stream);
        drop(carrier);
        let lose = |sending: Box<Sending>, begun| {
            let part = sending.part.id.part;
            let route = Arc::clone(&lane.route);
            let loss = Loss { part, lane: lane.id, route, at, begun, end: end.clone() };
            sending.resolve(Outcome::Lost(loss));
        };
        sent.into_values().for_each(|sending| lose(sending, true));
        while let Some(sending) = waiting.recv().await {
            lose(sending, false);
        }
        end
    }

    pub(crate) fn kind(&self) -> TransportKind {
        self.lane.kind
    }

    pub(crate) fn sent(&self) -> MutexGuard<'_, HashMap<PartId, Box<Sending>>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn touch(&self) {
        self.activity.store(self.lane.opened.elapsed().as_micros() as u64, Relaxed);
    }

    /// Ends when nothing has moved for too long.
    async fn watch(&self) -> LaneEnd {
        let config = &self.host.config;
        let interval = config.progress_timeout.min(config.idle_timeout) / 8;
        let mut work = Work::default();
        loop {
            baton_runtime::sleep(interval.clamp(Duration::from_millis(1), Duration::from_secs(1))).await;
            let open = self.lane.opened.elapsed();
            let still = open.saturating_sub(Duration::from_micros(self.activity.load(Relaxed)));
            match work.seen(open, self.lane.load() > 0) {
                Some(busy) if still.min(busy) >= config.progress_timeout => {
                    return LaneEnd::Failed(format!("no progress for {still:.1?}"));
                }
                None if still >= config.idle_timeout => return LaneEnd::Idle,
                _ => {}
            }
        }
    }

    /// Takes replies.
    async fn hear(&self, carrier: &impl Carrier) -> LaneEnd {
        let mut incoming = Incoming::new(self.host.config.progress_timeout);
        loop {
            let reply = match self.reply(&mut incoming).await {
                Ok(reply) => reply,
                Err(end) => return end,
            };
            self.touch();
            match reply {
                Reply::Ack(id) => {
                    if let Err(problem) = self.acknowledge(carrier, id) {
                        return LaneEnd::Protocol(problem);
                    }
                }
                Reply::Refuse(id, refusal) => self.resolve(id, Outcome::Refused(refusal)),
                Reply::Progress => {}
                Reply::Fault(message) => return LaneEnd::Protocol(format!("the peer says: {message}")),
                Reply::Payload { id, bytes } => {
                    if let Err(error) = carrier.land(self, &mut incoming, id, bytes as usize).await {
                        return error.into();
                    }
                }
                Reply::Welcome { .. } | Reply::Reject(_) => return LaneEnd::Protocol("a second handshake".into()),
                other => {
                    if let Err(problem) = carrier.on_reply(self, other) {
                        return LaneEnd::Protocol(problem);
                    }
                }
            }
        }
    }

    async fn reply(&self, incoming: &mut Incoming) -> Result<Reply, LaneEnd> {
        let closed = || LaneEnd::Failed("the peer closed the connection".into());
        let (prefix, body) = incoming.next(&self.stream).await?.ok_or_else(closed)?;
        Ok(Reply::decode(prefix, body).map_err(io::Error::from)?)
    }

    fn acknowledge(&self, carrier: &impl Carrier, id: PartId) -> Result<(), String> {
        let mut sent = self.sent();
        if sent.get(&id).is_some_and(|sending| !carrier.may_acknowledge(sending)) {
            let PartId { batch, part } = id;
            return Err(format!("part {part} of batch {batch} was acknowledged before all its bytes came"));
        }
        let acknowledged = sent.remove(&id);
        drop(sent);
        self.lane.route.on_carried();
        if let Some(sending) = acknowledged {
            let bytes = sending.part.bytes;
            sending.resolve(Outcome::Acknowledged { by: self.lane.kind, bytes });
        }
        Ok(())
    }

    /// A part that is not known was cancelled, or refused before.
    fn resolve(&self, id: PartId, outcome: Outcome) {
        if let Some(sending) = self.forget(id) {
            sending.resolve(outcome);
        }
    }

    pub(crate) fn forget(&self, id: PartId) -> Option<Box<Sending>> {
        self.sent().remove(&id)
    }

    async fn send(
        &self,
        carrier: &impl Carrier,
        waiting: &mut mpsc::Receiver<Box<Sending>>,
        follow_ups: &mut mpsc::UnboundedReceiver<FollowUp>,
    ) -> LaneEnd {
        if let Err(error) = carrier.begin(self).await {
            return error.into();
        }
        loop {
            if let Err(error) = self.make_room(follow_ups).await {
                return error.into();
            }
            let sending = tokio::select! {
                biased;
                Some(follow_up) = follow_ups.recv() => match self.follow_up(follow_up).await {
                    Ok(()) => continue,
                    Err(error) => return error.into(),
                },
                Some(sending) = waiting.recv() => sending,
                // The queue's other end lives in `self.lane`.
                else => return LaneEnd::Closing,
            };
            let part = Arc::clone(&sending.part);
            let mut head = Vec::new();
            for &connection in &sending.fences {
                put_fence(&mut head, connection);
            }
            self.touch();
            self.sent().insert(part.id, sending);
            match carrier.carry_part(self, &part, head).await {
                Ok(Carried::Sent) => {}
                Ok(Carried::Over) => drop(self.forget(part.id)),
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    let by = self.lane.kind;
                    let reason = error.to_string();
                    self.resolve(part.id, Outcome::Unable { part: part.id.part, by, reason });
                }
                Err(error) => return error.into(),
            }
        }
    }

    /// Waits while as many parts are unanswered as the owner keeps account of. What they wait for
    /// is sent meanwhile.
    async fn make_room(&self, follow_ups: &mut mpsc::UnboundedReceiver<FollowUp>) -> io::Result<()> {
        while self.sent().len() >= MAX_UNANSWERED {
            while let Ok(follow_up) = follow_ups.try_recv() {
                self.follow_up(follow_up).await?;
            }
            baton_runtime::sleep(ROOM_INTERVAL).await;
        }
        Ok(())
    }

    /// Sends what follows from a completion.
    async fn follow_up(&self, follow_up: FollowUp) -> io::Result<()> {
        match follow_up {
            FollowUp::Revoked(grant) => self.send_frame(&Frame::Revoked { grant }).await,
            FollowUp::Check(id) => {
                let part = self.sent().get(&id).map(|sending| Arc::clone(&sending.part));
                let Some(part) = part else { return Ok(()) };
                self.host.metrics.of(self.kind()).bytes_in.increment(part.bytes);
                let mut out = Vec::new();
                put_check(&mut out, &part.target(), &part.spans);
                self.stream.write_all(&out).await
            }
        }
    }

    /// Sends one small frame.
    pub(crate) async fn send_frame(&self, frame: &Frame) -> io::Result<()> {
        let mut out = Vec::new();
        frame.encode(&mut out);
        self.stream.write_all(&out).await
    }

    /// Receives so many bytes of a payload, and drops them.
    pub(crate) async fn drop_payload(&self, incoming: &mut Incoming, mut bytes: usize) -> io::Result<()> {
        while bytes > 0 {
            let piece = bytes.min(DROPPED_AT_ONCE);
            incoming.drop_all(&self.stream, piece).await?;
            self.touch();
            bytes -= piece;
        }
        Ok(())
    }

    /// Answers a part in the owner's place.
    pub(crate) fn refuse(&self, part: &Part, refusal: Refusal) -> io::Result<Carried> {
        self.resolve(part.id, Outcome::Refused(refusal));
        Ok(Carried::Over)
    }

    /// Tells the peer that a batch is over, if it has seen anything of it here.
    pub(crate) async fn give_up(&self, part: &Part, begun: bool) -> io::Result<Carried> {
        if begun {
            self.send_frame(&Frame::Cancel { batch: part.id.batch, grant: part.grant }).await?;
        }
        Ok(Carried::Over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lane_with_new_work_is_not_stalled() {
        const SECOND: Duration = Duration::from_secs(1);
        let mut work = Work::default();
        assert_eq!((work.seen(40 * SECOND, false), work.seen(50 * SECOND, true)), (None, Some(Duration::ZERO)));
        assert_eq!((work.seen(52 * SECOND, true), work.seen(53 * SECOND, false)), (Some(2 * SECOND), None));
        assert_eq!(work.seen(54 * SECOND, true), Some(Duration::ZERO));
    }
}
