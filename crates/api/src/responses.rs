//! OpenAI's `/v1/responses`. Responses are kept for a time, within bounds, unless the client says
//! otherwise. Tools of OpenAI's servers are left out.

mod answer;
mod conversation;
mod echo;
mod items;
mod store;
mod tools;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt as WirePrompt;
use baton_proto::v1::structured_output::Form;
use serde::Deserialize;
use serde_json::json;

use crate::Context;
use crate::answer::Call;
use crate::chat::check_effort;
use crate::common::{Objectives, check_bytes, with_defaults};
use crate::error::{BadRequest, FieldNames, Inside, Wording};
use crate::field::{
    AtMost, Entries, Ignored, JsonObject, LeftOut, Refused, Stray, TextOr, count, cut, objects, only_false, or_default,
};
use crate::format::{Schema, json_schema};
use crate::tools::{MAX_TOOLS, ToolChoice, check_name};
use crate::warnings::{Warnings, warn_object};

use answer::{Kept, ResponsesAnswer};
use conversation::{Entry, conversation};
use echo::{Echo, Format};
use items::{Item, Items};
use tools::{ToolJson, wire_tools};

pub use store::ResponseStore;
use store::{MAX_REFERRED_BYTES, NotGiven, Room};

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
        #[serde(default, deserialize_with = "count::<_, 1, { u32::MAX }>")]
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
        #[serde(default, deserialize_with = "count::<_, 0, 20>")]
        top_logprobs: Option<u32>,
        #[serde(default, deserialize_with = "or_default")]
        include: AtMost<Include, 16>,
        reasoning: Option<Reasoning>,
        #[serde(default, deserialize_with = "or_default")]
        metadata: Entries<String, 16>,
        truncation: Option<Truncation>,
        #[serde(default, deserialize_with = "only_false")]
        background: Ignored,
        /// Larger goes first.
        #[serde(default, deserialize_with = "crate::field::integer")]
        priority: Option<i32>,
        /// Objectives.
        #[serde(default, deserialize_with = "or_default")]
        pub baton: Objectives,
        /// Whether the response is kept; it is by default.
        store: Option<bool>,
        previous_response_id: Option<String>,
        #[serde(default)]
        client_metadata: Ignored,
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
        /// What is too long is refused, and never shortened.
        #[serde(default)]
        context_management: LeftOut,
        #[serde(default)]
        conversation: Refused,
        #[serde(default)]
        prompt: Refused,
        #[serde(default)]
        moderation: Refused,
    }

    struct StreamOptions {
        #[serde(default, rename = "include_obfuscation")]
        _include_obfuscation: Ignored,
    }

    /// The choice of one tool, or of those that are allowed.
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
    pub const FIELDS: FieldNames = FieldNames::new(
        Wording::Responses,
        &[
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
        ],
    );

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
            temperature: self.temperature,
            top_p: self.top_p,
            // Without a limit, as much as fits.
            max_tokens: Some(self.max_output_tokens.unwrap_or(u32::MAX)),
            logprobs,
            structured_output: format.wire(),
            ..Default::default()
        };
        let sampling = with_defaults(sampling, &context.defaults);
        // The response repeats what was used.
        self.temperature = sampling.temperature;
        self.top_p = sampling.top_p;
        let mut warnings = Warnings::default();
        let (tools, names) = wire_tools(&self.tools.0)?;
        let input = std::mem::replace(&mut self.input, TextOr::Text(String::new()));
        let mut room = Room::default();
        let entries = entries(input, &context, &mut room, &mut warnings)?;
        let earlier = self.earlier(&context, &mut room)?;
        let mut prompt = v1::MessagesPrompt {
            messages: conversation(self.instructions.as_deref(), earlier.iter().chain(&entries), &names),
            template_variables: self.template_variables()?,
            ..Default::default()
        };
        tools.put(&mut prompt, "tool_choice", choice.clone(), self.parallel_tool_calls == Some(false))?;
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
        let keeps = self.store.unwrap_or(true);
        let previous = self.previous_response_id.clone();
        let kept = keeps.then_some(Kept { store: context.responses, input: entries, previous });
        let echo = Echo::new(self, format, &choice, &names);
        let answer = ResponsesAnswer::new(context.created, streams, echo, names, kept);
        let call = Call::new(vec![request], streams, Self::FIELDS, Box::new(answer));
        Ok(Call { warnings, referred_bytes: room.used(), ..call })
    }

    /// What was said up to the response that this one goes on from.
    fn earlier(&self, context: &Context, room: &mut Room) -> Result<Vec<Entry>, BadRequest> {
        let Some(id) = &self.previous_response_id else { return Ok(Vec::new()) };
        let earlier = context.responses.conversation(id, context.created, room);
        earlier.map_err(|why| not_given("previous_response_id", id, why))
    }

    fn check(&self) -> Result<(), BadRequest> {
        check_bytes("model", [&self.model])?;
        check_bytes("metadata", self.metadata.0.iter().flat_map(|(key, value)| [key, value]))?;
        if !self.stream && self.stream_options.is_some() {
            return Err(BadRequest::new("stream_options", "says nothing without stream"));
        }
        Ok(())
    }

    fn wants_logprobs(&self) -> bool {
        self.top_logprobs.is_some_and(|top| top > 0)
            || self.include.0.iter().any(|Include(include)| include == LOGPROBS)
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
            "function" | "custom" => &["name"],
            "allowed_tools" => &["mode", "tools"],
            other => return Ok(ToolChoice::of_type(other)),
        };
        BadRequest::stray(&stray).map_err(|bad| bad.inside(PATH))?;
        let given = [("name", name.is_some()), ("mode", mode.is_some()), ("tools", tools.is_some())];
        BadRequest::of_other_kinds(&r#type, &given, own).map_err(|bad| bad.inside(PATH))?;
        let missing = |field: &str| BadRequest::missing(format!("{PATH}.{field}"));
        if r#type != "allowed_tools" {
            return Ok(ToolChoice::Named(name.ok_or_else(|| missing("name"))?));
        }
        let AtMost(tools) = tools.ok_or_else(|| missing("tools"))?;
        let names = tools.into_iter().map(|AllowedTool(name)| name).collect();
        ToolChoice::allowed(PATH, &mode.ok_or_else(|| missing("mode"))?, names)
    }
}

