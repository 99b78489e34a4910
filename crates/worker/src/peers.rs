//! Calls to other nodes: one connection per address, kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_intake::CountedChannel;
use baton_proto::{MAX_MESSAGE_BYTES, kind_of_status, v1};
use baton_types::{ErrorKind, Refused};
use tonic::transport::{Channel, Endpoint};

/// How long a peer may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a peer may take to answer. It answers at once or never: its loop decides without
/// waiting for anything.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// While a call waits, its connection is tried this often, and dropped if nothing comes back for so
/// long. After an interruption TCP tries again only after as long.
const PING_INTERVAL: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_millis(1500);
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
            format!("node at {peer} cannot be reached: {}", baton_proto::reason_of_status(status))
        }
        _ => status.message().to_owned(),
    };
    // Whatever broke the call, the peer did not take the request: it may be tried elsewhere.
    let kind =
        if matches!(kind, ErrorKind::Cancelled | ErrorKind::DeadlineExceeded) { ErrorKind::Unavailable } else { kind };
    Refused { kind, message }
}

impl Peers {
    /// A client for the node at `address` (`http://host:port`). Connects when first used and again
    /// after a failure.
    pub fn client(&self, address: &str) -> Result<v1::node_client::NodeClient<CountedChannel>, Refused> {
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
                let endpoint = endpoint.http2_keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_TIMEOUT);
                let channel = endpoint.connect_lazy();
                channels.insert(address.to_owned(), channel.clone());
                channel
            }
        };
        let client = v1::node_client::NodeClient::new(CountedChannel::from(channel));
        Ok(client.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn call_to_a_peer_that_is_cut_off_fails_at_ping_timeout() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut peer, _) = listener.accept().await.unwrap();
            // It greets (RFC 9113 section 6.5: empty SETTINGS), and says nothing more.
            peer.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
            std::future::pending::<()>().await;
        });
        let mut client = Peers::default().client(&address).unwrap();
        let asked = baton_runtime::within(
            &baton_runtime::SystemClock,
            PING_INTERVAL + PING_TIMEOUT * 2,
            client.check_integrity(v1::CheckIntegrityRequest {}),
        );
        let status = asked.await.expect("it is given up").unwrap_err();
        assert_eq!(refused("d0", &status).kind, ErrorKind::Unavailable, "{status}");
    }
}
