//! Answers to chat completions.

use baton_proto::v1::generate_response::Event;
use baton_proto::v1::{self, TokenLogprobs};
use serde::Serialize;

use crate::answer::{Answer, Chunk, Head};
use crate::common::{Object, StreamOptions, TotalUsage};
use crate::error::{Failure, to_json};
use crate::logprobs::{Tokens, drop_end};

/// Puts a chat completion together.
pub(crate) struct ChatAnswer {
    head: Head,
    wants_logprobs: bool,
    choices: Vec<Choice>,
    usage: TotalUsage,
    /// Of what was told already.
    so_far: TotalUsage,
    reasoning_tokens: u64,
}

/// One of the answers.
#[derive(Default)]
struct Choice {
    text: String,
    reasoning: String,
    calls: Vec<v1::ToolCall>,
    logprobs: Vec<TokenLogprobs>,
    finish_reason: Option<String>,
}

impl Choice {
    fn push(&mut self, delta: v1::Delta) {
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        self.logprobs.extend(delta.logprobs);
        for piece in delta.tool_calls {
            // A piece without a name belongs to the last call.
            if !piece.name.is_empty() {
                self.calls.push(v1::ToolCall { id: piece.id, name: piece.name, arguments: piece.arguments });
            } else if let Some(call) = self.calls.last_mut() {
                call.arguments.push_str(&piece.arguments);
            }
        }
    }

    fn whole(&self, index: usize, wants_logprobs: bool) -> WholeChoice<'_> {
        let Self { text, reasoning, calls, logprobs, finish_reason } = self;
        // If there are calls alone, nothing was said.
        let content = (!text.is_empty() || calls.is_empty()).then_some(text.as_str());
        let tool_calls = calls.iter().map(WholeCall::of).collect();
        WholeChoice {
            index,
            message: Message { role: "assistant", content, refusal: (), reasoning_content: reasoning, tool_calls },
            logprobs: wants_logprobs.then(|| content_logprobs(logprobs)),
            finish_reason: finish_reason.as_deref(),
        }
    }
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<ContentLogprobs<'a>>,
    finish_reason: Option<&'a str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallPiece<'a>>,
}

impl<'a> Delta<'a> {
    fn of(delta: &'a v1::Delta) -> Self {
        let shows_nothing = delta.reasoning.is_empty() && delta.tool_calls.is_empty();
        Self {
            role: None,
            reasoning_content: (!delta.reasoning.is_empty()).then_some(&delta.reasoning),
            content: (!delta.text.is_empty() || shows_nothing).then_some(&delta.text),
            tool_calls: delta.tool_calls.iter().map(CallPiece::of).collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.reasoning_content.is_none() && self.content.is_none_or(str::is_empty) && self.tool_calls.is_empty()
    }
}

/// A part of a call: clients add up strings, so the id and the name come once.
#[derive(Serialize)]
struct CallPiece<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionPiece<'a>,
}

#[derive(Serialize)]
struct FunctionPiece<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> CallPiece<'a> {
    fn of(piece: &'a v1::ToolCallDelta) -> Self {
        let is_first = !piece.name.is_empty();
        Self {
            index: piece.index,
            id: is_first.then_some(&piece.id),
            r#type: is_first.then_some("function"),
            function: FunctionPiece { name: is_first.then_some(&piece.name), arguments: &piece.arguments },
        }
    }
}

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ContentLogprobs<'a>>,
    finish_reason: Option<&'a str>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: (),
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<WholeCall<'a>>,
}

#[derive(Serialize)]
struct WholeCall<'a> {
    id: &'a str,
    r#type: &'static str,
    function: Function<'a>,
}

impl<'a> WholeCall<'a> {
    fn of(v1::ToolCall { id, name, arguments }: &'a v1::ToolCall) -> Self {
        Self { id, r#type: "function", function: Function { name, arguments } }
    }
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct ContentLogprobs<'a> {
    content: Tokens<'a>,
    refusal: (),
}

fn content_logprobs(tokens: &[TokenLogprobs]) -> ContentLogprobs<'_> {
    ContentLogprobs { content: Tokens(tokens), refusal: () }
}

