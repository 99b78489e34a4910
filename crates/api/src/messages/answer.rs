//! Answers to messages.

use baton_proto::v1;
use baton_proto::v1::generate_response::Event as WireEvent;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::answer::{Answer, Chunk};
use crate::error::{ErrorForm, Failure, to_json};
use crate::parts::{Kind, Part, Parts, Step};

/// Puts a message together.
pub(super) struct MessagesAnswer {
    streams: bool,
    id: String,
    model: String,
    parts: Parts,
    usage: v1::Usage,
    end: Option<End>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block<'a> },
    ContentBlockDelta { index: usize, delta: Delta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: &'a End, usage: Usage },
    MessageStop,
}

impl Event<'_> {
    fn chunk(&self) -> Chunk {
        let name = match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        };
        Chunk { event: Some(name), data: to_json(self) }
    }
}

#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block<'a>>,
    #[serde(flatten)]
    end: &'a End,
    usage: Usage,
}

/// Why an answer ended; nothing, if it goes on.
#[derive(Debug, Default, Serialize)]
struct End {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

impl End {
    fn of(finished: &v1::Finished) -> Self {
        let sequence = &finished.stop_sequence;
        let stop_reason = match finished.finish_reason.as_str() {
            "length" => "max_tokens",
            "tool_calls" => "tool_use",
            _ if !sequence.is_empty() => "stop_sequence",
            _ => "end_turn",
        };
        let stop_sequence = (stop_reason == "stop_sequence").then(|| sequence.clone());
        Self { stop_reason: Some(stop_reason), stop_sequence }
    }
}

#[derive(Serialize)]
struct Usage {
    /// Without those that were cached.
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block<'a> {
    /// Nothing checks who thought it, so the signature is empty.
    Thinking {
        thinking: &'a str,
        signature: &'static str,
    },
    Text {
        text: &'a str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: Box<RawValue>,
    },
}

impl<'a> Block<'a> {
    /// A part, as far as it has come.
    fn of(part: &'a Part) -> Self {
        Self::new(&part.kind, &part.text)
    }

    fn new(kind: &'a Kind, text: &'a str) -> Self {
        match kind {
            Kind::Reasoning => Self::Thinking { thinking: text, signature: "" },
            Kind::Text => Self::Text { text },
            Kind::Call { id, name, .. } => Self::ToolUse { id, name, input: object(text) },
        }
    }
}

/// The object that a text of JSON is. An answer that ended inside of one has none.
fn object(text: &str) -> Box<RawValue> {
    let object: Option<Box<RawValue>> = serde_json::from_str(text).ok();
    let object = object.filter(|object| object.get().starts_with('{'));
    object.unwrap_or_else(|| serde_json::from_str("{}").expect("an object"))
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: &'a str },
}

impl MessagesAnswer {
    pub(super) fn new(streams: bool) -> Self {
        Self {
            streams,
            id: String::new(),
            model: String::new(),
            parts: Parts::default(),
            usage: v1::Usage::default(),
            end: None,
        }
    }

    fn usage(&self) -> Usage {
        let v1::Usage { prompt_tokens, completion_tokens, cached_tokens } = self.usage;
        Usage {
            input_tokens: prompt_tokens.saturating_sub(cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached_tokens,
            output_tokens: completion_tokens,
        }
    }

    fn message<'a>(&'a self, end: &'a End) -> Message<'a> {
        Message {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content: self.parts.list().iter().map(Block::of).collect(),
            end,
            usage: self.usage(),
        }
    }

    fn chunk(&self, step: &Step) -> Chunk {
        let kind = |index: usize| &self.parts.list()[index].kind;
        let event = match step {
            Step::Opened(index) => {
                Event::ContentBlockStart { index: *index, content_block: Block::new(kind(*index), "") }
            }
            Step::Grew(index, text, _) => {
                let delta = match kind(*index) {
                    Kind::Reasoning => Delta::Thinking { thinking: text },
                    Kind::Text => Delta::Text { text },
                    Kind::Call { .. } => Delta::Input { partial_json: text },
                };
                Event::ContentBlockDelta { index: *index, delta }
            }
            Step::Closed(index) => Event::ContentBlockStop { index: *index },
        };
        event.chunk()
    }

    fn chunks(&self, steps: impl IntoIterator<Item = Step>) -> Vec<Chunk> {
        if !self.streams {
            return Vec::new();
        }
        steps.into_iter().map(|step| self.chunk(&step)).collect()
    }
}

impl Answer for MessagesAnswer {
    fn take(&mut self, _: usize, response: v1::GenerateResponse) -> Vec<Chunk> {
        match response.event {
            Some(WireEvent::Accepted(accepted)) => {
                self.id = format!("msg_{}", accepted.request_id);
                self.model = accepted.model;
                // How many of them are cached is known at the end.
                self.usage.prompt_tokens = accepted.prompt_token_ids.len() as u32;
                let start = || Event::MessageStart { message: self.message(&End::default()) }.chunk();
                self.streams.then(start).into_iter().collect()
            }
            Some(WireEvent::Delta(delta)) => {
                let steps = self.parts.take(delta);
                self.chunks(steps)
            }
            Some(WireEvent::Finished(finished)) => {
                self.usage = finished.usage.unwrap_or_default();
                self.end = Some(End::of(&finished));
                let step = self.parts.close();
                self.chunks(step)
            }
            Some(WireEvent::PromptLogprobs(_)) | None => Vec::new(),
        }
    }

    fn last(&mut self) -> Vec<Chunk> {
        let Some(delta) = &self.end else { return Vec::new() };
        vec![Event::MessageDelta { delta, usage: self.usage() }.chunk(), Event::MessageStop.chunk()]
    }

    fn failed(&mut self, failure: &Failure) -> Chunk {
        ErrorForm::Anthropic.event(failure)
    }

    fn is_whole(&self) -> bool {
        self.end.is_some()
    }

    fn body(&mut self) -> String {
        to_json(&self.message(self.end.as_ref().unwrap_or(&End::default())))
    }
}
