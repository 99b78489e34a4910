//! A network within one process, with faults on demand. Grants, fencing, notifications and errors
//! are the real ones.

#![allow(unsafe_code)] // copies between two registered regions; see the SAFETY note

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use baton_memory::MemoryRegion;
use baton_types::NodeId;
use tokio::sync::Notify;

use crate::batch::Op;
use crate::engine::Host;
use crate::error::{Refusal, RefusalReason};
use crate::grant::{Admission, BatchKey, Grant, RemoteSpan, Trailer};
use crate::transport::{CarryFuture, Job, Transport};
use crate::{SegmentId, SpanPair, TransferError, TransportAddress, TransportKind, batch};

/// Bytes that move without a break.
const STEP_BYTES: u64 = 64 << 10;
/// How long a batch is held back for another to overtake it.
const REORDER_WAIT: Duration = Duration::from_millis(20);

/// What goes wrong on a [`FakeNetwork`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FakeFaults {
    /// Every batch waits this long first.
    pub delay: Duration,
    /// As many of the next batches are lost without a word: they end at their deadline.
    pub drop_batches: u32,
    /// The next batch loses its connection after this many bytes have landed.
    pub fail_after_bytes: Option<u64>,
    /// Each batch is held back until another has overtaken it, or 20 ms have passed.
    pub reorder: bool,
    /// Nodes that cannot be reached.
    pub unreachable: HashSet<NodeId>,
}

#[derive(Default)]
struct Network {
    hosts: HashMap<NodeId, Weak<Host>>,
    faults: FakeFaults,
}

/// Connects the engines made with [`TransferEngine::fake`](crate::TransferEngine::fake). Cheap to
/// clone.
#[derive(Clone, Default)]
pub struct FakeNetwork {
    network: Arc<Mutex<Network>>,
    overtaken: Arc<Notify>,
}

impl FakeNetwork {
    /// A network without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes what goes wrong from now on.
    pub fn set_faults(&self, change: impl FnOnce(&mut FakeFaults)) {
        change(&mut self.lock().faults);
    }

    fn lock(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn host(&self, job: &Job) -> Result<Arc<Host>, TransferError> {
        let network = self.lock();
        let node = job.owner.node.clone();
        let reachable = !network.faults.unreachable.contains(&node);
        let host = network.hosts.get(&node).filter(|_| reachable).and_then(Weak::upgrade);
        let Some(host) = host.filter(|host| !host.closed.is_cancelled()) else {
            let reason = "it is not on the network".into();
            return Err(TransferError::PeerUnreachable { address: node.to_string(), node, reason });
        };
        let expected = job.owner.generation;
        let found = host.config.generation;
        if expected == found { Ok(host) } else { Err(TransferError::StaleGeneration { node, expected, found }) }
    }

    /// The faults of one batch: those that strike once are used up by it.
    fn faults_of_next_batch(&self) -> FakeFaults {
        let faults = &mut self.lock().faults;
        let now = faults.clone();
        faults.drop_batches = faults.drop_batches.saturating_sub(1);
        if now.drop_batches == 0 {
            faults.fail_after_bytes = None;
        }
        now
    }
}

/// One engine's end of a [`FakeNetwork`].
pub(crate) struct FakeTransport {
    network: FakeNetwork,
    host: Arc<Host>,
}

impl FakeTransport {
    /// A second engine of a name takes the first one's place, as a restarted node does.
    pub(crate) fn join(network: &FakeNetwork, host: &Arc<Host>) -> Arc<Self> {
        network.lock().hosts.insert(host.config.node.clone(), Arc::downgrade(host));
        Arc::new(Self { network: network.clone(), host: Arc::clone(host) })
    }

    async fn deliver(&self, job: Job) -> Result<(), TransferError> {
        let faults = self.network.faults_of_next_batch();
        baton_runtime::sleep(faults.delay).await;
        if faults.drop_batches > 0 {
            std::future::pending::<()>().await;
        }
        let owner = self.network.host(&job)?;
        let grant = owner.grants.find(job.grant)?;
        let key = BatchKey { writer: self.host.writer(), batch: job.batch };
        let mut allowed = faults.fail_after_bytes.unwrap_or(u64::MAX);
        for step in batch::cut(&job.spans, STEP_BYTES, 1) {
            self.land(&job, &grant, &key, step[0], &mut allowed)?;
            tokio::task::yield_now().await;
        }
        if faults.reorder {
            let _ = tokio::time::timeout(REORDER_WAIT, self.network.overtaken.notified()).await;
        }
        if job.op == Op::Read {
            return Ok(());
        }
        let trailer = Trailer { part: 0, parts: 1, bytes: batch::total(&job.spans), tag: job.tag };
        let room = owner.grants.room().await;
        owner.grants.commit(room, grant.id, &key, job.segment, &trailer)?;
        owner.metrics.of(TransportKind::Fake).bytes_in.increment(trailer.bytes);
        self.network.overtaken.notify_waiters();
        Ok(())
    }

    fn land(
        &self,
        job: &Job,
        grant: &Grant,
        key: &BatchKey,
        span: SpanPair,
        allowed: &mut u64,
    ) -> Result<(), TransferError> {
        let remote = RemoteSpan { offset: span.remote_offset, len: span.len as u32 };
        match job.op {
            Op::Read => grant.admit_read(&key.writer, job.segment, &[remote], baton_runtime::now())?,
            Op::Write if grant.admit(key, 0, job.segment, &[remote], baton_runtime::now())? == Admission::Duplicate => {
                return Ok(());
            }
            Op::Write => {}
        }
        let revoked = || Refusal::new(RefusalReason::Revoked, format!("grant {} was revoked", grant.id.0));
        let _local = job.fence.enter().ok_or(TransferError::Cancelled)?;
        let _remote = grant.fence.enter().ok_or_else(revoked)?;
        let len = span.len.min(*allowed) as usize;
        let local = (&job.local, span.local_offset as usize);
        let remote = (&grant.region, span.remote_offset as usize);
        let ((source, from), (target, to)) = if job.op == Op::Write { (local, remote) } else { (remote, local) };
        assert!(source.contains(&(from..from + len)) && target.contains(&(to..to + len)));
        // SAFETY: both spans lie inside their mappings (asserted), which the Arcs keep alive. Both
        // passes are held: the caller keeps off the local spans until its batch resolves, and the
        // owner lets nothing else use granted ranges until the grant is fenced. `copy` allows
        // overlap.
        unsafe { std::ptr::copy(source.as_ptr().add(from), target.as_ptr().add(to), len) };
        self.host.metrics.of(TransportKind::Fake).bytes_out.increment(len as u64);
        *allowed -= len as u64;
        if (len as u64) < span.len {
            let reason = "as the faults of this network have it".into();
            return Err(TransferError::ConnectionLost { node: job.owner.node.clone(), reason });
        }
        Ok(())
    }
}

impl Transport for FakeTransport {
    fn register(&self, _: SegmentId, _: &Arc<MemoryRegion>) -> Result<Vec<TransportAddress>, TransferError> {
        Ok(vec![TransportAddress { kind: TransportKind::Fake, address: self.host.config.node.to_string() }])
    }

    fn carry_batch(self: Arc<Self>, job: Job) -> CarryFuture {
        Box::pin(async move { self.deliver(job).await.map(|()| TransportKind::Fake) })
    }
}
