//! OpenAI's `/v1/responses`. Nothing is stored, so what refers to a stored thing is refused by
//! name, and so are tools of the server's.

mod answer;
mod echo;
mod items;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use baton_proto::v1::structured_output::Form;
use serde::Deserialize;
use serde_json::json;

use crate::Context;
use crate::answer::Call;
use crate::chat::{MAX_TOOL_NAME, check_effort};
use crate::common::{Objectives, check_bytes};
use crate::error::{BadRequest, FieldNames, Inside};
use crate::field::{AtMost, Entries, Ignored, JsonObject, Refused, Stray, TextOr, objects, only_false, or_default};
use crate::format::{Schema, json_schema};
use crate::tools::{MAX_TOOLS, Tool, ToolChoice, Tools, check_name, function_name};

use answer::ResponsesAnswer;
use echo::{Echo, Format};
use items::{Items, conversation};

/// What asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

objects! {
    /// The body of a response.
    #[allow(dead_code)] // fields that are ignored or refused only need to be read
    pub struct ResponsesRequest {
        /// Empty takes the cluster's model.
        #[serde(default, deserialize_with = "or_default")]
        model: String,
        input: TextOr<Items>,
        instructions: Option<String>,
        #[serde(default, deserialize_with = "crate::field::integer")]
        max_output_tokens: Option<u32>,
        temperature: Option<f32>,
        top_p: Option<f32>,
        #[serde(default, deserialize_with = "or_default")]
        stream: bool,
        stream_options: Option<StreamOptions>,
        #[serde(default, deserialize_with = "or_default")]
        tools: AtMost<ToolJson, MAX_TOOLS>,
        tool_choice: Option<TextOr<ToolChoiceJson>>,
        parallel_tool_calls: Option<bool>,
        text: Option<TextConfig>,
        #[serde(default, deserialize_with = "crate::field::integer")]
        top_logprobs: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        include: AtMost<String, 16>,
        reasoning: Option<Reasoning>,
        #[serde(default, deserialize_with = "or_default")]
        metadata: Entries<String, 16>,
        truncation: Option<String>,
        #[serde(default, deserialize_with = "only_false")]
        background: Ignored,
        /// Larger goes first.
        #[serde(default, deserialize_with = "crate::field::integer")]
        priority: Option<i32>,
        /// Objectives.
        #[serde(default, deserialize_with = "or_default")]
        pub baton: Objectives,
        #[serde(default)]
        store: Ignored,
        #[serde(default)]
        user: Ignored,
        #[serde(default)]
        safety_identifier: Ignored,
        #[serde(default)]
        prompt_cache_key: Ignored,
        #[serde(default)]
        prompt_cache_retention: Ignored,
        #[serde(default)]
        prompt_cache_options: Ignored,
        #[serde(default)]
        service_tier: Ignored,
        #[serde(default)]
        max_tool_calls: Ignored,
        #[serde(default)]
        access_programs: Ignored,
        #[serde(default)]
        background_options: Ignored,
        #[serde(default)]
        image: Ignored,
        #[serde(default)]
        previous_response_id: Refused,
        #[serde(default)]
        conversation: Refused,
        #[serde(default)]
        prompt: Refused,
        #[serde(default)]
        context_management: Refused,
        #[serde(default)]
        moderation: Refused,
    }

    struct StreamOptions {
        #[serde(default, rename = "include_obfuscation")]
        _include_obfuscation: Ignored,
    }

    struct ToolJson {
        r#type: String,
        name: Option<String>,
        description: Option<String>,
        parameters: Option<Schema>,
        strict: Option<bool>,
        #[serde(default, rename = "defer_loading")]
        _defer_loading: Ignored,
        #[serde(default, rename = "allowed_callers")]
        _allowed_callers: Ignored,
        #[serde(default, rename = "output_schema")]
        _output_schema: Ignored,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    /// Of one tool, or of those that are allowed.
    struct ToolChoiceJson {
        r#type: String,
        name: Option<String>,
        mode: Option<String>,
        tools: Option<AtMost<AllowedTool, MAX_TOOLS>>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct AllowedToolFields {
        r#type: String,
        name: Option<String>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct TextConfig {
        format: Option<FormatJson>,
        #[serde(default, rename = "verbosity")]
        _verbosity: Ignored,
    }

    struct FormatJson {
        r#type: String,
        name: Option<String>,
        description: Option<String>,
        schema: Option<Schema>,
        strict: Option<bool>,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    struct Reasoning {
        effort: Option<String>,
        #[serde(default, rename = "summary")]
        _summary: Ignored,
        #[serde(default, rename = "generate_summary")]
        _generate_summary: Ignored,
        #[serde(default, rename = "context")]
        _context: Ignored,
        #[serde(default, rename = "mode")]
        _mode: Ignored,
    }
}

impl ResponsesRequest {
    /// What this API calls fields of the wire.
    pub const FIELDS: FieldNames = FieldNames::new(&[
        ("prompt", "input"),
        ("text", "input"),
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("logprobs", "top_logprobs"),
        ("structured_output", "text.format"),
        ("one_tool_call", "parallel_tool_calls"),
        ("template_variables", "reasoning"),
        ("slo.ttft_ms", "baton.ttft_slo_ms"),
        ("slo.tbt_ms", "baton.tbt_slo_ms"),
        ("timeout_ms", "baton.timeout_ms"),
    ]);

    /// What it asks for.
    ///
    /// # Errors
    /// A field has a value that is not served.
    pub fn call(mut self, context: Context) -> Result<Call, BadRequest> {
        self.check()?;
        let format = self.format()?;
        let choice = self.tool_choice()?;
        let logprobs = self.wants_logprobs().then(|| self.top_logprobs.unwrap_or(0));
        let sampling = v1::SamplingParameters {
            // OpenAI's default, which is not ours.
            temperature: Some(self.temperature.unwrap_or(1.0)),
            top_p: self.top_p,
            // Without it, until the context is full.
            max_tokens: Some(self.max_output_tokens.unwrap_or(u32::MAX)),
            logprobs,
            structured_output: format.wire(),
            ..Default::default()
        };
        let input = std::mem::replace(&mut self.input, TextOr::Text(String::new()));
        let mut prompt = v1::MessagesPrompt {
            messages: conversation(self.instructions.as_deref(), input)?,
            template_variables: self.template_variables()?,
            ..Default::default()
        };
        self.wire_tools()?.put(&mut prompt, "tool_choice", choice.clone(), self.parallel_tool_calls == Some(false))?;
        let Objectives { ttft_slo_ms, tbt_slo_ms, timeout_ms } = self.baton;
        let request = v1::GenerateRequest {
            model: std::mem::take(&mut self.model),
            prompt: Some(WirePrompt::Messages(prompt)),
            sampling: Some(sampling),
            slo: Some(v1::ServiceLevelObjectives { ttft_ms: ttft_slo_ms, tbt_ms: tbt_slo_ms }),
            timeout_ms,
            priority: self.priority.unwrap_or(0),
            n: 1,
            ..Default::default()
        };
        let streams = self.stream;
        let answer = ResponsesAnswer::new(context.created, streams, Echo::new(self, format, &choice));
        Ok(Call { requests: vec![request], streams, fields: Self::FIELDS, answer: Box::new(answer) })
    }

    fn check(&self) -> Result<(), BadRequest> {
        check_bytes("model", [&self.model])?;
        check_bytes("metadata", self.metadata.0.iter().flat_map(|(key, value)| [key, value]))?;
        if let Some(other) = self.truncation.as_ref().filter(|truncation| *truncation != "disabled") {
            return Err(BadRequest::kind("truncation", other, "disabled"));
        }
        // Clients that do not store ask for the encrypted form of reasoning; here its items have
        // the text.
        let served = |include: &&String| include.as_str() != LOGPROBS && *include != "reasoning.encrypted_content";
        if let Some(other) = self.include.0.iter().find(served) {
            return Err(BadRequest::kind("include", other, LOGPROBS));
        }
        if !self.stream && self.stream_options.is_some() {
            return Err(BadRequest::new("stream_options", "says nothing without stream"));
        }
        Ok(())
    }

    fn wants_logprobs(&self) -> bool {
        self.top_logprobs.is_some_and(|top| top > 0) || self.include.0.iter().any(|include| include == LOGPROBS)
    }

    fn wire_tools(&self) -> Result<Tools, BadRequest> {
        let mut tools = Tools::default();
        for (index, ToolJson { r#type, name, description, parameters, strict, stray, .. }) in
            self.tools.0.iter().enumerate()
        {
            let path = format!("tools[{index}]");
            if r#type != "function" {
                return Err(BadRequest::kind(format!("{path}.type"), r#type, "function"));
            }
            BadRequest::stray(stray).map_err(|bad| bad.inside(&path))?;
            let path = format!("{path}.name");
            let name = name.as_ref().ok_or_else(|| BadRequest::missing(&path))?;
            let parameters = parameters.as_ref().map(|JsonObject(parameters)| &**parameters);
            let tool = Tool { name, description: description.as_deref(), parameters, strict: *strict };
            tools.add(&path, MAX_TOOL_NAME, &tool)?;
        }
        Ok(tools)
    }

    fn tool_choice(&mut self) -> Result<ToolChoice, BadRequest> {
        match self.tool_choice.take() {
            None => Ok(ToolChoice::Auto),
            Some(TextOr::Text(mode)) => ToolChoice::of_mode(&mode),
            Some(TextOr::Parts(choice)) => choice.choice(),
        }
    }

    fn format(&mut self) -> Result<Format, BadRequest> {
        const PATH: &str = "text.format";
        let Some(format) = self.text.as_mut().and_then(|text| text.format.take()) else { return Ok(Format::Text) };
        let FormatJson { r#type, name, description, schema, strict, stray } = format;
        let own: &[_] = match r#type.as_str() {
            "text" | "json_object" => &[],
            "json_schema" => &["name", "description", "schema", "strict"],
            other => {
                let served = "text, json_object or json_schema";
                return Err(BadRequest::kind(format!("{PATH}.type"), other, served));
            }
        };
        BadRequest::stray(&stray).map_err(|bad| bad.inside(PATH))?;
        let given = [
            ("name", name.is_some()),
            ("description", description.is_some()),
            ("schema", schema.is_some()),
            ("strict", strict.is_some()),
        ];
        BadRequest::of_other_kinds(&r#type, &given, own).map_err(|bad| bad.inside(PATH))?;
        match r#type.as_str() {
            "text" => Ok(Format::Text),
            "json_object" => Ok(Format::JsonObject),
            _ => {
                let missing = |field: &str| BadRequest::missing(format!("{PATH}.{field}"));
                let name = name.ok_or_else(|| missing("name"))?;
                check_name("text.format.name", &name, 64)?;
                let JsonObject(schema) = schema.ok_or_else(|| missing("schema"))?;
                Ok(Format::JsonSchema { name, description, schema, strict })
            }
        }
    }

    /// As a JSON object; empty for none.
    fn template_variables(&self) -> Result<String, BadRequest> {
        let Some(effort) = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref()) else {
            return Ok(String::new());
        };
        check_effort("reasoning.effort", effort)?;
        Ok(json!({ "reasoning_effort": effort }).to_string())
    }
}

impl ToolChoiceJson {
    fn choice(self) -> Result<ToolChoice, BadRequest> {
        const PATH: &str = "tool_choice";
        let Self { r#type, name, mode, tools, stray } = self;
        let own: &[_] = match r#type.as_str() {
            "function" => &["name"],
            "allowed_tools" => &["mode", "tools"],
            other => return Err(BadRequest::kind("tool_choice.type", other, "function or allowed_tools")),
        };
        BadRequest::stray(&stray).map_err(|bad| bad.inside(PATH))?;
        let given = [("name", name.is_some()), ("mode", mode.is_some()), ("tools", tools.is_some())];
        BadRequest::of_other_kinds(&r#type, &given, own).map_err(|bad| bad.inside(PATH))?;
        let missing = |field: &str| BadRequest::missing(format!("{PATH}.{field}"));
        if r#type == "function" {
            return Ok(ToolChoice::Named(name.ok_or_else(|| missing("name"))?));
        }
        let AtMost(tools) = tools.ok_or_else(|| missing("tools"))?;
        let names = tools.into_iter().map(|AllowedTool(name)| name).collect();
        ToolChoice::allowed(PATH, &mode.ok_or_else(|| missing("mode"))?, names)
    }
}

/// The name of a function; other kinds of tools are refused by name.
#[derive(Debug, Deserialize)]
#[serde(try_from = "AllowedToolFields")]
struct AllowedTool(String);

impl TryFrom<AllowedToolFields> for AllowedTool {
    type Error = Inside;

    fn try_from(AllowedToolFields { r#type, name, stray }: AllowedToolFields) -> Result<Self, Inside> {
        function_name(&r#type, &stray, "name", name).map(Self)
    }
}

impl Format {
    fn wire(&self) -> Option<v1::StructuredOutput> {
        let form = match self {
            Self::Text => return None,
            Self::JsonObject => Form::JsonObject(true),
            Self::JsonSchema { schema, strict, .. } => json_schema(schema.get(), *strict),
        };
        Some(v1::StructuredOutput { form: Some(form) })
    }
}

/// The objects that are read here: their schemas, and the fields that they take.
#[cfg(test)]
pub(crate) fn taken() -> Vec<(&'static str, Vec<&'static str>)> {
    use crate::object::taken;

    vec![
        ("ResponsesRequest", taken::<ResponsesRequest>()),
        ("ResponsesStreamOptions", taken::<StreamOptions>()),
        ("ResponsesTool", taken::<ToolJson>()),
        ("ResponsesToolChoice", taken::<ToolChoiceJson>()),
        ("ResponsesAllowedTool", taken::<AllowedToolFields>()),
        ("TextConfig", taken::<TextConfig>()),
        ("TextFormat", taken::<FormatJson>()),
        ("Reasoning", taken::<Reasoning>()),
        ("InputItem", taken::<items::Item>()),
        ("InputPart", taken::<items::PartFields>()),
    ]
}
