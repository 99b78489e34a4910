//! OpenAI's `/v1/chat/completions`. Images, audio and files are refused by name, but for those that
//! a tool returned: the model reads that they are not shown.

mod answer;

use std::collections::BTreeMap;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::value::{RawValue, to_raw_value};

use crate::Context;
use crate::answer::{Call, Head};
use crate::common::{Objectives, generation_request, with_defaults};
use crate::error::{BadRequest, FieldNames, Inside, Wording, to_json};
use crate::field::{
    AtMost, Entries, Ignored, Json, JsonObject, LeftOut, MAX_CONTENT_BYTES, Refused, Stray, TextOr, count, cut,
    is_empty_list, object_or_empty_list, objects, open_objects, or_default,
};
use crate::format::Schema;
use crate::tools::{MAX_TOOLS, Tool, ToolChoice, Tools, leave_out};
use crate::warnings::{not_shown, warn_not_shown};

use answer::ChatAnswer;

/// Longest name of a tool.
pub(crate) const MAX_TOOL_NAME: usize = 64;

/// What this API calls fields of the wire.
const FIELDS: FieldNames = FieldNames::new(
    Wording::OpenAi { prompt: "messages" },
    &[
        ("prompt", "messages"),
        ("text", "messages"),
        ("template_variables", "chat_template_kwargs"),
        ("logprobs", "top_logprobs"),
        ("structured_output", "response_format"),
        ("one_tool_call", "parallel_tool_calls"),
        ("slo.ttft_ms", "baton.ttft_slo_ms"),
        ("slo.tbt_ms", "baton.tbt_slo_ms"),
        ("timeout_ms", "baton.timeout_ms"),
    ],
);

/// Most messages of a conversation.
pub(crate) const MAX_MESSAGES: usize = 65_536;
pub(crate) type MessageList<T> = AtMost<T, MAX_MESSAGES>;
/// Tools, in this API's form.
pub(crate) type ToolList = AtMost<ToolJson, MAX_TOOLS>;
/// Longest list or object that is a variable of the template, bytes.
const MAX_TREE_BYTES: usize = 8 << 10;
/// Parts of a message, at most.
type Parts = AtMost<Part, 4096>;

generation_request! {
    /// The body of a chat completion.
    ChatRequest {
        messages: MessageList<Message>,
        #[serde(default, deserialize_with = "count::<_, 1, { u32::MAX }>")]
        max_tokens: Option<u32>,
        #[serde(default, deserialize_with = "count::<_, 1, { u32::MAX }>")]
        max_completion_tokens: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        logprobs: bool,
        #[serde(default, deserialize_with = "count::<_, 0, 20>")]
        top_logprobs: Option<u32>,
        /// More variables of the chat template, as vLLM takes them.
        #[serde(default, deserialize_with = "or_default")]
        chat_template_kwargs: Entries<Variable, 64>,
        #[serde(default, deserialize_with = "or_default")]
        modalities: AtMost<String, 8>,
        #[serde(default, deserialize_with = "or_default")]
        tools: ToolList,
        tool_choice: Option<TextOr<ToolChoiceJson>>,
        parallel_tool_calls: Option<bool>,
        /// What the answer may use, as vLLM takes it.
        #[serde(default, deserialize_with = "or_default")]
        documents: AtMost<JsonObject<MAX_CONTENT_BYTES>, 1024>,
        reasoning_effort: Option<String>,
        add_generation_prompt: Option<bool>,
        /// The answer goes on with the last message, as vLLM takes it.
        #[serde(default, deserialize_with = "or_default")]
        continue_final_message: bool,
        #[serde(default)]
        prediction: Ignored,
        #[serde(default)]
        verbosity: Ignored,
        #[serde(default)]
        functions: Refused,
        #[serde(default)]
        function_call: Refused,
        #[serde(default)]
        audio: Refused,
        #[serde(default)]
        web_search_options: LeftOut,
        #[serde(default)]
        client_metadata: Ignored,
        #[serde(default)]
        include_reasoning: Ignored,
        #[serde(default)]
        moderation: Refused,
        #[serde(default)]
        chat_template: Refused,
    }
}

/// A variable of the template. The tree of a list or an object could take far more memory than its
/// text, so those are short.
#[derive(Debug)]
struct Variable(Box<RawValue>);

