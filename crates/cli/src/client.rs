//! The connection to a conductor.

use std::time::Duration;

use baton_proto::v1::cluster_client::ClusterClient;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{VersionRequest, VersionResponse};
use baton_proto::{MAX_MESSAGE_BYTES, url};
use baton_runtime::innermost;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::error::CliError;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a conductor may take to say who it is, on a busy machine too.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A conductor that answers no ping for this long is gone, even if its machine vanished without
/// closing the connection.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Most conductors of a cluster.
const MAX_ADDRESSES: usize = 32;

/// A conductor says nothing: it hangs.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {} s", ANSWER_TIMEOUT.as_secs())]
pub struct Silent;

/// What took the connection broke it: most often no gRPC port.
#[derive(Debug, thiserror::Error)]
#[error("the connection broke at the first call: an HTTP port does that")]
struct NotGrpc;

/// Whether gRPC itself failed.
fn is_broken(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

/// A conductor that answered.
#[derive(Clone)]
pub struct Conductor {
    channel: Channel,
    /// Its own address first, then those of the others.
    addresses: Vec<String>,
}

impl Conductor {
    /// Connects to the first that answers of `host:port` or `http://host:port`, with commas between
    /// them.
    pub async fn connect(addresses: &str) -> Result<Self, CliError> {
        Self::first_of(split(addresses)?).await
    }

    /// Each of them, connected when it is asked.
    pub fn each(addresses: &str) -> Result<Vec<Self>, CliError> {
        let all = split(addresses)?;
        let one = |index: usize| {
            let mut addresses = all.clone();
            addresses.rotate_left(index);
            Ok(Self { channel: endpoint(&addresses[0])?.connect_lazy(), addresses })
        };
        (0..all.len()).map(one).collect()
    }

    /// Its address, as it was given.
    pub fn address(&self) -> &str {
        self.addresses.first().map_or("", String::as_str)
    }

    async fn first_of(addresses: Vec<String>) -> Result<Self, CliError> {
        let endpoints = addresses.iter().map(|address| endpoint(address)).collect::<Result<Vec<_>, _>>()?;
        let mut reasons = Vec::new();
        for (index, endpoint) in endpoints.into_iter().enumerate() {
            match endpoint.connect().await {
                Ok(channel) => {
                    let mut addresses = addresses.clone();
                    addresses.rotate_left(index);
                    let conductor = Self { channel, addresses };
                    match conductor.version().await {
                        Ok(Err(status)) if is_broken(&status) => reasons.push(NotGrpc.to_string()),
                        // One that hangs takes connections.
                        Err(silent) => reasons.push(silent.to_string()),
                        // What is answered does not matter: a port for clients does not know the
                        // call.
                        _ => return Ok(conductor),
                    }
                }
                Err(error) => reasons.push(innermost(&error)),
            }
        }
        reasons.dedup();
        Err(CliError::Unreachable { address: addresses.join(", "), reason: reasons.join("; ") })
    }

    /// Connects to another conductor, or to this one again if no other one answers.
    pub async fn another(&self) -> Result<Self, CliError> {
        let mut addresses = self.addresses.clone();
        addresses.rotate_left(1);
        Self::first_of(addresses).await
    }

    /// How many conductors the cluster has, as far as this command was told.
    pub fn conductors(&self) -> usize {
        self.addresses.len()
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// It says nothing in time.
    pub async fn version(&self) -> Result<Result<VersionResponse, Status>, Silent> {
        let mut client = self.cluster();
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.version(VersionRequest {})).await;
        answer.map(|answer| answer.map(Response::into_inner)).map_err(|_| Silent)
    }

    /// What clients call.
    pub fn inference(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// What operators call.
    pub fn cluster(&self) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }
}

fn split(addresses: &str) -> Result<Vec<String>, CliError> {
    let addresses: Vec<_> = addresses.split(',').map(|address| address.trim().to_owned()).collect();
    if addresses.len() <= MAX_ADDRESSES {
        return Ok(addresses);
    }
    let problem = format!("{} addresses, but at most {MAX_ADDRESSES} are taken", addresses.len());
    Err(CliError::invalid("--conductor", problem))
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
    fn conductor_address_needs_a_port_and_plain_http() {
        for right in ["127.0.0.1:1", "http://localhost:7070", "[::1]:7070"] {
            assert!(endpoint(right).is_ok(), "{right}");
        }
        for wrong in ["", "localhost", "https://h:1", "http://", "h:99999", "a b:1"] {
            assert!(endpoint(wrong).unwrap_err().to_string().starts_with("--conductor: "), "{wrong}");
        }
    }

    #[tokio::test]
    async fn unreachable_conductor_is_named_by_its_address() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let Err(error) = Conductor::connect(&address).await else { panic!("no conductor is there") };
        assert_eq!(error.exit_status(), 4);
        assert!(error.to_string().contains(&address) && error.to_string().contains("refused"), "{error}");
    }

    #[tokio::test]
    async fn conductor_that_hangs_is_unreachable() {
        let hangs = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let Err(error) = Conductor::connect(&hangs.local_addr().unwrap().to_string()).await else {
            panic!("it says nothing")
        };
        assert!(error.exit_status() == 4 && error.to_string().contains("no answer within 5 s"), "{error}");
    }

    #[tokio::test]
    async fn http_port_is_told_from_a_grpc_port() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            while let Ok((mut socket, _)) = listener.accept().await {
                let _ = socket.read(&mut [0; 64]).await;
                let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
            }
        });
        let Err(error) = Conductor::connect(&address).await else { panic!("no conductor is there") };
        assert_eq!(error.exit_status(), 4);
        let said = error.to_string();
        assert!(said.contains(&address) && said.contains("gRPC") && said.contains("--conductor"), "{said}");
    }

    #[tokio::test]
    async fn first_reachable_conductor_is_used_and_then_the_next() {
        let [gone, first, second] = [0; 3].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [gone_at, first_at, second_at] = [&gone, &first, &second].map(|it| it.local_addr().unwrap().to_string());
        drop(gone);
        // It takes connections, and says nothing.
        let hangs = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let hangs_at = hangs.local_addr().unwrap().to_string();
        // Connecting ends with the other side's greeting.
        for listener in [first, second] {
            listener.set_nonblocking(true).unwrap();
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            tokio::spawn(
                tonic::transport::Server::builder().add_routes(Default::default()).serve_with_incoming(incoming),
            );
        }
        let all = format!("{gone_at}, {hangs_at},{first_at},{second_at}");
        let conductor = Conductor::connect(&all).await.unwrap();
        assert_eq!(conductor.addresses, [first_at.as_str(), &second_at, &gone_at, &hangs_at]);
        assert_eq!(conductor.another().await.unwrap().addresses[0], second_at);
    }
}
