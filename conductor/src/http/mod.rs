//! The APIs of OpenAI and Anthropic over HTTP. `baton_api` translates; this carries bodies in and
//! answers out.

mod answer;
mod error;
mod warnings;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use baton_api::{
    BadRequest, Call, ChatRequest, CompletionRequest, Context, DetokenizeRequest, FieldNames, MessagesRequest,
};
use baton_api::{Objectives, ResponseStore, ResponsesRequest, TokenizeRequest, Warnings, Weight, counted, tokenized};
use baton_intake::{BodyError, BodyLimits, Budget, Reservation, reserve};
use baton_proto::v1;
use baton_runtime::serve::{Callers, Origins};
use baton_text::DecodeOptions;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use self::answer::{counted_json, serve};
use self::error::{ANTHROPIC_VERSION, HttpError};
use self::warnings::{WARNING, WarningLog};
use crate::checks::turns;
use crate::config::positive_millis;
use crate::cors;
use crate::error::GenerateError;
use crate::frontend::Frontend;
use crate::health::{self, HealthDetail};

/// Largest body taken, bytes: a prompt of the largest text taken, escaped.
const MAX_BODY_BYTES: usize = 64 << 20;
/// Bodies up to this many bytes are read on the spot: handing them to another thread would take
/// longer.
const READ_INLINE_BYTES: usize = 16 << 10;
/// Memory of what a response refers to, at most so many times its size: here, and in the prompt.
const REFERRED_COPIES: usize = 2;

/// Memory of a token of an answer to `/tokenize`: its id, and its text.
const ANSWERED_TOKEN_BYTES: usize = 256;
/// Memory of a byte of an answer to `/detokenize`: up to three as text, and up to six as JSON.
const ANSWERED_TEXT_COPIES: usize = 9;

/// Memory of the responses that are kept, and how long one is.
const MAX_KEPT_BYTES: usize = 64 << 20;
const MAX_KEPT_SECONDS: u64 = 24 * 60 * 60;

/// Objectives of a request, milliseconds.
const TTFT_SLO_HEADER: &str = "x-baton-ttft-slo-ms";
const TBT_SLO_HEADER: &str = "x-baton-tbt-slo-ms";
const TIMEOUT_HEADER: &str = "x-baton-timeout-ms";

#[derive(Clone)]
struct Shared {
    frontend: Arc<Frontend>,
    budget: Budget,
    /// Turns of reading long bodies: what each is read into is large while it is read.
    reading: Arc<Semaphore>,
    /// Of answers that are kept until they are whole. Bodies, which cost nothing yet, do not end
    /// them.
    answers: Budget,
    /// Responses that are kept.
    responses: Arc<ResponseStore>,
    warning_log: Arc<WarningLog>,
    /// When this conductor started, seconds since 1970: models are as old for clients.
    started: u64,
}

/// The routes, with those that tell of the inside.
pub fn router(
    frontend: Arc<Frontend>,
    tells: HealthDetail,
    budget: Budget,
    answers: Budget,
    origins: Origins,
    address: SocketAddr,
) -> Router {
    let document = Bytes::from(baton_api::openapi(matches!(tells, HealthDetail::Operators(_))));
    let openapi = || async { ([(header::CONTENT_TYPE, "application/json")], document) };
    let health = health::routes(Arc::clone(&frontend), tells);
    let started = frontend.clock.unix_ms() / 1000;
    let responses_kept = Arc::new(ResponseStore::new(MAX_KEPT_BYTES, MAX_KEPT_SECONDS));
    let warning_log = Arc::new(WarningLog::default());
    let reading = Arc::new(Semaphore::new(turns()));
    let shared = Shared { frontend, budget, reading, answers, responses: responses_kept, warning_log, started };
    let routes = Router::new()
        // Clients ask for it to see whether the server is there.
        .route("/", get(version))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/version", get(version))
        .route("/openapi.json", get(openapi))
        .with_state(shared)
        .merge(health)
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method);
    // The header that names a path's methods is put in around the layers of its own router: errors
    // are finished in a router around that.
    let mut routes = Router::new().fallback_service(routes).layer(middleware::from_fn(error::check_header));
    if let Some(cors) = cors::layer(&origins) {
        routes = routes.layer(cors);
    }
    let callers = Arc::new(Callers::at(address, origins));
    routes.layer(middleware::from_fn_with_state(callers, error::check_caller)).layer(middleware::from_fn(error::finish))
}