impl<'de> Deserialize<'de> for Variable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Json(value) = Json::<MAX_CONTENT_BYTES>::deserialize(deserializer)?;
        let bytes = value.get().len();
        if value.get().starts_with(['[', '{']) && bytes > MAX_TREE_BYTES {
            let problem = format!("a list or an object of {bytes} bytes, but at most {MAX_TREE_BYTES} are taken");
            return Err(D::Error::custom(problem));
        }
        Ok(Self(value))
    }
}

open_objects! {
    /// A tool.
    pub(crate) struct ToolFields {
        r#type: String,
        function: Option<FunctionJson>,
    }

    struct FunctionJson {
        name: String,
        description: Option<String>,
        #[serde(default, deserialize_with = "object_or_empty_list")]
        parameters: Option<Schema>,
        strict: Option<bool>,
    }

    /// A message.
    pub(crate) struct Message {
        role: String,
        content: Option<TextOr<Parts>>,
        #[serde(default, deserialize_with = "or_default")]
        name: String,
        /// What was thought before it was said.
        #[serde(default, deserialize_with = "or_default")]
        reasoning: String,
        /// The same by an older name.
        #[serde(default, deserialize_with = "or_default")]
        reasoning_content: String,
        /// What was said instead of an answer.
        #[serde(default, deserialize_with = "or_default")]
        refusal: String,
        #[serde(default, deserialize_with = "or_default")]
        tool_calls: AtMost<ToolCall, 1024>,
        #[serde(default, deserialize_with = "or_default")]
        tool_call_id: String,
        #[serde(default, rename = "annotations")]
        _annotations: Ignored,
        #[serde(default, rename = "id")]
        _id: Ignored,
        /// What clients of several APIs send to all of them.
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
        #[serde(default, rename = "provider_specific_fields")]
        _provider_specific_fields: Ignored,
        #[serde(default, rename = "thinking_blocks")]
        _thinking_blocks: Ignored,
        #[serde(default, rename = "reasoning_details")]
        _reasoning_details: Ignored,
        /// What the official client's helpers add.
        #[serde(default, rename = "parsed")]
        _parsed: Ignored,
        #[serde(default, rename = "audio")]
        _audio: Refused,
        #[serde(default, rename = "function_call")]
        _function_call: Refused,
    }

    struct ToolCallFields {
        #[serde(default, deserialize_with = "or_default")]
        id: String,
        r#type: Option<String>,
        #[serde(default, rename = "index")]
        _index: Ignored,
        #[serde(default, rename = "provider_specific_fields")]
        _provider_specific_fields: Ignored,
        function: Option<CalledFunction>,
    }

    struct CalledFunction {
        name: String,
        /// Null and empty are no arguments.
        #[serde(default, deserialize_with = "or_default")]
        arguments: Arguments,
        /// What the official client's helpers add.
        #[serde(default, rename = "parsed_arguments")]
        _parsed_arguments: Ignored,
    }

    struct PartFields {
        #[serde(default, deserialize_with = "or_default")]
        r#type: String,
        text: Option<String>,
        refusal: Option<String>,
        /// A text, or Mistral's list of texts.
        thinking: Option<TextOr<AtMost<Thought, 4096>>>,
        #[serde(default, rename = "prompt_cache_breakpoint")]
        _prompt_cache_breakpoint: Ignored,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
        #[serde(default, rename = "annotations")]
        _annotations: Ignored,
        #[serde(default, rename = "signature")]
        _signature: Ignored,
        #[serde(default, rename = "closed")]
        _closed: Ignored,
    }

    struct Thought {
        text: String,
        #[serde(default, rename = "type")]
        _type: Ignored,
    }
}

