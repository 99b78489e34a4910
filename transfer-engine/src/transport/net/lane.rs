//! The writer's end of a connection: sends one part after the other and hears what became of them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::incoming::Incoming;
use super::part::{Carried, InHand, LaneEnd, LaneLoad, Loss, Outcome, Part, Sending};
use super::rdma::{Flow, FollowUp};
use super::route::Route;
use super::shm::Source;
use super::stream::Stream;
use super::wire::{Frame, PartId, Reply, put_fence};
use super::{rdma, shm, tcp};
use crate::TransportKind;
use crate::batch::Op;
use crate::engine::Host;
use crate::error::Refusal;
use crate::grant::Writer;
use crate::metrics::GaugeGuard;

/// Parts that wait for a lane; who wants to add one waits in front of it.
const QUEUED_PARTS: usize = 128;

/// Parts sent and not answered; an owner takes four times as many.
const MAX_UNANSWERED: usize = 1024;
/// How often room is looked for if there is none.
const ROOM_INTERVAL: Duration = Duration::from_micros(200);

/// What carries the payload of a lane.
pub(crate) enum Carrier {
    /// The connection itself.
    Tcp,
    /// The owner, who copies it from shared memory.
    Shm(Source),
    /// The network adapters.
    Rdma(Box<Flow>),
}

