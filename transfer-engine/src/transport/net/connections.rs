//! The accepted connections of an engine, so that a writer can have an old one closed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use super::shm::ViewCache;
use super::wire::Rejection;
use crate::grant::Writer;

/// Handles of one live connection.
#[derive(Clone, Default)]
struct Live {
    /// Cancelled to end it.
    kill: CancellationToken,
    /// Cancelled when it has ended: nothing of it lands any more.
    gone: CancellationToken,
}

type Key = (Writer, u64);

/// The live connections, by writer and the number that the writer gave them.
#[derive(Default)]
pub(super) struct Connections {
    live: Mutex<HashMap<Key, Live>>,
    /// Writers' memory that their connections share.
    pub(super) views: ViewCache,
}

/// A place in [`Connections`]; dropped when the connection has ended.
pub(super) struct Registered {
    connections: Arc<Connections>,
    key: Key,
    live: Live,
}

impl Connections {
    /// Enters a connection. A writer's later generation ends the connections of the earlier ones, which are refused from then on as long as it has one.
    pub(super) fn register(self: &Arc<Self>, writer: &Writer, connection: u64) -> Result<Registered, Rejection> {
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
        let (key, live) = ((writer.clone(), connection), Live::default());
        if connections.contains_key(&key) {
            return Err(Rejection::InUse);
        }
        connections.insert(key.clone(), live.clone());
        Ok(Registered { connections: Arc::clone(self), key, live })
    }

    /// Closes a connection of a writer; resolves once nothing of it can land. One that is not known has ended before.
    pub(super) async fn fence(&self, writer: &Writer, connection: u64) {
        let live = self.lock().get(&(writer.clone(), connection)).cloned();
        if let Some(live) = live {
            live.kill.cancel();
            live.gone.cancelled().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Resolves when the connection is to end.
    pub(super) async fn killed(&self) {
        self.live.kill.cancelled().await;
    }

    pub(super) fn connection(&self) -> u64 {
        self.key.1
    }

    pub(super) fn writer(&self) -> &Writer {
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

    fn writer(generation: u64) -> Writer {
        Writer { node: NodeId::new("w").unwrap(), generation: Generation(generation) }
    }

    #[tokio::test]
    async fn a_fence_waits_for_the_end() {
        let connections = Arc::new(Connections::default());
        let writer = writer(1);
        let registered = connections.register(&writer, 7).unwrap();
        connections.fence(&writer, 8).await;
        let mut fence = Box::pin(connections.fence(&writer, 7));
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut fence).await.is_err());
        registered.killed().await;
        drop(registered);
        fence.await;
        assert!(connections.lock().is_empty());
    }

    #[tokio::test]
    async fn a_later_generation_ends_the_earlier_one() {
        let connections = Arc::new(Connections::default());
        let old = connections.register(&writer(1), 7).unwrap();
        assert_eq!(connections.register(&writer(1), 7).err(), Some(Rejection::InUse));
        let _new = connections.register(&writer(2), 7).unwrap();
        old.killed().await;
        assert_eq!(connections.register(&writer(1), 8).err(), Some(Rejection::StaleWriter(Generation(2))));
    }
}
