//! The stream of a conductor that follows, to the leader.

use std::time::Duration;

use baton_intake::CountedChannel;
use baton_proto::{MAX_MESSAGE_BYTES, url, v1};
use baton_runtime::{error_chain, within};
use baton_scheduler::LinkId;
use baton_types::FromLeader;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::Endpoint;

use crate::frontend::Frontend;

/// How long the leader may take to accept the connection, and to greet.
const GREETING_TIMEOUT: Duration = Duration::from_secs(2);

/// How soon a leader that does not answer at all, as behind a cut, is left.
const PING_INTERVAL: Duration = Duration::from_millis(500);
const PING_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a stream to the leader ended or did not begin.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It cannot be reached.
    #[error("cannot reach the leader at {address}: {reason}")]
    Unreachable {
        /// Its address.
        address: String,
        /// What the connection says.
        reason: String,
    },
    /// It did not answer in time.
    #[error("the leader at {0} did not greet within {GREETING_TIMEOUT:?}")]
    Silent(String),
    /// It ended the stream.
    #[error("the leader ended the stream: {0}")]
    Ended(String),
}

impl From<Status> for LinkError {
    fn from(status: Status) -> Self {
        Self::Ended(format!("{:?}: {}", status.code(), baton_proto::reason_of_status(&status)))
    }
}

/// Follows the leader at an address until the stream ends. What requests ask goes there, from the
/// moment that it is reached.
pub async fn follow(frontend: &Frontend, address: &str) -> Result<(), LinkError> {
    let silent = || LinkError::Silent(address.to_owned());
    let unreachable = |error: &dyn std::error::Error| LinkError::Unreachable {
        address: address.to_owned(),
        reason: error_chain(error),
    };
    let endpoint = Endpoint::from_shared(url(address)).map_err(|error| unreachable(&error))?.tcp_nodelay(true);
    let endpoint = endpoint.http2_keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_TIMEOUT);
    let channel = within(&*frontend.clock, GREETING_TIMEOUT, endpoint.connect()).await.ok_or_else(silent)?;
    let channel = channel.map_err(|error| unreachable(&error))?;
    let mut leader = v1::leader_client::LeaderClient::new(CountedChannel::from(channel))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let (messages, link) = frontend.follow();
    let _follows = Follows(frontend, link);
    let called = within(&*frontend.clock, GREETING_TIMEOUT, leader.follow(ReceiverStream::new(messages)))
        .await
        .ok_or_else(silent)?;
    let mut answers = called?.into_inner();
    // The greeting comes first. One that takes the call and says nothing is left.
    let mut next = within(&*frontend.clock, GREETING_TIMEOUT, answers.message()).await.ok_or_else(silent)??;
    while let Some(answer) = next {
        let told = FromLeader::try_from(answer)
            .map_err(|error| LinkError::Ended(format!("it sent what cannot be read: {error}")))?;
        frontend.on_told(link, told).map_err(|other| LinkError::Ended(other.to_string()))?;
        next = answers.message().await?;
    }
    Err(LinkError::Ended("it said nothing more".to_owned()))
}

/// While there is a stream.
struct Follows<'a>(&'a Frontend, LinkId);

impl Drop for Follows<'_> {
    fn drop(&mut self) {
        self.0.lose_leader(self.1);
    }
}
