//! What messages are made of, and the conversation that it is to a chat template.

use std::collections::HashMap;

use baton_proto::v1;

use crate::chat::MessageList;
use crate::error::BadRequest;
use crate::field::{AtMost, Ignored, JsonObject, MAX_CONTENT_BYTES, Stray, TextOr, objects, or_default};

/// Blocks of text, at most.
pub(super) type TextBlocks = AtMost<TextBlock, 4096>;

objects! {
    pub(super) struct Message {
        role: String,
        content: TextOr<AtMost<Block, 4096>>,
    }

    /// A block of any kind that is served: the fields of all of them.
    pub(super) struct Block {
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

    /// A block where text alone is served.
    pub(super) struct TextBlock {
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

/// The messages of the wire. What tools said comes right after the assistant's message, as templates expect it.
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
            ("user", TextOr::Parts(blocks)) => conversation.hear(&path, blocks.0)?,
            ("assistant", TextOr::Parts(blocks)) => conversation.answer(&path, blocks.0)?,
            ("system", TextOr::Parts(blocks)) => {
                let texts = texts(&path, blocks.0)?;
                conversation.say("system", texts);
            }
            (other, _) => return Err(BadRequest::kind(format!("{path}.role"), other, "user, assistant or system")),
        }
    }
    Ok(conversation.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<v1::ChatMessage>,
    /// Names of the tools that were called, by the ids of the calls: templates show them with what the tools said.
    called: HashMap<String, String>,
}

impl Conversation {
    fn say(&mut self, role: &str, content: String) {
        self.messages.push(v1::ChatMessage { role: role.to_owned(), content, ..Default::default() });
    }

    /// A message of the user's: what tools said, and then texts, which are lines of one.
    fn hear(&mut self, path: &str, blocks: Vec<Block>) -> Result<(), BadRequest> {
        let mut texts = Vec::new();
        let is_empty = blocks.is_empty();
        for (index, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}.content[{index}]");
            match block.r#type.as_str() {
                "text" => texts.push(block.text(&path)?),
                "tool_result" => {
                    let message = self.tool_result(&path, block)?;
                    self.messages.push(message);
                }
                other => return Err(BadRequest::kind(format!("{path}.type"), other, "text or tool_result")),
            }
        }
        if is_empty || !texts.is_empty() {
            self.say("user", texts.join("\n"));
        }
        Ok(())
    }

    fn tool_result(&self, path: &str, block: Block) -> Result<v1::ChatMessage, BadRequest> {
        block.has_only(path, &["tool_use_id", "content", "is_error"])?;
        let Block { tool_use_id, content, is_error, .. } = block;
        let tool_call_id = tool_use_id.ok_or_else(|| BadRequest::new(format!("{path}.tool_use_id"), "is missing"))?;
        let said = content.map(|content| text_of(&format!("{path}.content"), content)).transpose()?;
        let said = said.unwrap_or_default();
        Ok(v1::ChatMessage {
            role: "tool".to_owned(),
            // Templates have no place for it.
            content: if is_error { format!("Error: {said}") } else { said },
            name: self.called.get(&tool_call_id).cloned().unwrap_or_default(),
            tool_call_id,
            ..Default::default()
        })
    }

    /// A message of the assistant's. Its texts are one text, as the model wrote it.
    fn answer(&mut self, path: &str, blocks: Vec<Block>) -> Result<(), BadRequest> {
        let mut message = v1::ChatMessage { role: "assistant".to_owned(), ..Default::default() };
        for (index, block) in blocks.into_iter().enumerate() {
            let path = format!("{path}.content[{index}]");
            match block.r#type.as_str() {
                "text" => message.content.push_str(&block.text(&path)?),
                "thinking" => {
                    block.has_only(&path, &["thinking"])?;
                    let missing = || BadRequest::new(format!("{path}.thinking"), "is missing");
                    message.reasoning.push_str(&block.thinking.ok_or_else(missing)?);
                }
                // Only who wrote it could read it.
                "redacted_thinking" => block.has_only(&path, &[])?,
                "tool_use" => {
                    let call = block.tool_use(&path)?;
                    self.called.insert(call.id.clone(), call.name.clone());
                    message.tool_calls.push(call);
                }
                other => {
                    let served = "text, thinking, redacted_thinking or tool_use";
                    return Err(BadRequest::kind(format!("{path}.type"), other, served));
                }
            }
        }
        self.messages.push(message);
        Ok(())
    }
}

impl Block {
    fn text(self, path: &str) -> Result<String, BadRequest> {
        self.has_only(path, &["text"])?;
        self.text.ok_or_else(|| BadRequest::new(format!("{path}.text"), "is missing"))
    }

    fn tool_use(self, path: &str) -> Result<v1::ToolCall, BadRequest> {
        self.has_only(path, &["id", "name", "input"])?;
        let missing = |field: &str| BadRequest::new(format!("{path}.{field}"), "is missing");
        let JsonObject(input) = self.input.ok_or_else(|| missing("input"))?;
        Ok(v1::ToolCall {
            id: self.id.ok_or_else(|| missing("id"))?,
            name: self.name.ok_or_else(|| missing("name"))?,
            arguments: Box::<str>::from(input).into_string(),
        })
    }

    /// Refuses fields of other kinds than its own.
    fn has_only(&self, path: &str, own: &[&str]) -> Result<(), BadRequest> {
        BadRequest::stray(path, &self.stray)?;
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
        BadRequest::of_other_kinds(path, &self.r#type, &given, own)
    }
}

/// Texts of blocks are lines of one.
fn texts(path: &str, blocks: Vec<Block>) -> Result<String, BadRequest> {
    let text = |(index, block): (usize, Block)| {
        let path = format!("{path}.content[{index}]");
        if block.r#type != "text" {
            return Err(BadRequest::kind(format!("{path}.type"), &block.r#type, "text"));
        }
        block.text(&path)
    };
    let texts = blocks.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join("\n"))
}

/// A text, or blocks of it.
pub(super) fn text_of(path: &str, content: TextOr<TextBlocks>) -> Result<String, BadRequest> {
    let AtMost(blocks) = match content {
        TextOr::Text(text) => return Ok(text),
        TextOr::Parts(blocks) => blocks,
    };
    let text = |(index, TextBlock { r#type, text, stray, .. }): (usize, TextBlock)| {
        let path = format!("{path}[{index}]");
        if r#type != "text" {
            return Err(BadRequest::kind(format!("{path}.type"), &r#type, "text"));
        }
        BadRequest::stray(&path, &stray)?;
        text.ok_or_else(|| BadRequest::new(format!("{path}.text"), "is missing"))
    };
    let texts = blocks.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join("\n"))
}
