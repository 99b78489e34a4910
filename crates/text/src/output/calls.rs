//! Takes tool calls out of an answer.

use super::arguments::ArgumentsReader;
use super::call::{CallObject, CallStep};
use super::family::{Next, Position, ToolCallFormat};
use super::json::ValueStep;
use super::mark::MarkFinder;
use super::{Events, MAX_HELD_BYTES};

/// Longest text between calls that belongs to them: a name, an id, marks and white space, bytes.
const MAX_BETWEEN_BYTES: usize = 256;

/// Takes the calls of some tools out of an answer.
#[derive(Debug, Clone)]
pub(crate) struct CallParser {
    format: ToolCallFormat,
    tools: Vec<String>,
    opening: Option<MarkFinder>,
    state: State,
    /// Text from the white space before a mark to the end of a call's name: text if it is no call.
    held: String,
    /// The same of what is between calls, or between a mark and a call.
    between: String,
    /// Whether a call was given.
    has_called: bool,
}

#[derive(Debug, Clone)]
enum State {
    /// All the rest is text.
    Rest,
    /// Text, until a mark opens calls. `after_call`: there was no text since the last one.
    Text { after_call: bool },
    /// What is between calls. `after_text`: the call before was none, and so is text.
    Between { position: Position, after_text: bool },
    /// In the JSON object of a call.
    Object { call: CallObject, kind: Kind, in_list: bool },
    /// In arguments whose tool is known.
    Arguments { reader: ArgumentsReader, kind: Kind },
}

/// What an object that looks like a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unknown,
    Call,
    /// It is passed on as text to its end, so that nothing inside is taken for a call.
    Text,
}

impl CallParser {
    pub(crate) fn new(format: ToolCallFormat, tools: Vec<String>) -> Self {
        let opening = format.opening_mark().map(MarkFinder::new);
        let state = match opening {
            Some(_) => State::Text { after_call: false },
            None => State::Between { position: Position::BeforeCall, after_text: false },
        };
        Self { format, tools, opening, state, held: String::new(), between: String::new(), has_called: false }
    }

    /// Takes text in.
    pub(crate) fn push(&mut self, text: &str, events: &mut Events) {
        for (at, character) in text.char_indices() {
            if matches!(self.state, State::Rest) {
                events.text(&text[at..]);
                return;
            }
            self.step(character, events);
        }
    }

    /// The answer ended. A call keeps what it has. What may belong to the calls after one is left
    /// out, and so is another call that was cut off before its name.
    pub(crate) fn finish(&mut self, events: &mut Events) {
        let between = std::mem::take(&mut self.between);
        let mark = self.opening.as_mut().map(MarkFinder::take).unwrap_or_default();
        let has_called = self.has_called;
        match self.state {
            State::Text { after_call: true } => {}
            State::Between { position: Position::AfterCall | Position::InList, after_text: false } => {}
            State::Between { position: Position::BeforeCall, after_text: false } if has_called => {}
            State::Object { kind: Kind::Unknown, .. } if has_called => {}
            _ => [&self.held, &between, &mark].into_iter().for_each(|text| events.text(text)),
        }
        self.held.clear();
        self.state = State::Rest;
    }

    fn step(&mut self, character: char, events: &mut Events) {
        match &mut self.state {
            State::Rest => events.character(character),
            State::Text { after_call } => {
                let Some(opening) = &mut self.opening else { return events.character(character) };
                let emit = |text: &str| {
                    *after_call &= text.is_empty();
                    events.text(text);
                };
                if opening.push(character, emit) {
                    self.held = opening.take();
                    self.state = State::Between { position: Position::BeforeCall, after_text: false };
                }
            }
            &mut State::Between { position, after_text } => {
                self.between.push(character);
                let next = match self.between.len() {
                    0..=MAX_BETWEEN_BYTES => self.format.next(position, &self.between),
                    _ => Next::Text,
                };
                self.follow(next, position, after_text, events);
            }
            State::Object { call, kind, in_list } => {
                let step = call.step(character);
                match kind {
                    // They may come before the name.
                    Kind::Unknown => {}
                    Kind::Call => events.arguments(&call.take_arguments()),
                    Kind::Text => drop(call.take_arguments()),
                }
                let kind = *kind;
                let in_list = *in_list;
                self.follow_object(step, character, kind, in_list, events);
            }
            State::Arguments { reader, kind } => {
                let kind = *kind;
                let mut arguments = String::new();
                let step = reader.step(character, &mut arguments);
                match kind {
                    Kind::Call => events.arguments(&arguments),
                    Kind::Unknown | Kind::Text => events.character(character),
                }
                if step == ValueStep::Last {
                    self.end_call(kind, false);
                }
            }
        }
    }

