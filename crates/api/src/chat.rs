//! OpenAI's `/v1/chat/completions`. Text alone: tools, images and audio are refused by name.

mod answer;

use std::fmt;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::Context;
use crate::answer::{Call, Head};
use crate::common::{Objectives, generation_request};
use crate::error::{BadRequest, FieldNames};
use crate::field::{AtMost, Entries, Ignored, Refused, or_default};

use answer::ChatAnswer;

/// What this API calls fields of the wire.
const FIELDS: FieldNames = FieldNames(&[
    ("prompt", "messages"),
    ("text", "messages"),
    ("template_variables", "chat_template_kwargs"),
    ("logprobs", "top_logprobs"),
    ("max_tokens", "max_completion_tokens"),
    ("structured_output", "response_format"),
    ("one_tool_call", "parallel_tool_calls"),
    ("slo.ttft_ms", "baton.ttft_slo_ms"),
    ("slo.tbt_ms", "baton.tbt_slo_ms"),
]);
/// The same, of a body that has the older name.
const OLD_FIELDS: FieldNames = FieldNames(&[
    ("prompt", "messages"),
    ("text", "messages"),
    ("template_variables", "chat_template_kwargs"),
    ("logprobs", "top_logprobs"),
    ("structured_output", "response_format"),
    ("one_tool_call", "parallel_tool_calls"),
    ("slo.ttft_ms", "baton.ttft_slo_ms"),
    ("slo.tbt_ms", "baton.tbt_slo_ms"),
]);

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
                        Err(BadRequest::kind(format!("messages[{index}].content[{part}].type"), other, "text"))
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
        let fields = if self.max_completion_tokens.is_some() { FIELDS } else { OLD_FIELDS };
        let max_tokens = self.max_completion_tokens.or(self.max_tokens).or(Some(u32::MAX));
        let sampling = v1::SamplingParameters { max_tokens, logprobs, ..self.sampling()? };
        let stream = self.stream()?;
        let messages = std::mem::take(&mut self.messages);
        let request = self.request(WirePrompt::Messages(conversation(messages, &variables)?), sampling);
        let answer = ChatAnswer::new(Head::new(context.created, stream), 1, logprobs.is_some());
        Ok(Call { requests: vec![request], streams: stream.is_some(), fields, answer: Box::new(answer) })
    }

    fn check_kinds(&self) -> Result<(), BadRequest> {
        if !self.tools.0.is_empty() {
            return Err(BadRequest::new("tools", "are not served here"));
        }
        if let Some(choice) = self.tool_choice.iter().find(|choice| !["none", "auto"].contains(&choice.as_str())) {
            return Err(BadRequest::new("tool_choice", format!("'{choice}', but tools are not served here")));
        }
        if let Some(format) = self.response_format.as_ref().filter(|format| format.r#type != "text") {
            return Err(BadRequest::kind("response_format.type", &format.r#type, "text"));
        }
        if let Some(other) = self.modalities.0.iter().find(|modality| *modality != "text") {
            return Err(BadRequest::kind("modalities", other, "text"));
        }
        Ok(())
    }
}
