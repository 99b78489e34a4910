//! Answers to `/v1/responses`.

use std::borrow::Cow;
use std::sync::Arc;

use baton_proto::v1::generate_response::Event as WireEvent;
use baton_proto::v1::{self, TokenLogprobs};
use serde::Serialize;
use serde_json::{Value, json};

use super::conversation::Entry;
use super::echo::Echo;
use super::store::ResponseStore;
use super::tools::{Origin, ToolNames, custom_input};
use crate::answer::{Answer, Chunk};
use crate::error::{Failure, to_json};
use crate::logprobs::Tokens;
use crate::parts::{Kind, Part, Parts, Step};

/// Puts a response together.
pub(super) struct ResponsesAnswer {
    streams: bool,
    /// Number of the next event.
    sequence_number: u64,
    response: Response,
    kept: Option<Kept>,
}

/// What is kept of a response beside its output, and where.
pub(super) struct Kept {
    pub(super) store: Arc<ResponseStore>,
    pub(super) input: Vec<Entry>,
    pub(super) previous: Option<String>,
}

/// What has come of a response.
struct Response {
    /// Of the request; empty until it was placed.
    id: String,
    model: String,
    created: u64,
    echo: Echo,
    names: ToolNames,
    parts: Parts,
    status: Status,
    usage: Option<v1::Usage>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Status {
    InProgress,
    Completed,
    /// It has as many tokens as it may have.
    Incomplete,
    Failed {
        code: &'static str,
        message: String,
    },
}

impl Status {
    fn as_str(&self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed { .. } => "failed",
        }
    }
}

#[derive(Serialize)]
struct ResponseJson<'a> {
    id: String,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    error: Option<Value>,
    incomplete_details: Option<Value>,
    model: &'a str,
    output: Vec<Item<'a>>,
    usage: Option<Usage>,
    #[serde(flatten)]
    echo: &'a Echo,
}

#[derive(Serialize)]
struct Usage {
    input_tokens: u32,
    input_tokens_details: InputTokensDetails,
    output_tokens: u32,
    output_tokens_details: OutputTokensDetails,
    total_tokens: u32,
}

#[derive(Serialize)]
struct InputTokensDetails {
    cached_tokens: u32,
    cache_write_tokens: u32,
}

#[derive(Serialize)]
struct OutputTokensDetails {
    reasoning_tokens: u32,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Item<'a> {
    Reasoning {
        id: String,
        summary: [(); 0],
        content: Vec<Content<'a>>,
        status: &'static str,
    },
    Message {
        id: String,
        role: &'static str,
        content: Vec<Content<'a>>,
        status: &'static str,
    },
    FunctionCall {
        id: String,
        call_id: &'a str,
        name: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        arguments: &'a str,
        status: &'static str,
    },
    CustomToolCall {
        id: String,
        call_id: &'a str,
        name: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        input: String,
        status: &'static str,
    },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Content<'a> {
    ReasoningText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: Tokens<'a> },
}

/// An event, with its number.
#[derive(Serialize)]
struct Event<T> {
    r#type: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    fields: T,
}

#[derive(Serialize)]
struct OfResponse<'a> {
    response: ResponseJson<'a>,
}

#[derive(Serialize)]
struct OfItem<'a> {
    output_index: usize,
    item: Item<'a>,
}

/// Of what is in an item.
#[derive(Default, Serialize)]
struct OfContent<'a> {
    item_id: String,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Content<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Tokens<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<&'a str>,
}

/// Numbers events.
struct Events<'a> {
    sequence_number: &'a mut u64,
    chunks: Vec<Chunk>,
}

