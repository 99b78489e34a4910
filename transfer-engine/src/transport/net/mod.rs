//! Bytes between processes: over TCP, out of shared memory, or by RDMA.
//!
//! A writer keeps a few connections, **lanes**, to each owner it writes to; a lane carries data one
//! way and replies the other. A batch is cut into parts; each part goes over one lane and ends with
//! its trailer. Parts of one batch may take different lanes, of different kinds, and parts of
//! different batches follow each other on one. The batch is complete when the owner has
//! acknowledged every part.
//!
//! ```text
//!  writer                                                       owner
//!    HELLO(connection, who I am, whom I expect)          -->
//!                                                        <--    WELCOME | REJECT(why)
//!    DATA(batch, part, grant, spans) + payload           -->    tcp: each span checked, then the payload is received in place
//!    COPY(batch, part, grant, spans, slot)               -->    shm: each span checked, then copied out of the writer's memory
//!    COMMIT(batch, part, parts, bytes)                   -->    part accounted for; the last one is an Arrival
//!                                                        <--    ACK(batch, part) | REFUSE(batch, part, reason)
//!    READ(batch, part, lease, spans)                     -->    tcp: each span checked
//!                                                        <--    PAYLOAD(batch, part) + bytes ..., ACK
//!    MAP(segment)                                        -->    shm: for reads without the owner's help
//!                                                        <--    MAPPED(segment) + its file
//!    CHECK(batch, part, lease, spans)                    -->    shm: has the lease covered these until now?
//!                                                        <--    ACK | REFUSE
//!    CANCEL(batch)  in mid-part                          -->    its later frames are dropped
//!    FENCE(connection)  before a part is sent again      -->    the failed connection is closed here, and nothing of it lands any more
//!                                                        <--    PROGRESS  now and then in long payloads
//! ```
//!
//! What RDMA adds is described in [`rdma`].
//!
//! A refused part's payload is received and dropped until the writer has heard of the refusal. The
//! lane and other batches on it go on. Whatever breaks the protocol closes the connection, after a
//! FAULT that says why.

pub mod fuzz;
mod owner;
#[cfg(feature = "rdma")]
pub(crate) mod rdma;
#[cfg(not(feature = "rdma"))]
#[path = "rdma_off.rs"]
pub(crate) mod rdma;
mod shm;
mod tcp;
pub(crate) mod wire;
mod writer;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_memory::MemoryRegion;
use tokio::net::TcpListener;

pub(crate) use self::wire::MAX_FRAME_PAYLOAD;

use self::owner::accept::Acceptor;
use self::rdma::Devices;
use self::writer::peer::{Peer, PeerKey};
use crate::engine::Host;
use crate::path::PathReport;
use crate::transport::{CarryFuture, Job, Transport};
use crate::{SegmentId, TransferError, TransportAddress, TransportChoice, TransportKind};

/// Peers without connections are forgotten when there are more than this.
const REMEMBERED_PEERS: usize = 64;
/// Has an entry for each RDMA device of the machine, also if this process may not use it.
const RDMA_DEVICES: &str = "/sys/class/infiniband";

/// The transports between processes, of one engine.
pub(crate) struct NetTransport {
    host: Arc<Host>,
    choice: TransportChoice,
    addresses: Vec<TransportAddress>,
    peers: Mutex<HashMap<PeerKey, Arc<Peer>>>,
    next_connection: Arc<AtomicU64>,
}

impl NetTransport {
    /// Listens, and accepts as long as the engine lives. `choice`: what may carry. Returns the TCP
    /// address that was bound, too.
    pub(crate) async fn bind(
        host: Arc<Host>,
        choice: TransportChoice,
    ) -> Result<(Arc<Self>, SocketAddr), TransferError> {
        let acceptor = Acceptor::new(&host);
        let mut addresses = Vec::new();
        let bound = listen_tcp(&host, acceptor.clone()).await?;
        if choice.allows(TransportKind::Rdma) {
            addresses.extend(open_rdma(&host, choice, &acceptor, &host.config.advertised(bound))?);
        }
        if choice.allows(TransportKind::Shm) {
            addresses.extend(listen_shm(&host, choice, &acceptor)?);
        }
        if choice.allows(TransportKind::Tcp) {
            addresses.push(TransportAddress { kind: TransportKind::Tcp, address: host.config.advertised(bound) });
        }
        let next_connection = Arc::new(AtomicU64::new(1));
        Ok((Arc::new(Self { host, choice, addresses, peers: Mutex::default(), next_connection }), bound))
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<PeerKey, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self, job: &Job) -> Arc<Peer> {
        let key = PeerKey { owner: job.owner.clone(), addresses: job.addresses.clone() };
        let mut peers = self.peers();
        if let Some(peer) = peers.get(&key) {
            return Arc::clone(peer);
        }
        if peers.len() >= REMEMBERED_PEERS {
            peers.retain(|_, peer| peer.has_lanes() || Arc::strong_count(peer) > 1);
        }
        let peer =
            Arc::new(Peer::new(Arc::clone(&self.host), self.choice, key.clone(), Arc::clone(&self.next_connection)));
        peers.insert(key, Arc::clone(&peer));
        peer
    }
}

