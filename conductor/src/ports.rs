//! The ports and what is served on each.
//!
//! Three kinds of peers: clients (OpenAI's HTTP, gRPC `Inference`), operators (`Cluster`, metrics,
//! reflection) and nodes (`NodeRegistration`). Operators and nodes have ports of their own if the
//! settings name them; then the clients' ports tell nothing of the inside. By default they share
//! the clients' ports.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Router, middleware};
use baton_api::Weight;
use baton_intake::{Budget, Intake, take_in};
use baton_proto::{FILE_DESCRIPTORS, MAX_MESSAGE_BYTES, v1};
use baton_runtime::serve::{
    Callers, ConnectionLimits, Connections, Origins, Port, Protocol, connections_within_descriptors,
};
use baton_runtime::settings::BadSetting;
use baton_runtime::{TaskSet, Telemetry};
use tokio::net::TcpListener;
use tonic::Status;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer as ReflectionServer};

use crate::coalesce::Coalesced;
use crate::config::Settings;
use crate::frontend::Frontend;
use crate::grpc::{ClusterService, HealthService, InferenceService, NodeRegistrationService};
use crate::health::{self, HealthDetail};
use crate::http;
use crate::leader::LeaderService;

/// Connections at once of operators' port.
const MAX_OPERATORS: usize = 256;
/// Connections at once of nodes' port; each node has one.
const MAX_NODES: usize = 4096;

/// The listeners, bound and not served yet.
pub struct Ports {
    grpc: TcpListener,
    http: TcpListener,
    operators: Option<TcpListener>,
    nodes: Option<TcpListener>,
    max_connections: usize,
    limits: ConnectionLimits,
    budget: Budget,
    answers: Budget,
    origins: Origins,
}

/// Where they listen.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// gRPC of clients.
    pub grpc: SocketAddr,
    /// HTTP of clients.
    pub http: SocketAddr,
    /// Operators' own.
    pub operators: Option<SocketAddr>,
    /// Nodes' own.
    pub nodes: Option<SocketAddr>,
}

impl Addresses {
    /// Whom the clients' ports serve, too, though others than this host reach them.
    pub fn exposed(&self) -> Option<&'static str> {
        match (self.operators, self.nodes) {
            // Only metrics and counts of nodes are on the HTTP port.
            (None, _) if self.grpc.ip().is_loopback() && !self.http.ip().is_loopback() => Some("operators"),
            _ if self.grpc.ip().is_loopback() => None,
            (None, None) => Some("operators and nodes"),
            (None, Some(_)) => Some("operators"),
            (Some(_), None) => Some("nodes"),
            (Some(_), Some(_)) => None,
        }
    }
}

impl Ports {
    /// Binds what the settings name. Answers that clients do not read are ended after `stall`.
    pub async fn bind(settings: &Settings, stall: Duration) -> anyhow::Result<Self> {
        Ok(Self {
            origins: Origins::parse(&settings.cors_origins)?,
            grpc: listen("grpc", &settings.grpc).await?,
            http: listen("http", &settings.http).await?,
            operators: listen_if_set("operators", settings.operators.as_deref()).await?,
            nodes: listen_if_set("nodes", settings.nodes.as_deref()).await?,
            max_connections: settings.max_connections,
            limits: ConnectionLimits { stall, ..ConnectionLimits::default() },
            budget: Budget::new(settings.body_budget()),
            answers: Budget::new(settings.body_budget()),
        })
    }

    /// Budgets of what clients send, and of answers to them.
    pub fn budgets(&self) -> [Budget; 2] {
        [self.budget.clone(), self.answers.clone()]
    }

    /// Where they listen.
    pub fn addresses(&self) -> std::io::Result<Addresses> {
        let address = |listener: &Option<TcpListener>| listener.as_ref().map(TcpListener::local_addr).transpose();
        Ok(Addresses {
            grpc: self.grpc.local_addr()?,
            http: self.http.local_addr()?,
            operators: address(&self.operators)?,
            nodes: address(&self.nodes)?,
        })
    }