impl Events<'_> {
    fn push(&mut self, r#type: &'static str, fields: impl Serialize) {
        let data = to_json(&Event { r#type, sequence_number: *self.sequence_number, fields });
        *self.sequence_number += 1;
        self.chunks.push(Chunk { event: Some(r#type), data });
    }
}

fn content<'a>(kind: &Kind, text: &'a str, logprobs: &'a [TokenLogprobs]) -> Option<Content<'a>> {
    match kind {
        Kind::Reasoning => Some(Content::ReasoningText { text }),
        Kind::Text => Some(Content::OutputText { text, annotations: [], logprobs: Tokens(logprobs) }),
        Kind::Call { .. } => None,
    }
}

impl Response {
    fn json(&self) -> ResponseJson<'_> {
        let output = self.parts.list().iter().enumerate();
        ResponseJson {
            id: format!("resp_{}", self.id),
            object: "response",
            created_at: self.created,
            status: self.status.as_str(),
            error: match &self.status {
                Status::Failed { code, message } => Some(json!({ "code": code, "message": message })),
                _ => None,
            },
            incomplete_details: (self.status == Status::Incomplete).then(|| json!({ "reason": "max_output_tokens" })),
            model: &self.model,
            output: output.map(|(index, part)| self.item(index, part)).collect(),
            usage: self.usage.map(|usage| self.usage(usage)),
            echo: &self.echo,
        }
    }

    fn usage(&self, usage: v1::Usage) -> Usage {
        let v1::Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        let reasoning_tokens = self.parts.reasoning_tokens;
        Usage {
            input_tokens: prompt_tokens,
            input_tokens_details: InputTokensDetails { cached_tokens, cache_write_tokens: 0 },
            output_tokens: completion_tokens,
            output_tokens_details: OutputTokensDetails { reasoning_tokens },
            total_tokens: prompt_tokens + completion_tokens,
        }
    }

    /// Items keep their ids.
    fn item_id(&self, index: usize, kind: &Kind) -> String {
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Text => "msg",
            Kind::Call { name, .. } if self.is_custom(name) => "ctc",
            Kind::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{index}", self.id)
    }

    /// Whether a tool of this name is called with a text.
    fn is_custom(&self, name: &str) -> bool {
        self.names.origin(name).is_some_and(|origin| origin.is_custom)
    }

    /// An item that has ended.
    fn item<'s: 'a, 'a>(&'s self, index: usize, part: &'a Part) -> Item<'a> {
        // The one that an end cut off is the last.
        let is_last = index + 1 == self.parts.list().len();
        let is_cut = matches!(self.status, Status::Incomplete | Status::Failed { .. }) && is_last;
        let status = if is_cut { "incomplete" } else { "completed" };
        let content = content(&part.kind, &part.text, &part.logprobs).into_iter().collect();
        self.new_item(index, &part.kind, status, content, &part.text)
    }

    fn new_item<'s, 'a>(
        &'s self,
        index: usize,
        kind: &'a Kind,
        status: &'static str,
        content: Vec<Content<'a>>,
        arguments: &'a str,
    ) -> Item<'a>
    where
        's: 'a,
    {
        let id = self.item_id(index, kind);
        match kind {
            Kind::Reasoning => Item::Reasoning { id, summary: [], content, status },
            Kind::Text => Item::Message { id, role: "assistant", content, status },
            Kind::Call { id: call_id, name, .. } => match self.names.origin(name) {
                Some(Origin { namespace, name, is_custom: true }) => {
                    let input = if arguments.is_empty() { String::new() } else { custom_input(arguments) };
                    Item::CustomToolCall { id, call_id, name, namespace: namespace.as_deref(), input, status }
                }
                Some(Origin { namespace, name, .. }) => {
                    Item::FunctionCall { id, call_id, name, namespace: namespace.as_deref(), arguments, status }
                }
                None => Item::FunctionCall { id, call_id, name, namespace: None, arguments, status },
            },
        }
    }

    /// An item, as later prompts are made of it.
    fn entry(&self, part: &Part) -> Entry {
        match &part.kind {
            Kind::Reasoning => Entry::Thought(part.text.clone()),
            Kind::Text => Entry::Answered(part.text.clone()),
            Kind::Call { id, name, .. } => {
                let origin = self.names.origin(name);
                let namespace = origin.and_then(|origin| origin.namespace.clone());
                let name = origin.map_or(name, |origin| &origin.name).clone();
                Entry::Called { call: v1::ToolCall { id: id.clone(), name, arguments: part.text.clone() }, namespace }
            }
        }
    }

    /// Tells a step.
    fn tell(&self, step: &Step, events: &mut Events<'_>) {
        match step {
            Step::Opened(index) => self.tell_opened(*index, events),
            Step::Grew(index, text, logprobs) => self.tell_grown(*index, text, logprobs, events),
            Step::Closed(index) => self.tell_closed(*index, events),
        }
    }

    fn of_content(&self, output_index: usize) -> OfContent<'_> {
        let kind = &self.parts.list()[output_index].kind;
        // An item has one content; a call has none.
        let content_index = (!matches!(kind, Kind::Call { .. })).then_some(0);
        OfContent { item_id: self.item_id(output_index, kind), output_index, content_index, ..Default::default() }
    }

    fn tell_opened(&self, output_index: usize, events: &mut Events<'_>) {
        let kind = &self.parts.list()[output_index].kind;
        let item = self.new_item(output_index, kind, "in_progress", Vec::new(), "");
        events.push("response.output_item.added", OfItem { output_index, item });
        if let Some(part) = content(kind, "", &[]) {
            events.push("response.content_part.added", OfContent { part: Some(part), ..self.of_content(output_index) });
        }
    }

    fn tell_grown(&self, output_index: usize, text: &str, logprobs: &[TokenLogprobs], events: &mut Events<'_>) {
        let (name, logprobs) = match &self.parts.list()[output_index].kind {
            // Its text lies in JSON: it is told once that has ended.
            Kind::Call { name, .. } if self.is_custom(name) => return,
            Kind::Reasoning => ("response.reasoning_text.delta", None),
            Kind::Text => ("response.output_text.delta", Some(Tokens(logprobs))),
            Kind::Call { .. } => ("response.function_call_arguments.delta", None),
        };
        events.push(name, OfContent { delta: Some(text.into()), logprobs, ..self.of_content(output_index) });
    }

    fn tell_closed(&self, output_index: usize, events: &mut Events<'_>) {
        let part = &self.parts.list()[output_index];
        let of = self.of_content(output_index);
        let text = part.text.as_str();
        match &part.kind {
            Kind::Reasoning => {
                events.push("response.reasoning_text.done", OfContent { text: Some(text), ..of });
            }
            Kind::Text => {
                let logprobs = Some(Tokens(&part.logprobs));
                events.push("response.output_text.done", OfContent { text: Some(text), logprobs, ..of });
            }
            Kind::Call { name, .. } if self.is_custom(name) => {
                let input = custom_input(text);
                let delta = OfContent { delta: Some(input.as_str().into()), ..self.of_content(output_index) };
                events.push("response.custom_tool_call_input.delta", delta);
                events.push("response.custom_tool_call_input.done", OfContent { input: Some(&input), ..of });
            }
            Kind::Call { name, .. } => {
                let name = self.names.origin(name).map_or(name.as_str(), |origin| &origin.name);
                let done = OfContent { arguments: Some(text), name: Some(name), ..of };
                events.push("response.function_call_arguments.done", done);
            }
        }
        if let Some(content) = content(&part.kind, text, &part.logprobs) {
            let done = OfContent { part: Some(content), ..self.of_content(output_index) };
            events.push("response.content_part.done", done);
        }
        let item = self.item(output_index, part);
        events.push("response.output_item.done", OfItem { output_index, item });
    }
}

impl ResponsesAnswer {
    pub(super) fn new(created: u64, streams: bool, echo: Echo, names: ToolNames, kept: Option<Kept>) -> Self {
        let response = Response {
            id: String::new(),
            model: String::new(),
            created,
            echo,
            names,
            parts: Parts::default(),
            status: Status::InProgress,
            usage: None,
        };
        Self { streams, sequence_number: 0, response, kept }
    }

    /// Keeps what was asked, if its client wants that.
    fn keep_input(&mut self) {
        let Some(Kept { store, input, previous }) = &mut self.kept else { return };
        store.begin(&self.response.id, self.response.created, previous.take(), std::mem::take(input));
    }

    fn keep_output(&mut self) {
        let Some(Kept { store, .. }) = self.kept.take() else { return };
        let output = self.response.parts.list().iter().map(|part| self.response.entry(part)).collect();
        store.finish(&self.response.id, output);
    }

    /// The events of a stream that `tell` gives.
    fn events(&mut self, tell: impl FnOnce(&Response, &mut Events<'_>)) -> Vec<Chunk> {
        if !self.streams {
            return Vec::new();
        }
        let mut events = Events { sequence_number: &mut self.sequence_number, chunks: Vec::new() };
        tell(&self.response, &mut events);
        events.chunks
    }

    fn tell(&mut self, steps: impl IntoIterator<Item = Step>) -> Vec<Chunk> {
        self.events(|response, events| steps.into_iter().for_each(|step| response.tell(&step, events)))
    }
}

impl Answer for ResponsesAnswer {
    fn take(&mut self, _: usize, response: v1::GenerateResponse) -> Vec<Chunk> {
        match response.event {
            Some(WireEvent::Accepted(accepted)) => {
                self.response.id = accepted.request_id;
                self.response.model = accepted.model;
                self.keep_input();
                self.events(|response, events| {
                    events.push("response.created", OfResponse { response: response.json() });
                    events.push("response.in_progress", OfResponse { response: response.json() });
                })
            }
            Some(WireEvent::Delta(delta)) => {
                let steps = self.response.parts.take(delta);
                self.tell(steps)
            }
            Some(WireEvent::Finished(finished)) => {
                self.response.usage = Some(finished.usage.unwrap_or_default());
                let is_cut = finished.finish_reason == "length";
                self.response.status = if is_cut { Status::Incomplete } else { Status::Completed };
                let step = self.response.parts.close();
                self.keep_output();
                self.tell(step)
            }
            Some(WireEvent::PromptLogprobs(_)) | None => Vec::new(),
        }
    }

    fn last(&mut self) -> Vec<Chunk> {
        self.events(|response, events| {
            let name = match response.status {
                Status::Incomplete => "response.incomplete",
                _ => "response.completed",
            };
            events.push(name, OfResponse { response: response.json() });
        })
    }

    fn failed(&mut self, failure: &Failure) -> Chunk {
        let Failure { status, message, param, .. } = failure;
        let code = match status {
            _ if failure.code == Some("context_length_exceeded") => "context_length_exceeded",
            429 => "rate_limit_exceeded",
            500.. => "server_error",
            _ => "invalid_prompt",
        };
        let mut events = Events { sequence_number: &mut self.sequence_number, chunks: Vec::new() };
        // There is no response yet that could have failed.
        if self.response.id.is_empty() {
            // The official clients raise what is in `error`, and only then.
            let error = json!({ "code": code, "message": message, "param": param });
            events.push("error", json!({ "code": code, "message": message, "param": param, "error": error }));
        } else {
            self.response.status = Status::Failed { code, message: message.clone() };
            events.push("response.failed", OfResponse { response: self.response.json() });
        }
        events.chunks.swap_remove(0)
    }

    fn is_whole(&self) -> bool {
        self.response.usage.is_some()
    }

    fn body(&mut self) -> String {
        to_json(&self.response.json())
    }
}
