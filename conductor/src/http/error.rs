//! Errors over HTTP: what went wrong, in the form of the API that was called.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use baton_api::{BadRequest, ErrorForm, Failure, FieldNames};
use baton_intake::{BodyError, NO_ROOM_RETRY};
use baton_runtime::serve::Callers;
use baton_scheduler::RequestError;
use baton_types::ErrorKind;

use crate::error::GenerateError;
use crate::frontend::{MAX_CLIENT_ID_BYTES, new_request_id};

/// The id of a request; OpenAI's clients read this header.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// And Anthropic's this one.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// What the official clients obey before anything else.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// So much of a text of the client's is repeated.
const MAX_SHOWN_CHARS: usize = 64;

/// What Anthropic's clients send, also with the paths that both APIs have.
pub(super) const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// A request that fails before its answer begins. It becomes a response without a body; [`finish`]
/// knows in which form that is to be.
#[derive(Debug, Clone)]
pub(super) struct HttpError {
    pub(super) failure: Failure,
    /// Seconds.
    retry_after: Option<u64>,
    /// Whether clients are told not to come again by themselves.
    is_final: bool,
}

impl HttpError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { failure: Failure::new(status.as_u16(), message), retry_after: None, is_final: false }
    }

    /// An error of the conductor, with the API's names of fields.
    pub(super) fn of(error: &GenerateError, fields: FieldNames) -> Self {
        let retry_after = error.retry_after().map(|after| after.as_secs_f64().ceil().max(1.0) as u64);
        let status = baton_proto::http_status(error.kind());
        let wrong = |field: &str, problem: &str, code| {
            let bad = BadRequest { param: fields.of(field).to_owned(), problem: problem.to_owned() };
            Failure { status, code, ..bad.into() }
        };
        let failure = match error {
            GenerateError::Invalid { field, problem } => wrong(field, problem, None),
            GenerateError::NotFound { field, problem } => wrong(field, problem, Some("model_not_found")),
            GenerateError::TooLong(too_long) => fields.too_long(too_long),
            _ => Failure::new(status, error.told()),
        };
        // Its client does not wait any longer, or more nodes may die of it; and it would be
        // computed again.
        let ends = |error: &RequestError| matches!(error, RequestError::TimedOut(_) | RequestError::NodesDied(_));
        let is_final = matches!(error, GenerateError::Request(error) if ends(error))
            || error.kind() == ErrorKind::Conflict
            || error.is_out_of_reach();
        Self { failure, retry_after, is_final }
    }

    /// The answers that are not streamed take all the memory that they may.
    pub(super) fn too_long_to_keep() -> Self {
        let message = "there is no room to keep this answer until it is whole: stream it, or ask for less at once";
        // It would be computed again.
        Self { is_final: true, ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// A request that ended without a word: its client did not read, or there is a bug.
    pub(super) fn cut_off() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer was cut off")
    }
}

impl From<BadRequest> for HttpError {
    fn from(bad: BadRequest) -> Self {
        Self { failure: bad.into(), retry_after: None, is_final: false }
    }
}

impl From<BodyError> for HttpError {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLarge(_) | BodyError::TooHeavy { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Late(_) => StatusCode::REQUEST_TIMEOUT,
            BodyError::Broken => StatusCode::BAD_REQUEST,
            BodyError::NoRoom => StatusCode::TOO_MANY_REQUESTS,
        };
        let retry_after = (error == BodyError::NoRoom).then_some(NO_ROOM_RETRY.as_secs());
        Self { retry_after, ..Self::new(status, error.to_string()) }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.failure.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.is_final {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        response.extensions_mut().insert(self.failure);
        response
    }
}

/// The client's own id of a request.
pub(super) fn client_id(headers: &HeaderMap) -> Option<&str> {
    headers.get(&REQUEST_ID)?.to_str().ok().filter(|id| (1..=MAX_CLIENT_ID_BYTES).contains(&id.len()))
}

/// Largest header section over HTTP/1, bytes. A connection reads somewhat more at times. Over
/// HTTP/2 it refuses more than half of this.
const MAX_HEADER_BYTES: usize = 32 << 10;
/// What a field of a header has beside its name and its value: `: ` and the end of its line.
const FIELD_BYTES: usize = 4;