    /// Serves until `tasks` are cancelled.
    pub fn serve(self, frontend: &Arc<Frontend>, telemetry: &Telemetry, tasks: &TaskSet) -> anyhow::Result<()> {
        let services =
            Services { frontend, intake: Arc::new(Intake::new(&descriptors(), self.budget.clone(), memory)?) };
        let limits = self.limits;
        let port = |name, listener, protocol, connections| Port {
            name,
            listener,
            protocol,
            limits,
            connections,
            leaves: None,
        };
        // Requests go to another conductor, and so do those of clients that keep their connection.
        let of_clients = |name, listener, protocol, connections| Port {
            leaves: Some(frontend.shutdown.clone()),
            ..port(name, listener, protocol, connections)
        };
        let operators_here = self.operators.is_none();
        let nodes_here = self.nodes.is_none();
        let operators = || HealthDetail::Operators(telemetry.clone());
        if let Some(listener) = self.operators {
            let connections = Connections::new(connections_within_descriptors(MAX_OPERATORS));
            let callers = Callers::without_pages(listener.local_addr()?);
            let routes = health::routes(Arc::clone(frontend), operators());
            let routes = services.operators(routes, callers)?;
            port("operators", listener, Protocol::Both, connections).serve(routes, tasks);
        }
        if let Some(listener) = self.nodes {
            let connections = Connections::new(connections_within_descriptors(MAX_NODES));
            let routes =
                Routes::from(services.taken_in(Routes::new(services.membership()).add_service(services.leader())));
            port("nodes", listener, Protocol::Http2, connections).serve(routes.prepare(), tasks);
        }
        let clients = Connections::new(connections_within_descriptors(self.max_connections));
        let relayed = frontend.metrics.relayed.clone();
        let clock = Arc::clone(&frontend.clock);
        of_clients("grpc", self.grpc, Protocol::Http2, clients.clone()).serve_with(
            services.clients(operators_here, nodes_here)?,
            move |socket| Coalesced::new(socket, relayed.clone(), Arc::clone(&clock)),
            tasks,
        );
        let tells = if operators_here { operators() } else { HealthDetail::Clients };
        let address = self.http.local_addr()?;
        let routes = http::router(Arc::clone(frontend), tells, self.budget, self.answers, self.origins, address);
        of_clients("http", self.http, Protocol::Http1, clients).serve(routes, tasks);
        Ok(())
    }
}

async fn listen(key: &'static str, address: &str) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    Ok(listener.map_err(|error| {
        BadSetting::unavailable(key, format!("cannot listen on '{address}': {error} (expected host:port that is free)"))
    })?)
}

async fn listen_if_set(key: &'static str, address: Option<&str>) -> anyhow::Result<Option<TcpListener>> {
    match address {
        Some(address) => Ok(Some(listen(key, address).await?)),
        None => Ok(None),
    }
}

/// File descriptors of all services, those of health and reflection included.
fn descriptors() -> Vec<u8> {
    [FILE_DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET, tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET].concat()
}

/// Memory that is made of a message besides the entries of its lists.
fn memory(message: &[u8], text_bytes: usize) -> usize {
    Weight::of_message(message, text_bytes).memory()
}

fn reflection() -> Result<ReflectionServer<impl ServerReflection>, tonic_reflection::server::Error> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
}

/// A node or an operator that calls the wrong port is told so.
async fn not_here(uri: Uri, headers: HeaderMap) -> Response {
    let message = format!("this port does not serve {}; operators and nodes may have ports of their own", uri.path());
    refused(&headers, StatusCode::NOT_FOUND, Status::unimplemented(message))
}

/// Refuses a web page that may not call the operators' port.
async fn check_caller(State(callers): State<Arc<Callers>>, request: Request, next: Next) -> Response {
    match callers.check(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => refused(request.headers(), StatusCode::FORBIDDEN, Status::permission_denied(problem)),
    }
}

