//! The HTTP port: health, metrics, and OpenAI's APIs. `baton_api` translates; this carries bodies in and answers out.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use baton_api::{Answer, BadRequest, Call, ChatRequest, CompletionRequest, Context, DetokenizeRequest, Objectives};
use baton_api::{TokenizeRequest, tokenized};
use baton_proto::v1;
use baton_runtime::Telemetry;
use baton_text::DecodeOptions;
use baton_types::ErrorKind;
use futures::stream::{SelectAll, StreamExt, select_all};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;

use crate::body::{self, BodyError, BodyLimits};
use crate::budget::{Budget, Reservation};
use crate::config::positive_millis;
use crate::error::{GenerateError, NO_ROOM_RETRY};
use crate::front_door::{FrontDoor, Outgoing};

/// Largest body taken, bytes: a prompt of the largest text taken, escaped.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Bodies up to this many bytes are read on the spot: handing them to another thread would take longer.
const READ_INLINE_BYTES: usize = 16 << 10;
/// Memory of what is read of a body, at most so many times the body's: a token takes two bytes there and four here.
const READ_FACTOR: usize = 2;
/// Longest id of a client's that its answer repeats, bytes.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Objectives of a request, milliseconds.
const TTFT_SLO_HEADER: &str = "x-baton-ttft-slo-ms";
const TBT_SLO_HEADER: &str = "x-baton-tbt-slo-ms";
const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

#[derive(Clone)]
struct Shared {
    door: Arc<FrontDoor>,
    telemetry: Telemetry,
    budget: Budget,
}

/// The routes.
pub fn router(door: Arc<FrontDoor>, telemetry: Telemetry, budget: Budget) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn(repeat_request_id))
        .with_state(Shared { door, telemetry, budget })
}

/// 200 where a request could be served now, 503 where not; the body says what is there.
async fn health(State(shared): State<Shared>) -> Response {
    let card = shared.door.model_card();
    let ready = shared.door.is_ready();
    let body = json!({
        "status": if ready { "ready" } else { "not ready" },
        "model": card.name,
        "prefill_nodes": card.prefill_nodes,
        "decode_nodes": card.decode_nodes,
        "requests": shared.door.live.len(),
    });
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

async fn metrics(State(shared): State<Shared>) -> Response {
    shared.door.metrics.refresh(&shared.door);
    let text = shared.telemetry.render();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

fn model_json(card: &v1::Model) -> Value {
    json!({ "id": card.name, "object": "model", "created": 0, "owned_by": "baton", "max_model_len": card.context_length })
}

async fn models(State(shared): State<Shared>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_json(&shared.door.model_card())] }))
}

async fn model(State(shared): State<Shared>, Path(id): Path<String>) -> Result<Json<Value>, HttpError> {
    shared.door.model.check_model(&id)?;
    Ok(Json(model_json(&shared.door.model_card())))
}

async fn no_such_path() -> HttpError {
    HttpError::new(StatusCode::NOT_FOUND, "there is no such path")
}

async fn no_such_method() -> HttpError {
    HttpError::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
}

/// A body, and what it has of the budget.
struct Body {
    bytes: Bytes,
    reservation: Reservation,
}

impl FromRequest<Shared> for Body {
    type Rejection = HttpError;

