//! The writer's end of an RDMA lane.

#![allow(unsafe_code)] // posts work requests over registered memory; see the SAFETY note

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_types::GrantId;
use baton_verbs::{LocalSpan, MemoryRegistration, RemoteSpan, WorkRequests};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::timeout;

use super::link::{End, Link, WRITER_DEPTH};
use super::{Devices, PROBE, RdmaAddress, failed};
use crate::batch::Op;
use crate::error::{Refusal, RefusalReason};
use crate::fence_guard::{FenceGuard, OwnedPass};
use crate::grant::covers;
use crate::transport::net::wire::stream::Stream;
use crate::transport::net::wire::{Expect, Frame, PartId, Reply};
use crate::transport::net::writer::carrier::{Carrier, FollowUp};
use crate::transport::net::writer::lane::LaneTask;
use crate::transport::net::writer::part::{Carried, LaneEnd, Part, too_short};
use crate::transport::net::writer::route::read_reply;
use crate::{SegmentId, SpanPair};

/// Work requests posted with one call; the last of them is signalled.
const POSTED_AT_ONCE: usize = WRITER_DEPTH as usize / 4;
/// A batch that is over waits as long for the device to leave its memory alone; then its lane ends,
/// which makes it.
const LINGER: Duration = Duration::from_millis(250);

/// The writer's end.
pub(crate) struct RdmaCarrier {
    link: Link,
    state: Mutex<State>,
    /// Something in `state` has changed.
    changed: Notify,
    /// What follows from completions; at most one frame per part or grant.
    follow_ups: UnboundedSender<FollowUp>,
    /// The other end, until the lane takes it.
    to_follow: UnboundedReceiver<FollowUp>,
}

struct State {
    requests: WorkRequests,
    /// Work requests posted, and completed: they complete in order.
    posted: u64,
    done: u64,
    under_way: VecDeque<Posted>,
    grants: HashMap<GrantId, Opened>,
    revoking: Vec<GrantId>,
    /// `None`: the owner has no such segment for rdma.
    keys: HashMap<SegmentId, Option<RemoteKey>>,
    next_sequence: u32,
}

/// Work requests that were posted with one call.
struct Posted {
    /// Its last one's number plus one.
    end: u64,
    id: PartId,
    grant: GrantId,
    /// The part is read with it: the owner is to be asked.
    read: bool,
    pass: OwnedPass,
    fence: Arc<FenceGuard>,
}

enum Opened {
    Requested { segment: SegmentId, ranges: Vec<Range<u64>> },
    Open(Right),
    Closed(Refusal),
}

/// What a grant allows.
#[derive(Clone)]
struct Right {
    segment: SegmentId,
    op: Op,
    /// Sorted, disjoint, not touching.
    ranges: Arc<Vec<Range<u64>>>,
}

impl Right {
    /// What the owner would say of a part, if it saw the bytes.
    fn check(&self, part: &Part) -> Result<(), Refusal> {
        let grant = part.grant.0;
        if self.op != part.op {
            let message = format!("grant {grant} is to {:?}, not to {:?}", self.op, part.op).to_lowercase();
            return Err(Refusal::new(RefusalReason::WrongAccess, message));
        }
        if self.segment != part.segment {
            let message = format!("grant {grant} is for segment {}, not {}", self.segment, part.segment);
            return Err(Refusal::new(RefusalReason::WrongSegment, message));
        }
        let Some(span) = part.spans.iter().find(|span| !covers(&self.ranges, span.remote_offset, span.len)) else {
            return Ok(());
        };
        let message = format!("{} bytes at {} are not granted by grant {grant}", span.len, span.remote_offset);
        Err(Refusal::new(RefusalReason::OutOfRange, message))
    }
}

#[derive(Clone, Copy)]
struct RemoteKey {
    address: u64,
    bytes: u64,
    key: u32,
}

/// Sets a connection up, over the control connection, whose handshake is done; and tries it.
pub(crate) async fn connect(devices: &Devices, address: &RdmaAddress, stream: &Stream) -> io::Result<RdmaCarrier> {
    let rail = devices.toward(address.gid).ok_or_else(|| failed("no RDMA device here"))?;
    let link = Link::new(&rail, End::Writer)?;
    let mut frame = Vec::new();
    Frame::Endpoint { device: address.gid, endpoint: link.endpoint() }.encode(&mut frame);
    stream.write_all(&frame).await?;
    let remote = match read_reply(stream).await? {
        Reply::Connected(remote) => remote,
        Reply::Fault(reason) => return Err(failed(reason)),
        other => return Err(failed(format!("it answers ENDPOINT with {other:?}"))),
    };
    link.connect(&remote)?;
    let requests = WorkRequests::new(POSTED_AT_ONCE, link.max_sge());
    let (follow_ups, to_follow) = mpsc::unbounded_channel();
    let (under_way, grants, revoking, keys) = Default::default();
    let state = State { requests, posted: 0, done: 0, under_way, grants, revoking, keys, next_sequence: 0 };
    let carrier = RdmaCarrier { link, state: Mutex::new(state), changed: Notify::new(), follow_ups, to_follow };
    carrier.probe().await?;
    Ok(carrier)
}

