//! Registration: the node tells its conductor where it is, again and again.

use std::time::Duration;

use baton_proto::{PROTOCOL_VERSION, check_protocol_version, url, v1};
use baton_runtime::Clock;
use baton_runtime::settings::BadSetting;
use baton_types::{ErrorKind, NodeInfo};
use tonic::transport::Endpoint;

/// Waits between attempts while the conductor cannot be reached.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How long the conductor may take to answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The conductor will never take this node.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// It said no.
    #[error("the conductor at {conductor} refuses this node: {reason}")]
    Refused {
        /// Its address.
        conductor: String,
        /// Its reason.
        reason: String,
    },
}

/// The way to the conductor that the settings name.
pub fn endpoint(conductor: &str) -> Result<Endpoint, BadSetting> {
    let wrong =
        || BadSetting::invalid("conductor", format!("'{conductor}' is not an address of the form http://host:port"));
    let endpoint = Endpoint::from_shared(url(conductor)).map_err(|_| wrong())?;
    let uri = endpoint.uri();
    if uri.scheme_str() != Some("http") || uri.port_u16().is_none() || !matches!(uri.path(), "" | "/") {
        return Err(wrong());
    }
    Ok(endpoint.connect_timeout(CALL_TIMEOUT).timeout(CALL_TIMEOUT))
}

/// Registers for ever. Returns only where trying again is pointless. Losing the conductor never stops the node: it registers again by itself.
pub async fn keep_registered(endpoint: Endpoint, info: &NodeInfo, clock: &dyn Clock) -> Result<(), RegisterError> {
    let conductor = endpoint.uri().to_string().trim_end_matches('/').to_owned();
    let mut client = v1::membership_client::MembershipClient::new(endpoint.connect_lazy());
    let (mut wait, mut known) = (RETRY, None);
    loop {
        let request = v1::RegisterRequest { protocol_version: PROTOCOL_VERSION, node: Some(info.into()) };
        match client.register(request).await {
            Ok(response) => {
                let response = response.into_inner();
                if let Err(error) = check_protocol_version(response.protocol_version) {
                    return Err(RegisterError::Refused { conductor, reason: error.to_string() });
                }
                if known.as_ref() != Some(&response.conductor_id) {
                    tracing::info!(conductor, id = response.conductor_id, "registered");
                    known = Some(response.conductor_id);
                }
                wait = RETRY;
                clock.sleep(Duration::from_millis(u64::from(response.interval_ms.clamp(100, 60_000)))).await;
            }
            Err(status) if baton_proto::kind_of_status(&status) == ErrorKind::Invalid => {
                return Err(RegisterError::Refused { conductor, reason: status.message().to_owned() });
            }
            Err(status) => {
                // Once is no news: the conductor may be about to start, or this node to stop.
                match wait {
                    RETRY => tracing::info!(conductor, reason = status.message(), retry_in = ?wait, "cannot register"),
                    _ => tracing::warn!(conductor, reason = status.message(), retry_in = ?wait, "cannot register"),
                }
                clock.sleep(wait).await;
                wait = (wait * 2).min(RETRY_MAX);
            }
        }
    }
}
