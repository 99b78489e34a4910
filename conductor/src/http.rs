//! The HTTP port: health, metrics, and a minimal OpenAI surface (`/v1/models`, `/v1/completions`).

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use baton_proto::v1;
use baton_proto::v1::generate_response::Event;
use baton_runtime::Telemetry;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};

use crate::config::positive_millis;
use crate::error::GenerateError;
use crate::front_door::{FrontDoor, Responses};

/// Largest body taken, bytes: a prompt of the largest text taken, escaped.
const MAX_BODY_BYTES: usize = 64 << 20;

#[derive(Clone)]
struct Shared {
    door: Arc<FrontDoor>,
    telemetry: Telemetry,
}

/// The routes.
pub fn router(door: Arc<FrontDoor>, telemetry: Telemetry) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completions))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(Shared { door, telemetry })
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

async fn models(State(shared): State<Shared>) -> Json<Value> {
    let card = shared.door.model_card();
    Json(json!({
        "object": "list",
        "data": [{ "id": card.name, "object": "model", "owned_by": "baton", "max_model_len": card.context_length }],
    }))
}

/// Objectives of a request, milliseconds.
const TTFT_SLO_HEADER: &str = "x-baton-ttft-slo-ms";
const TBT_SLO_HEADER: &str = "x-baton-tbt-slo-ms";

/// The part of OpenAI's completion request that is served; anything else is refused by name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CompletionRequest {
    #[serde(default)]
    model: String,
    prompt: Prompt,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<u64>,
    #[serde(default)]
    stop: Stop,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    ignore_eos: bool,
    #[serde(default)]
    #[allow(dead_code)] // taken, as clients send it, and without effect: it names their end user
    user: Option<String>,
    #[serde(default)]
    n: Option<u32>,
    #[serde(default)]
    baton: BatonFields,
}

/// What OpenAI's API has no field for.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct BatonFields {
    /// Objective of the time to first token.
    ttft_slo_ms: Option<f64>,
    /// Objective of the time between tokens.
    tbt_slo_ms: Option<f64>,
}

impl BatonFields {
    /// These, and for what they do not say the headers: a gateway sets those for all of its clients.
    fn or_headers(self, headers: &HeaderMap) -> Result<Self, GenerateError> {
        let checked = |name, millis: f64| -> Result<Option<f64>, GenerateError> {
            let time = positive_millis(millis).map_err(|problem| GenerateError::invalid(name, problem))?;
            Ok(Some(time.as_secs_f64() * 1e3))
        };
        let of = |field, own: Option<f64>, name| match (own, headers.get(name)) {
            (Some(millis), _) => checked(field, millis),
            (None, None) => Ok(None),
            (None, Some(value)) => {
                let text = value.to_str().unwrap_or_default();
                let expected = |_| GenerateError::invalid(name, format!("'{text}': expected milliseconds"));
                checked(name, text.trim().parse::<f64>().map_err(expected)?)
            }
        };
        Ok(Self {
            ttft_slo_ms: of("baton.ttft_slo_ms", self.ttft_slo_ms, TTFT_SLO_HEADER)?,
            tbt_slo_ms: of("baton.tbt_slo_ms", self.tbt_slo_ms, TBT_SLO_HEADER)?,
        })
    }
}

/// What a stream tells besides its text.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    /// Usage comes in a chunk of its own, without choices, before `[DONE]`, and not in the last one with a choice.
    #[serde(default)]
    include_usage: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
enum Stop {
    #[default]
    None,
    One(String),
    Many(Vec<String>),
}

impl CompletionRequest {
    fn into_wire(self, headers: &HeaderMap) -> Result<v1::GenerateRequest, GenerateError> {
        let BatonFields { ttft_slo_ms, tbt_slo_ms } = self.baton.or_headers(headers)?;
        if let Some(n) = self.n.filter(|&n| n != 1) {
            return Err(GenerateError::invalid("n", format!("{n}, but only 1 completion per request is served")));
        }
        use v1::generate_request::Prompt as Wire;
        let prompt = match self.prompt {
            Prompt::Text(text) => Wire::Text(v1::TextPrompt { text, parse_special: true }),
            Prompt::Tokens(ids) => Wire::TokenIds(v1::TokenIds { ids }),
        };
        let sampling = v1::SamplingParameters {
            // OpenAI's defaults, which are not ours.
            temperature: Some(self.temperature.unwrap_or(1.0)),
            max_tokens: Some(self.max_tokens.unwrap_or(16)),
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            ignore_eos: self.ignore_eos,
            stop: match self.stop {
                Stop::None => Vec::new(),
                Stop::One(stop) => vec![stop],
                Stop::Many(stops) => stops,
            },
            ..Default::default()
        };
        Ok(v1::GenerateRequest {
            model: self.model,
            prompt: Some(prompt),
            sampling: Some(sampling),
            slo: Some(v1::ServiceLevelObjectives { ttft_ms: ttft_slo_ms, tbt_ms: tbt_slo_ms }),
            ..Default::default()
        })
    }
}

