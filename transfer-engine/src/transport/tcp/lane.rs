//! The writer's end of a connection: sends one part after the other and hears what became of them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_memory::MemoryRegion;
use baton_types::GrantId;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::socket::{Cursor, Outgoing, read_exact, write_all};
use super::wire::{
    Commit, MAX_FRAME_SPANS, PREFIX_BYTES, PartId, Prefix, Reply, put_cancel, put_commit, put_data, put_fence,
};
use crate::engine::Host;
use crate::error::Refusal;
use crate::gate::{Gate, Pass};
use crate::metrics::Held;
use crate::{SegmentId, SpanPair, batch};

/// Parts that wait for a lane; who wants to add one waits in front of it.
const QUEUED_PARTS: usize = 128;

/// A part of a batch.
pub(super) struct Part {
    pub(super) id: PartId,
    /// Parts of the batch.
    pub(super) parts: u32,
    pub(super) grant: GrantId,
    pub(super) segment: SegmentId,
    pub(super) tag: u64,
    pub(super) source: Arc<MemoryRegion>,
    pub(super) gate: Arc<Gate>,
    pub(super) spans: Vec<SpanPair>,
    pub(super) bytes: u64,
}

/// What became of a part that was given to a lane. A part whose batch is over has none.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Its bytes are visible at the owner.
    Acknowledged,
    /// The owner does not want it.
    Refused(Refusal),
    /// The lane ended before.
    Lost(Loss),
}

/// A part was given to a lane that has ended.
#[derive(Debug, Clone)]
pub(super) struct Loss {
    pub(super) part: u32,
    pub(super) lane: u64,
    /// When the lane ended.
    pub(super) at: Instant,
    /// Whether some of the part may have left.
    pub(super) begun: bool,
    pub(super) end: LaneEnd,
}

/// Why a lane ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LaneEnd {
    /// Nothing was to do.
    Idle,
    /// The engine shuts down.
    Closing,
    /// The network, or the peer, failed.
    Failed(String),
    /// The peer broke the protocol, or says that this end did.
    Protocol(String),
}

impl From<io::Error> for LaneEnd {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// A part on its way through a lane.
pub(super) struct Sending {
    pub(super) part: Arc<Part>,
    /// Connections that earlier attempts failed on.
    pub(super) fences: Vec<u64>,
    /// Unbounded, but for each part there is at most one outcome per attempt.
    pub(super) outcome: mpsc::UnboundedSender<Outcome>,
    /// Room among the bytes in flight to this peer, until there is an outcome.
    pub(super) _in_flight: (OwnedSemaphorePermit, Held),
    /// Its share of its lane's load, until there is an outcome.
    pub(super) load: Option<LaneLoad>,
}

/// Counts a part among a lane's load.
pub(super) struct LaneLoad {
    lane: Arc<Lane>,
    bytes: u64,
}

impl LaneLoad {
    fn new(lane: &Arc<Lane>, part: &Part) -> Self {
        // One more, so that parts without bytes count too.
        let bytes = part.bytes + 1;
        lane.load.fetch_add(bytes, Relaxed);
        Self { lane: Arc::clone(lane), bytes }
    }
}

impl Drop for LaneLoad {
    fn drop(&mut self) {
        self.lane.load.fetch_sub(self.bytes, Relaxed);
    }
}

impl Sending {
    fn resolve(self, outcome: Outcome) {
        // The batch may be over.
        let _ = self.outcome.send(outcome);
    }
}

/// A lane, as those who use it see it.
pub(super) struct Lane {
    /// The connection's number.
    pub(super) id: u64,
    pub(super) opened: Instant,
    queue: mpsc::Sender<Sending>,
    /// Bytes given to the lane and not yet resolved.
    load: AtomicU64,
}

impl Lane {
    /// A lane over a connection whose handshake is done, and what runs it.
    pub(super) fn new(host: Arc<Host>, stream: TcpStream, id: u64) -> (Arc<Self>, LaneTask) {
        let (queue, waiting) = mpsc::channel(QUEUED_PARTS);
        let lane = Arc::new(Self { id, opened: Instant::now(), queue, load: AtomicU64::new(0) });
        let activity = AtomicU64::new(0);
        (Arc::clone(&lane), LaneTask { host, stream, lane, waiting, sent: Mutex::default(), activity })
    }

