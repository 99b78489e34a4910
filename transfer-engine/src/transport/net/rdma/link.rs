//! One end of a reliable connection, and its completions.

#![allow(unsafe_code)] // waits for a raw file descriptor; see the SAFETY note

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use baton_verbs::{Completion, CompletionQueue, Endpoint, Gid, QueuePair, QueuePairConfig, Retries};
use tokio::io::unix::AsyncFd;

use super::devices::{Rail, mtu};
use super::failed;
use crate::transport::net::wire::RdmaEndpoint;

/// Work requests under way, and receives posted.
pub(super) const DEPTH: u32 = 256;
/// Completions taken at once.
const POLLED: usize = 64;
/// Reads under way at once.
const MAX_READS: u8 = 16;

struct QueueFd(Arc<CompletionQueue>);

impl AsRawFd for QueueFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A queue pair and its completion queue.
pub(super) struct Link {
    // Dropped first: nothing is under way once it is gone.
    pub(super) queue_pair: QueuePair,
    events: AsyncFd<QueueFd>,
    rail: Arc<Rail>,
    psn: u32,
    endpoint: RdmaEndpoint,
}

impl Link {
    /// A queue pair that can be connected.
    pub(super) fn new(rail: &Arc<Rail>) -> io::Result<Self> {
        let queue = CompletionQueue::new(&rail.context, DEPTH * 2).map_err(failed)?;
        let max_sge = rail.context.max_sge().min(16);
        let config = QueuePairConfig { send_depth: DEPTH, receive_depth: DEPTH, max_sge, max_inline: 0 };
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
        // SAFETY: the descriptor is the queue's own, which the value keeps open, and it does not change.
        let events = unsafe { AsyncFd::register(QueueFd(queue)) }?;
        Ok(Self { queue_pair, events, rail: Arc::clone(rail), psn, endpoint })
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
        let (pair, retries) = (&self.queue_pair, Retries::default());
        pair.ready_to_receive(path, port.active_mtu, &remote, self.endpoint.max_reads, retries).map_err(failed)?;
        pair.ready_to_send(self.psn, remote.max_reads.min(self.endpoint.max_reads), retries).map_err(failed)
    }

    /// What has completed; waits until something has. May be dropped while it waits.
    pub(super) async fn completed(&self) -> io::Result<Vec<Completion>> {
        let queue = &self.events.get_ref().0;
        loop {
            let found = self.poll()?;
            if !found.is_empty() {
                return Ok(found);
            }
            queue.arm().map_err(failed)?;
            // What came between the look and the arming makes no event.
            let found = self.poll()?;
            if !found.is_empty() {
                return Ok(found);
            }
            let mut ready = self.events.readable().await?;
            queue.drain_events().map_err(failed)?;
            ready.clear_ready();
        }
    }

    fn poll(&self) -> io::Result<Vec<Completion>> {
        let mut completions = [Completion::EMPTY; POLLED];
        let found = self.events.get_ref().0.poll(&mut completions).map_err(failed)?;
        Ok(completions[..found].to_vec())
    }
}
