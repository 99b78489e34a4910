//! What a response repeats of its request.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::ResponsesRequest;
use super::tools::{ToolEcho, ToolNames, echo};
use crate::tools::ToolChoice;

#[derive(Serialize)]
pub(super) struct Echo {
    instructions: Option<String>,
    max_output_tokens: Option<u32>,
    metadata: Map<String, Value>,
    parallel_tool_calls: bool,
    reasoning: Reasoning,
    temperature: f32,
    text: Text,
    tool_choice: Value,
    tools: Vec<ToolEcho>,
    top_logprobs: u32,
    top_p: f32,
    truncation: &'static str,
    background: bool,
    store: bool,
    previous_response_id: Option<String>,
}

#[derive(Serialize)]
struct Reasoning {
    effort: Option<String>,
    summary: (),
}

#[derive(Serialize)]
struct Text {
    format: Format,
}

/// The form of the text.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Format {
    Text,
    JsonObject,
    JsonSchema { name: String, description: Option<String>, schema: Box<RawValue>, strict: Option<bool> },
}

/// A tool that is chosen.
fn chosen(name: &str, names: &ToolNames) -> Value {
    let is_custom = names.origin(name).is_some_and(|origin| origin.is_custom);
    json!({ "type": if is_custom { "custom" } else { "function" }, "name": name })
}

impl Echo {
    pub(super) fn new(request: ResponsesRequest, format: Format, choice: &ToolChoice, names: &ToolNames) -> Self {
        let metadata = request.metadata.0.into_iter().map(|(key, value)| (key, Value::String(value)));
        Self {
            instructions: request.instructions,
            max_output_tokens: request.max_output_tokens,
            metadata: metadata.collect(),
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            reasoning: Reasoning { effort: request.reasoning.and_then(|reasoning| reasoning.effort), summary: () },
            temperature: request.temperature.unwrap_or(1.0),
            text: Text { format },
            tool_choice: match choice {
                ToolChoice::Auto => "auto".into(),
                ToolChoice::None => "none".into(),
                ToolChoice::Required => "required".into(),
                ToolChoice::Named(name) => chosen(name, names),
                ToolChoice::Allowed { names: allowed, is_required } => {
                    let tools: Vec<_> = allowed.iter().map(|name| chosen(name, names)).collect();
                    let mode = if *is_required { "required" } else { "auto" };
                    json!({ "type": "allowed_tools", "mode": mode, "tools": tools })
                }
            },
            tools: echo(request.tools.0),
            top_logprobs: request.top_logprobs.unwrap_or(0),
            top_p: request.top_p.unwrap_or(1.0),
            truncation: "disabled",
            background: false,
            store: request.store.unwrap_or(true),
            previous_response_id: request.previous_response_id,
        }
    }
}
