//! Which web pages may call the clients' port.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method};
use baton_runtime::settings::BadSetting;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// How long browsers may keep what a preflight said.
const MAX_AGE: Duration = Duration::from_secs(600);

/// The layer for these origins; `None` if there are none. `*` stands for all.
///
/// # Errors
/// One of them is no origin.
pub fn layer(origins: &[String]) -> Result<Option<CorsLayer>, BadSetting> {
    if origins.is_empty() {
        return Ok(None);
    }
    let origins = match origins {
        [all] if all == "*" => AllowOrigin::any(),
        some => AllowOrigin::list(some.iter().map(|text| origin(text)).collect::<Result<Vec<_>, _>>()?),
    };
    let exposed =
        ["x-request-id", "request-id", "retry-after", "x-should-retry", "x-baton-warning"].map(HeaderName::from_static);
    let layer = CorsLayer::new().allow_origin(origins).allow_methods([Method::GET, Method::POST]);
    Ok(Some(layer.allow_headers(AllowHeaders::mirror_request()).expose_headers(exposed).max_age(MAX_AGE)))
}

fn origin(text: &str) -> Result<HeaderValue, BadSetting> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let value = host.filter(|host| !host.is_empty() && !host.contains(['/', '*'])).and_then(|_| text.parse().ok());
    value.ok_or_else(|| {
        let problem = format!("'{text}' is no origin (expected https://host, https://host:port, or * alone)");
        BadSetting::invalid("cors_origins", problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cors_origin_needs_a_scheme_and_no_path() {
        let layer = |origins: &[&str]| layer(&origins.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(layer(&[]).unwrap().is_none());
        let exposed = format!("{:?}", layer(&["*"]).unwrap());
        assert!(
            exposed.contains("x-request-id,request-id,retry-after,x-should-retry,x-baton-warning"),
            "what the official clients read: {exposed}"
        );
        assert!(layer(&["https://a.example", "http://localhost:3000"]).unwrap().is_some());
        for wrong in ["a.example", "https://", "https://a/", "https://*.a", "ftp://a"] {
            assert!(layer(&[wrong]).unwrap_err().problem.contains(wrong), "{wrong}");
        }
        assert!(layer(&["https://a", "*"]).is_err());
    }
}
