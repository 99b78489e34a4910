//! Anthropic's `/v1/messages`, and the counting of its tokens. Images, and documents that are no
//! text, are refused by name. Tools of Anthropic's servers are left out.

mod answer;
mod blocks;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use baton_proto::v1::structured_output::Form;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::Context;
use crate::answer::Call;
use crate::chat::{MessageList, check_effort};
use crate::common::{MAX_STOPS, Objectives, check_bytes, with_defaults};
use crate::error::{BadRequest, FieldNames, Inside, Wording};
use crate::field::{
    AtMost, Ignored, Json, JsonObject, LeftOut, Refused, Stray, TextOr, count, cut, object_or_empty_list, objects,
    open_objects, or_default,
};
use crate::format::Schema;
use crate::tools::{MAX_TOOLS, Tool, ToolChoice, Tools, leave_out};
use crate::warnings::warn_object;

use answer::MessagesAnswer;
use blocks::{Message, TextBlocks, conversation, text_of};

/// Longest name of a tool.
const MAX_TOOL_NAME: usize = 128;
/// Longest text of what an edit keeps, bytes.
const MAX_KEEP_BYTES: usize = 1024;

objects! {
    /// The body of a message, or of a counting of tokens, which ignores what only an answer needs.
    #[allow(dead_code)] // fields that are ignored or refused only need to be read
    pub struct MessagesRequest {
        /// Empty takes the cluster's model.
        #[serde(default, deserialize_with = "or_default")]
        pub model: String,
        messages: MessageList<Message>,
        #[serde(default, deserialize_with = "count::<_, 1, { u32::MAX }>")]
        max_tokens: Option<u32>,
        system: Option<TextOr<TextBlocks>>,
        #[serde(default, deserialize_with = "or_default")]
        stop_sequences: AtMost<String, MAX_STOPS>,
        #[serde(default, deserialize_with = "or_default")]
        stream: bool,
        temperature: Option<f32>,
        top_p: Option<f32>,
        #[serde(default, deserialize_with = "count::<_, 0, { u32::MAX }>")]
        top_k: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        tools: AtMost<ToolJson, MAX_TOOLS>,
        tool_choice: Option<ToolChoiceJson>,
        thinking: Option<Thinking>,
        output_config: Option<OutputConfig>,
        output_format: Option<OutputFormat>,
        /// Larger goes first.
        #[serde(default, deserialize_with = "crate::field::integer")]
        priority: Option<i32>,
        context_management: Option<ContextManagement>,
        /// Objectives.
        #[serde(default, deserialize_with = "or_default")]
        pub baton: Objectives,
        #[serde(default)]
        metadata: Ignored,
        #[serde(default)]
        service_tier: Ignored,
        #[serde(default)]
        cache_control: Ignored,
        #[serde(default)]
        betas: Ignored,
        #[serde(default)]
        diagnostics: Ignored,
        #[serde(default)]
        inference_geo: Ignored,
        #[serde(default)]
        speed: Ignored,
        #[serde(default)]
        user_profile_id: Ignored,
        #[serde(default)]
        workspace_id: Ignored,
        #[serde(default)]
        billing_policy: Ignored,
        #[serde(default)]
        anthropic_version: Ignored,
        #[serde(default)]
        fallback_credit_token: Ignored,
        #[serde(default)]
        client_metadata: Ignored,
        /// What only Anthropic's own tools need.
        #[serde(default)]
        container: LeftOut,
        #[serde(default)]
        compaction: Refused,
        #[serde(default, deserialize_with = "or_default")]
        mcp_servers: AtMost<Refused, 0>,
        #[serde(default)]
        fallbacks: Refused,
        #[serde(default)]
        thread: Refused,
    }

    struct ToolChoiceJson {
        r#type: String,
        name: Option<String>,
        #[serde(default, deserialize_with = "or_default")]
        disable_parallel_tool_use: bool,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct Thinking {
        r#type: String,
        #[serde(default, rename = "budget_tokens")]
        _budget_tokens: Ignored,
        #[serde(default, rename = "display")]
        _display: Ignored,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct OutputConfig {
        effort: Option<String>,
        #[serde(default, rename = "task_budget")]
        _task_budget: LeftOut,
        format: Option<OutputFormat>,
    }

    /// Edits of the conversation, to be done before it becomes a prompt.
    struct ContextManagement {
        #[serde(default, rename = "edits", deserialize_with = "or_default")]
        _edits: AtMost<Edit, 64>,
    }

    struct OutputFormat {
        r#type: String,
        schema: Option<Schema>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }
}

open_objects! {
    struct ToolFields {
        r#type: Option<String>,
        #[serde(default, deserialize_with = "or_default")]
        name: String,
        description: Option<String>,
        #[serde(default, deserialize_with = "object_or_empty_list")]
        input_schema: Option<Schema>,
        strict: Option<bool>,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
        #[serde(default, rename = "eager_input_streaming")]
        _eager_input_streaming: Ignored,
        #[serde(default, rename = "allowed_callers")]
        _allowed_callers: Ignored,
        #[serde(default, rename = "defer_loading")]
        _defer_loading: Ignored,
        #[serde(default, rename = "input_examples")]
        _input_examples: Ignored,
    }

    struct EditFields {
        r#type: String,
        /// What the edit keeps. One that keeps all changes nothing, and has no warning.
        keep: Option<Keep>,
    }
}

/// A tool of the client's, or none: what runs at Anthropic's servers, or has a schema that only
/// Anthropic's models know, is left out.
#[derive(Debug, Deserialize)]
#[serde(try_from = "ToolFields")]
struct ToolJson(Option<ToolFields>);

impl TryFrom<ToolFields> for ToolJson {
    type Error = Inside;

    fn try_from(tool: ToolFields) -> Result<Self, Inside> {
        match (tool.r#type.as_deref(), &tool.input_schema) {
            (None | Some("custom"), Some(_)) if tool.name.is_empty() => Err(BadRequest::missing("name").into()),
            (None | Some("custom"), Some(_)) => Ok(Self(Some(tool))),
            (None | Some("custom"), None) => Err(BadRequest::missing("input_schema").into()),
            (Some(kind @ "function"), _) | (Some(kind), Some(_)) => {
                Err(BadRequest::kind("type", kind, "custom").into())
            }
            (Some(kind), None) => {
                leave_out(kind);
                Ok(Self(None))
            }
        }
    }
}

/// What an edit keeps: everything, or some of it.
#[derive(Debug)]
struct Keep {
    is_all: bool,
}

impl<'de> Deserialize<'de> for Keep {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Json(keep) = Json::<MAX_KEEP_BYTES>::deserialize(deserializer)?;
        Ok(Self { is_all: keep.get() == r#""all""# })
    }
}

/// An edit of a conversation. None is done: what the client sends is the prompt.
#[derive(Debug, Deserialize)]
#[serde(try_from = "EditFields")]
struct Edit;

impl TryFrom<EditFields> for Edit {
    type Error = Inside;

    fn try_from(EditFields { r#type, keep }: EditFields) -> Result<Self, Inside> {
        if !keep.is_some_and(|keep| keep.is_all) {
            warn_object(&format!("the edit '{}' is not done here", cut(&r#type)));
        }
        Ok(Self)
    }
}

impl MessagesRequest {
    /// What this API calls fields of the wire.
    pub const FIELDS: FieldNames = FieldNames::new(
        Wording::Anthropic,
        &[
            ("prompt", "messages"),
            ("text", "messages"),
            ("continue_final_message", "messages"),
            ("documents", "messages"),
            ("template_variables", "thinking"),
            ("stop", "stop_sequences"),
            ("structured_output", "output_config.format"),
            ("one_tool_call", "tool_choice.disable_parallel_tool_use"),
            ("slo.ttft_ms", "baton.ttft_slo_ms"),
            ("slo.tbt_ms", "baton.tbt_slo_ms"),
            ("timeout_ms", "baton.timeout_ms"),
        ],
    );

    /// What it asks for.
    ///
    /// # Errors
    /// A field has a value that is not served.
    pub fn call(mut self, context: &Context) -> Result<Call, BadRequest> {
        let sampling = with_defaults(self.sampling()?, &context.defaults);
        let prompt = self.prompt()?;
        let Objectives { ttft_slo_ms, tbt_slo_ms, timeout_ms } = self.baton;
        let request = v1::GenerateRequest {
            model: self.model,
            prompt: Some(WirePrompt::Messages(prompt)),
            sampling: Some(sampling),
            slo: Some(v1::ServiceLevelObjectives { ttft_ms: ttft_slo_ms, tbt_ms: tbt_slo_ms }),
            timeout_ms,
            priority: self.priority.unwrap_or(0),
            n: 1,
            ..Default::default()
        };
        let fields = Self::FIELDS.with("structured_output", "output_format", self.output_format.is_some());
        let answer = Box::new(MessagesAnswer::new(self.stream));
        Ok(Call::new(vec![request], self.stream, fields, answer))
    }

    /// The prompt, to count its tokens.
    ///
    /// # Errors
    /// A field has a value that is not served.
    pub fn prompt(&mut self) -> Result<v1::MessagesPrompt, BadRequest> {
        check_bytes("model", [&self.model])?;
        if self.messages.0.is_empty() {
            return Err(BadRequest::new("messages", "empty: at least one message is needed"));
        }
        let system = self.system.take().map(text_of);
        let mut prompt = v1::MessagesPrompt {
            messages: conversation(system, std::mem::take(&mut self.messages))?,
            template_variables: self.template_variables()?,
            ..Default::default()
        };
        let (choice, one_call) = self.tool_choice()?;
        self.tools()?.put(&mut prompt, "tool_choice", choice, one_call)?;
        // The answer begins with what the client has written of it.
        prompt.continue_final_message = prompt.messages.last().is_some_and(|last| last.role == "assistant");
        Ok(prompt)
    }

    fn sampling(&self) -> Result<v1::SamplingParameters, BadRequest> {
        check_bytes("stop_sequences", &self.stop_sequences.0)?;
        if self.max_tokens.is_none() {
            return Err(BadRequest::missing("max_tokens"));
        }
        Ok(v1::SamplingParameters {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            max_tokens: self.max_tokens,
            stop: self.stop_sequences.0.clone(),
            structured_output: self.structured_output()?,
            ..Default::default()
        })
    }

    fn structured_output(&self) -> Result<Option<v1::StructuredOutput>, BadRequest> {
        let format = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        let (path, format) = match (format, &self.output_format) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                return Err(BadRequest::new("output_format", "beside output_config.format: one of both is taken"));
            }
            (Some(format), None) => ("output_config.format", format),
            (None, Some(format)) => ("output_format", format),
        };
        if format.r#type != "json_schema" {
            return Err(BadRequest::kind(format!("{path}.type"), &format.r#type, "json_schema"));
        }
        BadRequest::stray(&format.stray).map_err(|bad| bad.inside(path))?;
        let missing = || BadRequest::missing(format!("{path}.schema"));
        let JsonObject(schema) = format.schema.as_ref().ok_or_else(missing)?;
        Ok(Some(v1::StructuredOutput { form: Some(Form::JsonSchema(schema.get().to_owned())) }))
    }

    fn tools(&self) -> Result<Tools, BadRequest> {
        let mut tools = Tools::default();
        for (index, ToolJson(tool)) in self.tools.0.iter().enumerate() {
            let Some(ToolFields { name, description, input_schema, strict, .. }) = tool else {
                tools.leave_out();
                continue;
            };
            let parameters = input_schema.as_ref().map(|JsonObject(schema)| &**schema);
            let wire = Tool { name, description: description.as_deref(), parameters, strict: *strict };
            tools.add(&format!("tools[{index}].name"), MAX_TOOL_NAME, &wire)?;
        }
        Ok(tools)
    }

    /// Which tools are asked for, and whether at most one is.
    fn tool_choice(&self) -> Result<(ToolChoice, bool), BadRequest> {
        let Some(ToolChoiceJson { r#type, name, disable_parallel_tool_use, stray }) = &self.tool_choice else {
            return Ok((ToolChoice::Auto, false));
        };
        let choice = match (r#type.as_str(), name) {
            ("auto", None) => ToolChoice::Auto,
            ("any", None) => ToolChoice::Required,
            ("none", None) => ToolChoice::None,
            ("tool", Some(name)) => ToolChoice::Named(name.clone()),
            ("tool", None) => return Err(BadRequest::missing("tool_choice.name")),
            ("auto" | "any" | "none", Some(_)) => {
                return Err(BadRequest::new("tool_choice.name", "says nothing to this type"));
            }
            (other, _) => return Err(BadRequest::kind("tool_choice.type", other, "auto, any, tool or none")),
        };
        BadRequest::stray(stray).map_err(|bad| bad.inside("tool_choice"))?;
        Ok((choice, *disable_parallel_tool_use))
    }

    /// As a JSON object; empty for none.
    fn template_variables(&self) -> Result<String, BadRequest> {
        let mut variables = Map::new();
        if let Some(thinking) = &self.thinking {
            let thinks = match thinking.r#type.as_str() {
                "enabled" | "adaptive" => true,
                "disabled" => false,
                other => return Err(BadRequest::kind("thinking.type", other, "enabled, adaptive or disabled")),
            };
            BadRequest::stray(&thinking.stray).map_err(|bad| bad.inside("thinking"))?;
            variables.insert("enable_thinking".to_owned(), thinks.into());
        }
        if let Some(effort) = self.output_config.as_ref().and_then(|config| config.effort.as_ref()) {
            check_effort("output_config.effort", effort)?;
            variables.insert("reasoning_effort".to_owned(), effort.as_str().into());
        }
        Ok(if variables.is_empty() { String::new() } else { Value::Object(variables).to_string() })
    }
}

/// The answer to a counting of tokens.
pub fn counted(tokens: usize) -> Value {
    json!({ "input_tokens": tokens })
}

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![
        ("MessagesRequest", taken::<MessagesRequest>()),
        ("Tool", taken::<ToolFields>()),
        ("ToolChoice", taken::<ToolChoiceJson>()),
        ("Thinking", taken::<Thinking>()),
        ("OutputConfig", taken::<OutputConfig>()),
        ("OutputFormat", taken::<OutputFormat>()),
        ("ContextManagement", taken::<ContextManagement>()),
        ("Edit", taken::<EditFields>()),
        ("Message", taken::<Message>()),
        ("Block", taken::<blocks::BlockFields>()),
        ("Source", taken::<blocks::Source>()),
        ("TextBlock", taken::<blocks::TextBlockFields>()),
    ]
}