/// In the form that its client understands.
fn refused(headers: &HeaderMap, code: StatusCode, status: Status) -> Response {
    let is_grpc = headers.get(CONTENT_TYPE).is_some_and(|given| given.as_bytes().starts_with(b"application/grpc"));
    if is_grpc { status.into_http() } else { (code, status.message().to_owned()).into_response() }
}

/// The gRPC services.
struct Services<'a> {
    frontend: &'a Arc<Frontend>,
    intake: Arc<Intake>,
}

impl Services<'_> {
    fn membership(&self) -> v1::node_registration_server::NodeRegistrationServer<NodeRegistrationService> {
        v1::node_registration_server::NodeRegistrationServer::new(NodeRegistrationService(Arc::clone(self.frontend)))
    }

    fn cluster(&self) -> v1::cluster_server::ClusterServer<ClusterService> {
        let service = v1::cluster_server::ClusterServer::new(ClusterService(Arc::clone(self.frontend)));
        service.max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// What other conductors call, beside what nodes do.
    fn leader(&self) -> v1::leader_server::LeaderServer<LeaderService> {
        let service = v1::leader_server::LeaderServer::new(LeaderService(Arc::clone(self.frontend)));
        service.max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    fn health(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService(Arc::clone(self.frontend)))
    }

    /// Has the messages of these services taken in within limits.
    fn taken_in(&self, routes: Routes) -> Router {
        let taken_in = middleware::from_fn_with_state(Arc::clone(&self.intake), take_in);
        routes.into_axum_router().layer(taken_in).fallback(not_here)
    }

    /// What clients call, and what else is on their port.
    fn clients(&self, with_operators: bool, with_nodes: bool) -> anyhow::Result<Routes> {
        // Node names are of the inside; operators who look elsewhere find them there, by the
        // request's id.
        let service = InferenceService { frontend: Arc::clone(self.frontend), names_nodes: with_operators };
        let inference = v1::inference_server::InferenceServer::new(service)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let mut ours = Routes::new(inference).add_service(self.health());
        if with_operators {
            ours = ours.add_service(self.cluster()).add_service(reflection()?);
        }
        if with_nodes {
            ours = ours.add_service(self.membership()).add_service(self.leader());
        }
        Ok(Routes::from(self.taken_in(ours)).prepare())
    }

    /// What operators call, beside these routes.
    fn operators(&self, http: Router, callers: Callers) -> anyhow::Result<Routes> {
        let ours = self.taken_in(Routes::new(self.cluster()).add_service(self.health()).add_service(reflection()?));
        let check = middleware::from_fn_with_state(Arc::new(callers), check_caller);
        Ok(Routes::from(ours.merge(http).layer(check)).prepare())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_exposed_to_other_hosts_are_reported() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let exposed = |grpc: &str, operators: bool, nodes: bool| {
            let own = |is_set: bool| is_set.then(|| address("10.0.0.1:1"));
            Addresses { grpc: address(grpc), http: address(grpc), operators: own(operators), nodes: own(nodes) }
                .exposed()
        };
        assert_eq!(exposed("127.0.0.1:1", false, false), None);
        assert_eq!(exposed("[::1]:1", false, false), None);
        assert_eq!(exposed("0.0.0.0:1", false, false), Some("operators and nodes"));
        assert_eq!(exposed("0.0.0.0:1", false, true), Some("operators"));
        assert_eq!(exposed("0.0.0.0:1", true, false), Some("nodes"));
        assert_eq!(exposed("0.0.0.0:1", true, true), None);
        let grpc = address("127.0.0.1:1");
        let http = address("0.0.0.0:1");
        let metrics = Addresses { grpc, http, operators: None, nodes: None };
        assert_eq!(metrics.exposed(), Some("operators"));
        assert_eq!(Addresses { operators: Some(grpc), ..metrics }.exposed(), None);
    }
}
