//! One end of a reliable connection, and its completions.

use std::io;
use std::sync::Arc;

use baton_verbs::{Completion, CompletionQueue, Endpoint, Gid, QueuePair, QueuePairConfig, Retries};

use super::devices::{Events, Rail, mtu};
use super::failed;
use crate::transport::net::wire::RdmaEndpoint;

/// Work requests under way at the writer. Devices round queues up to a power of two, with one place
/// that stays empty.
pub(super) const WRITER_DEPTH: u32 = 31;
/// Receives posted at the owner: one is used for each part. A writer that is faster is told to try
/// again by the device.
pub(super) const OWNER_DEPTH: u32 = 63;
/// Most local pieces of a work request: with one more, a request takes twice the room.
const MAX_SGE: u32 = 3;
/// Completions taken at once.
const POLLED: usize = 64;
/// Reads under way at once.
const MAX_READS: u8 = 16;

/// Which end of a lane. Queues are memory, pinned for each peer: each end has those that it uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Writer,
    Owner,
}

impl End {
    /// The queue pair's queues. One is never used, and as small as can be.
    fn queues(self, max_sge: u32) -> QueuePairConfig {
        match self {
            Self::Writer => QueuePairConfig { send_depth: WRITER_DEPTH, receive_depth: 1, max_sge, max_inline: 0 },
            Self::Owner => QueuePairConfig { send_depth: 1, receive_depth: OWNER_DEPTH, max_sge: 1, max_inline: 0 },
        }
    }

    /// Completions there may be, those of requests that are flushed included.
    fn completions(self) -> u32 {
        match self {
            Self::Writer => WRITER_DEPTH,
            Self::Owner => OWNER_DEPTH,
        }
    }
}

/// A queue pair and its completion queue.
pub(super) struct Link {
    // Dropped first: nothing is under way once it is gone.
    pub(super) queue_pair: QueuePair,
    queue: Arc<CompletionQueue>,
    events: Events,
    rail: Arc<Rail>,
    psn: u32,
    endpoint: RdmaEndpoint,
}

impl Link {
    /// A queue pair that can be connected.
    pub(super) fn new(rail: &Arc<Rail>, end: End) -> io::Result<Self> {
        let config = end.queues(rail.context.max_sge().min(MAX_SGE));
        let events = rail.events();
        let queue = CompletionQueue::new(rail.channel(), end.completions(), events.token).map_err(failed)?;
        let queue_pair = QueuePair::new(&rail.domain, &queue, &queue, config).map_err(failed)?;
        let (path, port) = rail.path().map_err(failed)?;
        queue_pair.init(path.port).map_err(failed)?;
        // Any will do that an earlier connection of the same number did not have.
        let psn = (queue_pair.qp_num() ^ std::process::id()).wrapping_mul(0x9e37_79b9) >> 8;
        let endpoint = RdmaEndpoint {
            gid: rail.gid.0,
            qp_num: queue_pair.qp_num(),
            psn,
            lid: port.lid,
            mtu: port.active_mtu.bytes() as u16,
            max_reads: rail.context.max_reads().min(MAX_READS),
        };
        Ok(Self { queue_pair, queue, events, rail: Arc::clone(rail), psn, endpoint })
    }

    /// For the peer.
    pub(super) fn endpoint(&self) -> RdmaEndpoint {
        self.endpoint
    }

    pub(super) fn rail(&self) -> &Rail {
        &self.rail
    }

    pub(super) fn max_sge(&self) -> usize {
        self.queue_pair.config().max_sge as usize
    }

    /// Connects to the peer's queue pair: packets may come and go.
    pub(super) fn connect(&self, remote: &RdmaEndpoint) -> io::Result<()> {
        let remote = Endpoint {
            qp_num: remote.qp_num,
            psn: remote.psn,
            gid: Gid(remote.gid),
            lid: remote.lid,
            mtu: mtu(remote.mtu).map_err(failed)?,
            max_reads: remote.max_reads,
        };
        let (path, port) = self.rail.path().map_err(failed)?;
        let pair = &self.queue_pair;
        let retries = Retries::default();
        pair.ready_to_receive(path, port.active_mtu, &remote, self.endpoint.max_reads, retries).map_err(failed)?;
        pair.ready_to_send(self.psn, remote.max_reads.min(self.endpoint.max_reads), retries).map_err(failed)
    }

    /// What has completed; waits until something has. May be dropped while it waits.
    pub(super) async fn completed(&self) -> io::Result<Vec<Completion>> {
        loop {
            let found = self.poll()?;
            if !found.is_empty() {
                return Ok(found);
            }
            self.queue.arm().map_err(failed)?;
            // What came between the look and the arming makes no event.
            let found = self.poll()?;
            if !found.is_empty() {
                return Ok(found);
            }
            self.events.came.notified().await;
        }
    }

    fn poll(&self) -> io::Result<Vec<Completion>> {
        let mut completions = [Completion::EMPTY; POLLED];
        let found = self.queue.poll(&mut completions).map_err(failed)?;
        Ok(completions[..found].to_vec())
    }
}