    pub(super) fn load(&self) -> u64 {
        self.load.load(Relaxed)
    }

    pub(super) fn is_open(&self) -> bool {
        !self.queue.is_closed()
    }

    /// Queues a part, or gives it back if the lane has ended.
    pub(super) async fn send(self: &Arc<Self>, mut sending: Sending) -> Result<(), Sending> {
        sending.load = Some(LaneLoad::new(self, &sending.part));
        self.queue.send(sending).await.map_err(|error| error.0)
    }
}

/// Runs a lane.
pub(super) struct LaneTask {
    host: Arc<Host>,
    stream: TcpStream,
    lane: Arc<Lane>,
    waiting: mpsc::Receiver<Sending>,
    /// Parts that were begun and have no outcome yet.
    sent: Mutex<HashMap<PartId, Sending>>,
    /// When something last moved, in microseconds since the lane was opened.
    activity: AtomicU64,
}

impl LaneTask {
    /// Sends until the lane ends. Every part given to it has had its outcome then.
    pub(super) async fn run(mut self) -> LaneEnd {
        let _open = Held::new(&self.host.metrics.connections_out, 1.0);
        let (_, closed) = mpsc::channel(1);
        let mut waiting = std::mem::replace(&mut self.waiting, closed);
        let end = tokio::select! {
            end = self.hear() => end,
            end = self.send(&mut waiting) => end,
            end = self.watch() => end,
            () = self.host.closed.cancelled() => LaneEnd::Closing,
        };
        waiting.close();
        let (lane, at, sent) = (self.lane.id, Instant::now(), std::mem::take(&mut *self.sent()));
        // Closed before anybody hears of the loss: a retry finds it so.
        drop(self.stream);
        let lose = |sending: Sending, begun| {
            let loss = Loss { part: sending.part.id.part, lane, at, begun, end: end.clone() };
            sending.resolve(Outcome::Lost(loss));
        };
        sent.into_values().for_each(|sending| lose(sending, true));
        while let Some(sending) = waiting.recv().await {
            lose(sending, false);
        }
        end
    }

    fn sent(&self) -> MutexGuard<'_, HashMap<PartId, Sending>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touch(&self) {
        self.activity.store(self.lane.opened.elapsed().as_micros() as u64, Relaxed);
    }

    /// Ends when nothing has moved for too long.
    async fn watch(&self) -> LaneEnd {
        let config = &self.host.config;
        let interval = config.progress_timeout.min(config.idle_timeout) / 8;
        loop {
            tokio::time::sleep(interval.clamp(Duration::from_millis(1), Duration::from_secs(1))).await;
            let still = self.lane.opened.elapsed().saturating_sub(Duration::from_micros(self.activity.load(Relaxed)));
            let busy = self.lane.load() > 0;
            if busy && still >= config.progress_timeout {
                return LaneEnd::Failed(format!("no progress for {still:.1?}"));
            }
            if !busy && still >= config.idle_timeout {
                return LaneEnd::Idle;
            }
        }
    }

    /// Takes replies.
    async fn hear(&self) -> LaneEnd {
        loop {
            let reply = match self.reply().await {
                Ok(reply) => reply,
                Err(end) => return end,
            };
            self.touch();
            match reply {
                Reply::Ack(id) => self.resolve(id, Outcome::Acknowledged),
                Reply::Refuse(id, refusal) => self.resolve(id, Outcome::Refused(refusal)),
                Reply::Progress => {}
                Reply::Fault(message) => return LaneEnd::Protocol(format!("the peer says: {message}")),
                Reply::Welcome { .. } | Reply::Reject(_) => return LaneEnd::Protocol("a second handshake".into()),
            }
        }
    }

