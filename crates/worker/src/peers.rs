//! Calls to other nodes: one connection per address, kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_proto::{MAX_MESSAGE_BYTES, kind_of_status, v1};
use baton_types::{ErrorKind, Refused};
use tonic::transport::{Channel, Endpoint};

/// How long a peer may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a peer may take to answer. It answers at once or never: its loop decides without waiting for anything.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections kept; past it all are closed and made again as needed.
const MAX_PEERS: usize = 4096;

/// The nodes that this node has called. Cheap to clone.
#[derive(Clone, Default)]
pub struct Peers(Arc<Mutex<HashMap<String, Channel>>>);

/// A peer could not be called, or said no.
pub fn refused(peer: &str, status: &tonic::Status) -> Refused {
    let kind = kind_of_status(status);
    let message = match kind {
        ErrorKind::Unavailable | ErrorKind::Cancelled | ErrorKind::DeadlineExceeded => {
            format!("node at {peer} cannot be reached: {}", status.message())
        }
        _ => status.message().to_owned(),
    };
    // Whatever broke the call, the peer did not take the request: it may be tried elsewhere.
    let kind =
        if matches!(kind, ErrorKind::Cancelled | ErrorKind::DeadlineExceeded) { ErrorKind::Unavailable } else { kind };
    Refused { kind, message }
}

impl Peers {
    /// A client for the node at `address` (`http://host:port`). Connects when first used and again after a failure.
    pub fn client(&self, address: &str) -> Result<v1::node_client::NodeClient<Channel>, Refused> {
        let mut channels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if channels.len() >= MAX_PEERS && !channels.contains_key(address) {
            channels.clear();
        }
        let channel = match channels.get(address) {
            Some(channel) => channel.clone(),
            None => {
                let invalid = |error: tonic::transport::Error| Refused {
                    kind: ErrorKind::Invalid,
                    message: format!("'{address}' is not a node's address: {error}"),
                };
                let endpoint = Endpoint::from_shared(address.to_owned()).map_err(invalid)?;
                let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(CALL_TIMEOUT).tcp_nodelay(true);
                let channel = endpoint.connect_lazy();
                channels.insert(address.to_owned(), channel.clone());
                channel
            }
        };
        let client = v1::node_client::NodeClient::new(channel);
        Ok(client.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES))
    }
}
