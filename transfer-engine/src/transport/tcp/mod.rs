//! Bytes over TCP.
//!
//! A writer keeps a few connections, **lanes**, to each owner it writes to; a lane carries data one way and replies the other. A batch is cut into parts;
//! each part goes over one lane as frames and ends with its trailer. Parts of one batch may take different lanes, parts of different batches follow each other
//! on one. The batch is complete when the owner has acknowledged every part.
//!
//! ```text
//!  writer                                                       owner
//!    HELLO(connection, who I am, whom I expect)          -->
//!                                                        <--    WELCOME | REJECT(why)
//!    DATA(batch, part, grant, spans) + payload           -->    each span checked, then the payload is received in place
//!    COMMIT(batch, part, parts, bytes)                   -->    part accounted for; the last one is an Arrival
//!                                                        <--    ACK(batch, part) | REFUSE(batch, part, reason)
//!    CANCEL(batch)  in mid-part                          -->    its later frames are dropped
//!    FENCE(connection)  before a part is sent again      -->    the failed connection is closed here, and nothing of it lands any more
//!                                                        <--    PROGRESS  now and then in long payloads
//! ```
//!
//! A refused part's payload is received and dropped, frame by frame, until the writer has heard of the refusal: the lane and other batches on it go on. Whatever
//! breaks the protocol closes the connection, after a FAULT that says why.

mod accept;
mod connections;
mod lane;
mod peer;
mod receive;
pub(crate) mod socket;
pub(crate) mod wire;
mod write;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::TcpListener;

pub(crate) use self::wire::MAX_FRAME_PAYLOAD;

use self::connections::Connections;
use self::peer::{Peer, PeerKey};
use crate::engine::Host;
use crate::transport::{Transport, WriteFuture, WriteJob};
use crate::{TransferError, TransportKind};

/// Peers without connections are forgotten when there are more than this.
const REMEMBERED_PEERS: usize = 64;

/// The TCP transport of one engine.
pub(crate) struct TcpTransport {
    host: Arc<Host>,
    address: String,
    peers: Mutex<HashMap<PeerKey, Arc<Peer>>>,
    next_connection: Arc<AtomicU64>,
}

impl TcpTransport {
    /// Listens, and accepts as long as the engine lives. Returns the address that was bound, too.
    pub(crate) async fn bind(host: Arc<Host>) -> Result<(Arc<Self>, SocketAddr), TransferError> {
        let listen = host.config.listen;
        let failed =
            |error: std::io::Error| TransferError::Listen { address: listen.to_string(), reason: error.to_string() };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let (accepting, connections) = (Arc::clone(&host), Arc::new(Connections::default()));
        host.tasks.spawn("transfer accept", async move {
            accept::accept(&accepting, listener, connections).await;
            // An engine may be shut down before its process; the task itself must not end earlier.
            accepting.tasks.cancelled().await;
            Ok::<(), TransferError>(())
        });
        let (address, next_connection) = (host.config.advertised(bound), Arc::new(AtomicU64::new(1)));
        Ok((Arc::new(Self { host, address, peers: Mutex::default(), next_connection }), bound))
    }

    fn peer(&self, job: &WriteJob) -> Arc<Peer> {
        let key = PeerKey { target: job.target.clone(), address: job.address.clone() };
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.get(&key) {
            return Arc::clone(peer);
        }
        if peers.len() >= REMEMBERED_PEERS {
            peers.retain(|_, peer| peer.has_lanes() || Arc::strong_count(peer) > 1);
        }
        let peer = Arc::new(Peer::new(Arc::clone(&self.host), key.clone(), Arc::clone(&self.next_connection)));
        peers.insert(key, Arc::clone(&peer));
        peer
    }
}

impl Transport for TcpTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn address(&self) -> String {
        self.address.clone()
    }

    fn write(self: Arc<Self>, job: WriteJob) -> WriteFuture {
        let peer = self.peer(&job);
        Box::pin(write::write(peer, job))
    }
}
