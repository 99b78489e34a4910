//! What messages are made of, and the conversation that it is to a chat template.

use std::collections::HashMap;

use baton_proto::v1;
use serde::Deserialize;

use crate::chat::{MAX_MESSAGES, MessageList};
use crate::error::{BadRequest, Inside};
use crate::field::{
    AtMost, Content, Ignored, JsonObject, MAX_CONTENT_BYTES, TextOr, cut, object_or_empty_list, open_objects,
    or_default,
};
use crate::warnings::{not_shown, warn_not_shown, warn_object};

/// Blocks of text, at most.
pub(super) type TextBlocks = AtMost<TextBlock, 4096>;
/// Blocks of any kind, at most.
type Blocks = AtMost<Block, 4096>;

open_objects! {
    pub(super) struct Message {
        role: String,
        content: TextOr<Blocks>,
        #[serde(default, rename = "id")]
        _id: Ignored,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
    }

    /// Of a block of any kind.
    pub(super) struct BlockFields {
        r#type: String,
        text: Option<String>,
        thinking: Option<String>,
        id: Option<String>,
        name: Option<String>,
        #[serde(default, deserialize_with = "object_or_empty_list")]
        input: Option<JsonObject<MAX_CONTENT_BYTES>>,
        tool_use_id: Option<String>,
        content: Option<Content<Blocks>>,
        #[serde(default, deserialize_with = "or_default")]
        is_error: bool,
        /// Content of a document, or the place of a search result.
        source: Option<TextOr<Source>>,
        title: Option<String>,
        context: Option<String>,
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
    }

    /// What a document is.
    pub(super) struct Source {
        r#type: String,
        data: Option<String>,
        content: Option<Content<Blocks>>,
        #[serde(default, rename = "media_type")]
        _media_type: Ignored,
        #[serde(default, rename = "url")]
        _url: Ignored,
        #[serde(default, rename = "file_id")]
        _file_id: Ignored,
    }

    pub(super) struct TextBlockFields {
        r#type: String,
        text: Option<String>,
        #[serde(default, rename = "cache_control")]
        _cache_control: Ignored,
        #[serde(default, rename = "citations")]
        _citations: Ignored,
    }
}

/// A block.
#[derive(Debug, Deserialize)]
#[serde(try_from = "BlockFields")]
enum Block {
    /// Text, a document of text, or a result of a search.
    Text(String),
    Thinking(String),
    ToolUse(v1::ToolCall),
    ToolResult {
        tool_use_id: String,
        said: String,
    },
    /// What says nothing to the model: what its servers did, and what only they can read.
    Nothing,
    /// An image, or another kind that is no text.
    NoText(String),
}

/// Kinds of blocks that tell what a provider's servers did for an earlier answer, whose text says
/// it, too.
const OF_SERVERS: [&str; 12] = [
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "tool_reference",
    "advisor_tool_result",
    "fallback",
];

impl TryFrom<BlockFields> for Block {
    type Error = Inside;

