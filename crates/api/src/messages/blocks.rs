//! What messages are made of, and the conversation that it is to a chat template.

use std::collections::HashMap;

use baton_proto::v1;
use serde::Deserialize;

use crate::chat::{MAX_MESSAGES, MessageList};
use crate::error::{BadRequest, Inside};
use crate::field::{AtMost, Ignored, JsonObject, MAX_CONTENT_BYTES, Stray, TextOr, objects, or_default};

/// Blocks of text, at most.
pub(super) type TextBlocks = AtMost<TextBlock, 4096>;

objects! {
    pub(super) struct Message {
        role: String,
        content: TextOr<AtMost<Block, 4096>>,
    }

    /// Of a block of any kind.
    pub(super) struct BlockFields {
        r#type: String,
        text: Option<String>,
        thinking: Option<String>,
        id: Option<String>,
        name: Option<String>,
        input: Option<JsonObject<MAX_CONTENT_BYTES>>,
        tool_use_id: Option<String>,
        content: Option<TextOr<TextBlocks>>,
        #[serde(default, deserialize_with = "or_default")]
        is_error: bool,
        #[serde(default, rename = "signature")]
        _signature: Ignored,
        #[serde(default, rename = "data")]
        _data: Ignored,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
        #[serde(default, rename = "citations")]
        _citations: Ignored,
        #[serde(default, rename = "caller")]
        _caller: Ignored,
        #[serde(default, rename = "toolset_name")]
        _toolset_name: Ignored,
        #[serde(default, rename = "?")]
        stray: Stray,
    }

    pub(super) struct TextBlockFields {
        r#type: String,
        text: Option<String>,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
        #[serde(default, rename = "citations")]
        _citations: Ignored,
        #[serde(default, rename = "?")]
        stray: Stray,
    }
}

/// A block of a kind that is served; others are refused by name.
#[derive(Debug, Deserialize)]
#[serde(try_from = "BlockFields")]
enum Block {
    Text(String),
    Thinking(String),
    /// Only who wrote it could read it.
    RedactedThinking,
    ToolUse(v1::ToolCall),
    ToolResult {
        tool_use_id: String,
        said: String,
    },
}

impl TryFrom<BlockFields> for Block {
    type Error = Inside;

    fn try_from(fields: BlockFields) -> Result<Self, Inside> {
        let own: &[_] = match fields.r#type.as_str() {
            "text" => &["text"],
            "thinking" => &["thinking"],
            "redacted_thinking" => &[],
            "tool_use" => &["id", "name", "input"],
            "tool_result" => &["tool_use_id", "content", "is_error"],
            other => {
                let served = "text, thinking, redacted_thinking, tool_use or tool_result";
                return Err(BadRequest::kind("type", other, served).into());
            }
        };
        fields.has_only(own)?;
        Ok(match fields.r#type.as_str() {
            "text" => Self::Text(fields.text.ok_or_else(|| BadRequest::missing("text"))?),
            "thinking" => Self::Thinking(fields.thinking.ok_or_else(|| BadRequest::missing("thinking"))?),
            "tool_use" => {
                let JsonObject(input) = fields.input.ok_or_else(|| BadRequest::missing("input"))?;
                Self::ToolUse(v1::ToolCall {
                    id: fields.id.ok_or_else(|| BadRequest::missing("id"))?,
                    name: fields.name.ok_or_else(|| BadRequest::missing("name"))?,
                    arguments: Box::<str>::from(input).into_string(),
                })
            }
            "tool_result" => {
                let said = fields.content.map(text_of).unwrap_or_default();
                Self::ToolResult {
                    tool_use_id: fields.tool_use_id.ok_or_else(|| BadRequest::missing("tool_use_id"))?,
                    // Templates have no place for it.
                    said: if fields.is_error { format!("Error: {said}") } else { said },
                }
            }
            _ => Self::RedactedThinking,
        })
    }
}

impl BlockFields {
    /// Refuses fields of other kinds than its own.
    fn has_only(&self, own: &[&str]) -> Result<(), BadRequest> {
        BadRequest::stray(&self.stray)?;
        let given = [
            ("text", self.text.is_some()),
            ("thinking", self.thinking.is_some()),
            ("id", self.id.is_some()),
            ("name", self.name.is_some()),
            ("input", self.input.is_some()),
            ("tool_use_id", self.tool_use_id.is_some()),
            ("content", self.content.is_some()),
            ("is_error", self.is_error),
        ];
        BadRequest::of_other_kinds(&self.r#type, &given, own)
    }
}

impl Block {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Thinking(_) => "thinking",
            Self::RedactedThinking => "redacted_thinking",
            Self::ToolUse(_) => "tool_use",
            Self::ToolResult { .. } => "tool_result",
        }
    }
}

