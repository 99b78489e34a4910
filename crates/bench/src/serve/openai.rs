//! OpenAI's completions over HTTP, streamed.

use std::time::Duration;

use baton_runtime::innermost;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde_json::{Value, json};

use super::args::{JsonSchema, ServeArgs};
use super::arrivals::{Arrival, Prompt};
use super::outcome::Limits;
use super::received::{Problem, ReceivedAnswer, Usage};
use super::sse::SseReader;
use crate::BenchError;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the list of models may take.
const MODELS_TIMEOUT: Duration = Duration::from_secs(30);
/// A connection that was idle for longer is not used again. Servers close theirs after 5 s, and a
/// request that meets the end of one would count as failed.
const IDLE: Duration = Duration::from_secs(2);
/// Longest body other than a stream, bytes.
const MAX_BODY_BYTES: usize = 1 << 20;
/// Characters of a server's reason that are kept.
const MAX_REASON_CHARS: usize = 200;

/// A server, and what every request says.
#[derive(Clone)]
pub struct OpenAi {
    client: Client<HttpConnector, Full<Bytes>>,
    host: String,
    /// Name of the model.
    pub model: String,
    temperature: f32,
    ignore_eos: bool,
    schema: Option<JsonSchema>,
    objectives: Option<Limits>,
}

impl OpenAi {
    /// Asks for the models if none is named.
    pub async fn connect(host: &str, args: &ServeArgs) -> Result<Self, BenchError> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = Client::builder(TokioExecutor::new()).pool_idle_timeout(IDLE).build(connector);
        let mut server = Self {
            client,
            host: host.to_owned(),
            model: args.model.clone().unwrap_or_default(),
            temperature: args.temperature,
            ignore_eos: args.ignores_eos(),
            schema: args.json_schema.clone(),
            objectives: args.objectives(),
        };
        if args.model.is_none() {
            let found = tokio::time::timeout(MODELS_TIMEOUT, server.first_model()).await;
            let found = found.unwrap_or_else(|_| Err(format!("no answer within {} s", MODELS_TIMEOUT.as_secs())));
            server.model = found.map_err(|problem| {
                BenchError::control("server", format!("http://{host}/v1/models: {problem} (--model names one instead)"))
            })?;
        }
        Ok(server)
    }

    async fn first_model(&self) -> Result<String, String> {
        let answer = self.send(Method::GET, "/v1/models", Bytes::new()).await?;
        let status = answer.status();
        let body = whole(answer).await?;
        let list: Value = serde_json::from_slice(&body).map_err(|_| format!("HTTP {status}, and no JSON"))?;
        let first = list["data"][0]["id"].as_str();
        first.map(ToOwned::to_owned).ok_or_else(|| format!("HTTP {status}, and no model"))
    }

    /// What is sent for an arrival.
    pub fn body(&self, arrival: &Arrival) -> Bytes {
        let prompt = match arrival.prompt() {
            Prompt::Text(text) => Value::from(text),
            Prompt::Tokens(ids) => Value::from(ids),
        };
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": arrival.max_tokens,
            "temperature": self.temperature,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        if self.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        if let Some(JsonSchema(schema)) = &self.schema {
            body["structured_outputs"] = json!({ "json": schema });
        }
        if let Some(limits) = &self.objectives {
            body["baton"] = json!({ "ttft_slo_ms": limits.ttft_ms(), "tbt_slo_ms": limits.tbt_ms() });
        }
        Bytes::from(body.to_string())
    }

    /// Sends a request, and hears its answer to the end.
    pub async fn ask(&self, body: Bytes, received: &mut ReceivedAnswer) -> Result<(), Problem> {
        let answer = self.send(Method::POST, "/v1/completions", body).await.map_err(Problem::failed)?;
        match answer.status() {
            StatusCode::OK => hear(answer, received).await,
            status @ (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) => {
                // Read to its end, so that the connection can be used again.
                let _ = whole(answer).await;
                Err(Problem::Rejected(status.as_u16()))
            }
            status => {
                let reason = reason(&whole(answer).await.unwrap_or_default());
                Err(Problem::failed(format!("HTTP {}: {reason}", status.as_u16())))
            }
        }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<hyper::body::Incoming>, String> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.host))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        self.client.request(request).await.map_err(|error| innermost(&error))
    }
}

/// A body that is no stream.
async fn whole(answer: Response<hyper::body::Incoming>) -> Result<Bytes, String> {
    let body = Limited::new(answer.into_body(), MAX_BODY_BYTES).collect().await;
    body.map(|body| body.to_bytes()).map_err(|error| error.to_string())
}

/// A chunk of a stream, or an error in its place.
#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<ChunkUsage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ChunkUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl ChunkUsage {
    fn usage(&self) -> Usage {
        let details = self.prompt_tokens_details.as_ref();
        let cached = details.and_then(|details| details.cached_tokens).unwrap_or(0);
        Usage { prompt: self.prompt_tokens, cached, output: self.completion_tokens }
    }
}

