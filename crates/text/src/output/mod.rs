//! What a model writes becomes reasoning, text and tool calls, as it comes.
//!
//! ```text
//! text of a step -> Reasoning -> CallParser -> events
//!                   <think>..    Text <-> Ahead -> Object | Arguments -> Ahead
//! ```
//!
//! **Invariants**
//! - How the text is cut into pieces changes nothing: every parser here goes from character to
//!   character.
//! - What is no call is text, to the byte. Only marks, white space right around them and what else
//!   belongs to a call is left out.
//! - At most [`MAX_HELD_BYTES`] are held back, so a push costs what is new.

mod arguments;
mod call;
mod calls;
mod family;
mod format;
mod json;
mod mark;
mod reasoning;
#[cfg(test)]
mod tests;

pub use family::ToolCallFormat;
pub use format::OutputFormat;
pub use reasoning::ReasoningMarks;

use calls::CallParser;
use reasoning::Reasoning;

/// Most bytes held back: half a mark, white space that may be followed by one, or the beginning of
/// a call up to its name. What is longer is text.
pub const MAX_HELD_BYTES: usize = 4096;

/// Some more of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputEvent {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// It asks for a tool.
    CallBegins {
        /// One of the request's tools.
        name: String,
    },
    /// More of the arguments of the last call: the text of a JSON object, as the model writes it.
    CallArguments(String),
}

/// Turns the text of one answer into events, each character once.
#[derive(Debug, Clone)]
pub struct OutputParser {
    reasoning: Option<Reasoning>,
    calls: Option<CallParser>,
}

impl OutputParser {
    fn new(reasoning: Option<Reasoning>, calls: Option<CallParser>) -> Self {
        Self { reasoning, calls }
    }

    /// Takes text in; returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<OutputEvent> {
        let mut events = Events::default();
        match &mut self.reasoning {
            Some(reasoning) => {
                let answer = reasoning.push(text, &mut events);
                self.push_answer(&answer, &mut events);
            }
            None => self.push_answer(text, &mut events),
        }
        events.into_vec()
    }

    /// The answer ended: returns what was held back. A call that has begun keeps what it has.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        let mut events = Events::default();
        if let Some(reasoning) = &mut self.reasoning {
            let answer = reasoning.finish(&mut events);
            self.push_answer(&answer, &mut events);
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut events);
        }
        events.into_vec()
    }

    fn push_answer(&mut self, text: &str, events: &mut Events) {
        match &mut self.calls {
            Some(calls) => calls.push(text, events),
            None => events.text(text),
        }
    }
}

/// Collects events: pieces of one kind are joined.
#[derive(Debug, Default)]
struct Events(Vec<OutputEvent>);

impl Events {
    fn reasoning(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(OutputEvent::Reasoning(text)) => text.push_str(more),
            _ => self.0.push(OutputEvent::Reasoning(more.to_owned())),
        }
    }

    fn text(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(OutputEvent::Text(text)) => text.push_str(more),
            _ => self.0.push(OutputEvent::Text(more.to_owned())),
        }
    }

    fn character(&mut self, character: char) {
        self.text(character.encode_utf8(&mut [0; 4]));
    }

    fn begin(&mut self, name: String) {
        self.0.push(OutputEvent::CallBegins { name });
    }

    fn arguments(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(OutputEvent::CallArguments(text)) => text.push_str(more),
            _ => self.0.push(OutputEvent::CallArguments(more.to_owned())),
        }
    }

    fn into_vec(self) -> Vec<OutputEvent> {
        self.0
    }
}
