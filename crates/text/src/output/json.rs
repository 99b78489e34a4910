//! Where JSON values end, and what their strings say.

/// What a character is to a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueStep {
    /// Belongs to it.
    Inside,
    /// Belongs to it and ends it.
    Last,
    /// Comes after it: only its next character tells that a number has ended.
    After,
    /// No value begins so.
    Broken,
}

/// Finds the end of one JSON value from its first character on. Inside, it only looks at strings
/// and brackets: the text is another's to check.
#[derive(Debug, Clone, Default)]
pub(crate) struct ValueScanner {
    depth: usize,
    string: StringState,
    is_literal: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum StringState {
    #[default]
    Outside,
    Inside,
    Backslash,
}

impl ValueScanner {
    pub(crate) fn step(&mut self, character: char) -> ValueStep {
        match (self.string, character) {
            (StringState::Backslash, _) => self.string = StringState::Inside,
            (StringState::Inside, '\\') => self.string = StringState::Backslash,
            (StringState::Inside, '"') => {
                self.string = StringState::Outside;
                return self.last_at_top();
            }
            (StringState::Inside, _) => {}
            (StringState::Outside, _) => return self.step_outside(character),
        }
        ValueStep::Inside
    }

    fn step_outside(&mut self, character: char) -> ValueStep {
        let is_literal = character.is_ascii_alphanumeric() || matches!(character, '-' | '+' | '.');
        if self.is_literal {
            return if is_literal { ValueStep::Inside } else { ValueStep::After };
        }
        match character {
            '"' => self.string = StringState::Inside,
            '{' | '[' => self.depth += 1,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                return self.last_at_top();
            }
            _ if self.depth > 0 => {}
            _ if is_literal => self.is_literal = true,
            _ => return ValueStep::Broken,
        }
        ValueStep::Inside
    }

    fn last_at_top(&self) -> ValueStep {
        if self.depth == 0 { ValueStep::Last } else { ValueStep::Inside }
    }
}

/// Turns the inside of a JSON string into the text that it says. What is no escape stands for
/// itself, and half a surrogate pair becomes U+FFFD.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unescape {
    state: EscapeState,
    high_surrogate: Option<u16>,
}

#[derive(Debug, Clone, Copy, Default)]
enum EscapeState {
    #[default]
    Text,
    Backslash,
    Unicode {
        digits: u8,
        unit: u16,
    },
}

impl Unescape {
    pub(crate) fn step(&mut self, character: char, out: &mut String) {
        match self.state {
            EscapeState::Text if character == '\\' => self.state = EscapeState::Backslash,
            EscapeState::Text => self.character(character, out),
            EscapeState::Backslash if character == 'u' => self.state = EscapeState::Unicode { digits: 0, unit: 0 },
            EscapeState::Backslash => {
                self.state = EscapeState::Text;
                let meant = match character {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    'b' => '\u{8}',
                    'f' => '\u{c}',
                    other => other,
                };
                self.character(meant, out);
            }
            EscapeState::Unicode { digits, unit } => match character.to_digit(16) {
                Some(digit) => {
                    let unit = unit << 4 | digit as u16;
                    self.state = EscapeState::Unicode { digits: digits + 1, unit };
                    if digits == 3 {
                        self.state = EscapeState::Text;
                        self.unit(unit, out);
                    }
                }
                None => {
                    self.state = EscapeState::Text;
                    self.character(char::REPLACEMENT_CHARACTER, out);
                    self.step(character, out);
                }
            },
        }
    }

    fn character(&mut self, character: char, out: &mut String) {
        if self.high_surrogate.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        out.push(character);
    }

    /// Takes a UTF-16 code unit in.
    fn unit(&mut self, unit: u16, out: &mut String) {
        let high = self.high_surrogate.take();
        if let Some(character) = high.and_then(|high| char::decode_utf16([high, unit]).next()?.ok()) {
            return out.push(character);
        }
        if high.is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        match unit {
            0xd800..0xdc00 => self.high_surrogate = Some(unit),
            _ => out.push(char::from_u32(unit.into()).unwrap_or(char::REPLACEMENT_CHARACTER)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of a text that is the value at its beginning.
    fn value(text: &str) -> Option<&str> {
        let mut scanner = ValueScanner::default();
        for (at, character) in text.char_indices() {
            match scanner.step(character) {
                ValueStep::Inside => {}
                ValueStep::Last => return Some(&text[..at + character.len_utf8()]),
                ValueStep::After => return Some(&text[..at]),
                ValueStep::Broken => return None,
            }
        }
        None
    }

    #[test]
    fn json_value_in_output_ends_where_its_json_ends() {
        let cases = [
            (r#"{"a": "}"} x"#, Some(r#"{"a": "}"}"#)),
            (r#"{"a": "\"}", "b": [{}, "]"]}}"#, Some(r#"{"a": "\"}", "b": [{}, "]"]}"#)),
            (r#""a\\" "#, Some(r#""a\\""#)),
            ("-1.5e+3,", Some("-1.5e+3")),
            ("null}", Some("null")),
            ("[]]", Some("[]")),
            ("{", None),
            ("<tool_call>", None),
            ("}", None),
        ];
        for (text, expected) in cases {
            assert_eq!(value(text), expected, "{text}");
        }
    }

    #[test]
    fn json_strings_in_output_unescape_as_serde_does() {
        let strings = [r#"a\"b\\c\/d\b\f\n\r\té"#, r"\u00e9\u4e2d x \ud83d\ude00 \uD83D\uDE00\u0041"];
        for inside in strings {
            let expected: String = serde_json::from_str(&format!("\"{inside}\"")).unwrap();
            assert_eq!(unescaped(inside), expected);
        }
        assert_eq!(unescaped(r"\ud83dx \ud83d\ud83d\ude00 \ude00 \u12x"), "\u{fffd}x \u{fffd}😀 \u{fffd} \u{fffd}x");
    }

    fn unescaped(inside: &str) -> String {
        let mut unescape = Unescape::default();
        let mut out = String::new();
        inside.chars().for_each(|character| unescape.step(character, &mut out));
        out
    }
}