    fn try_from(fields: BlockFields) -> Result<Self, Inside> {
        let missing = |field: &str| BadRequest::missing(field);
        let kind = fields.r#type.clone();
        let own: &[_] = match kind.as_str() {
            "text" => &["text"],
            "thinking" => &["thinking"],
            "tool_use" => &["id", "name", "input"],
            "tool_result" => &["tool_use_id", "content", "is_error"],
            "document" => &["source", "title", "context"],
            "search_result" => &["source", "title", "content"],
            "compaction" => &["content"],
            // Only who wrote it can read it.
            "redacted_thinking" => return Ok(Self::Nothing),
            server if OF_SERVERS.contains(&server) => {
                warn_object(&format!("the block '{server}' is left out"));
                return Ok(Self::Nothing);
            }
            _ => return Ok(Self::no_text(kind)),
        };
        fields.warn_of_others(own);
        Ok(match kind.as_str() {
            "text" => Self::Text(fields.text.ok_or_else(|| missing("text"))?),
            "thinking" => Self::Thinking(fields.thinking.ok_or_else(|| missing("thinking"))?),
            "tool_use" => {
                let JsonObject(input) = fields.input.ok_or_else(|| missing("input"))?;
                Self::ToolUse(v1::ToolCall {
                    id: fields.id.ok_or_else(|| missing("id"))?,
                    name: fields.name.ok_or_else(|| missing("name"))?,
                    arguments: Box::<str>::from(input).into_string(),
                })
            }
            "tool_result" => {
                let said = fields.content.map(shown).transpose()?.unwrap_or_default();
                Self::ToolResult {
                    tool_use_id: fields.tool_use_id.ok_or_else(|| missing("tool_use_id"))?,
                    // Templates have no place for it.
                    said: if fields.is_error { format!("Error: {said}") } else { said },
                }
            }
            "document" => match fields.source.ok_or_else(|| missing("source"))? {
                TextOr::Text(_) => return Err(BadRequest::new("source", "is no object").into()),
                TextOr::Parts(source) => {
                    let kind = format!("document of {}", cut(&source.r#type));
                    match source.text()? {
                        Some(text) => Self::Text(lines([fields.title, fields.context, Some(text)])),
                        None => Self::no_text(kind),
                    }
                }
            },
            "search_result" => {
                let source = match fields.source {
                    Some(TextOr::Text(source)) => Some(source),
                    _ => None,
                };
                Self::Text(lines([fields.title, source, fields.content.map(shown).transpose()?]))
            }
            _ => Self::Text(fields.content.map(shown).transpose()?.unwrap_or_default()),
        })
    }
}

/// Texts as lines of one text; none and empty ones are left out.
fn lines<const N: usize>(texts: [Option<String>; N]) -> String {
    let texts: Vec<_> = texts.into_iter().flatten().filter(|text| !text.is_empty()).collect();
    texts.join("\n")
}

/// The text of what a tool said. Of what is no text it says so much: the model must not take the
/// result for empty.
fn shown(content: Content<Blocks>) -> Result<String, BadRequest> {
    let blocks = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(AtMost(blocks)) => blocks,
        Content::Object => return Err(BadRequest::new("content", "is neither a text nor a list")),
    };
    let text = |block| match block {
        Block::Text(text) | Block::Thinking(text) => Some(text),
        Block::NoText(kind) => Some(not_shown(&kind)),
        Block::ToolUse(_) | Block::ToolResult { .. } | Block::Nothing => None,
    };
    let texts: Vec<_> = blocks.into_iter().filter_map(text).collect();
    Ok(texts.join("\n"))
}

impl Source {
    /// None, if it is no text.
    fn text(self) -> Result<Option<String>, BadRequest> {
        match self.r#type.as_str() {
            "text" => Ok(Some(self.data.ok_or_else(|| BadRequest::missing("source.data"))?)),
            "content" => {
                let content = self.content.ok_or_else(|| BadRequest::missing("source.content"))?;
                shown(content).map(Some).map_err(|bad| bad.inside("source"))
            }
            _ => Ok(None),
        }
    }
}

impl BlockFields {
    /// Warns of fields of other kinds than its own.
    fn warn_of_others(&self, own: &[&str]) {
        let given = [
            ("text", self.text.is_some()),
            ("thinking", self.thinking.is_some()),
            ("id", self.id.is_some()),
            ("name", self.name.is_some()),
            ("input", self.input.is_some()),
            ("tool_use_id", self.tool_use_id.is_some()),
            ("content", self.content.is_some()),
            ("is_error", self.is_error),
            ("source", self.source.is_some()),
            ("title", self.title.is_some()),
            ("context", self.context.is_some()),
        ];
        BadRequest::warn_of_other_kinds(&self.r#type, &given, own);
    }
}

impl Block {
    /// A block of a kind that is no text. The message that has it refuses it, or leaves it out.
    fn no_text(kind: String) -> Self {
        warn_not_shown(&kind);
        Self::NoText(kind)
    }

    fn kind(&self) -> &str {
        match self {
            Self::Text(_) => "text",
            Self::Thinking(_) => "thinking",
            Self::ToolUse(_) => "tool_use",
            Self::ToolResult { .. } => "tool_result",
            Self::Nothing => "redacted_thinking",
            Self::NoText(kind) => kind,
        }
    }
}

/// A block if only text is served.
#[derive(Debug, Deserialize)]
#[serde(try_from = "TextBlockFields")]
pub(super) struct TextBlock(String);

impl TryFrom<TextBlockFields> for TextBlock {
    type Error = Inside;

    fn try_from(TextBlockFields { r#type, text, .. }: TextBlockFields) -> Result<Self, Inside> {
        if r#type != "text" {
            return Err(BadRequest::kind("type", &r#type, "text").into());
        }
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
    for (index, Message { role, content, .. }) in messages.0.into_iter().enumerate() {
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
                Block::Nothing => {}
                Block::ToolResult { tool_use_id, said } if role == "user" => self.tool_result(tool_use_id, said),
                other => {
                    let text = "text, documents of text and search_result";
                    let served = if role == "user" { format!("tool_result, {text}") } else { text.to_owned() };
                    return Err(BadRequest::kind(format!("{path}.content[{index}].type"), other.kind(), &served));
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
                Block::Nothing => {}
                Block::ToolUse(call) => {
                    self.called.insert(call.id.clone(), call.name.clone());
                    message.tool_calls.push(call);
                }
                other => {
                    let served = "text, thinking, redacted_thinking or tool_use";
                    return Err(BadRequest::kind(format!("{path}.content[{index}].type"), other.kind(), served));
                }
            }
        }
        self.messages.push(message);
        Ok(())
    }
}
