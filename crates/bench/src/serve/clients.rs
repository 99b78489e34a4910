//! Connections to a conductor's gRPC.

use std::time::Duration;

use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{MAX_MESSAGE_BYTES, url};
use baton_runtime::innermost;
use tonic::transport::{Channel, Endpoint};

use crate::BenchError;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections to a conductor.
pub struct Clients(Vec<InferenceClient<Channel>>);

impl Clients {
    /// Connects to `host:port`, which `flag` gave.
    pub async fn connect(flag: &'static str, conductor: &str, connections: u32) -> Result<Self, BenchError> {
        let wrong = |problem: String| BenchError::invalid(flag, format!("{conductor}: {problem}"));
        let endpoint = Endpoint::from_shared(url(conductor)).map_err(|error| wrong(error.to_string()))?;
        let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true);
        let mut clients = Vec::new();
        for _ in 0..connections {
            let channel = endpoint.connect().await;
            let channel = channel.map_err(|error| {
                BenchError::control("conductor", format!("cannot reach {conductor}: {}", innermost(&error)))
            })?;
            clients.push(InferenceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES));
        }
        Ok(Self(clients))
    }

    /// That of one request, by its number.
    pub fn client(&self, request: usize) -> InferenceClient<Channel> {
        self.0[request % self.0.len()].clone()
    }
}