    async fn reply(&self) -> Result<Reply, LaneEnd> {
        let mut prefix = [0; PREFIX_BYTES];
        if !read_exact(&self.stream, &mut prefix).await? {
            return Err(LaneEnd::Failed("the peer closed the connection".into()));
        }
        let protocol = |error: super::wire::WireError| LaneEnd::Protocol(error.0);
        let prefix = Prefix::decode(prefix).map_err(protocol)?;
        let mut body = vec![0; prefix.body];
        read_exact(&self.stream, &mut body).await?;
        Reply::decode(prefix, &body).map_err(protocol)
    }

    /// A part that is not known was cancelled, or refused before.
    fn resolve(&self, id: PartId, outcome: Outcome) {
        if let Some(sending) = self.forget(id) {
            sending.resolve(outcome);
        }
    }

    fn forget(&self, id: PartId) -> Option<Sending> {
        self.sent().remove(&id)
    }

    async fn send(&self, waiting: &mut mpsc::Receiver<Sending>) -> LaneEnd {
        while let Some(sending) = waiting.recv().await {
            let (part, mut head) = (Arc::clone(&sending.part), Vec::new());
            for &connection in &sending.fences {
                put_fence(&mut head, connection);
            }
            self.touch();
            self.sent().insert(part.id, sending);
            match self.send_part(&part, head).await {
                Ok(true) => {}
                Ok(false) => drop(self.forget(part.id)),
                Err(error) => return error.into(),
            }
        }
        // The queue's other end lives in `self.lane`.
        LaneEnd::Closing
    }

    /// Sends a part with its trailer. False: its batch is over, and the peer knows it.
    async fn send_part(&self, part: &Part, mut head: Vec<u8>) -> io::Result<bool> {
        let mut tail = Vec::new();
        let Part { id, parts, grant, segment, tag, bytes, .. } = *part;
        put_commit(&mut tail, &Commit { id, grant, segment, parts, bytes, tag });
        let frames = batch::cut(&part.spans, u64::from(self.host.config.frame_bytes), MAX_FRAME_SPANS);
        let last = frames.len().saturating_sub(1);
        for (i, spans) in frames.iter().enumerate() {
            let Some(pass) = part.gate.enter() else { return self.give_up(part, i > 0).await };
            put_data(&mut head, id, grant, segment, spans);
            let source = spans.iter().map(|span| (span.local_offset as usize, span.len as usize));
            let frame = Outgoing {
                head: &head,
                region: &part.source,
                payload: Cursor::new(&part.source, source),
                tail: if i == last { &tail } else { &[] },
            };
            if !self.send_frame(part, frame, pass).await? {
                return self.give_up(part, true).await;
            }
            self.host.metrics.bytes_out.increment(batch::total(spans));
            head.clear();
        }
        if frames.is_empty() {
            head.append(&mut tail);
            write_all(&self.stream, &head).await?;
        }
        Ok(true)
    }

    /// Sends a frame from the source. False: the batch was over in mid-frame. The rest of the frame has been sent from a copy, made at once, so that the source
    /// was free at once; what follows the payload has not.
    async fn send_frame(&self, part: &Part, mut frame: Outgoing<'_>, pass: Pass<'_>) -> io::Result<bool> {
        while !frame.is_done() {
            match frame.try_send(&self.stream) {
                Ok(_) => {
                    self.touch();
                    tokio::task::coop::consume_budget().await;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::select! {
                    ready = self.stream.writable() => ready?,
                    () = part.gate.closed() => break,
                },
                Err(error) => return Err(error),
            }
        }
        if frame.payload_is_done() {
            drop(pass);
            self.write(frame.tail).await?;
            return Ok(true);
        }
        let rest = frame.copy_rest();
        drop(pass);
        self.write(&rest).await?;
        Ok(false)
    }

    async fn write(&self, bytes: &[u8]) -> io::Result<()> {
        // In pieces, so that slow progress is progress.
        for piece in bytes.chunks(64 << 10) {
            write_all(&self.stream, piece).await?;
            self.touch();
        }
        Ok(())
    }

    /// Tells the peer that a batch is over, if it has seen anything of it here.
    async fn give_up(&self, part: &Part, begun: bool) -> io::Result<bool> {
        if begun {
            let mut cancel = Vec::new();
            put_cancel(&mut cancel, part.id.batch, part.grant);
            write_all(&self.stream, &cancel).await?;
        }
        Ok(false)
    }
}