/// The name of a function or a custom tool; the type of a tool of another kind.
#[derive(Debug, Deserialize)]
#[serde(try_from = "AllowedToolFields")]
struct AllowedTool(String);

impl TryFrom<AllowedToolFields> for AllowedTool {
    type Error = Inside;

    fn try_from(AllowedToolFields { r#type, name, stray }: AllowedToolFields) -> Result<Self, Inside> {
        if r#type != "function" && r#type != "custom" {
            return Ok(Self(r#type));
        }
        BadRequest::stray(&stray)?;
        Ok(Self(name.ok_or_else(|| BadRequest::missing("name"))?))
    }
}

/// What else an answer is to have. What only OpenAI's own tools and items have is left out.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Include(String);

impl TryFrom<String> for Include {
    type Error = String;

    fn try_from(include: String) -> Result<Self, String> {
        // Clients that do not store ask for the encrypted form of reasoning; here its items have
        // the text.
        const KNOWN: [&str; 8] = [
            "reasoning.encrypted_content",
            "web_search_call.results",
            "web_search_call.action.sources",
            "file_search_call.results",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "message.input_image.image_url",
            LOGPROBS,
        ];
        if !KNOWN.contains(&include.as_str()) {
            return Err(format!("'{}', but only these are taken: {}", cut(&include), KNOWN.join(", ")));
        }
        Ok(Self(include))
    }
}

/// What is done with an input that is too long: it is refused.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Truncation;

impl TryFrom<String> for Truncation {
    type Error = String;

    fn try_from(truncation: String) -> Result<Self, String> {
        match truncation.as_str() {
            "disabled" => {}
            "auto" => warn_object("nothing is cut: an input that is too long is refused"),
            other => return Err(format!("'{}', but only disabled or auto is served here", cut(other))),
        }
        Ok(Self)
    }
}

/// The entries of an input, with those that were kept in place of what refers to them.
fn entries(
    input: TextOr<Items>,
    context: &Context,
    room: &mut Room,
    warnings: &mut Warnings,
) -> Result<Vec<Entry>, BadRequest> {
    let AtMost(items) = match input {
        TextOr::Text(content) => return Ok(vec![Entry::Said { role: "user".to_owned(), content }]),
        TextOr::Parts(items) => items,
    };
    let mut entries = Vec::new();
    for (index, Item(entry)) in items.into_iter().enumerate() {
        let path = format!("input[{index}]");
        match entry {
            None => {}
            Some(Entry::Reference(id)) => match context.responses.item(&id, context.created, room) {
                Ok(entry) => entries.push(entry),
                // A conversation goes on without what was thought.
                Err(NotGiven::NotKept) if id.starts_with("rs_") => {
                    warnings.add(&path, "this reasoning is kept no longer, and is left out")
                }
                Err(why) => return Err(not_given(&format!("{path}.id"), &id, why)),
            },
            Some(entry) => entries.push(entry),
        }
    }
    Ok(entries)
}

fn not_given(param: &str, id: &str, why: NotGiven) -> BadRequest {
    let id = cut(id);
    let problem = match why {
        NotGiven::NotKept => format!(
            "'{id}' is not kept here: it is too old, or another conductor's, or was sent with store: false; send store: false and the items themselves"
        ),
        NotGiven::TooLarge => format!(
            "'{id}', but what the request refers to has more than {} MiB; send the items themselves",
            MAX_REFERRED_BYTES >> 20
        ),
    };
    BadRequest::new(param, problem)
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
        ("ResponsesTool", taken::<tools::ToolFields>()),
        ("InputFormat", taken::<tools::InputFormat>()),
        ("ResponsesToolChoice", taken::<ToolChoiceJson>()),
        ("ResponsesAllowedTool", taken::<AllowedToolFields>()),
        ("TextConfig", taken::<TextConfig>()),
        ("TextFormat", taken::<FormatJson>()),
        ("Reasoning", taken::<Reasoning>()),
        ("InputItem", taken::<items::ItemFields>()),
        ("InputPart", taken::<items::PartFields>()),
    ]
}