/// In the form of the API whose client asks: Anthropic's has the same paths.
fn model_json(name: &str, max_model_len: u32, started: u64, is_anthropic: bool) -> Value {
    if is_anthropic {
        return json!({ "type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z" });
    }
    json!({ "id": name, "object": "model", "created": started, "owned_by": "baton", "max_model_len": max_model_len })
}

fn models_json(names: &[String], max_model_len: u32, started: u64, is_anthropic: bool) -> Value {
    let models: Vec<_> = names.iter().map(|name| model_json(name, max_model_len, started, is_anthropic)).collect();
    if is_anthropic {
        return json!({ "data": models, "has_more": false, "first_id": names.first(), "last_id": names.last() });
    }
    json!({ "object": "list", "data": models })
}

async fn models(State(shared): State<Shared>, headers: HeaderMap) -> Json<Value> {
    let frontend = &shared.frontend;
    let max_model_len = frontend.model_card().max_model_len;
    Json(models_json(&frontend.model.names, max_model_len, shared.started, headers.contains_key(ANTHROPIC_VERSION)))
}

async fn model(
    State(shared): State<Shared>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, HttpError> {
    let Ok(Path(id)) = id else { return Err(HttpError::new(StatusCode::NOT_FOUND, "there is no such model")) };
    let unknown = |error: GenerateError| HttpError::of(&error, TokenizeRequest::FIELDS);
    shared.frontend.model.check_model(&id).map_err(unknown)?;
    let max_model_len = shared.frontend.model_card().max_model_len;
    Ok(Json(model_json(&id, max_model_len, shared.started, headers.contains_key(ANTHROPIC_VERSION))))
}

/// In vLLM's form.
async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn no_such_path(uri: Uri) -> HttpError {
    let path = uri.path();
    let hint = match meant(path) {
        Some(meant) => format!("did you mean {meant}?"),
        None => "/openapi.json lists those that there are".to_owned(),
    };
    HttpError::new(StatusCode::NOT_FOUND, format!("there is no such path: {:?}; {hint}", error::shown(path)))
}

/// What a path is meant to be that has `/v1` twice, not at all, or behind something else: a
/// client's base URL is wrong.
fn meant(path: &str) -> Option<String> {
    let path = path.trim_end_matches('/');
    let ends = ["/models", "/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens"];
    ends.iter().find(|end| path.ends_with(*end)).map(|end| format!("/v1{end}"))
}

async fn no_such_method(method: Method) -> HttpError {
    let method = error::shown(method.as_str());
    HttpError::new(StatusCode::METHOD_NOT_ALLOWED, format!("this path does not take {method}"))
}

/// A body, and what it has of the budget.
struct Body {
    bytes: Bytes,
    reservation: Reservation,
    /// The turns of reading long ones.
    reading: Arc<Semaphore>,
}

impl FromRequest<Shared> for Body {
    type Rejection = HttpError;

    async fn from_request(request: Request, shared: &Shared) -> Result<Self, HttpError> {
        let headers = request.headers();
        check_content_type(headers)?;
        if let Some(given) =
            headers.get(header::CONTENT_ENCODING).filter(|given| !given.as_bytes().eq_ignore_ascii_case(b"identity"))
        {
            let message = format!("content-encoding: {given:?}, but bodies are not compressed");
            return Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let limits = BodyLimits::new(MAX_BODY_BYTES);
        let (bytes, reservation) = baton_intake::read(request.into_body(), limits, &shared.budget).await?;
        Ok(Self { bytes, reservation, reading: Arc::clone(&shared.reading) })
    }
}

/// A web page may send any other type without asking first, and none at all.
fn check_content_type(headers: &HeaderMap) -> Result<(), HttpError> {
    let given: Vec<_> = headers.get_all(header::CONTENT_TYPE).into_iter().collect();
    let wrong = match given.iter().find(|given| !is_json(given)) {
        Some(given) => format!("{:?}", error::shown(given.to_str().unwrap_or("?"))),
        None if given.is_empty() => "missing".to_owned(),
        None => return Ok(()),
    };
    let message = format!("content-type: {wrong}, but bodies are JSON: send the header Content-Type: application/json");
    Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// `application/json`, or something of that form: `application/problem+json; charset=utf-8`.
fn is_json(content_type: &HeaderValue) -> bool {
    let essence = content_type.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    essence.split_once('/').is_some_and(|(_, kind)| {
        let kind = kind.to_ascii_lowercase();
        // `text/plain, a/+json` is a list, and no type.
        (kind == "json" || kind.ends_with("+json")) && !kind.contains([',', ' ', '/'])
    })
}

async fn completions(State(shared): State<Shared>, headers: HeaderMap, body: Body) -> Result<Response, HttpError> {
    let context = shared.context();
    let given = headers.clone();
    let read = read(body, move |mut request: CompletionRequest| {
        request.baton = objectives(request.baton, &given)?;
        request.call(context)
    });
    let (call, warnings, taken_in) = read.await?;
    Ok(shared.serve(&headers, call, warnings, taken_in).await)
}

async fn chat(State(shared): State<Shared>, headers: HeaderMap, body: Body) -> Result<Response, HttpError> {
    let context = shared.context();
    let given = headers.clone();
    let read = read(body, move |mut request: ChatRequest| {
        request.baton = objectives(request.baton, &given)?;
        request.call(context)
    });
    let (call, warnings, taken_in) = read.await?;
    Ok(shared.serve(&headers, call, warnings, taken_in).await)
}

async fn responses(State(shared): State<Shared>, headers: HeaderMap, body: Body) -> Result<Response, HttpError> {
    let context = shared.context();
    let given = headers.clone();
    let read = read(body, move |mut request: ResponsesRequest| {
        request.baton = objectives(request.baton, &given)?;
        request.call(context)
    });
    let (call, warnings, mut taken_in) = read.await?;
    reserve(&mut taken_in, call.referred_bytes * REFERRED_COPIES)?;
    Ok(shared.serve(&headers, call, warnings, taken_in).await)
}

async fn messages(State(shared): State<Shared>, headers: HeaderMap, body: Body) -> Result<Response, HttpError> {
    let context = shared.context();
    let given = headers.clone();
    let read = read(body, move |mut request: MessagesRequest| {
        request.baton = objectives(request.baton, &given)?;
        request.call(&context)
    });
    let (call, warnings, taken_in) = read.await?;
    Ok(shared.serve(&headers, call, warnings, taken_in).await)
}

async fn count_tokens(State(shared): State<Shared>, body: Body) -> Result<Response, HttpError> {
    let read = read(body, |mut request: MessagesRequest| Ok((request.prompt()?, request.model)));
    let ((prompt, model), warnings, _taken_in) = read.await?;
    let prompt = v1::generate_request::Prompt::Messages(prompt);
    let (tokens, _) = tokens_of(&shared, model, prompt, MessagesRequest::FIELDS).await?;
    Ok(shared.with_warnings(&warnings, Json(counted(tokens.len()))))
}

/// The tokens of a prompt, and how many of prompt and output a request may have.
async fn tokens_of(
    shared: &Shared,
    model: String,
    prompt: v1::generate_request::Prompt,
    fields: FieldNames,
) -> Result<(Vec<u32>, u32), HttpError> {
    let request = v1::GenerateRequest { model, prompt: Some(prompt), ..Default::default() };
    shared.frontend.tokenize(request).await.map_err(|error| HttpError::of(&error, fields))
}

async fn tokenize(State(shared): State<Shared>, body: Body) -> Result<Response, HttpError> {
    let read = read(body, |request: TokenizeRequest| Ok((request.model.clone(), request.prompt()?)));
    let ((model, (prompt, wants_texts)), warnings, mut taken_in) = read.await?;
    let (tokens, max_model_len) = tokens_of(&shared, model, prompt, TokenizeRequest::FIELDS).await?;
    reserve(&mut taken_in, tokens.len() * ANSWERED_TOKEN_BYTES)?;
    let texts = wants_texts.then(|| tokens.iter().map(|token| shared.decode(&[*token])).collect());
    let body = tokenized(&tokens, max_model_len, texts).to_string();
    Ok(shared.with_warnings(&warnings, shared.counted(body)?))
}

async fn detokenize(State(shared): State<Shared>, body: Body) -> Result<Response, HttpError> {
    let (request, _, mut taken_in) = read::<DetokenizeRequest, _>(body, Ok).await?;
    let unknown = |error: GenerateError| HttpError::of(&error, TokenizeRequest::FIELDS);
    shared.frontend.model.check_model(&request.model).map_err(unknown)?;
    let size = shared.frontend.model.tokenizer.vocab_size();
    if let Some((position, id)) = request.tokens.iter().enumerate().find(|&(_, &id)| id >= size) {
        let problem = format!("{id}, but the vocabulary has {size} tokens");
        return Err(BadRequest { param: format!("tokens[{position}]"), problem }.into());
    }
    let bytes = shared.check_text(&request.tokens)?;
    reserve(&mut taken_in, bytes * ANSWERED_TEXT_COPIES)?;
    let body = json!({ "prompt": shared.decode(&request.tokens) }).to_string();
    shared.counted(body)
}

/// Reads a body and makes something of it, of a long one not on the async threads; also gives what
/// was left out of it. What it has of the budget is to be kept until the request was taken in.
async fn read<T: DeserializeOwned, R: Send + 'static>(
    body: Body,
    make: impl FnOnce(T) -> Result<R, BadRequest> + Send + 'static,
) -> Result<(R, Warnings, Reservation), HttpError> {
    let Body { bytes, reservation, reading } = body;
    if bytes.len() <= READ_INLINE_BYTES {
        return read_weighed(bytes, reservation, make);
    }
    // Closed only with the process.
    let turn = reading.acquire_owned().await.map_err(|_| BodyError::Broken)?;
    let reading = tokio::task::spawn_blocking(move || {
        // Kept, as the reservation is, until the work is over, even if the client has gone away.
        let _turn = turn;
        read_weighed(bytes, reservation, make)
    });
    reading.await.unwrap_or_else(|error| {
        tracing::error!(%error, "reading a body failed");
        Err(HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, "reading the body failed"))
    })
}

/// Reads a body if there is room for what is made of it.
fn read_weighed<T: DeserializeOwned, R>(
    bytes: Bytes,
    mut reservation: Reservation,
    make: impl FnOnce(T) -> Result<R, BadRequest>,
) -> Result<(R, Warnings, Reservation), HttpError> {
    let weight = Weight::of_body(&bytes)?;
    reserve(&mut reservation, weight.memory())?;
    let (request, warnings) = baton_api::read(&bytes)?;
    drop(bytes);
    Ok((make(request)?, warnings, reservation))
}

/// A request's own objectives, and for what it does not say the headers': a gateway sets those for
/// all of its clients.
fn objectives(own: Objectives, headers: &HeaderMap) -> Result<Objectives, BadRequest> {
    let known = |name: &str| [TTFT_SLO_HEADER, TBT_SLO_HEADER, TIMEOUT_HEADER].contains(&name);
    let names = headers.keys().map(|name| name.as_str());
    if let Some(unknown) = names.filter(|name| name.starts_with("x-baton-")).find(|name| !known(name)) {
        let problem = format!("not known; there are {TTFT_SLO_HEADER}, {TBT_SLO_HEADER} and {TIMEOUT_HEADER}");
        return Err(BadRequest { param: unknown.to_owned(), problem });
    }
    let checked = |param: &str, millis: f64| match positive_millis(millis) {
        Ok(time) => Ok(Some(time.as_secs_f64() * 1e3)),
        Err(problem) => Err(BadRequest { param: param.to_owned(), problem }),
    };
    let of = |field: &str, own: Option<f64>, name: &str| match (own, headers.get(name)) {
        (Some(millis), _) => checked(field, millis),
        (None, None) => Ok(None),
        (None, Some(value)) => {
            let text = value.to_str().unwrap_or_default();
            let expected = |_| {
                let shown = error::shown(text);
                BadRequest { param: name.to_owned(), problem: format!("'{shown}': expected milliseconds") }
            };
            checked(name, text.trim().parse::<f64>().map_err(expected)?)
        }
    };
    Ok(Objectives {
        ttft_slo_ms: of("baton.ttft_slo_ms", own.ttft_slo_ms, TTFT_SLO_HEADER)?,
        tbt_slo_ms: of("baton.tbt_slo_ms", own.tbt_slo_ms, TBT_SLO_HEADER)?,
        timeout_ms: of("baton.timeout_ms", own.timeout_ms, TIMEOUT_HEADER)?,
    })
}

impl Shared {
    /// Serves a call, and tells what was left out of it.
    async fn serve(
        &self,
        headers: &HeaderMap,
        mut call: Call,
        mut warnings: Warnings,
        taken_in: Reservation,
    ) -> Response {
        warnings.append(std::mem::take(&mut call.warnings));
        let response = serve(self, headers, call, taken_in).await;
        self.with_warnings(&warnings, response)
    }

    /// An answer that tells what was left out of its request.
    fn with_warnings(&self, warnings: &Warnings, answer: impl IntoResponse) -> Response {
        let mut response = answer.into_response();
        if warnings.is_empty() {
            return response;
        }
        let line = warnings.line();
        self.warning_log.log(self.frontend.clock.now(), &line);
        if let Ok(line) = HeaderValue::from_str(&line) {
            response.headers_mut().insert(WARNING, line);
        }
        response
    }

    /// An answer that counts until its client has read it.
    fn counted(&self, body: String) -> Result<Response, HttpError> {
        Ok(counted_json(body.into_bytes(), self.answers.reserve()).map_err(|_| BodyError::NoRoom)?)
    }

    /// Refuses tokens whose text is longer than any prompt; gives its bytes.
    fn check_text(&self, tokens: &[u32]) -> Result<usize, BadRequest> {
        let model = &self.frontend.model;
        let bytes = |&token: &u32| model.tokenizer.token_bytes(token).map_or(0, <[u8]>::len);
        let all = tokens.iter().map(bytes).sum::<usize>();
        let most = model.max_prompt_bytes;
        if all <= most {
            return Ok(all);
        }
        let problem = format!("a text of {all} bytes, but at most {most} are given");
        Err(BadRequest { param: "tokens".to_owned(), problem })
    }

    fn decode(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&decode(&self.frontend, tokens)).into_owned()
    }

    fn context(&self) -> Context {
        let frontend = Arc::clone(&self.frontend);
        Context {
            created: self.frontend.clock.unix_ms() / 1000,
            decode: Arc::new(move |tokens| decode(&frontend, tokens)),
            responses: Arc::clone(&self.responses),
            defaults: self.frontend.model.sampling_defaults,
        }
    }
}

