//! A node's HTTP port: health and metrics.

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_runtime::serve::{ConnectionLimits, Connections, Port, Protocol, connections_within_descriptors};
use baton_runtime::{Phase, Shutdown, TaskSet, Telemetry};
use tokio::net::TcpListener;

/// Most connections of each port: from every conductor and node, with room to spare.
const MAX_CONNECTIONS: usize = 4096;
/// Bytes of one call that may come ahead of their being read.
const WINDOW_BYTES: u32 = 1 << 20;
/// Nodes keep their connections to each other, and need them at once.
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Clone)]
struct Shared {
    telemetry: Telemetry,
    shutdown: Shutdown,
}

/// Serves until the tasks end.
pub fn start(listener: TcpListener, telemetry: Telemetry, shutdown: &Shutdown, tasks: &TaskSet) {
    let shared = Shared { telemetry, shutdown: shutdown.clone() };
    let router = Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(shared);
    port("http", listener, Protocol::Http1).serve(router, tasks);
}

/// A port of this node. Conductors and other nodes send large messages there.
pub(crate) fn port(name: &'static str, listener: TcpListener, protocol: Protocol) -> Port {
    let limits = ConnectionLimits { window_bytes: WINDOW_BYTES, idle: IDLE, ..ConnectionLimits::default() };
    let connections = Connections::new(connections_within_descriptors(MAX_CONNECTIONS));
    Port { name, listener, protocol, limits, connections }
}

/// 200 for as long as the process answers.
async fn health() -> &'static str {
    "alive\n"
}

/// 200 while the node takes requests, 503 once it drains.
async fn ready(State(shared): State<Shared>) -> Response {
    match shared.shutdown.phase() {
        Phase::Serving => (StatusCode::OK, "serving\n").into_response(),
        phase => (StatusCode::SERVICE_UNAVAILABLE, format!("{phase:?}\n").to_lowercase()).into_response(),
    }
}

async fn metrics(State(shared): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], shared.telemetry.render()).into_response()
}