objects! {
    /// The choice of one tool, or of those that are allowed.
    struct ToolChoiceJson {
        r#type: String,
        function: Option<FunctionName>,
        allowed_tools: Option<AllowedTools>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct AllowedTools {
        mode: String,
        tools: AtMost<AllowedTool, MAX_TOOLS>,
    }

    struct AllowedToolFields {
        r#type: String,
        function: Option<FunctionName>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct FunctionName {
        name: String,
    }
}

/// A function, or none: what runs at a provider's servers is left out.
#[derive(Debug, Deserialize)]
#[serde(try_from = "ToolFields")]
pub(crate) struct ToolJson(Option<FunctionJson>);

impl TryFrom<ToolFields> for ToolJson {
    type Error = Inside;

    fn try_from(ToolFields { r#type, function }: ToolFields) -> Result<Self, Inside> {
        match (r#type.as_str(), function) {
            ("function", Some(function)) => Ok(Self(Some(function))),
            ("function", None) => Err(BadRequest::missing("function").into()),
            ("custom", _) | (_, Some(_)) => Err(BadRequest::kind("type", &r#type, "function").into()),
            (kind, None) => {
                leave_out(kind);
                Ok(Self(None))
            }
        }
    }
}

/// The name of a function; the type of a tool of another kind, which has no other name.
#[derive(Debug, Deserialize)]
#[serde(try_from = "AllowedToolFields")]
struct AllowedTool(String);

impl TryFrom<AllowedToolFields> for AllowedTool {
    type Error = Inside;

    fn try_from(AllowedToolFields { r#type, function, stray }: AllowedToolFields) -> Result<Self, Inside> {
        if r#type != "function" {
            return Ok(Self(r#type));
        }
        BadRequest::stray(&stray)?;
        Ok(Self(function.ok_or_else(|| BadRequest::missing("function"))?.name))
    }
}

/// A call of a function; other kinds are refused by name.
#[derive(Debug, Deserialize)]
#[serde(try_from = "ToolCallFields")]
struct ToolCall(v1::ToolCall);

impl TryFrom<ToolCallFields> for ToolCall {
    type Error = Inside;

    fn try_from(fields: ToolCallFields) -> Result<Self, Inside> {
        let ToolCallFields { id, r#type, function, .. } = fields;
        // A client that puts a stream together may leave it empty.
        if let Some(kind) = r#type.filter(|kind| kind != "function" && !kind.is_empty()) {
            return Err(BadRequest::kind("type", &kind, "function").into());
        }
        let CalledFunction { name, arguments: Arguments(arguments), .. } =
            function.ok_or_else(|| BadRequest::missing("function"))?;
        Ok(Self(v1::ToolCall { id, name, arguments }))
    }
}

/// Arguments of a call, as text. Some clients send the object itself.
#[derive(Debug, Default)]
struct Arguments(String);

impl<'de> Deserialize<'de> for Arguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Json(json) = Json::<{ usize::MAX }>::deserialize(deserializer)?;
        match json.get().as_bytes() {
            [b'{', ..] => Ok(Self(Box::<str>::from(json).into_string())),
            _ if is_empty_list(json.get()) => Ok(Self("{}".to_owned())),
            [b'"', ..] => serde_json::from_str(json.get()).map(Self).map_err(D::Error::custom),
            _ => Err(D::Error::custom("is neither a text nor an object")),
        }
    }
}

/// A part of a message. vLLM's clients may send a text alone.
#[derive(Debug, Deserialize)]
#[serde(try_from = "TextOr<PartFields>")]
enum Part {
    Text(String),
    Thought(String),
    /// An image, or another kind that is no text.
    NoText(String),
}

impl TryFrom<TextOr<PartFields>> for Part {
    type Error = Inside;

    fn try_from(part: TextOr<PartFields>) -> Result<Self, Inside> {
        let PartFields { r#type, text, refusal, thinking, .. } = match part {
            TextOr::Text(text) => return Ok(Self::Text(text)),
            TextOr::Parts(fields) => fields,
        };
        let missing = |field: &str| BadRequest::missing(field);
        match r#type.as_str() {
            "" if text.is_none() => Err(missing("type").into()),
            // The Responses API's names, too: clients of both mix them.
            "" | "text" | "input_text" | "output_text" => Ok(Self::Text(text.ok_or_else(|| missing("text"))?)),
            "reasoning" => Ok(Self::Thought(text.ok_or_else(|| missing("text"))?)),
            // Only who wrote it can read it.
            "redacted_thinking" => Ok(Self::Thought(String::new())),
            "refusal" => Ok(Self::Text(refusal.ok_or_else(|| missing("refusal"))?)),
            "thinking" => match thinking.ok_or_else(|| missing("thinking"))? {
                TextOr::Text(thought) => Ok(Self::Thought(thought)),
                TextOr::Parts(AtMost(thoughts)) => {
                    Ok(Self::Thought(thoughts.into_iter().map(|Thought { text, .. }| text).collect()))
                }
            },
            _ => {
                warn_not_shown(&r#type);
                Ok(Self::NoText(r#type))
            }
        }
    }
}

impl Message {
    /// A message of the wire. What a tool said says so much of what is no text: the model must not
    /// take it for empty. Other messages refuse it.
    fn wire(self) -> Result<v1::ChatMessage, BadRequest> {
        let is_tool = ["tool", "function"].contains(&self.role.as_str());
        let mut reasoning = if self.reasoning.is_empty() { self.reasoning_content } else { self.reasoning };
        let mut texts = Vec::new();
        match self.content {
            None => {}
            Some(TextOr::Text(text)) => texts.push(text),
            Some(TextOr::Parts(AtMost(parts))) => {
                for (index, part) in parts.into_iter().enumerate() {
                    match part {
                        Part::Text(text) => texts.push(text),
                        Part::Thought(thought) => reasoning.push_str(&thought),
                        Part::NoText(kind) if is_tool => texts.push(not_shown(&kind)),
                        Part::NoText(kind) => {
                            let path = format!("content[{index}].type");
                            return Err(BadRequest::kind(path, &kind, "text, refusal or thinking"));
                        }
                    }
                }
            }
        }
        if !self.refusal.is_empty() {
            texts.push(self.refusal);
        }
        Ok(v1::ChatMessage {
            // Templates know the older name of the role.
            role: if self.role == "developer" { "system".to_owned() } else { self.role },
            // Parts are lines of one text.
            content: texts.join("\n"),
            name: self.name,
            reasoning,
            tool_calls: self.tool_calls.0.into_iter().map(|ToolCall(call)| call).collect(),
            tool_call_id: self.tool_call_id,
        })
    }
}

/// The prompt of a conversation.
pub(crate) fn conversation(messages: MessageList<Message>) -> Result<v1::MessagesPrompt, BadRequest> {
    let numbered = messages.0.into_iter().enumerate();
    let messages =
        numbered.map(|(index, message)| message.wire().map_err(|bad| bad.inside(&format!("messages[{index}]"))));
    Ok(v1::MessagesPrompt { messages: messages.collect::<Result<_, _>>()?, ..Default::default() })
}

impl ChatRequest {
    /// What it asks for.
    ///
    /// # Errors
    /// A field has a value that is not served.
    pub fn call(mut self, context: Context) -> Result<Call, BadRequest> {
        self.check()?;
        if let Some(other) = self.modalities.0.iter().find(|modality| *modality != "text") {
            return Err(BadRequest::kind("modalities", other, "text"));
        }
        let logprobs = match (self.logprobs, self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(BadRequest::new("top_logprobs", "says nothing without logprobs")),
        };
        let fields = FIELDS.with("max_tokens", "max_completion_tokens", self.max_completion_tokens.is_some()).with(
            "structured_output",
            "structured_outputs",
            self.structured_outputs.is_some(),
        );
        // Without a limit, as much as fits.
        let max_tokens = self.max_completion_tokens.or(self.max_tokens).or(Some(u32::MAX));
        let sampling = v1::SamplingParameters { max_tokens, logprobs, ..self.sampling()? };
        let sampling = with_defaults(sampling, &context.defaults);
        let stream = self.stream()?;
        let prompt = self.prompt()?;
        let request = self.request(WirePrompt::Messages(prompt), sampling);
        let answer = ChatAnswer::new(Head::new(context.created, stream), request.n, logprobs.is_some());
        Ok(Call::new(vec![request], stream.is_some(), fields, Box::new(answer)))
    }

    fn prompt(&mut self) -> Result<v1::MessagesPrompt, BadRequest> {
        let mut prompt = conversation(std::mem::take(&mut self.messages))?;
        prompt.documents = self.documents.0.iter().map(|JsonObject(document)| document.get().to_owned()).collect();
        prompt.template_variables = self.template_variables()?;
        prompt.continue_final_message = self.continue_final_message;
        // Without an answer to come, nothing is generated.
        if self.add_generation_prompt.is_some_and(|adds| adds == self.continue_final_message) {
            let other = if self.continue_final_message { "with" } else { "without" };
            let problem = format!("{}, {other} continue_final_message", !self.continue_final_message);
            return Err(BadRequest::new("add_generation_prompt", problem));
        }
        let one_call = self.parallel_tool_calls == Some(false);
        let choice = self.tool_choice()?;
        tools(&self.tools)?.put(&mut prompt, "tool_choice", choice, one_call)?;
        Ok(prompt)
    }

    fn tool_choice(&mut self) -> Result<ToolChoice, BadRequest> {
        match self.tool_choice.take() {
            None => Ok(ToolChoice::Auto),
            Some(TextOr::Text(mode)) => ToolChoice::of_mode(&mode),
            Some(TextOr::Parts(choice)) => choice.choice(),
        }
    }

    /// As a JSON object; empty for none.
    fn template_variables(&mut self) -> Result<String, BadRequest> {
        let Entries(variables) = std::mem::take(&mut self.chat_template_kwargs);
        let mut variables: BTreeMap<_, _> =
            variables.into_iter().map(|(name, Variable(value))| (name, value)).collect();
        if let Some(effort) = self.reasoning_effort.take() {
            check_effort("reasoning_effort", &effort)?;
            // Who names the variable itself means that.
            let effort =
                to_raw_value(&effort).map_err(|error| BadRequest::new("reasoning_effort", error.to_string()))?;
            variables.entry("reasoning_effort".to_owned()).or_insert(effort);
        }
        Ok(if variables.is_empty() { String::new() } else { to_json(&variables) })
    }
}

/// The tools of a request.
pub(crate) fn tools(AtMost(given): &ToolList) -> Result<Tools, BadRequest> {
    let mut tools = Tools::default();
    for (index, ToolJson(function)) in given.iter().enumerate() {
        let Some(FunctionJson { name, description, parameters, strict }) = function else {
            tools.leave_out();
            continue;
        };
        let parameters = parameters.as_ref().map(|JsonObject(parameters)| &**parameters);
        let tool = Tool { name, description: description.as_deref(), parameters, strict: *strict };
        tools.add(&format!("tools[{index}].function.name"), MAX_TOOL_NAME, &tool)?;
    }
    Ok(tools)
}

impl ToolChoiceJson {
    fn choice(self) -> Result<ToolChoice, BadRequest> {
        const PATH: &str = "tool_choice";
        let Self { r#type, function, allowed_tools, stray } = self;
        let own: &[_] = match r#type.as_str() {
            "function" => &["function"],
            "allowed_tools" => &["allowed_tools"],
            other => return Ok(ToolChoice::of_type(other)),
        };
        BadRequest::stray(&stray).map_err(|bad| bad.inside(PATH))?;
        let given = [("function", function.is_some()), ("allowed_tools", allowed_tools.is_some())];
        BadRequest::of_other_kinds(&r#type, &given, own).map_err(|bad| bad.inside(PATH))?;
        match (function, allowed_tools) {
            (Some(FunctionName { name }), _) => Ok(ToolChoice::Named(name)),
            (None, Some(AllowedTools { mode, tools })) => {
                let names = tools.0.into_iter().map(|AllowedTool(name)| name).collect();
                ToolChoice::allowed("tool_choice.allowed_tools", &mode, names)
            }
            (None, None) => Err(BadRequest::missing(format!("{PATH}.{type}"))),
        }
    }
}

/// How much a model thinks.
pub(crate) fn check_effort(param: &str, effort: &str) -> Result<(), BadRequest> {
    const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
    if EFFORTS.contains(&effort) {
        return Ok(());
    }
    Err(BadRequest::new(param, format!("'{}', but must be one of {}", cut(effort), EFFORTS.join(", "))))
}

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![
        ("ChatRequest", taken::<ChatRequest>()),
        ("ChatTool", taken::<ToolFields>()),
        ("ChatFunction", taken::<FunctionJson>()),
        ("ChatToolChoice", taken::<ToolChoiceJson>()),
        ("FunctionName", taken::<FunctionName>()),
        ("AllowedTools", taken::<AllowedTools>()),
        ("AllowedTool", taken::<AllowedToolFields>()),
        ("ChatMessage", taken::<Message>()),
        ("ChatToolCall", taken::<ToolCallFields>()),
        ("CalledFunction", taken::<CalledFunction>()),
        ("ChatPart", taken::<PartFields>()),
        ("Thought", taken::<Thought>()),
    ]
}