/// A block if only text is served.
#[derive(Debug, Deserialize)]
#[serde(try_from = "TextBlockFields")]
pub(super) struct TextBlock(String);

impl TryFrom<TextBlockFields> for TextBlock {
    type Error = Inside;

    fn try_from(TextBlockFields { r#type, text, stray, .. }: TextBlockFields) -> Result<Self, Inside> {
        if r#type != "text" {
            return Err(BadRequest::kind("type", &r#type, "text").into());
        }
        BadRequest::stray(&stray)?;
        Ok(Self(text.ok_or_else(|| BadRequest::missing("text"))?))
    }
}

/// A text, or blocks of it, which are its lines.
pub(super) fn text_of(content: TextOr<TextBlocks>) -> String {
    match content {
        TextOr::Text(text) => text,
        TextOr::Parts(AtMost(blocks)) => {
            let texts: Vec<_> = blocks.into_iter().map(|TextBlock(text)| text).collect();
            texts.join("\n")
        }
    }
}

/// The messages of the wire. What tools said comes right after the assistant's message, as
/// templates expect it.
pub(super) fn conversation(
    system: Option<String>,
    messages: MessageList<Message>,
) -> Result<Vec<v1::ChatMessage>, BadRequest> {
    let mut conversation = Conversation::default();
    if let Some(system) = system {
        conversation.say("system", system);
    }
    for (index, Message { role, content }) in messages.0.into_iter().enumerate() {
        let path = format!("messages[{index}]");
        match (role.as_str(), content) {
            ("user" | "assistant" | "system", TextOr::Text(text)) => conversation.say(&role, text),
            ("user" | "system", TextOr::Parts(AtMost(blocks))) => conversation.hear(&path, &role, blocks)?,
            ("assistant", TextOr::Parts(AtMost(blocks))) => conversation.answer(&path, blocks)?,
            (other, _) => return Err(BadRequest::kind(format!("{path}.role"), other, "user, assistant or system")),
        }
        // What a tool said is a message of its own.
        if conversation.messages.len() > MAX_MESSAGES {
            return Err(BadRequest::new("messages", format!("at most {MAX_MESSAGES} are taken, with what tools said")));
        }
    }
    Ok(conversation.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<v1::ChatMessage>,
    /// Names of the tools that were called, by the ids of the calls: templates show them with what
    /// the tools said.
    called: HashMap<String, String>,
}

impl Conversation {
    fn say(&mut self, role: &str, content: String) {
        self.messages.push(v1::ChatMessage { role: role.to_owned(), content, ..Default::default() });
    }

    /// A message of the client's: what tools said, and then texts, which are lines of one.
    fn hear(&mut self, path: &str, role: &str, blocks: Vec<Block>) -> Result<(), BadRequest> {
        let mut texts = Vec::new();
        let is_empty = blocks.is_empty();
        for (index, block) in blocks.into_iter().enumerate() {
            match block {
                Block::Text(text) => texts.push(text),
                Block::ToolResult { tool_use_id, said } if role == "user" => self.tool_result(tool_use_id, said),
                other => {
                    let served = if role == "user" { "text or tool_result" } else { "text" };
                    return Err(BadRequest::kind(format!("{path}.content[{index}].type"), other.kind(), served));
                }
            }
        }
        if is_empty || !texts.is_empty() {
            self.say(role, texts.join("\n"));
        }
        Ok(())
    }

    fn tool_result(&mut self, tool_call_id: String, content: String) {
        let name = self.called.get(&tool_call_id).cloned().unwrap_or_default();
        let role = "tool".to_owned();
        self.messages.push(v1::ChatMessage { role, content, name, tool_call_id, ..Default::default() });
    }

    /// A message of the assistant's. Its texts are one text, as the model wrote it.
    fn answer(&mut self, path: &str, blocks: Vec<Block>) -> Result<(), BadRequest> {
        let mut message = v1::ChatMessage { role: "assistant".to_owned(), ..Default::default() };
        for (index, block) in blocks.into_iter().enumerate() {
            match block {
                Block::Text(text) => message.content.push_str(&text),
                Block::Thinking(thinking) => message.reasoning.push_str(&thinking),
                Block::RedactedThinking => {}
                Block::ToolUse(call) => {
                    self.called.insert(call.id.clone(), call.name.clone());
                    message.tool_calls.push(call);
                }
                Block::ToolResult { .. } => {
                    let served = "text, thinking, redacted_thinking or tool_use";
                    return Err(BadRequest::kind(format!("{path}.content[{index}].type"), "tool_result", served));
                }
            }
        }
        self.messages.push(message);
        Ok(())
    }
}