/// Refuses a request whose header is too large.
pub(super) async fn check_header(request: Request, next: Next) -> Response {
    let fields: usize =
        request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES).sum();
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    if fields + target > MAX_HEADER_BYTES {
        let message = format!("the header has more than {MAX_HEADER_BYTES} bytes");
        return HttpError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message).into_response();
    }
    next.run(request).await
}

/// Refuses a web page that may not call.
pub(super) async fn check_caller(State(callers): State<Arc<Callers>>, request: Request, next: Next) -> Response {
    match callers.check(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => HttpError::new(StatusCode::FORBIDDEN, problem).into_response(),
    }
}

/// Names the methods that a path takes.
fn tell_methods(failure: &mut Failure, headers: &HeaderMap) {
    if failure.status != StatusCode::METHOD_NOT_ALLOWED.as_u16() {
        return;
    }
    if let Some(allowed) = headers.get(header::ALLOW).and_then(|allowed| allowed.to_str().ok()) {
        failure.message = format!("{}; it takes {}", failure.message, allowed.replace(',', " and "));
    }
}

/// Gives errors their body, and every answer the client's own id, which goes before ours.
pub(super) async fn finish(request: Request, next: Next) -> Response {
    let given = client_id(request.headers()).and_then(|id| HeaderValue::from_str(id).ok());
    let path = request.uri().path().to_owned();
    let is_anthropic = path.starts_with("/v1/messages") || request.headers().contains_key(ANTHROPIC_VERSION);
    let mut response = next.run(request).await;
    // What is no request has no id of its own.
    let own = new_request_id();
    let has_id = response.headers().contains_key(&REQUEST_ID);
    if let Some(mut failure) = response.extensions_mut().remove::<Failure>() {
        tell_methods(&mut failure, response.headers());
        if !has_id {
            // What got as far as an id has been logged.
            let client_request = given.as_ref().and_then(|id| id.to_str().ok());
            let path = shown(&path);
            let status = failure.status;
            let error = failure.message.as_str();
            tracing::info!(request = %own, client_request, path, status, error, "request rejected");
        }
        let form = if is_anthropic { ErrorForm::Anthropic } else { ErrorForm::OpenAi };
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().remove(header::CONTENT_LENGTH);
        let id = given.as_ref().or(response.headers().get(&REQUEST_ID)).and_then(|id| id.to_str().ok());
        let own = own.to_string();
        let body = form.body(&failure, id.unwrap_or(&own));
        *response.body_mut() = Body::from(body);
    }
    let headers = response.headers_mut();
    if let Some(given) = given {
        headers.insert(REQUEST_ID, given);
    } else if !has_id && let Ok(id) = HeaderValue::from_str(&own.to_string()) {
        headers.insert(REQUEST_ID, id);
    }
    if is_anthropic && let Some(id) = headers.get(&REQUEST_ID).cloned() {
        headers.insert(ANTHROPIC_REQUEST_ID, id);
    }
    response
}

/// The beginning of a text of the client's.
pub(super) fn shown(text: &str) -> &str {
    text.char_indices().nth(MAX_SHOWN_CHARS).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use baton_api::TooLong;

    use super::*;

    #[test]
    fn http_error_has_status_code_and_param() {
        let failure = |error: GenerateError| HttpError::of(&error, baton_api::MessagesRequest::FIELDS).failure;
        let too_long = TooLong {
            prompt_tokens: 99,
            is_exact: true,
            completion_tokens: Some(5),
            max_model_len: 64,
            context_length: 64,
        };
        let long = failure(GenerateError::TooLong(too_long));
        assert_eq!((long.status, long.message.as_str()), (400, "prompt is too long: 99 tokens > 64 maximum"));
        assert_eq!(failure(GenerateError::invalid("n", "0")).code, None);
        let unknown = failure(GenerateError::NotFound { field: "model", problem: "there is no 'm'".to_owned() });
        assert_eq!((unknown.status, unknown.code), (404, Some("model_not_found")));
    }
}
