//! A conversation as chat templates see it, in the form that Hugging Face gives them.

use minijinja::Value;
use minijinja::value::Serde;
use serde_json::Value as Json;

use crate::guard::{Author, Marker, UsedMarks};

/// A message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or what else the template knows.
    pub role: String,
    /// What was said; may be empty beside tool calls.
    pub content: String,
    /// Who said it, or the tool whose answer it is; empty for none.
    pub name: String,
    /// What the model thought before; empty for nothing.
    pub reasoning: String,
    /// What the model asked tools for.
    pub tool_calls: Vec<ToolCall>,
    /// The call that it answers; empty for none.
    pub tool_call_id: String,
}

/// A tool that the model asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Its name in the answer.
    pub id: String,
    /// The tool.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

/// What a template makes a prompt of.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// In order.
    pub messages: Vec<ChatMessage>,
    /// Tools that the model may ask for: `{"type": "function", "function": {"name", "description",
    /// "parameters"}}`.
    pub tools: Vec<Json>,
    /// Documents that it may use: `{"title", "text"}`.
    pub documents: Vec<Json>,
    /// What else the template may ask for, such as `enable_thinking`.
    pub variables: serde_json::Map<String, Json>,
    /// The prompt ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// The prompt ends with the content of the last message, and nothing of the template behind it.
    pub continue_final_message: bool,
}

impl Conversation {
    /// Of messages alone; the answer follows.
    pub fn new(messages: Vec<ChatMessage>) -> Self {
        Self {
            messages,
            tools: Vec::new(),
            documents: Vec::new(),
            variables: serde_json::Map::new(),
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }

    /// Whether it is texts alone, with nothing of a form that the client chose.
    pub(crate) fn is_plain(&self) -> bool {
        let has_calls = self.messages.iter().any(|message| !message.tool_calls.is_empty());
        self.tools.is_empty() && self.documents.is_empty() && self.variables.is_empty() && !has_calls
    }

    /// Which marks its texts have already.
    pub(crate) fn used_marks(&self) -> UsedMarks {
        let mut used = UsedMarks::default();
        for message in &self.messages {
            let ChatMessage { role, content, name, reasoning, tool_calls, tool_call_id } = message;
            [role, content, name, reasoning, tool_call_id].into_iter().for_each(|text| used.add(text));
            let calls = tool_calls.iter().flat_map(|call| [&call.id, &call.name, &call.arguments]);
            calls.for_each(|text| used.add(text));
        }
        self.tools.iter().chain(&self.documents).chain(self.variables.values()).for_each(|json| add(json, &mut used));
        self.variables.keys().for_each(|key| used.add(key));
        used
    }
}

fn add(json: &Json, used: &mut UsedMarks) {
    match json {
        Json::String(text) => used.add(text),
        Json::Array(items) => items.iter().for_each(|item| add(item, used)),
        Json::Object(fields) => fields.iter().for_each(|(key, value)| {
            used.add(key);
            add(value, used);
        }),
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

/// How a template takes the arguments of a tool call: this is not settled between models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// As the model wrote them: a prompt that has them again finds its cached prefix.
    Text,
    /// As an object.
    Object,
}

/// A message, without the keys that say nothing: templates ask whether a key is there.
pub(crate) fn message_value(message: &ChatMessage, arguments: Arguments, marker: &Marker<'_>) -> Value {
    let author = if message.role == "assistant" { Author::Model } else { Author::Client };
    let role = Value::from(&*marker.role(&message.role));
    let mut fields = vec![("role", role), ("content", content(&message.content, author, marker))];
    let mut optional = |key, value: &str, author| {
        if !value.is_empty() {
            fields.push((key, content(value, author, marker)));
        }
    };
    optional("name", &message.name, Author::Client);
    optional("reasoning_content", &message.reasoning, author);
    optional("tool_call_id", &message.tool_call_id, Author::Client);
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| call_value(call, arguments, marker));
        fields.push(("tool_calls", calls.collect()));
    }
    Value::from_pairs(fields)
}

fn call_value(call: &ToolCall, arguments: Arguments, marker: &Marker<'_>) -> Value {
    let text = |text: &str| content(text, Author::Client, marker);
    let given = match call.arguments.trim() {
        // So clients write that there are none.
        "" | "null" => "{}",
        _ => &call.arguments,
    };
    // What is no object stays text, whatever the template makes of it.
    let object = || serde_json::from_str::<Json>(given).ok().filter(Json::is_object);
    let arguments = match arguments {
        Arguments::Object => object().map_or_else(|| text(given), |object| json_value(&object, marker)),
        Arguments::Text => text(given),
    };
    let function = Value::from_pairs([("name", text(&call.name)), ("arguments", arguments)]);
    Value::from_pairs([("id", text(&call.id)), ("type", Value::from("function")), ("function", function)])
}

fn content(text: &str, author: Author, marker: &Marker<'_>) -> Value {
    Value::from(&*marker.content(text, author))
}

/// JSON of a client, every text of it marked.
pub(crate) fn json_value(json: &Json, marker: &Marker<'_>) -> Value {
    match json {
        Json::String(text) => content(text, Author::Client, marker),
        Json::Array(items) => items.iter().map(|item| json_value(item, marker)).collect(),
        Json::Object(fields) => {
            let field =
                |(key, value): (&String, &Json)| (content(key, Author::Client, marker), json_value(value, marker));
            Value::from_pairs(fields.iter().map(field))
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => Value::from(Serde(json)),
    }
}
