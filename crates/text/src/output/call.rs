//! One call as a JSON object: `{"name": "f", "arguments": {...}}`.

use super::arguments::ArgumentsReader;
use super::json::{ValueScanner, ValueStep};

/// Longest name of a tool, as JSON, bytes.
const MAX_NAME_BYTES: usize = 256;

/// What a character led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallStep {
    More,
    /// The tool is known.
    Named(String),
    /// The character closes the object.
    End,
    /// The character does not belong to a call.
    Broken,
}

/// Reads a call after its opening brace. The keys may be in any order: arguments that come before
/// the name wait in `arguments`.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallObject {
    phase: Phase,
    is_named: bool,
    has_arguments: bool,
    arguments: String,
}

#[derive(Debug, Clone, Default)]
enum Phase {
    /// A key or the end.
    #[default]
    Key,
    InKey {
        text: String,
        scanner: ValueScanner,
    },
    Colon(Field),
    Value(Field),
    InName {
        text: String,
        scanner: ValueScanner,
    },
    InArguments(ArgumentsReader),
    InOther(ValueScanner),
    /// A comma or the end.
    AfterValue,
}

#[derive(Debug, Clone, Copy)]
enum Field {
    Name,
    Arguments,
    Other,
}

impl CallObject {
    /// What has come of the arguments since the last time.
    pub(crate) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    pub(crate) fn step(&mut self, character: char) -> CallStep {
        let is_space = character.is_ascii_whitespace();
        match &mut self.phase {
            Phase::Key | Phase::Colon(_) | Phase::Value(_) | Phase::AfterValue if is_space => CallStep::More,
            Phase::Key => match character {
                '"' => self.enter(Phase::InKey { text: "\"".to_owned(), scanner: opened_string() }),
                '}' => self.end(),
                _ => CallStep::Broken,
            },
            Phase::InKey { text, scanner } => {
                // A longer key is none that counts, and is not kept.
                if text.len() < MAX_NAME_BYTES {
                    text.push(character);
                }
                if scanner.step(character) == ValueStep::Last {
                    let field = match text.as_str() {
                        "\"name\"" if !self.is_named => Field::Name,
                        "\"arguments\"" | "\"parameters\"" if !self.has_arguments => Field::Arguments,
                        _ => Field::Other,
                    };
                    self.phase = Phase::Colon(field);
                }
                CallStep::More
            }
            Phase::Colon(field) => match character {
                ':' => {
                    self.phase = Phase::Value(*field);
                    CallStep::More
                }
                _ => CallStep::Broken,
            },
            Phase::Value(Field::Name) => match character {
                '"' => self.enter(Phase::InName { text: "\"".to_owned(), scanner: opened_string() }),
                _ => CallStep::Broken,
            },
            Phase::Value(Field::Arguments) => {
                self.has_arguments = true;
                self.phase = Phase::InArguments(ArgumentsReader::default());
                self.step(character)
            }
            Phase::Value(Field::Other) => {
                self.phase = Phase::InOther(ValueScanner::default());
                self.step(character)
            }
            Phase::InName { text, scanner } => {
                text.push(character);
                match scanner.step(character) {
                    ValueStep::Last => {
                        let name = serde_json::from_str(text);
                        self.phase = Phase::AfterValue;
                        self.is_named = true;
                        name.map_or(CallStep::Broken, CallStep::Named)
                    }
                    _ if text.len() > MAX_NAME_BYTES => CallStep::Broken,
                    _ => CallStep::More,
                }
            }
            Phase::InArguments(reader) => {
                let step = reader.step(character, &mut self.arguments);
                self.after(step, character)
            }
            Phase::InOther(scanner) => {
                let step = scanner.step(character);
                self.after(step, character)
            }
            Phase::AfterValue => match character {
                ',' => self.enter(Phase::Key),
                '}' => self.end(),
                _ => CallStep::Broken,
            },
        }
    }

    fn enter(&mut self, phase: Phase) -> CallStep {
        self.phase = phase;
        CallStep::More
    }

    fn after(&mut self, step: ValueStep, character: char) -> CallStep {
        match step {
            ValueStep::Inside => CallStep::More,
            ValueStep::Last => self.enter(Phase::AfterValue),
            ValueStep::After => {
                self.phase = Phase::AfterValue;
                self.step(character)
            }
            ValueStep::Broken => CallStep::Broken,
        }
    }

    /// A tool without parameters is often called without arguments: clients expect an object.
    fn end(&mut self) -> CallStep {
        if !self.has_arguments {
            self.arguments.push_str("{}");
        }
        CallStep::End
    }
}

/// After the quote that opens a string.
fn opened_string() -> ValueScanner {
    let mut scanner = ValueScanner::default();
    scanner.step('"');
    scanner
}
