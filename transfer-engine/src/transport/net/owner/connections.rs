//! The accepted connections of an engine, so that a writer can have an old one closed.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_types::{GrantId, NodeStart};
use futures::future::join_all;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::transport::net::shm::ViewCache;
use crate::transport::net::wire::Rejection;

/// Longest wait for a writer to say that nothing is under way under a grant any more.
const CONFIRMATION: Duration = Duration::from_millis(500);

/// A connection on which nothing came for so long may have to make room.
const IDLE_MS: u64 = 100;
/// In the middle of a payload it may be silent for so much longer: links stall.
const PAYLOAD_GRACE_MS: u64 = 900;

struct OpenedAt(Instant);

impl Default for OpenedAt {
    fn default() -> Self {
        Self(baton_runtime::now())
    }
}

impl OpenedAt {
    fn elapsed_ms(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}

/// Handles of one live connection.
#[derive(Clone, Default)]
struct Live {
    /// Cancelled to end it.
    kill: CancellationToken,
    /// Cancelled when it has ended: nothing of it lands any more.
    gone: CancellationToken,
    /// Grants under which bytes may land without this processor's help, and how to have them ended
    /// (rdma).
    opened: Arc<Mutex<HashSet<GrantId>>>,
    revokes: Arc<OnceLock<Revokes>>,
    /// When it last had something to say, in milliseconds since [`Connections`] was made.
    touched: Arc<AtomicU64>,
}

type Revokes = mpsc::UnboundedSender<(GrantId, oneshot::Sender<()>)>;

impl Live {
    fn opened(&self) -> MutexGuard<'_, HashSet<GrantId>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the writer to confirm the end of a grant; if it does not, ends the connection.
    async fn end_grant(self, grant: GrantId) {
        let (fenced, confirmed) = oneshot::channel();
        let asked = self.revokes.get().is_some_and(|revokes| revokes.send((grant, fenced)).is_ok());
        if !asked || !matches!(timeout(CONFIRMATION, confirmed).await, Ok(Ok(()))) {
            self.kill.cancel();
            self.gone.cancelled().await;
        }
    }
}

type Key = (NodeStart, u64);

/// The live connections, by writer and the number that the writer gave them.
#[derive(Default)]
pub(crate) struct Connections {
    live: Mutex<HashMap<Key, Live>>,
    made: OpenedAt,
    /// Writers' memory that their connections share.
    pub(crate) views: ViewCache,
}

/// A place in [`Connections`]; dropped when the connection has ended.
pub(crate) struct Registered {
    connections: Arc<Connections>,
    key: Key,
    live: Live,
}

impl Connections {
    /// Enters a connection. A writer's later generation ends the connections of the earlier ones,
    /// which are refused from then on as long as it has one.
    pub(crate) fn register(self: &Arc<Self>, writer: &NodeStart, connection: u64) -> Result<Registered, Rejection> {
        let mut connections = self.lock();
        let same_node = connections.iter().filter(|((other, _), _)| other.node == writer.node);
        for ((other, _), live) in same_node {
            if other.generation > writer.generation {
                return Err(Rejection::StaleWriter(other.generation));
            }
            if other.generation < writer.generation {
                live.kill.cancel();
            }
        }
        let key = (writer.clone(), connection);
        let live = Live::default();
        live.touched.store(self.made.elapsed_ms(), Relaxed);
        if connections.contains_key(&key) {
            return Err(Rejection::InUse);
        }
        connections.insert(key.clone(), live.clone());
        Ok(Registered { connections: Arc::clone(self), key, live })
    }

    /// Ends the connection that has been idle for longest, if any is idle. Its place is for one
    /// that has something to say.
    pub(crate) fn end_idlest(&self) -> bool {
        let connections = self.lock();
        let idlest =
            connections.values().filter(|live| !live.kill.is_cancelled()).min_by_key(|live| live.touched.load(Relaxed));
        let idle = idlest.filter(|live| self.made.elapsed_ms() >= live.touched.load(Relaxed) + IDLE_MS);
        idle.inspect(|live| live.kill.cancel()).is_some()
    }

    /// Closes a connection of a writer; resolves once nothing of it can land. One that is not known
    /// has ended before.
    pub(crate) async fn fence(&self, writer: &NodeStart, connection: u64) {
        let live = self.lock().get(&(writer.clone(), connection)).cloned();
        if let Some(live) = live {
            live.kill.cancel();
            live.gone.cancelled().await;
        }
    }

    /// Ends what writers may still do under a grant without this processor's help. The grant's
    /// fence guard is closed.
    pub(crate) async fn fence_grant(&self, grant: GrantId) {
        let holders: Vec<_> = self.lock().values().filter(|live| live.opened().contains(&grant)).cloned().collect();
        join_all(holders.into_iter().map(|live| live.end_grant(grant))).await;
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Resolves when the connection is to end.
    pub(crate) async fn killed(&self) {
        self.live.kill.cancelled().await;
    }

    /// Requests to end grants come here from now on. `None` the second time.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
    pub(crate) fn take_revokes(&self) -> Option<mpsc::UnboundedReceiver<(GrantId, oneshot::Sender<()>)>> {
        let (revokes, received) = mpsc::unbounded_channel();
        self.live.revokes.set(revokes).ok().map(|()| received)
    }

    /// Bytes may land under this grant. False: they might before, too.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
    pub(crate) fn remember_grant(&self, grant: GrantId) -> bool {
        self.live.opened().insert(grant)
    }

    /// No bytes may land under this grant any more.
    #[cfg_attr(not(feature = "rdma"), allow(dead_code))] // for rdma
    pub(crate) fn forget_grant(&self, grant: GrantId) {
        self.live.opened().remove(&grant);
    }

    /// A frame has come.
    pub(crate) fn touch(&self) {
        self.live.touched.store(self.connections.made.elapsed_ms(), Relaxed);
    }

    /// Payload has come, and more will.
    pub(crate) fn touch_in_payload(&self) {
        self.live.touched.store(self.connections.made.elapsed_ms() + PAYLOAD_GRACE_MS, Relaxed);
    }

    pub(crate) fn connection(&self) -> u64 {
        self.key.1
    }

    pub(crate) fn writer(&self) -> &NodeStart {
        &self.key.0
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.connections.lock().remove(&self.key);
        self.live.gone.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{Generation, NodeId};

    use super::*;

    fn writer(generation: u64) -> NodeStart {
        NodeStart { node: NodeId::new("w").unwrap(), generation: Generation(generation) }
    }

    #[tokio::test]
    async fn fence_waits_for_the_end_of_its_connection() {
        let connections = Arc::new(Connections::default());
        let writer = writer(1);
        let registered = connections.register(&writer, 7).unwrap();
        connections.fence(&writer, 8).await;
        let mut fence = Box::pin(connections.fence(&writer, 7));
        assert!(timeout(Duration::from_millis(5), &mut fence).await.is_err());
        registered.killed().await;
        drop(registered);
        fence.await;
        assert!(connections.lock().is_empty());
    }

    #[tokio::test]
    async fn later_generation_ends_connection_of_the_earlier_one() {
        let connections = Arc::new(Connections::default());
        let old = connections.register(&writer(1), 7).unwrap();
        assert_eq!(connections.register(&writer(1), 7).err(), Some(Rejection::InUse));
        let _new = connections.register(&writer(2), 7).unwrap();
        old.killed().await;
        assert_eq!(connections.register(&writer(1), 8).err(), Some(Rejection::StaleWriter(Generation(2))));
    }
}