/// An error in the form of OpenAI's API.
struct HttpError(GenerateError);

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let code = baton_proto::http_status(self.0.kind());
        let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(error_body(&self.0))).into_response();
        if let Some(after) = self.0.retry_after() {
            let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

fn error_body(error: &GenerateError) -> Value {
    let param = match error {
        GenerateError::Invalid { field, .. } | GenerateError::NotFound { field, .. } => Some(*field),
        _ => None,
    };
    json!({ "error": { "message": error.to_string(), "type": error.kind().as_str(), "param": param } })
}

async fn completions(
    State(shared): State<Shared>,
    headers: HeaderMap,
    body: Result<Json<CompletionRequest>, JsonRejection>,
) -> Result<Response, HttpError> {
    let Json(request) = body.map_err(|error| HttpError(GenerateError::invalid("body", error.body_text())))?;
    let stream = request.stream.then(|| request.stream_options.unwrap_or_default());
    let request = request.into_wire(&headers).map_err(HttpError)?;
    let mut responses = shared.door.generate(request).await.map_err(HttpError)?;
    let created = shared.door.clock.unix_ms() / 1000;
    if let Some(options) = stream {
        let events = completion_events(responses, created, options).map(Ok::<_, Infallible>);
        return Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response());
    }
    let mut whole = Completion { created, ..Completion::default() };
    while let Some(outgoing) = responses.recv().await {
        whole.take(outgoing.response.map_err(HttpError)?);
    }
    Ok(Json(whole.body()).into_response())
}

/// A completion, put together from the stream.
#[derive(Default)]
struct Completion {
    created: u64,
    id: String,
    model: String,
    text: String,
    finish_reason: Option<String>,
    usage: Option<v1::Usage>,
}

impl Completion {
    /// Takes a response in; the text of this one, where it has any.
    fn take(&mut self, response: v1::GenerateResponse) -> Option<String> {
        match response.event? {
            Event::Accepted(accepted) => {
                self.id = format!("cmpl-{}", accepted.request_id);
                self.model = accepted.model;
                None
            }
            Event::Delta(delta) => {
                self.text.push_str(&delta.text);
                // A token that shows no text, or none yet, is a chunk, too: clients see that the answer goes on.
                (!delta.text.is_empty() || !delta.token_ids.is_empty()).then_some(delta.text)
            }
            Event::PromptLogprobs(_) => None,
            Event::Finished(finished) => {
                self.finish_reason = Some(finished.finish_reason);
                self.usage = finished.usage;
                Some(String::new())
            }
        }
    }

    fn usage(&self) -> Value {
        let usage = self.usage.unwrap_or_default();
        json!({
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
        })
    }

    fn chunk(&self, text: &str) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{ "index": 0, "text": text, "logprobs": null, "finish_reason": self.finish_reason }],
        })
    }

    /// What a stream says for some text: usage goes with the end.
    fn chunks(&self, text: &str, options: StreamOptions) -> Vec<Value> {
        let mut chunk = self.chunk(text);
        match (&self.finish_reason, options.include_usage) {
            (None, _) => vec![chunk],
            (Some(_), false) => {
                chunk["usage"] = self.usage();
                vec![chunk]
            }
            (Some(_), true) => {
                let mut last = self.chunk("");
                (last["choices"], last["usage"]) = (json!([]), self.usage());
                vec![chunk, last]
            }
        }
    }

    fn body(&self) -> Value {
        let mut body = self.chunk(&self.text);
        body["usage"] = self.usage();
        body
    }
}

/// Server-sent events: chunks, then `[DONE]`; an error becomes a last event of its own.
fn completion_events(responses: Responses, created: u64, options: StreamOptions) -> impl Stream<Item = SseEvent> {
    let mut whole = Completion { created, ..Completion::default() };
    let chunks = ReceiverStream::new(responses).map(move |outgoing| match outgoing.response {
        Ok(response) => whole.take(response).map(|text| whole.chunks(&text, options)).unwrap_or_default(),
        Err(error) => vec![error_body(&error)],
    });
    let events = futures::StreamExt::flat_map(chunks, futures::stream::iter);
    let events = events.map(|chunk| SseEvent::default().data(chunk.to_string()));
    events.chain(tokio_stream::once(SseEvent::default().data("[DONE]")))
}
