//! A node's HTTP port: health and metrics.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_runtime::serve::{Callers, ConnectionLimits, Connections, Port, Protocol, connections_within_descriptors};
use baton_runtime::{TaskSet, Telemetry};
use tokio::net::TcpListener;

use crate::readiness::{Readiness, Ready};

/// Most connections of each port: from every conductor and node, with room to spare.
const MAX_CONNECTIONS: usize = 4096;
/// Bytes of one call that may come ahead of their being read.
const WINDOW_BYTES: u32 = 1 << 20;
/// Nodes keep their connections to each other, and need them at once.
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Clone)]
struct Shared {
    telemetry: Telemetry,
    readiness: Readiness,
}

/// Serves until the tasks end. No web page may call.
pub fn start(listener: TcpListener, telemetry: Telemetry, readiness: Readiness, tasks: &TaskSet) -> io::Result<()> {
    let callers = Callers::without_pages(listener.local_addr()?);
    let shared = Shared { telemetry, readiness };
    let router = Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(shared)
        .layer(middleware::from_fn_with_state(Arc::new(callers), check_caller));
    port("http", listener, Protocol::Http1).serve(router, tasks);
    Ok(())
}

async fn check_caller(State(callers): State<Arc<Callers>>, request: Request, next: Next) -> Response {
    match callers.check(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => (StatusCode::FORBIDDEN, format!("{problem}\n")).into_response(),
    }
}

/// A port of this node. Conductors and other nodes send large messages there.
pub(crate) fn port(name: &'static str, listener: TcpListener, protocol: Protocol) -> Port {
    let limits = ConnectionLimits { window_bytes: WINDOW_BYTES, idle: IDLE, ..ConnectionLimits::default() };
    let connections = Connections::new(connections_within_descriptors(MAX_CONNECTIONS));
    Port { name, listener, protocol, limits, connections, leaves: None }
}

/// 200 for as long as the process answers.
async fn health() -> &'static str {
    "alive\n"
}

/// 200 while the node takes requests, 503 if it drains or its engine is stalled.
async fn ready(State(shared): State<Shared>) -> Response {
    let ready = shared.readiness.get();
    let status = if ready == Ready::Serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{}\n", ready.as_str())).into_response()
}

async fn metrics(State(shared): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], shared.telemetry.render()).into_response()
}