    async fn from_request(request: Request, shared: &Shared) -> Result<Self, HttpError> {
        let headers = request.headers();
        if let Some(given) = headers.get(header::CONTENT_TYPE).filter(|given| !is_json(given)) {
            let message = format!("content-type: {given:?}, but bodies are application/json");
            return Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let limits = BodyLimits::new(MAX_BODY_BYTES);
        let (bytes, reservation) = body::read(request.into_body(), limits, &shared.budget).await?;
        Ok(Self { bytes, reservation })
    }
}

/// `application/json`, or something of that form: `application/problem+json; charset=utf-8`.
fn is_json(content_type: &HeaderValue) -> bool {
    let essence = content_type.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    essence.split_once('/').is_some_and(|(_, kind)| {
        let kind = kind.to_ascii_lowercase();
        kind == "json" || kind.ends_with("+json")
    })
}

async fn completions(State(shared): State<Shared>, headers: HeaderMap, body: Body) -> Result<Response, HttpError> {
    let (mut request, taken_in): (CompletionRequest, _) = read(body).await?;
    request.baton = objectives(request.baton, &headers)?;
    let call = request.call(shared.context())?;
    serve(&shared, call, taken_in).await
}

async fn chat(State(shared): State<Shared>, headers: HeaderMap, body: Body) -> Result<Response, HttpError> {
    let (mut request, taken_in): (ChatRequest, _) = read(body).await?;
    request.baton = objectives(request.baton, &headers)?;
    let call = request.call(shared.context())?;
    serve(&shared, call, taken_in).await
}

async fn tokenize(State(shared): State<Shared>, body: Body) -> Result<Json<Value>, HttpError> {
    let (request, _taken_in): (TokenizeRequest, _) = read(body).await?;
    let model = request.model.clone();
    let (prompt, wants_texts) = request.prompt()?;
    let request = v1::GenerateRequest { model, prompt: Some(prompt), ..Default::default() };
    let (tokens, context_length) = shared.door.tokenize(request).await?;
    let texts = wants_texts.then(|| tokens.iter().map(|token| shared.decode(&[*token])).collect());
    Ok(Json(tokenized(&tokens, context_length, texts)))
}

async fn detokenize(State(shared): State<Shared>, body: Body) -> Result<Json<Value>, HttpError> {
    let (request, _taken_in): (DetokenizeRequest, _) = read(body).await?;
    shared.door.model.check_model(&request.model)?;
    let size = shared.door.model.tokenizer.vocab_size();
    if let Some((position, id)) = request.tokens.iter().enumerate().find(|&(_, &id)| id >= size) {
        let problem = format!("{id}, but the vocabulary has {size} tokens");
        return Err(BadRequest { param: format!("tokens[{position}]"), problem }.into());
    }
    Ok(Json(json!({ "prompt": shared.decode(&request.tokens) })))
}

/// Reads a body, a long one not on the async threads. What it has of the budget is to be kept until the request was taken in.
async fn read<T: DeserializeOwned + Send + 'static>(body: Body) -> Result<(T, Reservation), HttpError> {
    let Body { bytes, mut reservation } = body;
    reservation.grow(bytes.len() * READ_FACTOR).map_err(|_| BodyError::NoRoom)?;
    if bytes.len() <= READ_INLINE_BYTES {
        return Ok((baton_api::read(&bytes)?, reservation));
    }
    // The reservation goes along: the work goes on where the client has gone away.
    let reading = tokio::task::spawn_blocking(move || (baton_api::read(&bytes), reservation)).await;
    let (read, reservation) = reading.map_err(|error| {
        tracing::error!(%error, "reading a body failed");
        HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "reading the body failed")
    })?;
    Ok((read?, reservation))
}

/// A request's own objectives, and for what it does not say the headers': a gateway sets those for all of its clients.
fn objectives(own: Objectives, headers: &HeaderMap) -> Result<Objectives, BadRequest> {
    let checked = |param: &str, millis: f64| match positive_millis(millis) {
        Ok(time) => Ok(Some(time.as_secs_f64() * 1e3)),
        Err(problem) => Err(BadRequest { param: param.to_owned(), problem }),
    };
    let of = |field: &str, own: Option<f64>, name: &str| match (own, headers.get(name)) {
        (Some(millis), _) => checked(field, millis),
        (None, None) => Ok(None),
        (None, Some(value)) => {
            let text = value.to_str().unwrap_or_default();
            let expected =
                |_| BadRequest { param: name.to_owned(), problem: format!("'{text}': expected milliseconds") };
            checked(name, text.trim().parse::<f64>().map_err(expected)?)
        }
    };
    Ok(Objectives {
        ttft_slo_ms: of("baton.ttft_slo_ms", own.ttft_slo_ms, TTFT_SLO_HEADER)?,
        tbt_slo_ms: of("baton.tbt_slo_ms", own.tbt_slo_ms, TBT_SLO_HEADER)?,
    })
}

impl Shared {
    fn decode(&self, tokens: &[u32]) -> String {
        decode(&self.door, tokens)
    }

    fn context(&self) -> Context {
        let door = Arc::clone(&self.door);
        Context { created: self.door.clock.unix_ms() / 1000, decode: Arc::new(move |tokens| decode(&door, tokens)) }
    }
}

fn decode(door: &FrontDoor, tokens: &[u32]) -> String {
    door.model.tokenizer.decode(tokens, DecodeOptions { skip_special: false, starts_text: true })
}

/// What the requests of a call bring, each with its number.
type Brought = SelectAll<futures::stream::BoxStream<'static, (usize, Outgoing)>>;

/// Serves a call. Whatever refuses one of its requests does so before the answer begins.
async fn serve(shared: &Shared, call: Call, taken_in: Reservation) -> Result<Response, HttpError> {
    let Call { requests, stream, mut answer } = call;
    let responses =
        futures::future::try_join_all(requests.into_iter().map(|request| shared.door.generate(request))).await?;
    drop(taken_in);
    let numbered = responses
        .into_iter()
        .enumerate()
        .map(|(index, responses)| ReceiverStream::new(responses).map(move |outgoing| (index, outgoing)).boxed());
    let mut brought: Brought = select_all(numbered);
    // The first that each says is who it is.
    let first = brought.next().await;
    let id = first.as_ref().and_then(request_id);
    let mut brought = futures::stream::iter(first).chain(brought);
    let response = match stream {
        Some(_) => {
            let events = events(brought, answer).map(Ok::<_, Infallible>);
            Sse::new(events).keep_alive(KeepAlive::default()).into_response()
        }
        None => {
            while let Some((index, outgoing)) = brought.next().await {
                answer.take(index, outgoing.response?);
            }
            if !answer.is_whole() {
                return Err(cut_off());
            }
            Json(answer.body()).into_response()
        }
    };
    Ok((id.map(|id| [(REQUEST_ID_HEADER, id)]), response).into_response())
}

