//! Bodies, and outputs of requests.

use std::sync::Arc;

use baton_api::{BadRequest, Call, ChatRequest, Chunk, CompletionRequest, Context, ResponseStore};
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::structured_output::Form;
use baton_proto::v1::{self, TokenLogprobs, TopLogprob};
use baton_types::SamplingDefaults;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

pub fn context() -> Context {
    keeping(&Arc::new(ResponseStore::new(1 << 20, 60)))
}

/// A context that keeps its responses there.
pub fn keeping(responses: &Arc<ResponseStore>) -> Context {
    let decode = |tokens: &[u32]| tokens.iter().flat_map(|token| format!("<{token}>").into_bytes()).collect();
    let defaults = SamplingDefaults::default();
    Context { created: 7, decode: Arc::new(decode), responses: Arc::clone(responses), defaults }
}

/// A body, without what was left out of it.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, BadRequest> {
    baton_api::read(body).map(|(read, _)| read)
}

/// What was left out of a body.
pub fn left_out<T: DeserializeOwned>(body: &Value) -> String {
    let (_, warnings) = baton_api::read::<T>(body.to_string().as_bytes()).expect("a body");
    warnings.line()
}

pub fn completion(body: Value) -> Call {
    read::<CompletionRequest>(body.to_string().as_bytes()).expect("a body").call(context()).expect("a call")
}

pub fn chat(body: Value) -> Call {
    read::<ChatRequest>(body.to_string().as_bytes()).expect("a body").call(context()).expect("a call")
}

pub fn response(event: Event) -> v1::GenerateResponse {
    v1::GenerateResponse { event: Some(event), completion: 0 }
}

pub fn logprobs(text: &str, logprob: f32) -> TokenLogprobs {
    let top = vec![TopLogprob { token_id: 9, logprob: -0.5, text: "z".into(), ..Default::default() }];
    TokenLogprobs { logprob: Some(logprob), top, text: text.into(), ..Default::default() }
}

/// The outputs of a request of two tokens, `ab` and then `c`, for a prompt of two.
pub fn brought(with_logprobs: bool) -> Vec<v1::GenerateResponse> {
    let delta = |index, text: &str, logprob| v1::Delta {
        index,
        token_ids: vec![index],
        text: text.into(),
        logprobs: if with_logprobs { vec![logprobs(text, logprob)] } else { Vec::new() },
        ..Default::default()
    };
    let prompt_token_ids = vec![1, 2];
    let accepted = v1::Accepted { request_id: "id".into(), model: "m".into(), prompt_token_ids, seed: 1 };
    let usage = Some(v1::Usage { prompt_tokens: 2, completion_tokens: 2, cached_tokens: 1 });
    let finished = v1::Finished { finish_reason: "stop".into(), usage, ..Default::default() };
    [
        Event::Accepted(accepted),
        Event::Delta(delta(0, "ab", -1.0)),
        Event::Delta(delta(1, "c", -2.0)),
        Event::Finished(Box::new(finished)),
    ]
    .map(response)
    .into()
}

pub fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

pub fn prompt(call: &Call) -> &v1::MessagesPrompt {
    match &call.requests[0].prompt {
        Some(Prompt::Messages(prompt)) => prompt,
        other => panic!("{other:?}"),
    }
}

pub fn form(call: &Call) -> Option<Form> {
    call.requests[0].sampling.as_ref()?.structured_output.as_ref()?.form.clone()
}

/// The end of answer number `sample`.
pub fn finished(completion: u32, reason: &str) -> v1::GenerateResponse {
    let usage = Some(v1::Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 3 });
    let finished = v1::Finished { finish_reason: reason.into(), usage, ..Default::default() };
    v1::GenerateResponse { event: Some(Event::Finished(Box::new(finished))), completion }
}

pub fn accepted() -> v1::GenerateResponse {
    let accepted = v1::Accepted { request_id: "id".into(), model: "m".into(), prompt_token_ids: vec![1; 9], seed: 1 };
    response(Event::Accepted(accepted))
}

pub fn delta(completion: u32, delta: v1::Delta) -> v1::GenerateResponse {
    v1::GenerateResponse { event: Some(Event::Delta(delta)), completion }
}

pub fn call_piece(index: u32, id: &str, name: &str, arguments: &str) -> v1::ToolCallDelta {
    v1::ToolCallDelta { index, id: id.into(), name: name.into(), arguments: arguments.into() }
}

/// A token of a text.
pub fn said(completion: u32, text: &str, logprob: Option<f32>) -> v1::GenerateResponse {
    let logprobs = logprob.map(|logprob| logprobs(text, logprob)).into_iter().collect();
    delta(completion, v1::Delta { text: text.into(), token_ids: vec![1], logprobs, ..Default::default() })
}

/// Reasoning, a text, and two calls.
pub fn thought_said_and_called() -> Vec<v1::GenerateResponse> {
    let piece = |reasoning: &str, text: &str, tool_calls: Vec<v1::ToolCallDelta>| {
        let reasoning = reasoning.into();
        let text = text.into();
        delta(0, v1::Delta { reasoning, text, tool_calls, token_ids: vec![7], ..Default::default() })
    };
    vec![
        accepted(),
        piece("hm", "", vec![]),
        piece("m.", "", vec![]),
        piece("", "I'll", vec![]),
        piece("", " look", vec![call_piece(0, "c0", "f", "")]),
        piece("", "", vec![call_piece(0, "", "", "{\"a\":")]),
        piece("", "", vec![call_piece(0, "", "", " 1}"), call_piece(1, "c1", "g", "{}")]),
        finished(0, "tool_calls"),
    ]
}

pub fn whole(mut call: Call, responses: Vec<v1::GenerateResponse>) -> Value {
    assert!(!call.answer.is_whole());
    responses.into_iter().for_each(|response| assert!(call.answer.take(0, response).is_empty()));
    assert!(call.answer.is_whole());
    serde_json::from_str(&call.answer.body()).expect("JSON")
}

pub fn streamed(mut call: Call, responses: Vec<v1::GenerateResponse>) -> Vec<Value> {
    let mut chunks: Vec<_> = responses.into_iter().flat_map(|response| call.answer.take(0, response)).collect();
    chunks.extend(call.answer.last());
    assert_eq!(chunks.pop(), Some(Chunk { event: None, data: "[DONE]".into() }));
    chunks.iter().map(|chunk| serde_json::from_str(&chunk.data).expect("JSON")).collect()
}

/// The events of a stream whose events have names: those are the types that the events tell.
pub fn named(mut call: Call, responses: Vec<v1::GenerateResponse>) -> Vec<Value> {
    let mut chunks: Vec<_> = responses.into_iter().flat_map(|response| call.answer.take(0, response)).collect();
    chunks.extend(call.answer.last());
    let event = |chunk: &Chunk| -> Value {
        let event: Value = serde_json::from_str(&chunk.data).expect("JSON");
        assert_eq!(event["type"].as_str(), chunk.event);
        event
    };
    chunks.iter().map(event).collect()
}
