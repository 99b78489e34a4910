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

/// Most conductors of a cluster.
const MAX_CONDUCTORS: usize = 16;

/// The ways to the conductors that the settings name.
pub fn endpoints(conductors: &str) -> Result<Vec<Endpoint>, BadSetting> {
    let named: Vec<_> = conductors.split(',').map(str::trim).collect();
    if named.len() > MAX_CONDUCTORS {
        let problem = format!("{} addresses, but at most {MAX_CONDUCTORS} are taken", named.len());
        return Err(BadSetting::invalid("conductor", problem));
    }
    named.into_iter().map(endpoint).collect()
}

fn endpoint(conductor: &str) -> Result<Endpoint, BadSetting> {
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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use baton_proto::v1::membership_server::{Membership, MembershipServer};
    use baton_types::{Generation, KvDtype, KvLayout, NodeId, NodeProfile, NodeRole};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::testing::{TestClock, soon};

    /// What the conductor says next, and who hears that a node came.
    struct Scripted {
        answers: Mutex<VecDeque<Result<u32, ErrorKind>>>,
        came: mpsc::UnboundedSender<String>,
    }

    #[tonic::async_trait]
    impl Membership for Scripted {
        async fn register(
            &self,
            request: Request<v1::RegisterRequest>,
        ) -> Result<Response<v1::RegisterResponse>, Status> {
            let node = request.into_inner().node.map(|node| node.name).unwrap_or_default();
            self.came.send(node).unwrap();
            match self.answers.lock().unwrap().pop_front().unwrap() {
                Ok(interval_ms) => {
                    let conductor_id = "0".repeat(16);
                    Ok(Response::new(v1::RegisterResponse {
                        protocol_version: PROTOCOL_VERSION,
                        conductor_id,
                        interval_ms,
                    }))
                }
                Err(kind) => Err(baton_proto::status(kind, "as the test wants it", None)),
            }
        }
    }

    fn info() -> NodeInfo {
        let layout = KvLayout {
            model: 7,
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 8,
            block_tokens: 16,
            dtype: KvDtype::F16,
            num_blocks: 4,
        };
        NodeInfo {
            node: NodeId::new("p0").unwrap(),
            role: NodeRole::Prefill,
            generation: Generation(1),
            address: "http://127.0.0.1:1".into(),
            model: "m".into(),
            vocab_size: 10,
            context_length: 100,
            numerics: "mock".into(),
            layout,
            profile: NodeProfile::default(),
            copies_prefixes: true,
            splits_prompts: true,
            vocabulary: String::new(),
        }
    }

    #[test]
    fn conductors_are_named_by_commas() {
        assert_eq!(endpoints("http://a:1, b:2").unwrap().len(), 2);
        assert_eq!(endpoints("").unwrap_err().to_string(), endpoint("").unwrap_err().to_string());
        for wrong in ["a:1,", "a", "a:1,https://b:2", "a:1/path"] {
            assert!(endpoints(wrong).unwrap_err().to_string().contains("host:port"), "{wrong}");
        }
        let many = vec!["a:1"; MAX_CONDUCTORS + 1].join(",");
        assert!(endpoints(&many).unwrap_err().to_string().contains("17 addresses"));
    }

    #[tokio::test]
    async fn a_node_registers_again_and_again_and_waits_longer_where_it_cannot() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let away = Err(ErrorKind::Unavailable);
        let answers = Mutex::new([away, away, Ok(2000), Ok(2000), away, Err(ErrorKind::Invalid)].into());
        let (came, mut coming) = mpsc::unbounded_channel();
        let tasks = baton_runtime::TaskSet::new();
        let end = tasks.clone();
        tasks.spawn("conductor", async move {
            let server =
                tonic::transport::Server::builder().add_service(MembershipServer::new(Scripted { answers, came }));
            server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), end.cancelled()).await
        });
        let clock = TestClock::default();
        let (info, endpoint) = (info(), endpoint(&format!("http://{address}")).unwrap());
        let registration = keep_registered(endpoint, &info, &clock);
        let story = async {
            // Twice away; there, twice; away again, which begins with the short wait; and then it says no for good.
            for wait in [250, 500, 2000, 2000, 250] {
                assert_eq!(coming.recv().await.unwrap(), "p0");
                clock.pass(Duration::from_millis(wait)).await;
            }
            coming.recv().await.unwrap()
        };
        let (ended, last) = soon("the story", async { tokio::join!(registration, story) }).await;
        let RegisterError::Refused { conductor, reason } = ended.unwrap_err();
        assert_eq!(
            (conductor, reason.as_str(), last.as_str()),
            (format!("http://{address}"), "as the test wants it", "p0")
        );
        assert!(coming.try_recv().is_err(), "it does not come again");
        tasks.join(Duration::from_secs(5)).await.unwrap();
    }
}