    fn follow(&mut self, next: Next, position: Position, after_text: bool, events: &mut Events) {
        match next {
            Next::More => {}
            Next::Object | Next::ListObject => {
                self.hold_between(after_text, events);
                let in_list = next == Next::ListObject;
                self.state = State::Object { call: CallObject::default(), kind: Kind::Unknown, in_list };
            }
            Next::Arguments(name) => {
                let brace = self.between.pop();
                let kind = if self.tools.contains(&name) { Kind::Call } else { Kind::Text };
                match kind {
                    Kind::Call => {
                        self.has_called = true;
                        events.begin(name);
                    }
                    Kind::Unknown | Kind::Text => {
                        [&self.held, &self.between].into_iter().for_each(|text| events.text(text))
                    }
                }
                self.held.clear();
                self.between.clear();
                self.state = State::Arguments { reader: ArgumentsReader::default(), kind };
                brace.into_iter().for_each(|brace| self.step(brace, events));
            }
            Next::End => {
                let between = std::mem::take(&mut self.between);
                if after_text {
                    events.text(&between);
                }
                self.state = State::Text { after_call: !after_text };
            }
            Next::Text => {
                let between = std::mem::take(&mut self.between);
                self.give_up(events);
                if let State::Text { after_call } = &mut self.state {
                    *after_call = position != Position::BeforeCall && !after_text;
                }
                self.push(&between, events);
            }
        }
    }

    /// Holds back what is before a call's JSON, but for what is after text, to which it belongs.
    fn hold_between(&mut self, after_text: bool, events: &mut Events) {
        let between = std::mem::take(&mut self.between);
        match between.strip_suffix('{') {
            Some(separator) if after_text => {
                events.text(separator);
                self.held.push('{');
            }
            _ => self.held.push_str(&between),
        }
    }

    fn follow_object(&mut self, step: CallStep, character: char, kind: Kind, in_list: bool, events: &mut Events) {
        match (step, kind) {
            (CallStep::Broken, Kind::Unknown | Kind::Text) => {
                self.give_up(events);
                self.step(character, events);
            }
            (CallStep::Broken, Kind::Call) => {
                self.end_call(kind, in_list);
                self.step(character, events);
            }
            (CallStep::Named(name), Kind::Unknown) if self.tools.contains(&name) => {
                self.held.clear();
                self.has_called = true;
                events.begin(name);
                if let State::Object { call, kind, .. } = &mut self.state {
                    *kind = Kind::Call;
                    events.arguments(&call.take_arguments());
                }
            }
            (step, Kind::Unknown) => {
                self.held.push(character);
                let is_end = step == CallStep::End;
                if is_end || step != CallStep::More || self.held.len() > MAX_HELD_BYTES {
                    events.text(&std::mem::take(&mut self.held));
                    if let State::Object { kind, .. } = &mut self.state {
                        *kind = Kind::Text;
                    }
                }
                if is_end {
                    self.end_call(Kind::Text, in_list);
                }
            }
            (step, kind) => {
                if kind == Kind::Text {
                    events.character(character);
                }
                if step == CallStep::End {
                    self.end_call(kind, in_list);
                }
            }
        }
    }

    /// What was held back is text.
    fn give_up(&mut self, events: &mut Events) {
        events.text(&std::mem::take(&mut self.held));
        self.state = self.text_state();
    }

    fn end_call(&mut self, kind: Kind, in_list: bool) {
        let after_text = kind != Kind::Call;
        self.state = match in_list {
            true => State::Between { position: Position::InList, after_text },
            false if after_text => self.text_state(),
            false => State::Between { position: Position::AfterCall, after_text },
        };
    }

    fn text_state(&self) -> State {
        match self.opening {
            Some(_) => State::Text { after_call: false },
            None => State::Rest,
        }
    }
}