fn decode(frontend: &Frontend, tokens: &[u32]) -> Vec<u8> {
    frontend.model.tokenizer.decode_bytes(tokens, DecodeOptions { skip_special: false, starts_text: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_list_has_the_form_of_each_api() {
        let names = ["m".to_owned(), "alias".to_owned()];
        let model =
            |name| json!({ "type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z" });
        let data = [model("m"), model("alias")];
        let list = json!({ "data": data, "has_more": false, "first_id": "m", "last_id": "alias" });
        assert_eq!(models_json(&names, 64, 7, true), list);
        let openai = models_json(&names, 64, 7, false);
        assert_eq!((&openai["data"][0]["created"], &openai["data"][1]["id"]), (&json!(7), &json!("alias")));
        assert_eq!((&openai["object"], &openai["data"][0]["object"]), (&json!("list"), &json!("model")));
    }

    #[test]
    fn body_needs_a_content_type_of_json() {
        let check = |given: &[&'static str]| {
            let headers = given.iter().map(|given| (header::CONTENT_TYPE, HeaderValue::from_static(given)));
            check_content_type(&headers.fold(HeaderMap::new(), |mut headers, (name, value)| {
                headers.append(name, value);
                headers
            }))
        };
        for right in ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/ld+json"]
        {
            assert!(check(&[right]).is_ok(), "{right}");
        }
        let json = "application/json";
        for wrong in [&[][..], &["text/plain"], &[""], &["text/plain, a/+json"], &["text/plain;+json"], &[json, "a/b"]]
        {
            let failure = check(wrong).unwrap_err().failure;
            let names_what_to_send = failure.message.ends_with("send the header Content-Type: application/json");
            assert!(failure.status == 415 && names_what_to_send, "{}", failure.message);
        }
        assert!(check(&[]).unwrap_err().failure.message.starts_with("content-type: missing, but"));
    }

    #[test]
    fn wrong_base_url_is_told_the_path() {
        for wrong in ["/chat/completions", "/v1/v1/chat/completions", "/openai/v1/chat/completions/"] {
            assert_eq!(meant(wrong).as_deref(), Some("/v1/chat/completions"), "{wrong}");
        }
        assert_eq!(meant("/completions").as_deref(), Some("/v1/completions"));
        assert_eq!(meant("/v1/embeddings"), None);
    }

    #[test]
    fn invalid_objective_header_gives_a_short_error() {
        let wrong = |value: &str| {
            let headers =
                HeaderMap::from_iter([(header::HeaderName::from_static(TIMEOUT_HEADER), value.parse().unwrap())]);
            objectives(Objectives::default(), &headers).unwrap_err()
        };
        for value in ["1e300", &"x".repeat(9999), "-1"] {
            let BadRequest { param, problem } = wrong(value);
            assert!(param == TIMEOUT_HEADER && problem.len() < 100, "{problem}");
        }
    }
}