/// Our id of a request.
fn request_id((_, first): &(usize, Outgoing)) -> Option<HeaderValue> {
    let Some(v1::generate_response::Event::Accepted(accepted)) = &first.response.as_ref().ok()?.event else {
        return None;
    };
    HeaderValue::from_str(&accepted.request_id).ok()
}

/// Every answer repeats the client's id, an error too; it goes before ours.
async fn repeat_request_id(request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID_HEADER).filter(|id| id.len() <= MAX_REQUEST_ID_BYTES).cloned();
    let mut response = next.run(request).await;
    if let Some(given) = given {
        response.headers_mut().insert(REQUEST_ID_HEADER, given);
    }
    response
}

/// A request that ended without a word: its client did not read, or there is a bug.
fn cut_off() -> HttpError {
    HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "the answer was cut off")
}

/// Server-sent events: chunks, then `[DONE]`. An error is the last event: what ends without `[DONE]` is not whole.
fn events(
    brought: impl Stream<Item = (usize, Outgoing)> + Send + 'static,
    answer: Box<dyn Answer>,
) -> impl Stream<Item = SseEvent> {
    struct Stage<S> {
        brought: std::pin::Pin<Box<S>>,
        answer: Box<dyn Answer>,
        ended: bool,
    }
    let stage = Stage { brought: Box::pin(brought), answer, ended: false };
    let chunks = futures::stream::unfold(stage, |mut stage| async move {
        if stage.ended {
            return None;
        }
        let data = match stage.brought.next().await {
            Some((index, Outgoing { response: Ok(response), .. })) => {
                stage.answer.take(index, response).into_iter().map(|chunk| chunk.to_string()).collect()
            }
            Some((_, Outgoing { response: Err(error), .. })) => {
                stage.ended = true;
                vec![HttpError::from(error).body().to_string()]
            }
            None if !stage.answer.is_whole() => {
                stage.ended = true;
                vec![cut_off().body().to_string()]
            }
            None => {
                stage.ended = true;
                stage.answer.last().map(|chunk| chunk.to_string()).into_iter().chain(["[DONE]".to_owned()]).collect()
            }
        };
        Some((futures::stream::iter(data), stage))
    });
    chunks.flatten().map(|data: String| SseEvent::default().data(data))
}

/// An error in the form of OpenAI's API.
#[derive(Debug)]
struct HttpError {
    status: StatusCode,
    message: String,
    /// A class that programs know.
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
    /// Seconds.
    retry_after: Option<u64>,
}

impl HttpError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = if status.is_client_error() { "invalid_request_error" } else { ErrorKind::Internal.as_str() };
        Self { status, message: message.into(), kind, param: None, code: None, retry_after: None }
    }

    fn body(&self) -> Value {
        let Self { message, kind, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<BadRequest> for HttpError {
    fn from(BadRequest { param, problem }: BadRequest) -> Self {
        let message = format!("{param}: {problem}");
        Self { param: Some(param), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }
}

impl From<BodyError> for HttpError {
    fn from(error: BodyError) -> Self {
        let message = error.to_string();
        match error {
            BodyError::TooLarge(_) => Self::new(StatusCode::PAYLOAD_TOO_LARGE, message),
            BodyError::Late(_) => Self::new(StatusCode::REQUEST_TIMEOUT, message),
            BodyError::Broken => Self::new(StatusCode::BAD_REQUEST, message),
            BodyError::NoRoom => Self {
                kind: ErrorKind::Overloaded.as_str(),
                retry_after: Some(NO_ROOM_RETRY.as_secs()),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
            },
        }
    }
}

impl From<GenerateError> for HttpError {
    fn from(error: GenerateError) -> Self {
        let code = baton_proto::http_status(error.kind());
        let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let retry_after = error.retry_after().map(|after| after.as_secs_f64().ceil().max(1.0) as u64);
        match &error {
            GenerateError::Invalid { field, problem } | GenerateError::NotFound { field, problem } => {
                // What gRPC clients know by other names.
                let param = if ["text", "token_ids"].contains(field) { "prompt" } else { field };
                let code = matches!(error, GenerateError::NotFound { .. }).then_some("model_not_found");
                let bad = BadRequest { param: param.to_owned(), problem: problem.clone() };
                Self { status, code, retry_after, ..bad.into() }
            }
            _ if error.kind() == ErrorKind::Invalid => Self::new(status, error.to_string()),
            _ => Self { kind: error.kind().as_str(), retry_after, ..Self::new(status, error.to_string()) },
        }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
