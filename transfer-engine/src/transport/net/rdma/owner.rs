//! The owner's end of an RDMA lane.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

use baton_types::GrantId;
use baton_verbs::CompletionStatus;
use futures::future::{BoxFuture, OptionFuture};
use tokio::sync::mpsc::Permit;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::link::{End, Link, OWNER_DEPTH};
use super::{Devices, PROBE, failed};
use crate::SegmentId;
use crate::error::{Refusal, RefusalReason};
use crate::grant::{Access, Arrival};
use crate::transport::net::owner::receiver::{Receiver, invalid};
use crate::transport::net::wire::{Commit, Expect, Frame, MAX_OPENED_RANGES, RdmaEndpoint, Reply, Target};

/// Receives are posted again when as many have been used.
const REPOSTED: usize = 16;
/// Trailers that may wait for their immediates; writers keep below it.
const MAX_EXPECTED: usize = 4096;
/// Longest wait for the receives of a queue pair in the error state to be flushed: a local matter
/// of moments.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Where a writer's bytes land, past the processor.
pub(crate) struct Landing {
    link: Link,
    used: usize,
    immediates: VecDeque<u32>,
    expected: VecDeque<Expect>,
    /// Grants that are being ended, and who waits for that.
    revoking: HashMap<GrantId, Vec<oneshot::Sender<()>>>,
}

impl Landing {
    /// Makes and connects this end.
    pub(crate) fn accept(
        devices: &Devices,
        device: [u8; 16],
        remote: &RdmaEndpoint,
    ) -> io::Result<(Self, RdmaEndpoint)> {
        let rail = devices.at(device).ok_or_else(|| failed("no such device here"))?;
        let link = Link::new(&rail, End::Owner)?;
        link.queue_pair.post_receives(0, OWNER_DEPTH as usize).map_err(failed)?;
        link.connect(remote)?;
        let endpoint = link.endpoint();
        let (immediates, expected) = Default::default();
        Ok((Self { link, used: 0, immediates, expected, revoking: HashMap::new() }, endpoint))
    }

    /// Waits until something has landed. May be dropped while it waits.
    pub(crate) async fn landed(&mut self) -> io::Result<()> {
        for completion in self.link.completed().await? {
            if !completion.status.is_success() {
                return Err(failed(completion));
            }
            self.used += 1;
            self.immediates.extend(completion.immediate.filter(|immediate| *immediate != PROBE));
        }
        if self.immediates.len() > MAX_EXPECTED {
            return Err(invalid("more immediates than may be under way"));
        }
        if self.used >= REPOSTED {
            self.link.queue_pair.post_receives(0, self.used).map_err(failed)?;
            self.used = 0;
        }
        Ok(())
    }

    fn expect(&mut self, expect: Expect) -> io::Result<()> {
        if self.expected.len() >= MAX_EXPECTED {
            return Err(invalid("more parts announced than may be under way"));
        }
        self.expected.push_back(expect);
        Ok(())
    }

    /// Whether a part is here and announced.
    fn has_part(&self) -> bool {
        !self.immediates.is_empty() && !self.expected.is_empty()
    }

    /// The next part that is here and announced; both come in order.
    fn next_part(&mut self) -> io::Result<Option<Expect>> {
        let (Some(immediate), Some(expect)) = (self.immediates.front(), self.expected.front()) else { return Ok(None) };
        if *immediate != expect.sequence {
            return Err(invalid(format!("part {} was announced, but {immediate} came", expect.sequence)));
        }
        self.immediates.pop_front();
        Ok(self.expected.pop_front())
    }

    /// Ends all landing: the queue pair goes to the error state, and its receives are flushed. A
    /// device flushes them when it has put its last packet down.
    pub(crate) async fn fence(self) {
        if let Err(error) = self.link.queue_pair.to_error() {
            // Dropped below, which ends it as well.
            tracing::warn!(%error, "cannot move a queue pair to the error state");
            return;
        }
        // One at least is there to be flushed, whatever has been used.
        if let Err(error) = self.link.queue_pair.post_receives(0, 1)
            && !error.full
        {
            tracing::warn!(%error, "cannot post a receive to a queue pair in the error state");
        }
        let limit = baton_runtime::now() + FLUSH_LIMIT;
        let flushed = async {
            loop {
                match self.link.completed().await {
                    Ok(all) if all.iter().any(|c| c.status == CompletionStatus::Flushed) => return,
                    Ok(_) => {}
                    Err(error) => return tracing::warn!(%error, "completions of a queue pair in the error state"),
                }
            }
        };
        if timeout_at(limit.into(), flushed).await.is_err() {
            tracing::warn!("the receives of a queue pair in the error state were not flushed in {FLUSH_LIMIT:?}");
        }
    }
}

/// What the loop of an RDMA connection wakes up for.
enum Event<'a> {
    Frame(Option<Frame>),
    Landed,
    Revoke(GrantId, oneshot::Sender<()>),
    /// There is room for an arrival.
    Room(Option<Permit<'a, Arrival>>),
    /// The connection that a frame asked to be fenced is.
    Fenced,
}

