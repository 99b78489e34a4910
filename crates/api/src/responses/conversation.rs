//! The conversation that the items of an input are to a chat template.

use std::collections::HashMap;

use baton_proto::v1;

use super::tools::ToolNames;

/// An item of a conversation, as far as a prompt is made of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A message of another than the assistant.
    Said {
        role: String,
        content: String,
    },
    /// A message of the assistant.
    Answered(String),
    Thought(String),
    Called {
        call: v1::ToolCall,
        namespace: Option<String>,
    },
    /// What a tool said.
    Returned {
        call_id: String,
        name: Option<String>,
        content: String,
    },
    /// An item that was kept, by its id.
    Reference(String),
}

/// Memory that an entry takes beside its texts, bytes, at most.
const ENTRY_BYTES: usize = 256;

impl Entry {
    /// Memory that it takes, at most.
    pub(super) fn bytes(&self) -> usize {
        let texts = match self {
            Self::Said { role, content } => role.len() + content.len(),
            Self::Answered(text) | Self::Thought(text) | Self::Reference(text) => text.len(),
            Self::Called { call: v1::ToolCall { id, name, arguments }, namespace } => {
                id.len() + name.len() + arguments.len() + namespace.as_ref().map_or(0, String::len)
            }
            Self::Returned { call_id, name, content } => {
                call_id.len() + content.len() + name.as_ref().map_or(0, String::len)
            }
        };
        texts + ENTRY_BYTES
    }
}

/// The messages of the wire. What the assistant thought, said and called, one after the other, is
/// one message.
pub(super) fn conversation<'a>(
    instructions: Option<&str>,
    entries: impl Iterator<Item = &'a Entry>,
    names: &ToolNames,
) -> Vec<v1::ChatMessage> {
    let mut conversation = Conversation { messages: Vec::new(), turn: None, called: HashMap::new(), names };
    if let Some(instructions) = instructions {
        conversation.say("system", instructions);
    }
    for entry in entries {
        conversation.take(entry);
    }
    conversation.end_turn();
    conversation.messages
}

struct Conversation<'a> {
    messages: Vec<v1::ChatMessage>,
    /// The assistant's message that more may come to.
    turn: Option<v1::ChatMessage>,
    /// Names of the functions that were called, by the ids of the calls: templates show them with
    /// what the functions said.
    called: HashMap<String, String>,
    names: &'a ToolNames,
}

impl Conversation<'_> {
    fn take(&mut self, entry: &Entry) {
        match entry {
            Entry::Said { role, content } => self.say(role, content),
            Entry::Answered(content) => {
                let turn = self.turn(|turn| turn.content.is_empty() && turn.tool_calls.is_empty());
                turn.content.clone_from(content);
            }
            Entry::Thought(thought) => {
                let turn = self.turn(|turn| turn.content.is_empty() && turn.tool_calls.is_empty());
                turn.reasoning.push_str(thought);
            }
            Entry::Called { call, namespace } => {
                let name = self.names.wire(namespace.as_deref(), &call.name);
                self.called.insert(call.id.clone(), name.clone());
                self.turn(|_| true).tool_calls.push(v1::ToolCall { name, ..call.clone() });
            }
            Entry::Returned { call_id, name, content } => {
                let name = self.called.get(call_id).or(name.as_ref()).cloned().unwrap_or_default();
                self.end_turn();
                self.messages.push(v1::ChatMessage {
                    role: "tool".to_owned(),
                    content: content.clone(),
                    name,
                    tool_call_id: call_id.clone(),
                    ..Default::default()
                });
            }
            // All have been looked up.
            Entry::Reference(_) => {}
        }
    }

    fn say(&mut self, role: &str, content: &str) {
        self.end_turn();
        let content = content.to_owned();
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
