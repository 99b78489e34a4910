//! The items of an input, and what a prompt is made of them.

use baton_proto::v1;
use serde::Deserialize;
use serde_json::json;

use super::conversation::Entry;
use crate::error::{BadRequest, Inside};
use crate::field::{AtMost, Content, Ignored, JsonObject, MAX_CONTENT_BYTES, open_objects, or_default};
use crate::warnings::{not_shown, warn_not_shown, warn_object};

/// Items of an input, at most.
pub(super) type Items = AtMost<Item, 65_536>;
/// Longest outcome of a command, bytes.
const MAX_SHORT_JSON: usize = 1024;
/// Parts of a content, at most.
type Parts = AtMost<Part, 4096>;

open_objects! {
    /// An item of any kind: the fields of all of them.
    pub(super) struct ItemFields {
        r#type: Option<String>,
        role: Option<String>,
        content: Option<Content<Parts>>,
        call_id: Option<String>,
        name: Option<String>,
        arguments: Option<String>,
        input: Option<String>,
        output: Option<Content<Parts>>,
        summary: Option<Parts>,
        action: Option<JsonObject<MAX_CONTENT_BYTES>>,
        operation: Option<JsonObject<MAX_CONTENT_BYTES>>,
        id: Option<String>,
        namespace: Option<String>,
        status: Option<String>,
        #[serde(default, rename = "phase")]
        _phase: Ignored,
        #[serde(default, rename = "encrypted_content")]
        _encrypted_content: Ignored,
        #[serde(default, rename = "caller")]
        _caller: Ignored,
        #[serde(default, rename = "max_output_length")]
        _max_output_length: Ignored,
    }

    pub(super) struct PartFields {
        #[serde(default, deserialize_with = "or_default")]
        r#type: String,
        text: Option<String>,
        refusal: Option<String>,
        /// What a command wrote, and how it ended.
        stdout: Option<String>,
        stderr: Option<String>,
        outcome: Option<JsonObject<MAX_SHORT_JSON>>,
        #[serde(default, rename = "annotations")]
        _annotations: Ignored,
        #[serde(default, rename = "logprobs")]
        _logprobs: Ignored,
        #[serde(default, rename = "prompt_cache_breakpoint")]
        _prompt_cache_breakpoint: Ignored,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
    }
}

/// A part of a content.
#[derive(Debug, Deserialize)]
#[serde(try_from = "PartFields")]
enum Part {
    Text(String),
    /// An image, or another kind that is no text.
    NoText(String),
}

impl TryFrom<PartFields> for Part {
    type Error = Inside;