impl Receiver<'_> {
    /// Serves an RDMA connection until the writer closes.
    pub(crate) async fn serve_rdma(&mut self, landing: &mut Option<Landing>) -> io::Result<()> {
        let Some(Frame::Endpoint { device, endpoint }) = self.next_frame().await? else {
            return Err(invalid("an RDMA connection begins with ENDPOINT"));
        };
        let devices = self.host.rdma.get().ok_or_else(|| invalid("no RDMA here"))?;
        let mut revokes = self.registered.take_revokes().ok_or_else(|| invalid("a second ENDPOINT"))?;
        let (here, ours) = Landing::accept(devices, device, &endpoint).map_err(|e| invalid(e.to_string()))?;
        let here = landing.insert(here);
        self.reply(&Reply::Connected(ours)).await?;
        // Frames after a FENCE wait for it, and parts that are here for room to tell of them.
        // Nothing else does: who revokes a grant waits for an answer.
        let mut fencing: Option<BoxFuture<'static, ()>> = None;
        let host = self.host;
        loop {
            let event = tokio::select! {
                Some((grant, fenced)) = revokes.recv() => Event::Revoke(grant, fenced),
                landed = here.landed() => landed.map(|()| Event::Landed)?,
                room = host.grants.room(), if here.has_part() => Event::Room(room),
                Some(()) = OptionFuture::from(fencing.as_mut()) => Event::Fenced,
                frame = self.next_frame(), if fencing.is_none() => Event::Frame(frame?),
            };
            // Other connections' tasks get their turn, whatever this one sends.
            tokio::task::coop::consume_budget().await;
            self.registered.touch();
            match event {
                Event::Frame(None) => return Ok(()),
                Event::Frame(Some(Frame::Fence { connection })) => fencing = Some(self.fence(connection)?),
                Event::Frame(Some(frame)) => self.on_rdma_frame(here, frame).await?,
                Event::Fenced => fencing = None,
                Event::Landed => {}
                Event::Room(room) => {
                    if let Some(Expect { commit, .. }) = here.next_part()? {
                        self.metrics().bytes_in.increment(commit.bytes);
                        self.settle(room, commit).await?;
                    }
                }
                Event::Revoke(grant, fenced) => {
                    here.revoking.entry(grant).or_default().push(fenced);
                    self.reply(&Reply::Revoke { grant }).await?;
                }
            }
        }
    }

    async fn on_rdma_frame(&mut self, here: &mut Landing, frame: Frame) -> io::Result<()> {
        match frame {
            Frame::Expect(expect) => here.expect(expect),
            Frame::Cancel { batch, grant } => {
                self.on_cancel(batch, grant);
                Ok(())
            }
            Frame::Commit(commit) => self.on_question(commit).await,
            Frame::Check(read) => self.on_check(read).await,
            Frame::Map { segment } => self.on_map_rdma(here, segment).await,
            Frame::Open { grant, segment } => self.on_open(grant, segment).await,
            Frame::Revoked { grant } => {
                self.registered.forget_grant(grant);
                // Who waits may have gone.
                let waiting = here.revoking.remove(&grant).unwrap_or_default();
                for fenced in waiting {
                    let _ = fenced.send(());
                }
                Ok(())
            }
            _ => Err(self.misplaced()),
        }
    }

    /// The writer has missed the answer to a part, and its grant has ended: has it arrived?
    async fn on_question(&mut self, commit: Commit) -> io::Result<()> {
        let Target { id, grant, segment } = commit.target;
        if self.host.grants.has_arrived(grant, &self.key(id.batch)) {
            return self.reply(&Reply::Ack(id)).await;
        }
        let writer = self.registered.writer();
        let found = self.host.grants.find(grant);
        let allowed = found.and_then(|grant| grant.check(Access::Write, writer, segment, baton_runtime::now()));
        // No peer that keeps to the protocol asks about one that lives.
        let lives = || Refusal::new(RefusalReason::Revoked, format!("grant {} was said to have ended", grant.0));
        self.refuse(id, allowed.err().unwrap_or_else(lives)).await
    }

    async fn on_map_rdma(&mut self, here: &Landing, segment: SegmentId) -> io::Result<()> {
        let registration = here.link.rail().registration(segment);
        let (bytes, address, key) = registration.map_or((0, 0, 0), |r| (r.len() as u64, r.address(), r.remote_key()));
        self.reply(&Reply::Mapped { segment, bytes, address, key }).await
    }

    /// Tells the ranges of a grant. From then on the grant does not end before the writer has said
    /// REVOKED, or this connection is fenced.
    async fn on_open(&mut self, grant: GrantId, segment: SegmentId) -> io::Result<()> {
        // First, so that a revocation either finds it here or has closed the grant by the next
        // line.
        let first = self.registered.remember_grant(grant);
        let opened = self.host.grants.find(grant).and_then(|grant| {
            let writer = self.registered.writer();
            let now = baton_runtime::now();
            let allowed = grant.check(grant.access(), writer, segment, now);
            allowed.map(|()| (grant.access(), grant.ranges().to_vec()))
        });
        match opened {
            Ok((access, ranges)) => {
                let write = access == Access::Write;
                let mut rest = ranges.as_slice();
                loop {
                    let (now, later) = rest.split_at(rest.len().min(MAX_OPENED_RANGES));
                    let opened = Reply::Opened { grant, write, more: !later.is_empty(), ranges: now.to_vec() };
                    self.reply(&opened).await?;
                    rest = later;
                    if rest.is_empty() {
                        return Ok(());
                    }
                }
            }
            Err(refusal) => {
                // What was posted after an earlier OPEN may still be under way.
                if first {
                    self.registered.forget_grant(grant);
                }
                self.reply(&Reply::Closed { grant, refusal }).await
            }
        }
    }
}