async fn listen_tcp(host: &Arc<Host>, acceptor: Acceptor) -> Result<SocketAddr, TransferError> {
    let listen = host.config.listen;
    let failed =
        |error: std::io::Error| TransferError::Listen { address: listen.to_string(), reason: error.to_string() };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    accept_with(host, "transfer accept", acceptor.tcp(listener));
    Ok(bound)
}

/// If there is no shared memory, the others do; unless it is what was asked for.
fn listen_shm(
    host: &Arc<Host>,
    choice: TransportChoice,
    acceptor: &Acceptor,
) -> Result<Option<TransportAddress>, TransferError> {
    match shm::listen(host.config.generation, host.config.shm_folder.as_deref()) {
        Ok((listener, address)) => {
            accept_with(host, "transfer accept shm", acceptor.clone().shm(listener));
            Ok(Some(TransportAddress { kind: TransportKind::Shm, address: address.to_string() }))
        }
        Err(error) if choice == TransportChoice::Auto => {
            let folder = host.config.shm_folder.as_deref().map(|folder| tracing::field::display(folder.display()));
            tracing::warn!(%error, folder, "no transfers over shared memory");
            Ok(None)
        }
        Err(error) => Err(TransferError::Listen { address: "shared memory".into(), reason: error.to_string() }),
    }
}

/// If there is no RDMA, the others do; unless it is what was asked for.
fn open_rdma(
    host: &Arc<Host>,
    choice: TransportChoice,
    acceptor: &Acceptor,
    control: &str,
) -> Result<Vec<TransportAddress>, TransferError> {
    match Devices::open(host.config.rdma_devices.as_deref(), host.config.rdma_gid_index) {
        Ok(devices) => {
            let addresses = devices.addresses(control);
            let connections = Arc::clone(acceptor.connections());
            host.grants.set_fence(move |grant| {
                let connections = Arc::clone(&connections);
                Box::pin(async move { connections.fence_grant(grant).await })
            });
            let devices = Arc::new(devices);
            let dispatching = Arc::clone(&devices);
            let closed = host.closed.clone();
            host.tasks.spawn_request("transfer completions", async move {
                tokio::select! {
                    () = dispatching.dispatch() => {}
                    () = closed.cancelled() => {}
                }
            });
            // Set once: an engine is bound once.
            let _ = host.rdma.set(devices);
            let address = |address| TransportAddress { kind: TransportKind::Rdma, address };
            Ok(addresses.into_iter().map(address).collect())
        }
        Err(problem) if choice == TransportChoice::Auto => {
            if has_entries(Path::new(RDMA_DEVICES)) {
                tracing::warn!(problem, "no transfers over rdma, but this machine has RDMA devices");
            } else {
                tracing::debug!(problem, "no transfers over rdma");
            }
            Ok(Vec::new())
        }
        Err(problem) => {
            Err(TransferError::Config { field: "transport", problem: format!("rdma, which cannot be had: {problem}") })
        }
    }
}

fn has_entries(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

fn accept_with(host: &Arc<Host>, name: &'static str, accept: impl Future<Output = ()> + Send + 'static) {
    let accepting = Arc::clone(host);
    host.tasks.spawn(name, async move {
        accept.await;
        // An engine may be shut down before its process; the task itself must not end earlier.
        accepting.tasks.cancelled().await;
        Ok::<(), TransferError>(())
    });
}

impl Transport for NetTransport {
    fn register(&self, segment: SegmentId, region: &Arc<MemoryRegion>) -> Result<Vec<TransportAddress>, TransferError> {
        let registered = self.host.rdma.get().map_or(Ok(()), |devices| devices.register(segment, region));
        let Err(problem) = registered else { return Ok(self.addresses.clone()) };
        if self.choice != TransportChoice::Auto {
            return Err(TransferError::Config { field: "transport", problem: format!("rdma: {problem}") });
        }
        tracing::warn!(%segment, problem, "no transfers over rdma for a segment");
        Ok(self.addresses.iter().filter(|address| address.kind != TransportKind::Rdma).cloned().collect())
    }

    fn carry_batch(self: Arc<Self>, job: Job) -> CarryFuture {
        let peer = self.peer(&job);
        Box::pin(writer::carry::carry_in_parts(peer, job))
    }

    fn paths(&self) -> Vec<PathReport> {
        self.peers().values().map(|peer| peer.path()).collect()
    }

    fn disconnect(&self) {
        self.peers().values().for_each(|peer| peer.disconnect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_without_rdma_devices_is_told_from_one_with_them() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_entries(&folder.path().join("infiniband")), "no driver is loaded");
        assert!(!has_entries(folder.path()), "drivers are loaded, and there is no device");
        std::fs::create_dir(folder.path().join("mlx5_0")).unwrap();
        assert!(has_entries(folder.path()));
    }
}
