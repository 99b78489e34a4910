//! The items of an input, and the conversation that they are to a chat template.

use std::collections::HashMap;

use baton_proto::v1;
use serde::Deserialize;

use crate::error::{BadRequest, Inside};
use crate::field::{AtMost, Ignored, Stray, TextOr, objects};

/// Items of an input, at most.
pub(super) type Items = AtMost<Item, 65_536>;
/// Parts of a content, at most.
type Parts = AtMost<Part, 4096>;

objects! {
    /// An item of any kind that is served: the fields of all of them.
    pub(super) struct Item {
        r#type: Option<String>,
        role: Option<String>,
        content: Option<TextOr<Parts>>,
        call_id: Option<String>,
        name: Option<String>,
        arguments: Option<String>,
        output: Option<TextOr<Parts>>,
        summary: Option<Parts>,
        #[serde(default, rename = "id")]
        _id: Ignored,
        #[serde(default, rename = "status")]
        _status: Ignored,
        #[serde(default, rename = "phase")]
        _phase: Ignored,
        #[serde(default, rename = "encrypted_content")]
        _encrypted_content: Ignored,
        #[serde(default, rename = "namespace")]
        _namespace: Ignored,
        #[serde(default, rename = "caller")]
        _caller: Ignored,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    pub(super) struct PartFields {
        r#type: String,
        text: Option<String>,
        #[serde(default, rename = "annotations")]
        _annotations: Ignored,
        #[serde(default, rename = "logprobs")]
        _logprobs: Ignored,
        #[serde(default, rename = "prompt_cache_breakpoint")]
        _prompt_cache_breakpoint: Ignored,
        #[serde(default, rename = "?")]
        stray: Stray,
    }
}

/// A part of a content: text of one kind or another; what is none is refused by name.
#[derive(Debug, Deserialize)]
#[serde(try_from = "PartFields")]
struct Part {
    kind: PartKind,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartKind {
    Input,
    Output,
    Reasoning,
    Summary,
}

impl PartKind {
    const ALL: [Self; 4] = [Self::Input, Self::Output, Self::Reasoning, Self::Summary];

    fn as_str(self) -> &'static str {
        match self {
            Self::Input => "input_text",
            Self::Output => "output_text",
            Self::Reasoning => "reasoning_text",
            Self::Summary => "summary_text",
        }
    }
}

impl TryFrom<PartFields> for Part {
    type Error = Inside;

    fn try_from(PartFields { r#type, text, stray, .. }: PartFields) -> Result<Self, Inside> {
        let kind = PartKind::ALL.into_iter().find(|kind| kind.as_str() == r#type);
        let kind = kind.ok_or_else(|| BadRequest::kind("type", &r#type, "text"))?;
        BadRequest::stray(&stray)?;
        Ok(Self { kind, text: text.ok_or_else(|| BadRequest::missing("text"))? })
    }
}

/// The messages of the wire. What the assistant thought, said and called, one after the other, is
/// one message.
pub(super) fn conversation(
    instructions: Option<&str>,
    input: TextOr<Items>,
) -> Result<Vec<v1::ChatMessage>, BadRequest> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = instructions {
        conversation.say("system", instructions.to_owned());
    }
    match input {
        TextOr::Text(text) => conversation.say("user", text),
        TextOr::Parts(AtMost(items)) => {
            for (index, item) in items.into_iter().enumerate() {
                conversation.take(&format!("input[{index}]"), item)?;
            }
        }
    }
    conversation.end_turn();
    Ok(conversation.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<v1::ChatMessage>,
    /// The assistant's message that more may come to.
    turn: Option<v1::ChatMessage>,
    /// Names of the functions that were called, by the ids of the calls: templates show them with
    /// what the functions said.
    called: HashMap<String, String>,
}

impl Conversation {
    fn take(&mut self, path: &str, item: Item) -> Result<(), BadRequest> {
        let kind = match (&item.r#type, &item.role) {
            (Some(kind), _) => kind.clone(),
            (None, Some(_)) => "message".to_owned(),
            (None, None) => return Err(BadRequest::missing(format!("{path}.type"))),
        };
        match kind.as_str() {
            "message" => self.message(path, item),
            "function_call" => self.function_call(path, item),
            "function_call_output" => self.function_call_output(path, item),
            "reasoning" => self.reasoning(path, item),
            other => {
                let served = "message, function_call, function_call_output or reasoning";
                Err(BadRequest::kind(format!("{path}.type"), other, served))
            }
        }
    }

    fn message(&mut self, path: &str, item: Item) -> Result<(), BadRequest> {
        item.has_only(path, "message", &["role", "content"])?;
        let missing = |field: &str| BadRequest::missing(format!("{path}.{field}"));
        let role = item.role.ok_or_else(|| missing("role"))?;
        let content = item.content.ok_or_else(|| missing("content"))?;
        let text = |separator| text(&format!("{path}.content"), content, &SAID, separator);
        match role.as_str() {
            "user" | "system" => self.say(&role, text("\n")?),
            // Templates know the older name of the role.
            "developer" => self.say("system", text("\n")?),
            "assistant" => {
                let content = text("")?;
                self.turn(|turn| turn.content.is_empty() && turn.tool_calls.is_empty()).content = content;
            }
            other => {
                let served = "user, assistant, system or developer";
                return Err(BadRequest::kind(format!("{path}.role"), other, served));
            }
        }
        Ok(())
    }

    fn function_call(&mut self, path: &str, item: Item) -> Result<(), BadRequest> {
        item.has_only(path, "function_call", &["call_id", "name", "arguments"])?;
        let missing = |field: &str| BadRequest::missing(format!("{path}.{field}"));
        let call = v1::ToolCall {
            id: item.call_id.ok_or_else(|| missing("call_id"))?,
            name: item.name.ok_or_else(|| missing("name"))?,
            arguments: item.arguments.ok_or_else(|| missing("arguments"))?,
        };
        self.called.insert(call.id.clone(), call.name.clone());
        self.turn(|_| true).tool_calls.push(call);
        Ok(())
    }

    fn function_call_output(&mut self, path: &str, item: Item) -> Result<(), BadRequest> {
        item.has_only(path, "function_call_output", &["call_id", "name", "output"])?;
        let missing = |field: &str| BadRequest::missing(format!("{path}.{field}"));
        let tool_call_id = item.call_id.ok_or_else(|| missing("call_id"))?;
        let output = item.output.ok_or_else(|| missing("output"))?;
        let content = text(&format!("{path}.output"), output, &SAID, "\n")?;
        let name = self.called.get(&tool_call_id).cloned().or(item.name).unwrap_or_default();
        self.end_turn();
        let role = "tool".to_owned();
        self.messages.push(v1::ChatMessage { role, content, name, tool_call_id, ..Default::default() });
        Ok(())
    }

    /// Its text, or what is told of it.
    fn reasoning(&mut self, path: &str, item: Item) -> Result<(), BadRequest> {
        item.has_only(path, "reasoning", &["content", "summary"])?;
        let content = item.content.map(|content| text(&format!("{path}.content"), content, &[PartKind::Reasoning], ""));
        let summary = item
            .summary
            .map(|summary| text(&format!("{path}.summary"), TextOr::Parts(summary), &[PartKind::Summary], "\n"));
        let content = content.transpose()?;
        let summary = summary.transpose()?;
        let thought = content.filter(|content| !content.is_empty()).or(summary).unwrap_or_default();
        let turn = self.turn(|turn| turn.content.is_empty() && turn.tool_calls.is_empty());
        turn.reasoning.push_str(&thought);
        Ok(())
    }

    fn say(&mut self, role: &str, content: String) {
        self.end_turn();
        self.messages.push(v1::ChatMessage { role: role.to_owned(), content, ..Default::default() });
    }

    /// The assistant's message: the one that is open, if it goes on, or a new one.
    fn turn(&mut self, goes_on: impl FnOnce(&v1::ChatMessage) -> bool) -> &mut v1::ChatMessage {
        if !self.turn.as_ref().is_some_and(goes_on) {
            self.end_turn();
        }
        self.turn.get_or_insert_with(|| v1::ChatMessage { role: "assistant".to_owned(), ..Default::default() })
    }

    fn end_turn(&mut self) {
        self.messages.extend(self.turn.take());
    }
}

impl Item {
    /// Refuses fields of other kinds than its own.
    fn has_only(&self, path: &str, kind: &str, own: &[&str]) -> Result<(), BadRequest> {
        BadRequest::stray(&self.stray).map_err(|bad| bad.inside(path))?;
        let given = [
            ("role", self.role.is_some()),
            ("content", self.content.is_some()),
            ("call_id", self.call_id.is_some()),
            ("name", self.name.is_some()),
            ("arguments", self.arguments.is_some()),
            ("output", self.output.is_some()),
            ("summary", self.summary.is_some()),
        ];
        BadRequest::of_other_kinds(kind, &given, own).map_err(|bad| bad.inside(path))
    }
}

/// Kinds of parts of what was said.
const SAID: [PartKind; 2] = [PartKind::Input, PartKind::Output];

/// A text, or parts of these kinds, joined.
fn text(path: &str, content: TextOr<Parts>, kinds: &[PartKind], separator: &str) -> Result<String, BadRequest> {
    let AtMost(parts) = match content {
        TextOr::Text(text) => return Ok(text),
        TextOr::Parts(parts) => parts,
    };
    if let Some(index) = parts.iter().position(|part| !kinds.contains(&part.kind)) {
        let served: Vec<_> = kinds.iter().map(|kind| kind.as_str()).collect();
        let kind = parts[index].kind.as_str();
        return Err(BadRequest::kind(format!("{path}[{index}].type"), kind, &served.join(" or ")));
    }
    let texts: Vec<_> = parts.into_iter().map(|part| part.text).collect();
    Ok(texts.join(separator))
}
