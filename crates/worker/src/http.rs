//! A node's HTTP port: health and metrics.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_runtime::{Phase, Shutdown, TaskSet, Telemetry};
use tokio::net::TcpListener;

#[derive(Clone)]
struct Shared {
    telemetry: Telemetry,
    shutdown: Shutdown,
}

/// Serves until the tasks end.
pub fn start(listener: TcpListener, telemetry: Telemetry, shutdown: &Shutdown, tasks: &TaskSet) {
    let shared = Shared { telemetry, shutdown: shutdown.clone() };
    let router = Router::new().route("/health", get(health)).route("/metrics", get(metrics)).with_state(shared);
    let end = tasks.clone();
    tasks.spawn("http server", async move {
        let stop = async move { end.cancelled().await };
        axum::serve(listener, router).with_graceful_shutdown(stop).await
    });
}

/// 200 while the node takes requests, 503 once it drains.
async fn health(State(shared): State<Shared>) -> Response {
    match shared.shutdown.phase() {
        Phase::Serving => (StatusCode::OK, "serving\n").into_response(),
        phase => (StatusCode::SERVICE_UNAVAILABLE, format!("{phase:?}\n").to_lowercase()).into_response(),
    }
}

async fn metrics(State(shared): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], shared.telemetry.render()).into_response()
}
