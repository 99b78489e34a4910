//! The connection to a conductor.

use std::time::Duration;

use baton_proto::v1::cluster_client::ClusterClient;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{MAX_MESSAGE_BYTES, url};
use baton_runtime::innermost;
use tonic::transport::{Channel, Endpoint};

use crate::error::CliError;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A conductor that answers no ping for this long is gone, even where its machine vanished without closing the connection.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// A conductor that answered.
#[derive(Clone)]
pub struct Conductor(Channel);

impl Conductor {
    /// Connects to `host:port` or `http://host:port`.
    pub async fn connect(address: &str) -> Result<Self, CliError> {
        let endpoint = endpoint(address)?;
        let channel = endpoint
            .connect()
            .await
            .map_err(|error| CliError::Unreachable { address: address.to_owned(), reason: innermost(&error) })?;
        Ok(Self(channel))
    }

    /// What clients call.
    pub fn inference(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.0.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// What operators call.
    pub fn cluster(&self) -> ClusterClient<Channel> {
        ClusterClient::new(self.0.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }
}

fn endpoint(address: &str) -> Result<Endpoint, CliError> {
    let wrong =
        || CliError::invalid("--conductor", format!("'{address}' is not an address; expected http://host:port"));
    let uri: tonic::transport::Uri = url(address).parse().map_err(|_| wrong())?;
    if uri.scheme_str() != Some("http") || uri.port_u16().is_none() {
        return Err(wrong());
    }
    let endpoint = Endpoint::from(uri).connect_timeout(CONNECT_TIMEOUT);
    Ok(endpoint.http2_keep_alive_interval(KEEPALIVE).keep_alive_timeout(KEEPALIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_port_and_speak_http() {
        for right in ["127.0.0.1:1", "http://localhost:7070", "[::1]:7070"] {
            assert!(endpoint(right).is_ok(), "{right}");
        }
        for wrong in ["", "localhost", "https://h:1", "http://", "h:99999", "a b:1"] {
            assert!(endpoint(wrong).unwrap_err().to_string().starts_with("--conductor: "), "{wrong}");
        }
    }

    #[tokio::test]
    async fn nobody_there_is_said_with_the_address() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let Err(error) = Conductor::connect(&address).await else { panic!("nobody is there") };
        assert_eq!(error.exit_status(), 4);
        assert!(error.to_string().contains(&address) && error.to_string().contains("refused"), "{error}");
    }
}