impl RdmaCarrier {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes no bytes and waits for the completion: the rail carries packets both ways.
    async fn probe(&self) -> io::Result<()> {
        {
            let mut state = self.state();
            let wr_id = state.posted;
            state.posted += 1;
            state.requests.write(wr_id, &[], RemoteSpan { address: 0, key: 0 }, Some(PROBE), true).map_err(failed)?;
            // SAFETY: the request names no memory.
            unsafe { self.link.queue_pair.post(&mut state.requests) }.map_err(failed)?;
            state.requests.clear();
        }
        for completion in self.link.completed().await? {
            if !completion.status.is_success() {
                return Err(failed(completion));
            }
        }
        self.state().done = 1;
        Ok(())
    }

    /// Confirms the end of grants under which nothing is under way.
    fn follow(&self, state: &mut State) {
        let State { revoking, under_way, .. } = state;
        revoking.retain(|grant| {
            let busy = under_way.iter().any(|posted| posted.grant == *grant);
            if !busy {
                // The lane may be ending.
                let _ = self.follow_ups.send(FollowUp::Revoked(*grant));
            }
            busy
        });
    }

    /// Waits until `ready` yields something, looking again whenever the state has changed.
    async fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(value) = ready(&mut self.state()) {
                return value;
            }
            changed.await;
        }
    }

    /// The ranges of a grant; asks for them the first time, or again if `anew`: the answer then
    /// comes after all that was sent before.
    async fn open(&self, lane: &LaneTask, part: &Part, anew: bool) -> io::Result<Result<Right, Refusal>> {
        let grant = part.grant;
        let ask = {
            let mut state = self.state();
            if anew {
                state.grants.remove(&grant);
            }
            let ask = !state.grants.contains_key(&grant);
            state
                .grants
                .entry(grant)
                .or_insert_with(|| Opened::Requested { segment: part.segment, ranges: Vec::new() });
            ask
        };
        if ask {
            lane.send_frame(&Frame::Open { grant, segment: part.segment }).await?;
        }
        let answer = self.wait(|state| match state.grants.get(&grant) {
            Some(Opened::Open(right)) => Some(Ok(right.clone())),
            Some(Opened::Closed(refusal)) => {
                let refusal = refusal.clone();
                state.grants.remove(&grant);
                Some(Err(refusal))
            }
            Some(Opened::Requested { .. }) => None,
            None => Some(Err(ended(grant))),
        });
        Ok(answer.await)
    }

    async fn key(&self, lane: &LaneTask, segment: SegmentId) -> io::Result<RemoteKey> {
        let known = self.state().keys.contains_key(&segment);
        if !known {
            lane.send_frame(&Frame::Map { segment }).await?;
        }
        let key = self.wait(|state| state.keys.get(&segment).copied()).await;
        let missing = || format!("the owner has not registered segment {segment} with its devices");
        key.ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, missing()))
    }
}

impl State {
    fn on_opened(&mut self, grant: GrantId, write: bool, more: bool, ranges: Vec<Range<u64>>) -> Result<(), String> {
        let Some(Opened::Requested { segment, ranges: known }) = self.grants.get_mut(&grant) else {
            return Err(format!("OPENED of grant {}, which was not asked for", grant.0));
        };
        known.extend(ranges);
        if !more {
            let segment = *segment;
            let ranges = Arc::new(std::mem::take(known));
            let op = if write { Op::Write } else { Op::Read };
            self.grants.insert(grant, Opened::Open(Right { segment, op, ranges }));
        }
        Ok(())
    }
}

fn ended(grant: GrantId) -> Refusal {
    Refusal::new(RefusalReason::Revoked, format!("grant {} has ended", grant.0))
}

/// Work requests: remote neighbours are joined, as many local pieces as the device takes.
fn requests(spans: &[SpanPair], max_sge: usize) -> Vec<&[SpanPair]> {
    let mut all = Vec::new();
    let mut rest = spans;
    while let Some(first) = rest.first() {
        let mut end = first.remote_offset + first.len;
        let joined = rest[1..].iter().take(max_sge - 1).take_while(|span| {
            let next = span.remote_offset == end;
            end += span.len;
            next
        });
        let (request, later) = rest.split_at(1 + joined.count());
        all.push(request);
        rest = later;
    }
    all
}