/// Hears a stream to `[DONE]`, or to the end of the connection.
async fn hear(answer: Response<hyper::body::Incoming>, received: &mut ReceivedAnswer) -> Result<(), Problem> {
    let mut body = answer.into_body();
    let mut reader = SseReader::default();
    let mut end = End::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Problem::failed(format!("the stream broke: {}", innermost(&error))))?;
        let Ok(bytes) = frame.into_data() else { continue };
        for event in reader.push(&bytes).map_err(Problem::failed)? {
            end.take(&event, received)?;
        }
    }
    if end.finished { Ok(()) } else { Err(Problem::failed("the stream ended in mid-answer")) }
}

/// Whether an answer has ended.
#[derive(Debug, Default)]
struct End {
    finished: bool,
}

impl End {
    fn take(&mut self, event: &str, received: &mut ReceivedAnswer) -> Result<(), Problem> {
        if event == "[DONE]" {
            self.finished = true;
            return Ok(());
        }
        let chunk: Chunk =
            serde_json::from_str(event).map_err(|error| Problem::failed(format!("an event: {error}")))?;
        if let Some(error) = &chunk.error {
            // As Baton names it.
            if error["type"] == "cancelled" {
                return Err(Problem::Aborted(reason(event.as_bytes())));
            }
            return Err(Problem::failed(format!("in mid-answer: {}", reason(event.as_bytes()))));
        }
        if let Some(choice) = chunk.choices.first() {
            let shows = choice.text.as_ref().is_some_and(|text| !text.is_empty());
            let ends = choice.finish_reason.is_some();
            // The last chunk has the reason; if it has no text it has no token either.
            if shows || !ends {
                received.chunk(shows)?;
            }
            self.finished |= ends;
        }
        if let Some(usage) = chunk.usage {
            received.usage(usage.usage())?;
        }
        Ok(())
    }
}

/// What a server says of an error, shortened.
fn reason(body: &[u8]) -> String {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = [&json["error"]["message"], &json["message"], &json["error"], &json["detail"]];
    let said = said.into_iter().find_map(Value::as_str).map(ToOwned::to_owned);
    let said = said.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    said.chars().take(MAX_REASON_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(events: &[&str]) -> (Result<bool, Problem>, ReceivedAnswer) {
        let mut end = End::default();
        let mut received = ReceivedAnswer::of_at_most(4);
        let taken: Result<(), _> = events.iter().try_for_each(|event| end.take(event, &mut received));
        (taken.map(|()| end.finished), received)
    }

    const TEXT: &str = r#"{"choices": [{"index": 0, "text": "a", "finish_reason": null}], "usage": null}"#;
    const EMPTY: &str = r#"{"choices": [{"text": "", "finish_reason": null}]}"#;
    const LAST: &str = r#"{"choices": [{"text": "", "finish_reason": "length"}]}"#;
    const USAGE: &str = r#"{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}}"#;

    #[test]
    fn openai_stream_ends_with_finish_reason_and_usage() {
        let (ended, received) = take(&[TEXT, EMPTY, TEXT, LAST, USAGE, "[DONE]"]);
        assert_eq!(ended, Ok(true));
        assert_eq!(received.sizes(), Usage { prompt: 9, cached: 5, output: 4 });
        assert_eq!((received.count().at.len(), received.count().merged), (3, 1), "the last chunk is no token");
        assert_eq!(take(&[TEXT, TEXT]).0, Ok(false));
    }

    #[test]
    fn openai_error_event_is_a_failure_with_its_message() {
        let (ended, _) = take(&[TEXT, r#"{"error": {"message": "no node is ready", "type": "unavailable"}}"#]);
        assert_eq!(ended, Err(Problem::failed("in mid-answer: no node is ready")));
        let (ended, _) = take(&[r#"{"error": {"message": "the request was aborted", "type": "cancelled"}}"#]);
        assert_eq!(ended, Err(Problem::Aborted("the request was aborted".into())));
        assert!(matches!(take(&["{"]).0, Err(Problem::Failed(reason)) if reason.starts_with("an event: ")));
    }

    #[test]
    fn openai_stream_without_end_is_a_failure() {
        let (ended, received) = take(&[TEXT; 1000]);
        assert!(matches!(ended, Err(Problem::Failed(reason)) if reason.starts_with("more than 80 messages")));
        assert_eq!(received.count().at.len(), 80);
    }

    #[test]
    fn http_error_reason_is_found_and_truncated() {
        for body in [r#"{"error": {"message": "why"}}"#, r#"{"message": "why"}"#, r#"{"error": "why"}"#, "why"] {
            assert_eq!(reason(body.as_bytes()), "why", "{body}");
        }
        assert_eq!(reason(&[b'x'; 5000]).len(), MAX_REASON_CHARS);
    }
}
