//! What browsers are told: which web pages may read the answers of the clients' port.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method};
use baton_runtime::serve::Origins;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// How long browsers may keep what a preflight said.
const MAX_AGE: Duration = Duration::from_secs(600);

/// The layer for these origins; `None` if there are none.
pub fn layer(origins: &Origins) -> Option<CorsLayer> {
    let named: Vec<HeaderValue> = origins.named().iter().filter_map(|origin| origin.parse().ok()).collect();
    if named.is_empty() && !origins.are_all() {
        return None;
    }
    let allowed = if origins.are_all() { AllowOrigin::any() } else { AllowOrigin::list(named) };
    let exposed =
        ["x-request-id", "request-id", "retry-after", "x-should-retry", "x-baton-warning"].map(HeaderName::from_static);
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]);
    Some(layer.allow_headers(AllowHeaders::mirror_request()).expose_headers(exposed).max_age(MAX_AGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cors_layer_exposes_what_the_official_clients_read() {
        let layer = |origins: &[&str]| {
            let origins = origins.iter().map(ToString::to_string).collect::<Vec<_>>();
            layer(&Origins::parse(&origins).unwrap())
        };
        assert!(layer(&[]).is_none());
        for origins in [&["*"][..], &["https://a.example", "http://localhost:3000"]] {
            let exposed = format!("{:?}", layer(origins).unwrap());
            assert!(
                exposed.contains("x-request-id,request-id,retry-after,x-should-retry,x-baton-warning"),
                "{exposed}"
            );
        }
    }
}