impl ChatAnswer {
    pub(super) fn new(head: Head, n: u32, wants_logprobs: bool) -> Self {
        let choices = std::iter::repeat_with(Choice::default).take(n as usize).collect();
        Self {
            head,
            wants_logprobs,
            choices,
            usage: TotalUsage::default(),
            so_far: TotalUsage::default(),
            reasoning_tokens: 0,
        }
    }

    fn object<'a, C>(&'a self, object: &'static str, choices: Vec<C>) -> Object<'a, C> {
        let Head { id, model, created, .. } = &self.head;
        Object { id, object, created: *created, model, choices, usage: None }
    }

    fn chunk(&self, index: u32, delta: Delta<'_>, logprobs: Option<&[TokenLogprobs]>) -> Chunk {
        let logprobs = logprobs.map(content_logprobs);
        let finish_reason = self.choices[index as usize].finish_reason.as_deref();
        let object = self.object("chat.completion.chunk", vec![ChunkChoice { index, delta, logprobs, finish_reason }]);
        let StreamOptions { include_usage, continuous_usage_stats, .. } = self.head.options;
        let usage = (include_usage == Some(true)).then(|| continuous_usage_stats.then(|| self.so_far.json(None)));
        Chunk { event: None, data: to_json(&Object { usage, ..object }) }
    }
}

impl Answer for ChatAnswer {
    fn take(&mut self, _: usize, response: v1::GenerateResponse) -> Vec<Chunk> {
        let v1::GenerateResponse { event, completion } = response;
        match event {
            Some(Event::Accepted(accepted)) => {
                self.head.id = format!("chatcmpl-{}", accepted.request_id);
                self.head.model = accepted.model;
                self.so_far.prompt(&accepted.prompt_token_ids);
                if !self.head.streams {
                    return Vec::new();
                }
                let role = |index| {
                    let delta = Delta { role: Some("assistant"), content: Some(""), ..Default::default() };
                    self.chunk(index, delta, None)
                };
                (0..self.choices.len() as u32).map(role).collect()
            }
            Some(Event::Delta(mut delta)) => {
                let Some(choice) = self.choices.get_mut(completion as usize) else { return Vec::new() };
                drop_end(&mut delta.logprobs);
                if !delta.reasoning.is_empty() && delta.text.is_empty() {
                    self.reasoning_tokens += delta.token_ids.len() as u64;
                }
                if !self.head.streams {
                    choice.push(delta);
                    return Vec::new();
                }
                self.so_far.output(&delta.token_ids);
                let told = Delta::of(&delta);
                // Text may be held back. If usage is told with every chunk, it goes on all the
                // same.
                if told.is_empty() && delta.logprobs.is_empty() && !self.head.options.continuous_usage_stats {
                    return Vec::new();
                }
                vec![self.chunk(completion, told, self.wants_logprobs.then_some(&delta.logprobs))]
            }
            Some(Event::Finished(finished)) => {
                let Some(choice) = self.choices.get_mut(completion as usize) else { return Vec::new() };
                choice.finish_reason = Some(finished.finish_reason);
                self.usage.add(completion, finished.usage.unwrap_or_default());
                if self.head.streams { vec![self.chunk(completion, Delta::default(), None)] } else { Vec::new() }
            }
            Some(Event::PromptLogprobs(_)) | None => Vec::new(),
        }
    }

    fn last(&mut self) -> Vec<Chunk> {
        let usage = (self.head.options.include_usage == Some(true)).then(|| {
            let object = self.object::<ChunkChoice<'_>>("chat.completion.chunk", Vec::new());
            let usage = Some(Some(self.usage.json(Some(self.reasoning_tokens))));
            Chunk { event: None, data: to_json(&Object { usage, ..object }) }
        });
        usage.into_iter().chain([Chunk::done()]).collect()
    }

    fn failed(&mut self, failure: &Failure) -> Chunk {
        Head::failed(failure)
    }

    fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish_reason.is_some())
    }

    fn body(&mut self) -> String {
        let choices = self.choices.iter().enumerate();
        let choices = choices.map(|(index, choice)| choice.whole(index, self.wants_logprobs)).collect();
        let usage = Some(Some(self.usage.json(Some(self.reasoning_tokens))));
        to_json(&Object { usage, ..self.object("chat.completion", choices) })
    }
}
