//! Whether this process lives, whether it could serve, and its metrics, over HTTP: routes of
//! clients' and operators' ports.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use baton_runtime::Telemetry;
use serde_json::json;

use crate::frontend::Frontend;

/// What a port tells of the inside.
#[derive(Clone)]
pub enum HealthDetail {
    /// Whether it could serve.
    Clients,
    /// All: what is there, and the metrics.
    Operators(Telemetry),
}

/// `/health` and `/ready`, and for operators `/metrics`.
pub fn routes(frontend: Arc<Frontend>, tells: HealthDetail) -> Router {
    let routes = Router::new().route("/health", get(alive));
    match tells {
        HealthDetail::Clients => routes.route("/ready", get(ready)).with_state(frontend),
        HealthDetail::Operators(telemetry) => {
            let metrics = Router::new().route("/metrics", get(metrics)).with_state((Arc::clone(&frontend), telemetry));
            routes.route("/ready", get(ready_with_details)).with_state(frontend).merge(metrics)
        }
    }
}

/// 200 for as long as the process answers.
async fn alive() -> Response {
    Json(json!({ "status": "alive" })).into_response()
}

fn status(frontend: &Frontend) -> (StatusCode, &'static str) {
    if frontend.is_ready() { (StatusCode::OK, "ready") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready") }
}

/// 200 if a request could be served now, 503 if not.
async fn ready(State(frontend): State<Arc<Frontend>>) -> Response {
    let (code, status) = status(&frontend);
    (code, Json(json!({ "status": status }))).into_response()
}

/// The same; the body says what is there.
async fn ready_with_details(State(frontend): State<Arc<Frontend>>) -> Response {
    let card = frontend.model_card();
    let (code, status) = status(&frontend);
    let body = json!({
        "status": status,
        "has_leader": frontend.desk.is_led(frontend.clock.now()),
        "model": card.name,
        "prefill_nodes": card.prefill_nodes,
        "decode_nodes": card.decode_nodes,
        "requests": frontend.live.len(),
    });
    (code, Json(body)).into_response()
}

async fn metrics(State((frontend, telemetry)): State<(Arc<Frontend>, Telemetry)>) -> Response {
    frontend.metrics.refresh(&frontend);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], telemetry.render()).into_response()
}
