//! OpenAI's `/v1/chat/completions`. Text alone: tools, images and audio are refused by name.

use std::fmt;

use baton_proto::v1::generate_request::Prompt as WirePrompt;
use baton_proto::v1::generate_response::Event;
use baton_proto::v1::{self, TokenLogprobs, TopLogprob};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use crate::common::{Objectives, StreamOptions, TotalUsage, generation_request};
use crate::field::{AtMost, Entries, Ignored, Refused, or_default};
use crate::{Answer, BadRequest, Call, Context};

/// Messages of a conversation, at most.
pub(crate) type MessageList<T> = AtMost<T, 65_536>;
/// Parts of a message, at most.
type Parts = AtMost<Part, 4096>;

generation_request! {
    /// The body of a chat completion.
    ChatRequest {
        messages: MessageList<Message>,
        max_tokens: Option<u32>,
        max_completion_tokens: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        logprobs: bool,
        top_logprobs: Option<u32>,
        /// More variables of the chat template, as vLLM takes them.
        #[serde(default, deserialize_with = "or_default")]
        chat_template_kwargs: Entries<Plain, 64>,
        response_format: Option<ResponseFormat>,
        #[serde(default, deserialize_with = "or_default")]
        modalities: AtMost<String, 8>,
        tool_choice: Option<String>,
        #[serde(default, deserialize_with = "or_default")]
        tools: AtMost<Ignored, 1024>,
        #[serde(default)]
        parallel_tool_calls: Ignored,
        #[serde(default)]
        prediction: Ignored,
        #[serde(default)]
        verbosity: Ignored,
        #[serde(default)]
        reasoning_effort: Ignored,
        #[serde(default)]
        functions: Refused,
        #[serde(default)]
        function_call: Refused,
        #[serde(default)]
        audio: Refused,
        #[serde(default)]
        web_search_options: Refused,
        #[serde(default)]
        moderation: Refused,
        #[serde(default)]
        chat_template: Refused,
    }
}

