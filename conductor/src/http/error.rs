//! Errors over HTTP: what went wrong, in the form of the API that was called.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use baton_api::{BadRequest, ErrorForm, Failure, FieldNames};
use baton_runtime::random_u64;

use crate::body::BodyError;
use crate::error::{GenerateError, NO_ROOM_RETRY};

/// Longest id of a client's that its answer repeats, bytes.
const MAX_REQUEST_ID_BYTES: usize = 128;
/// The id of a request; OpenAI's clients read this header.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// And Anthropic's this one.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// A request that fails before its answer begins. It becomes a response without a body; [`finish`] knows in which form that is to be.
#[derive(Debug, Clone)]
pub(super) struct HttpError {
    pub(super) failure: Failure,
    /// Seconds.
    retry_after: Option<u64>,
}

impl HttpError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { failure: Failure::new(status.as_u16(), message), retry_after: None }
    }

    /// An error of the conductor, with the API's names of fields.
    pub(super) fn of(error: &GenerateError, fields: FieldNames) -> Self {
        let retry_after = error.retry_after().map(|after| after.as_secs_f64().ceil().max(1.0) as u64);
        let failure = match error {
            GenerateError::Invalid { field, problem } | GenerateError::NotFound { field, problem } => {
                let bad = BadRequest { param: fields.of(field).to_owned(), problem: problem.clone() };
                let code = matches!(error, GenerateError::NotFound { .. }).then_some("model_not_found");
                Failure { status: baton_proto::http_status(error.kind()), code, ..bad.into() }
            }
            _ => Failure::new(baton_proto::http_status(error.kind()), error.told()),
        };
        Self { failure, retry_after }
    }

    /// A request that ended without a word: its client did not read, or there is a bug.
    pub(super) fn cut_off() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer was cut off")
    }
}

impl From<BadRequest> for HttpError {
    fn from(bad: BadRequest) -> Self {
        Self { failure: bad.into(), retry_after: None }
    }
}

impl From<BodyError> for HttpError {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
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
        response.extensions_mut().insert(self.failure);
        response
    }
}

/// Gives errors their body, and every answer the client's own id, which goes before ours.
pub(super) async fn finish(request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID).filter(|id| id.len() <= MAX_REQUEST_ID_BYTES).cloned();
    let is_anthropic = request.uri().path().starts_with("/v1/messages");
    let mut response = next.run(request).await;
    if let Some(failure) = response.extensions_mut().remove::<Failure>() {
        let form = if is_anthropic { ErrorForm::Anthropic } else { ErrorForm::OpenAi };
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = Body::from(form.body(&failure));
    }
    let headers = response.headers_mut();
    if let Some(given) = given {
        headers.insert(REQUEST_ID, given);
    } else if !headers.contains_key(&REQUEST_ID)
        && let Ok(id) =
            HeaderValue::from_str(&format!("{:032x}", u128::from(random_u64()) << 64 | u128::from(random_u64())))
    {
        // What was refused has no id of its own.
        headers.insert(REQUEST_ID, id);
    }
    if is_anthropic && let Some(id) = headers.get(&REQUEST_ID).cloned() {
        headers.insert(ANTHROPIC_REQUEST_ID, id);
    }
    response
}