impl Carrier for RdmaCarrier {
    async fn carry_part(&self, lane: &LaneTask, part: &Part, head: Vec<u8>) -> io::Result<Carried> {
        // What was sent elsewhere is fenced before anything is posted: the owner answers OPEN after
        // that.
        lane.stream.write_all(&head).await?;
        let right = self.open(lane, part, !head.is_empty()).await?;
        let right = match right {
            Ok(right) => right,
            Err(refusal) => return refused(lane, part, refusal, !head.is_empty()).await,
        };
        if let Err(refusal) = right.check(part) {
            return lane.refuse(part, refusal);
        }
        let key = self.key(lane, part.segment).await?;
        if part.spans.iter().any(|span| span.remote_offset + span.len > key.bytes) {
            return lane.refuse(part, too_short(part.segment));
        }
        let registration = self.link.rail().registration(part.local_segment);
        let missing =
            || io::Error::new(io::ErrorKind::Unsupported, "the local memory is not registered with the devices");
        let registration = registration.ok_or_else(missing)?;
        match self.post_part(lane, part, &registration, key).await? {
            Posting::Done => Ok(Carried::Sent),
            Posting::BatchOver => lane.give_up(part, true).await,
            Posting::GrantEnded => refused(lane, part, ended(part.grant), !head.is_empty()).await,
        }
    }