/// A connection whose handshake is done.
pub(crate) struct Connected {
    pub(crate) stream: Stream,
    pub(crate) carrier: Carrier,
    /// What is to be sent after completions (rdma).
    pub(crate) follow_ups: Option<mpsc::UnboundedReceiver<FollowUp>>,
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
    pub(crate) fn new(
        (host, target): (Arc<Host>, Writer),
        route: Arc<Route>,
        Connected { stream, carrier, follow_ups }: Connected,
        id: u64,
    ) -> (Arc<Self>, LaneTask) {
        let (queue, waiting) = mpsc::channel(QUEUED_PARTS);
        let kind = route.kind();
        let opened = baton_runtime::now();
        let end = CancellationToken::new();
        let lane = Arc::new(Self { id, opened, kind, route, end, queue, load: AtomicU64::new(0) });
        let activity = AtomicU64::new(0);
        (
            Arc::clone(&lane),
            LaneTask { host, target, stream, carrier, lane, waiting, follow_ups, sent: Mutex::default(), activity },
        )
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
    target: Writer,
    pub(crate) stream: Stream,
    carrier: Carrier,
    lane: Arc<Lane>,
    waiting: mpsc::Receiver<Box<Sending>>,
    follow_ups: Option<mpsc::UnboundedReceiver<FollowUp>>,
    /// Parts that were begun and have no outcome yet.
    sent: Mutex<HashMap<PartId, Box<Sending>>>,
    /// When something last moved, in microseconds since the lane was opened.
    activity: AtomicU64,
}

impl LaneTask {
    /// Sends until the lane ends. Every part given to it has had its outcome then.
    pub(crate) async fn run(mut self) -> LaneEnd {
        let _open = GaugeGuard::new(&self.host.metrics.of(self.lane.kind).connections_out, 1.0);
        let (_, closed) = mpsc::channel(1);
        let mut waiting = std::mem::replace(&mut self.waiting, closed);
        let mut follow_ups = self.follow_ups.take();
        let end = tokio::select! {
            end = self.hear() => end,
            end = self.send(&mut waiting, &mut follow_ups) => end,
            end = self.completions() => end,
            end = self.watch() => end,
            () = self.lane.end.cancelled() => LaneEnd::Failed("closed on demand".into()),
            () = self.host.closed.cancelled() => LaneEnd::Closing,
        };
        waiting.close();
        if let LaneEnd::Failed(reason) = &end
            && !self.host.closed.is_cancelled()
        {
            self.lane.route.on_failure(&self.target, reason);
        }
        let lane = Arc::clone(&self.lane);
        let at = baton_runtime::now();
        let sent = std::mem::take(&mut *self.sent());
        // Closed before a batch hears of the loss: a retry finds it so. With the carrier goes what
        // still reads or writes local memory.
        drop(self.stream);
        drop(self.carrier);
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
    async fn hear(&self) -> LaneEnd {
        let mut incoming = Incoming::new(self.host.config.progress_timeout);
        loop {
            let reply = match self.reply(&mut incoming).await {
                Ok(reply) => reply,
                Err(end) => return end,
            };
            self.touch();
            match reply {
                Reply::Ack(id) => {
                    if let Err(problem) = self.acknowledge(id) {
                        return LaneEnd::Protocol(problem);
                    }
                }
                Reply::Refuse(id, refusal) => self.resolve(id, Outcome::Refused(refusal)),
                Reply::Progress => {}
                Reply::Fault(message) => return LaneEnd::Protocol(format!("the peer says: {message}")),
                Reply::Payload { id, bytes } => {
                    if let Err(error) = tcp::land(self, &mut incoming, id, bytes as usize).await {
                        return error.into();
                    }
                }
                other => {
                    if let Err(problem) = self.on_carriers_reply(other) {
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

    fn acknowledge(&self, id: PartId) -> Result<(), String> {
        let mut sent = self.sent();
        if let (Some(sending), Carrier::Tcp) = (sent.get(&id), &self.carrier)
            && sending.part.op == Op::Read
            && !matches!(&sending.in_hand, InHand::Landing(cursor) if cursor.is_done())
            // Of a batch that is over, nothing lands.
            && sending.part.fence.enter().is_some()
        {
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

    async fn completions(&self) -> LaneEnd {
        match &self.carrier {
            Carrier::Rdma(flow) => rdma::completions(self, flow).await,
            Carrier::Tcp | Carrier::Shm(_) => std::future::pending().await,
        }
    }

    async fn send(
        &self,
        waiting: &mut mpsc::Receiver<Box<Sending>>,
        follow_ups: &mut Option<mpsc::UnboundedReceiver<FollowUp>>,
    ) -> LaneEnd {
        if let Carrier::Shm(source) = &self.carrier
            && let Err(error) = shm::send_slots(self, source).await
        {
            return error.into();
        }
        loop {
            if let Err(error) = self.make_room(follow_ups).await {
                return error.into();
            }
            let sending = tokio::select! {
                biased;
                Some(follow_up) = next(follow_ups) => match self.follow_up(follow_up).await {
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
            match self.send_part(&part, head).await {
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
    async fn make_room(&self, follow_ups: &mut Option<mpsc::UnboundedReceiver<FollowUp>>) -> io::Result<()> {
        while self.sent().len() >= MAX_UNANSWERED {
            while let Some(follow_up) = follow_ups.as_mut().and_then(|follow_ups| follow_ups.try_recv().ok()) {
                self.follow_up(follow_up).await?;
            }
            baton_runtime::sleep(ROOM_INTERVAL).await;
        }
        Ok(())
    }

    async fn follow_up(&self, follow_up: FollowUp) -> io::Result<()> {
        match &self.carrier {
            Carrier::Rdma(flow) => flow.send_follow_up(self, follow_up).await,
            Carrier::Tcp | Carrier::Shm(_) => Ok(()),
        }
    }

    fn on_carriers_reply(&self, reply: Reply) -> Result<(), String> {
        match (&self.carrier, reply) {
            (_, Reply::Welcome { .. } | Reply::Reject(_)) => Err("a second handshake".into()),
            (Carrier::Rdma(flow), reply) => flow.on_reply(reply),
            (Carrier::Shm(source), Reply::Mapped { segment, bytes, .. }) => {
                source.on_mapped(&self.stream, segment, bytes)
            }
            (_, reply) => Err(format!("{reply:?} has no place on a connection over {}", self.lane.kind)),
        }
    }

    /// Sends what there is of a part.
    async fn send_part(&self, part: &Part, head: Vec<u8>) -> io::Result<Carried> {
        match (&self.carrier, part.op) {
            (Carrier::Tcp, Op::Write) => tcp::send_part(self, part, head).await,
            (Carrier::Tcp, Op::Read) => tcp::ask(self, part, head).await,
            (Carrier::Shm(source), Op::Write) => shm::send_part(self, source, part, head).await,
            (Carrier::Shm(source), Op::Read) => shm::read_part(self, source, part, head).await,
            (Carrier::Rdma(flow), _) => rdma::carry_part(self, flow, part, head).await,
        }
    }

    /// Answers a part in the owner's place.
    pub(crate) fn refuse(&self, part: &Part, refusal: Refusal) -> io::Result<Carried> {
        self.resolve(part.id, Outcome::Refused(refusal));
        Ok(Carried::Over)
    }

    /// Tells the peer that a batch is over, if it has seen anything of it here.
    pub(crate) async fn give_up(&self, part: &Part, begun: bool) -> io::Result<Carried> {
        if begun {
            let mut cancel = Vec::new();
            Frame::Cancel { batch: part.id.batch, grant: part.grant }.encode(&mut cancel);
            self.stream.write_all(&cancel).await?;
        }
        Ok(Carried::Over)
    }
}

async fn next(follow_ups: &mut Option<mpsc::UnboundedReceiver<FollowUp>>) -> Option<FollowUp> {
    match follow_ups {
        Some(follow_ups) => follow_ups.recv().await,
        None => std::future::pending().await,
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