/// A value that has no parts: a tree could take far more memory than its text.
#[derive(Debug)]
struct Plain(Value);

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Plain;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a number, true, false or null")
            }

            fn visit_unit<E: Error>(self) -> Result<Plain, E> {
                Ok(Plain(Value::Null))
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Plain, E> {
                Ok(Plain(value.into()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Plain, E> {
                Ok(Plain(value.into()))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Plain, E> {
                Ok(Plain(value.into()))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Plain, E> {
                Ok(Plain(value.into()))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Plain, E> {
                Ok(Plain(value.into()))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// What the answer looks like; text alone is served.
#[derive(Debug, Deserialize)]
struct ResponseFormat {
    r#type: String,
}

/// A message.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Message {
    role: String,
    #[serde(default)]
    content: Content,
    #[serde(default, deserialize_with = "or_default")]
    name: String,
    /// What was thought before it was said.
    #[serde(default, deserialize_with = "or_default")]
    reasoning: String,
    /// The same by an older name.
    #[serde(default, deserialize_with = "or_default")]
    reasoning_content: String,
    #[serde(default, deserialize_with = "or_default")]
    tool_calls: AtMost<ToolCall, 1024>,
    #[serde(default, deserialize_with = "or_default")]
    tool_call_id: String,
    #[serde(default, rename = "refusal")]
    _refusal: Ignored,
    #[serde(default, rename = "annotations")]
    _annotations: Ignored,
    #[serde(default, rename = "audio")]
    _audio: Refused,
    #[serde(default, rename = "function_call")]
    _function_call: Refused,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCall {
    #[serde(default, deserialize_with = "or_default")]
    id: String,
    #[serde(default, rename = "type")]
    _type: Ignored,
    #[serde(default, rename = "index")]
    _index: Ignored,
    function: Function,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Function {
    name: String,
    arguments: String,
}

/// Text, or parts, which are text.
#[derive(Debug, Default)]
enum Content {
    #[default]
    None,
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a message. Kinds other than text are read, so that they can be refused by name.
#[derive(Debug, Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of parts")
            }

            fn visit_unit<E: Error>(self) -> Result<Content, E> {
                Ok(Content::None)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
                let parts = Parts::deserialize(serde::de::value::SeqAccessDeserializer::new(parts))?;
                Ok(Content::Parts(parts.0))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl Content {
    /// Parts are lines of one text.
    fn text(self, index: usize) -> Result<String, BadRequest> {
        match self {
            Self::None => Ok(String::new()),
            Self::Text(text) => Ok(text),
            Self::Parts(parts) => {
                let text = |(part, Part { r#type, text }): (usize, Part)| match (r#type.as_str(), text) {
                    ("text", Some(text)) => Ok(text),
                    ("text", None) => {
                        Err(BadRequest::new(format!("messages[{index}].content[{part}].text"), "is missing"))
                    }
                    (other, _) => {
                        let problem = format!("'{other}', but only text is served here");
                        Err(BadRequest::new(format!("messages[{index}].content[{part}].type"), problem))
                    }
                };
                let texts: Result<Vec<_>, _> = parts.into_iter().enumerate().map(text).collect();
                Ok(texts?.join("\n"))
            }
        }
    }
}

/// The prompt of a conversation.
pub(crate) fn conversation(
    messages: MessageList<Message>,
    template_variables: &str,
) -> Result<v1::MessagesPrompt, BadRequest> {
    let message = |(index, message): (usize, Message)| -> Result<v1::ChatMessage, BadRequest> {
        let call =
            |call: ToolCall| v1::ToolCall { id: call.id, name: call.function.name, arguments: call.function.arguments };
        // Templates know the older name of the role.
        let role = if message.role == "developer" { "system".to_owned() } else { message.role };
        Ok(v1::ChatMessage {
            role,
            content: message.content.text(index)?,
            name: message.name,
            reasoning: if message.reasoning.is_empty() { message.reasoning_content } else { message.reasoning },
            tool_calls: message.tool_calls.0.into_iter().map(call).collect(),
            tool_call_id: message.tool_call_id,
        })
    };
    let messages = messages.0.into_iter().enumerate().map(message).collect::<Result<_, _>>()?;
    Ok(v1::MessagesPrompt { messages, template_variables: template_variables.to_owned(), ..Default::default() })
}

impl ChatRequest {
    /// What it asks for.
    ///
    /// # Errors
    /// A field has a value that is not served.
    pub fn call(mut self, context: Context) -> Result<Call, BadRequest> {
        self.check()?;
        self.check_kinds()?;
        let Entries(variables) = std::mem::take(&mut self.chat_template_kwargs);
        let variables: Map<_, _> = variables.into_iter().map(|(name, Plain(value))| (name, value)).collect();
        let variables = if variables.is_empty() { String::new() } else { Value::Object(variables).to_string() };
        let logprobs = match (self.logprobs, self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(BadRequest::new("top_logprobs", "says nothing without logprobs")),
        };
        // Without it, until the context is full.
        let max_tokens = self.max_completion_tokens.or(self.max_tokens).or(Some(u32::MAX));
        let sampling = v1::SamplingParameters { max_tokens, logprobs, ..self.sampling()? };
        let stream = self.stream()?;
        let messages = std::mem::take(&mut self.messages);
        let request = self.request(WirePrompt::Messages(conversation(messages, &variables)?), sampling);
        let answer = ChatAnswer {
            wants_logprobs: logprobs.is_some(),
            streams: stream.is_some(),
            options: stream.unwrap_or_default(),
            id: String::new(),
            model: String::new(),
            text: String::new(),
            logprobs: Vec::new(),
            finish_reason: None,
            usage: TotalUsage::default(),
            context,
        };
        Ok(Call { requests: vec![request], stream, answer: Box::new(answer) })
    }

    fn check_kinds(&self) -> Result<(), BadRequest> {
        if !self.tools.0.is_empty() {
            return Err(BadRequest::new("tools", "are not served here"));
        }
        if let Some(choice) = self.tool_choice.iter().find(|choice| !["none", "auto"].contains(&choice.as_str())) {
            return Err(BadRequest::new("tool_choice", format!("'{choice}', but tools are not served here")));
        }
        if let Some(format) = self.response_format.as_ref().filter(|format| format.r#type != "text") {
            let problem = format!("'{}', but only text is served here", format.r#type);
            return Err(BadRequest::new("response_format.type", problem));
        }
        if let Some(other) = self.modalities.0.iter().find(|modality| *modality != "text") {
            return Err(BadRequest::new("modalities", format!("'{other}', but only text is served here")));
        }
        Ok(())
    }
}

/// Puts a chat completion together.
struct ChatAnswer {
    wants_logprobs: bool,
    /// Chunks are sent, and nothing is kept.
    streams: bool,
    options: StreamOptions,
    id: String,
    model: String,
    text: String,
    logprobs: Vec<Value>,
    finish_reason: Option<String>,
    usage: TotalUsage,
    context: Context,
}

impl ChatAnswer {
    fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.context.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn chunk(&self, delta: Value, logprobs: Option<&[Value]>) -> Value {
        let choice = json!({
            "index": 0,
            "delta": delta,
            "logprobs": logprobs.map(content_logprobs),
            "finish_reason": self.finish_reason,
        });
        let mut chunk = self.object("chat.completion.chunk", json!([choice]));
        if self.options.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

fn content_logprobs(tokens: &[Value]) -> Value {
    json!({ "content": tokens, "refusal": null })
}

fn token(text: &str, logprob: f32) -> Value {
    // Half a character has bytes that its text does not show.
    let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then_some(text.as_bytes());
    json!({ "token": text, "logprob": logprob, "bytes": bytes })
}

fn token_logprobs(TokenLogprobs { logprob, top, text }: &TokenLogprobs) -> Value {
    let mut of = token(text, logprob.unwrap_or_default());
    of["top_logprobs"] = top.iter().map(|TopLogprob { text, logprob, .. }| token(text, *logprob)).collect();
    of
}

impl Answer for ChatAnswer {
    fn take(&mut self, _: usize, response: v1::GenerateResponse) -> Vec<Value> {
        match response.event {
            Some(Event::Accepted(accepted)) => {
                self.id = format!("chatcmpl-{}", accepted.request_id);
                self.model = accepted.model;
                vec![self.chunk(json!({ "role": "assistant", "content": "" }), None)]
            }
            Some(Event::Delta(delta)) if !delta.text.is_empty() || !delta.token_ids.is_empty() => {
                let logprobs: Vec<_> = delta.logprobs.iter().map(token_logprobs).collect();
                let chunk = self.chunk(json!({ "content": delta.text }), self.wants_logprobs.then_some(&logprobs));
                if !self.streams {
                    self.text.push_str(&delta.text);
                    self.logprobs.extend(logprobs);
                }
                vec![chunk]
            }
            Some(Event::Finished(finished)) => {
                self.finish_reason = Some(finished.finish_reason);
                self.usage.add(finished.usage.unwrap_or_default());
                vec![self.chunk(json!({}), None)]
            }
            Some(Event::Delta(_) | Event::PromptLogprobs(_)) | None => Vec::new(),
        }
    }

    fn last(&mut self) -> Option<Value> {
        if !self.options.include_usage {
            return None;
        }
        let mut chunk = self.object("chat.completion.chunk", json!([]));
        chunk["usage"] = self.usage.json();
        Some(chunk)
    }

    fn is_whole(&self) -> bool {
        self.finish_reason.is_some()
    }

    fn body(&mut self) -> Value {
        let choice = json!({
            "index": 0,
            "message": { "role": "assistant", "content": self.text, "refusal": null },
            "logprobs": self.wants_logprobs.then(|| content_logprobs(&self.logprobs)),
            "finish_reason": self.finish_reason,
        });
        let mut body = self.object("chat.completion", json!([choice]));
        body["usage"] = self.usage.json();
        body
    }
}