    fn on_reply(&self, _: &LaneTask, reply: Reply) -> Result<(), String> {
        let mut state = self.state();
        match reply {
            Reply::Mapped { segment, bytes, address, key } => {
                state.keys.insert(segment, (bytes > 0).then_some(RemoteKey { address, bytes, key }));
            }
            Reply::Opened { grant, write, more, ranges } => state.on_opened(grant, write, more, ranges)?,
            Reply::Closed { grant, refusal } => {
                state.grants.insert(grant, Opened::Closed(refusal));
            }
            Reply::Revoke { grant } => {
                state.grants.remove(&grant);
                state.revoking.push(grant);
                self.follow(&mut state);
            }
            other => return Err(format!("{other:?} on an RDMA connection")),
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    async fn completions(&self, lane: &LaneTask) -> LaneEnd {
        let mut lingering = None;
        loop {
            match timeout(LINGER / 2, self.link.completed()).await {
                Err(_) => {}
                Ok(Err(error)) => return error.into(),
                Ok(Ok(all)) => {
                    lane.touch();
                    for completion in all {
                        if !completion.status.is_success() {
                            return LaneEnd::Failed(completion.to_string());
                        }
                        self.on_completion(lane, completion.wr_id + 1);
                    }
                    self.changed.notify_waiters();
                }
            }
            // A batch that is over must get its memory back, whatever the network does.
            let over = self.state().under_way.iter().any(|posted| posted.fence.is_closed());
            lingering = over.then(|| lingering.unwrap_or_else(baton_runtime::now));
            if lingering.is_some_and(|since| since.elapsed() > LINGER) {
                return LaneEnd::Failed("the device holds on to the memory of a batch that is over".into());
            }
        }
    }

    fn follow_ups(&mut self) -> UnboundedReceiver<FollowUp> {
        std::mem::replace(&mut self.to_follow, mpsc::unbounded_channel().1)
    }
}

/// The grant of a part has ended. If the part has been sent before, its answer may be what was
/// lost: the owner is asked.
async fn refused(lane: &LaneTask, part: &Part, refusal: Refusal, again: bool) -> io::Result<Carried> {
    if !again || part.op == Op::Read {
        return lane.refuse(part, refusal);
    }
    lane.send_frame(&Frame::Commit(part.trailer())).await?;
    Ok(Carried::Sent)
}

/// What became of posting a part.
enum Posting {
    Done,
    BatchOver,
    GrantEnded,
}

impl RdmaCarrier {
    /// Posts a part, call by call, as there is room.
    async fn post_part(
        &self,
        lane: &LaneTask,
        part: &Part,
        registration: &MemoryRegistration,
        key: RemoteKey,
    ) -> io::Result<Posting> {
        let requests = requests(&part.spans, self.link.max_sge());
        let mut calls: Vec<_> = requests.chunks(POSTED_AT_ONCE).collect();
        if calls.is_empty() {
            calls.push(&[]);
        }
        let last = calls.len() - 1;
        let mut sequence = None;
        for (i, call) in calls.into_iter().enumerate() {
            let count = call.len().max(1) as u64;
            let room = |state: &mut State| (state.posted - state.done + count <= u64::from(WRITER_DEPTH)).then_some(());
            tokio::select! {
                () = self.wait(room) => {}
                () = part.fence.closed() => return Ok(Posting::BatchOver),
            }
            let Some(pass) = part.fence.enter_owned() else { return Ok(Posting::BatchOver) };
            let mut state = self.state();
            if !matches!(state.grants.get(&part.grant), Some(Opened::Open(_))) {
                return Ok(Posting::GrantEnded);
            }
            let immediate = (i == last && part.op == Op::Write).then(|| state.take_sequence());
            sequence = immediate.or(sequence);
            state.fill(part.op, call, registration, key, immediate)?;
            // SAFETY: the pass is kept with the request until its completion, or until the queue
            // pair is dropped with the lane: meanwhile the batch is not over, so its caller leaves
            // the local spans alone, and the registrations live as long as the device.
            unsafe { self.link.queue_pair.post(&mut state.requests) }.map_err(failed)?;
            state.posted += count;
            let end = state.posted;
            let read = i == last && part.op == Op::Read;
            let id = part.id;
            let grant = part.grant;
            let fence = Arc::clone(&part.fence);
            state.under_way.push_back(Posted { end, id, grant, read, pass, fence });
        }
        lane.touch();
        if let Some(sequence) = sequence {
            lane.send_frame(&Frame::Expect(Expect { sequence, commit: part.trailer() })).await?;
            lane.host.metrics.of(lane.kind()).bytes_out.increment(part.bytes);
        }
        Ok(Posting::Done)
    }

    fn on_completion(&self, lane: &LaneTask, done: u64) {
        let mut state = self.state();
        state.done = state.done.max(done);
        while state.under_way.front().is_some_and(|posted| posted.end <= done) {
            let Some(Posted { id, read, pass, .. }) = state.under_way.pop_front() else { break };
            drop(pass);
            if read {
                // The lane may be ending.
                let _ = self.follow_ups.send(FollowUp::Check(id));
            }
        }
        self.follow(&mut state);
        drop(state);
        lane.touch();
    }
}

impl State {
    fn take_sequence(&mut self) -> u32 {
        let sequence = self.next_sequence;
        self.next_sequence = if sequence + 1 == PROBE { 0 } else { sequence + 1 };
        sequence
    }

    /// Makes the work requests of one call; the last one is signalled, and has the immediate if
    /// there is one.
    fn fill(
        &mut self,
        op: Op,
        call: &[&[SpanPair]],
        registration: &MemoryRegistration,
        key: RemoteKey,
        immediate: Option<u32>,
    ) -> io::Result<()> {
        self.requests.clear();
        let first = self.posted;
        for (i, spans) in call.iter().enumerate() {
            let wr_id = first + i as u64;
            let is_last = i + 1 == call.len();
            let local =
                |span: &SpanPair| LocalSpan { registration, offset: span.local_offset as usize, len: span.len as u32 };
            let locals: Vec<_> = spans.iter().map(local).collect();
            let remote = RemoteSpan { address: key.address + spans[0].remote_offset, key: key.key };
            let added = match op {
                Op::Write => self.requests.write(wr_id, &locals, remote, immediate.filter(|_| is_last), is_last),
                Op::Read => self.requests.read(wr_id, &locals, remote, is_last),
            };
            added.map_err(failed)?;
        }
        if call.is_empty() {
            let nowhere = RemoteSpan { address: key.address, key: key.key };
            self.requests.write(first, &[], nowhere, immediate, true).map_err(failed)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_remote_spans_share_a_work_request() {
        let span = |local_offset, remote_offset, len| SpanPair { local_offset, remote_offset, len };
        let spans = [span(50, 0, 10), span(0, 10, 10), span(90, 20, 5), span(10, 30, 5), span(70, 35, 5)];
        let shape = |max| requests(&spans, max).iter().map(|request| request.len()).collect::<Vec<_>>();
        assert_eq!(shape(4), [3, 2]);
        assert_eq!(shape(2), [2, 1, 2]);
        assert_eq!(shape(1), [1, 1, 1, 1, 1]);
        let ranges = [0..10, 20..40];
        let inside = |span: &SpanPair| covers(&ranges, span.remote_offset, span.len);
        assert!(inside(&spans[0]) && !inside(&spans[1]) && inside(&spans[4]));
        assert!(!inside(&span(0, 38, 3)));
    }
}
