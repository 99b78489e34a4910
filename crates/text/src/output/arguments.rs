//! The arguments of a call as they are passed on.

use super::json::{Unescape, ValueScanner, ValueStep};

/// Passes on the text of an arguments object. Some models write it as a JSON string that holds the
/// object: then what the string says is passed on. No arguments (`null`, `""`) are `{}`.
#[derive(Debug, Clone, Default)]
pub(crate) struct ArgumentsReader {
    scanner: ValueScanner,
    form: Form,
}

#[derive(Debug, Clone, Default)]
enum Form {
    #[default]
    Unknown,
    Raw,
    Null,
    /// A string of which no character is known yet.
    Quoted {
        raw: String,
        unescape: Unescape,
    },
    /// A string that holds an object.
    Decoded(Unescape),
}

impl ArgumentsReader {
    /// Takes a character in and adds to `out` what is certain of the arguments.
    pub(crate) fn step(&mut self, character: char, out: &mut String) -> ValueStep {
        let step = self.scanner.step(character);
        match (step, &self.form) {
            (ValueStep::Inside, _) | (ValueStep::Last, Form::Raw) => self.take(character, out),
            (ValueStep::After, Form::Null) => out.push_str("{}"),
            (ValueStep::Last, Form::Quoted { raw, .. }) if raw == "\"" => out.push_str("{}"),
            (ValueStep::Last, Form::Quoted { raw, .. }) => {
                out.push_str(raw);
                out.push(character);
            }
            _ => {}
        }
        step
    }

    fn take(&mut self, character: char, out: &mut String) {
        match &mut self.form {
            Form::Unknown => match character {
                '"' => self.form = Form::Quoted { raw: "\"".to_owned(), unescape: Unescape::default() },
                'n' => self.form = Form::Null,
                _ => {
                    self.form = Form::Raw;
                    out.push(character);
                }
            },
            Form::Raw => out.push(character),
            Form::Null => {}
            Form::Quoted { raw, unescape } => {
                raw.push(character);
                let mut said = String::new();
                unescape.step(character, &mut said);
                if said.starts_with('{') {
                    out.push_str(&said);
                    self.form = Form::Decoded(std::mem::take(unescape));
                } else if !said.is_empty() {
                    out.push_str(raw);
                    self.form = Form::Raw;
                }
            }
            Form::Decoded(unescape) => unescape.step(character, out),
        }
    }
}