    fn try_from(PartFields { r#type, text, refusal, stdout, stderr, outcome, .. }: PartFields) -> Result<Self, Inside> {
        match r#type.as_str() {
            "" if stdout.is_some() || stderr.is_some() => {
                let outcome = outcome.map(|JsonObject(outcome)| Box::<str>::from(outcome).into_string());
                let lines: Vec<_> = [stdout, stderr, outcome].into_iter().flatten().collect();
                Ok(Self::Text(lines.join("\n")))
            }
            "" => Err(BadRequest::missing("type").into()),
            "input_text" | "output_text" | "reasoning_text" | "summary_text" | "text" => {
                Ok(Self::Text(text.ok_or_else(|| BadRequest::missing("text"))?))
            }
            "refusal" => Ok(Self::Text(refusal.ok_or_else(|| BadRequest::missing("refusal"))?)),
            _ => {
                warn_not_shown(&r#type);
                Ok(Self::NoText(r#type))
            }
        }
    }
}

/// An item, as far as a prompt is made of it.
#[derive(Debug, Deserialize)]
#[serde(try_from = "ItemFields")]
pub(super) struct Item(pub(super) Option<Entry>);

/// Kinds of items that tell what a provider's servers did for an earlier answer. Its text says it,
/// too.
const OF_SERVERS: [&str; 14] = [
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "tool_search_call",
    "tool_search_output",
    "program",
    "program_output",
];

impl TryFrom<ItemFields> for Item {
    type Error = Inside;

    fn try_from(mut item: ItemFields) -> Result<Self, Inside> {
        let kind = match (item.r#type.take(), &item.role, &item.id) {
            (Some(kind), _, _) => kind,
            (None, Some(_), _) => "message".to_owned(),
            // As OpenAI's own clients may leave it out.
            (None, None, Some(_)) => "item_reference".to_owned(),
            (None, None, None) => return Err(BadRequest::missing("type").into()),
        };
        let entry = match kind.as_str() {
            "message" => item.message()?,
            "function_call" => item.function_call()?,
            "custom_tool_call" => item.custom_tool_call()?,
            "local_shell_call" | "shell_call" | "apply_patch_call" => item.built_in_call(&kind)?,
            "function_call_output"
            | "custom_tool_call_output"
            | "local_shell_call_output"
            | "shell_call_output"
            | "apply_patch_call_output" => item.call_output(&kind)?,
            "reasoning" => item.reasoning()?,
            "item_reference" => Entry::Reference(item.id.ok_or_else(|| BadRequest::missing("id"))?),
            server if OF_SERVERS.contains(&server) => {
                warn_object(&format!("the item '{server}' is left out"));
                return Ok(Self(None));
            }
            "compaction" | "compaction_summary" => {
                let problem =
                    "'compaction', but only its provider can read what it stands for: send the items themselves";
                return Err(BadRequest::new("type", problem).into());
            }
            other => {
                let served = "message, reasoning, item_reference, a call (function_call, custom_tool_call, local_shell_call, shell_call, apply_patch_call) or its output";
                return Err(BadRequest::kind("type", other, served).into());
            }
        };
        Ok(Self(Some(entry)))
    }
}

impl ItemFields {
    fn message(self) -> Result<Entry, BadRequest> {
        self.warn_of_others("message", &["role", "content"]);
        let role = self.role.ok_or_else(|| BadRequest::missing("role"))?;
        let content = self.content.ok_or_else(|| BadRequest::missing("content"))?;
        match role.as_str() {
            "assistant" => Ok(Entry::Answered(text("content", content, "")?)),
            "user" | "system" => Ok(Entry::Said { role, content: text("content", content, "\n")? }),
            // Templates know the older name of the role.
            "developer" => Ok(Entry::Said { role: "system".to_owned(), content: text("content", content, "\n")? }),
            other => Err(BadRequest::kind("role", other, "user, assistant, system or developer")),
        }
    }

    fn function_call(self) -> Result<Entry, BadRequest> {
        self.warn_of_others("function_call", &["call_id", "name", "arguments"]);
        let missing = |field: &str| BadRequest::missing(field);
        let call = v1::ToolCall {
            id: self.call_id.ok_or_else(|| missing("call_id"))?,
            name: self.name.ok_or_else(|| missing("name"))?,
            arguments: self.arguments.ok_or_else(|| missing("arguments"))?,
        };
        Ok(Entry::Called { call, namespace: self.namespace })
    }

    fn custom_tool_call(self) -> Result<Entry, BadRequest> {
        self.warn_of_others("custom_tool_call", &["call_id", "name", "input"]);
        let missing = |field: &str| BadRequest::missing(field);
        let input = self.input.ok_or_else(|| missing("input"))?;
        let call = v1::ToolCall {
            id: self.call_id.ok_or_else(|| missing("call_id"))?,
            name: self.name.ok_or_else(|| missing("name"))?,
            arguments: json!({ "input": input }).to_string(),
        };
        Ok(Entry::Called { call, namespace: self.namespace })
    }

    /// A call of a tool that OpenAI's models have built in: a shell has an action, a patch an
    /// operation.
    fn built_in_call(self, kind: &str) -> Result<Entry, BadRequest> {
        let (field, value) = match kind {
            "apply_patch_call" => ("operation", &self.operation),
            _ => ("action", &self.action),
        };
        self.warn_of_others(kind, &["call_id", field]);
        let missing = |field: &str| BadRequest::missing(field);
        let JsonObject(value) = value.as_ref().ok_or_else(|| missing(field))?;
        let arguments = value.get().to_owned();
        let call = v1::ToolCall {
            id: self.call_id.or(self.id).ok_or_else(|| missing("call_id"))?,
            name: kind.trim_end_matches("_call").to_owned(),
            arguments,
        };
        Ok(Entry::Called { call, namespace: None })
    }

    fn call_output(self, kind: &str) -> Result<Entry, BadRequest> {
        self.warn_of_others(kind, &["call_id", "name", "output"]);
        let missing = |field: &str| BadRequest::missing(field);
        let call_id = self.call_id.or(self.id).ok_or_else(|| missing("call_id"))?;
        let content = match self.output {
            Some(output) => shown(output)?,
            None if kind == "apply_patch_call_output" => String::new(),
            None => return Err(missing("output")),
        };
        // A patch may say no more than whether it was applied.
        let content = if content.is_empty() { self.status.unwrap_or_default() } else { content };
        Ok(Entry::Returned { call_id, name: self.name, content })
    }

    /// Reads the text of a reasoning, or the summary if it has no text.
    fn reasoning(self) -> Result<Entry, BadRequest> {
        self.warn_of_others("reasoning", &["content", "summary"]);
        let content = self.content.map(|content| text("content", content, "")).transpose()?;
        let summary = self.summary.map(|summary| text("summary", Content::Parts(summary), "\n")).transpose()?;
        Ok(Entry::Thought(content.filter(|content| !content.is_empty()).or(summary).unwrap_or_default()))
    }

    /// Warns of fields of other kinds than its own.
    fn warn_of_others(&self, kind: &str, own: &[&str]) {
        let given = [
            ("role", self.role.is_some()),
            ("content", self.content.is_some()),
            ("call_id", self.call_id.is_some()),
            ("name", self.name.is_some()),
            ("arguments", self.arguments.is_some()),
            ("input", self.input.is_some()),
            ("output", self.output.is_some()),
            ("summary", self.summary.is_some()),
            ("action", self.action.is_some()),
            ("operation", self.operation.is_some()),
        ];
        BadRequest::warn_of_other_kinds(kind, &given, own);
    }
}

/// A text, or parts of it, joined; what is no text is refused by name.
fn text(field: &str, content: Content<Parts>, separator: &str) -> Result<String, BadRequest> {
    let parts = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(AtMost(parts)) => parts,
        Content::Object => return Err(BadRequest::new(field, "is neither a text nor a list")),
    };
    let numbered = parts.into_iter().enumerate();
    let texts = numbered.map(|(index, part)| match part {
        Part::Text(text) => Ok(text),
        Part::NoText(kind) => {
            let served = "input_text, output_text, refusal, reasoning_text or summary_text";
            Err(BadRequest::kind(format!("{field}[{index}].type"), &kind, served))
        }
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join(separator))
}

/// The text of what a function said. Of what is no text it says so much: the model must not take
/// the output for empty.
fn shown(output: Content<Parts>) -> Result<String, BadRequest> {
    let parts = match output {
        Content::Text(text) => return Ok(text),
        Content::Parts(AtMost(parts)) => parts,
        Content::Object => return Err(BadRequest::new("output", "is neither a text nor a list")),
    };
    let text = |part| match part {
        Part::Text(text) => text,
        Part::NoText(kind) => not_shown(&kind),
    };
    let texts: Vec<_> = parts.into_iter().map(text).collect();
    Ok(texts.join("\n"))
}
