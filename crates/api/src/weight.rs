//! What a body weighs, counted before anything is made of it: a value of two bytes takes hundreds
//! in memory.
//!
//! A list, an object, and each item of them need a bracket or a comma of their own. So the brackets
//! and commas outside strings bound the values that any reader can make of a text, whole or broken.

use crate::error::BadRequest;

/// Most values of a body, besides token ids: 65,536 messages of two fields, and a third more.
pub const MAX_VALUES: usize = 1 << 18;
/// Most token ids of a body.
pub const MAX_TOKEN_IDS: usize = 1 << 22;
/// Most values of documents, tools, calls and their arguments, which become trees.
pub const MAX_NODES: usize = 65_536;

/// Memory of a value of a body, bytes: as what it is read into, and as a message of the prompt.
const VALUE_BYTES: usize = 128;
/// Memory of a token id, bytes: in a list that grows, and as part of a request.
const TOKEN_BYTES: usize = 12;
/// Memory of a node of a tree, bytes: as JSON, and as a value of the chat template. An object of
/// one field is two nodes, and takes about 700 bytes.
const NODE_BYTES: usize = 400;
/// Memory of a byte of a text: as part of a request, as a value of the chat template, as output of
/// that, which grows, and as a token if it is one.
const TEXT_BYTES: usize = 7;

/// Fields of bodies that list token ids.
const OF_TOKENS: [&[u8]; 2] = [b"prompt", b"tokens"];

/// The weight of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weight {
    /// Bytes of the text.
    bytes: usize,
    /// Values of JSON in it, at most.
    values: usize,
    /// Token ids, at most; they are no values.
    token_ids: usize,
    /// Bytes of its strings, as they are read.
    text: usize,
    /// Brackets and commas inside strings: a string may be JSON, too.
    quoted: usize,
}

impl Weight {
    /// Weighs a body.
    ///
    /// # Errors
    /// It has too many values, or token ids. The error names the field in which they are.
    pub fn of_body(body: &[u8]) -> Result<Self, BadRequest> {
        let mut scan = Scan::new(body);
        while scan.step() {
            let Self { values, token_ids, .. } = scan.weight;
            if values > MAX_VALUES {
                return Err(scan.refused(format!("the body has more than {MAX_VALUES} values: it is too large")));
            }
            if token_ids > MAX_TOKEN_IDS {
                return Err(scan.refused(format!("more than {MAX_TOKEN_IDS} token ids")));
            }
        }
        Ok(scan.weight)
    }

    /// Weighs a message of another form than JSON, with texts of so many bytes, which may be JSON.
    pub fn of_message(message: &[u8], text: usize) -> Self {
        let quoted = message.iter().filter(|byte| makes_value(**byte)).count();
        Self { bytes: message.len(), text, quoted, ..Self::default() }
    }

    /// Memory that a request of this weight takes beside its own bytes until it is tokens.
    pub fn memory(&self) -> usize {
        let nodes = (self.values + self.quoted).min(MAX_NODES);
        let counted = self.values * VALUE_BYTES + self.token_ids * TOKEN_BYTES + nodes * NODE_BYTES;
        self.bytes + self.text * TEXT_BYTES + counted
    }
}

/// Most values that a reader can make of a text of JSON.
pub fn nodes(json: &str) -> usize {
    let mut scan = Scan { depth: 1, ..Scan::new(json.as_bytes()) };
    while scan.step() {}
    scan.weight.values
}

fn makes_value(byte: u8) -> bool {
    matches!(byte, b',' | b'[' | b'{')
}

/// A pass over a text of JSON.
struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
    /// The next string is the name of a field of the outermost object.
    is_name_next: bool,
    /// The field of the outermost object that it is in.
    field: &'a [u8],
    weight: Weight,
}

impl<'a> Scan<'a> {
    fn new(text: &'a [u8]) -> Self {
        let weight = Weight { bytes: text.len(), values: 1, ..Weight::default() };
        Self { text, at: 0, depth: 0, is_name_next: false, field: b"", weight }
    }

    /// Takes the next byte, or the next string. `false`: there is none.
    fn step(&mut self) -> bool {
        let Some(&byte) = self.text.get(self.at) else { return false };
        self.at += 1;
        match byte {
            b'"' => self.string(),
            b',' | b'[' | b'{' => self.value(byte),
            b']' | b'}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        true
    }

    fn string(&mut self) {
        let start = self.at;
        while let Some(&byte) = self.text.get(self.at) {
            self.at += 1;
            match byte {
                b'"' => break,
                b'\\' => self.escaped(),
                _ => {
                    self.weight.text += 1;
                    self.weight.quoted += usize::from(makes_value(byte));
                }
            }
        }
        if std::mem::take(&mut self.is_name_next) {
            // A string that does not end is no name.
            self.field = self.text.get(start..self.at - 1).unwrap_or_default();
        }
    }

    /// Takes what follows a backslash.
    fn escaped(&mut self) {
        let is_code = self.text.get(self.at) == Some(&b'u');
        let digits = self.text.get(self.at + 1..self.at + 5).unwrap_or_default();
        let bytes = match digits {
            _ if !is_code => 1,
            [b'0', b'0', b'0'..=b'7', _] => 1,
            [b'0', b'0'..=b'7', ..] => 2,
            _ => 3,
        };
        self.at += if is_code { 1 + digits.len() } else { 1 };
        self.weight.text += bytes;
    }

    fn value(&mut self, byte: u8) {
        self.is_name_next = if byte == b',' { self.depth == 1 } else { self.depth == 0 };
        self.depth += usize::from(byte != b',');
        if self.depth > 1 && byte != b'{' && OF_TOKENS.contains(&self.field) {
            self.weight.token_ids += 1;
        } else {
            self.weight.values += 1;
        }
    }

    fn refused(&self, problem: String) -> BadRequest {
        let field = String::from_utf8_lossy(self.field);
        BadRequest::new(if field.is_empty() { "body" } else { crate::field::cut(&field) }, problem)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn weight(body: &str) -> Weight {
        Weight::of_body(body.as_bytes()).unwrap()
    }

    #[test]
    fn values_are_counted_outside_strings() {
        assert_eq!(nodes("1"), 1);
        assert_eq!(nodes(r#"[{"":0},{"":0}]"#), 1 + 3 + 1);
        assert_eq!(nodes(r#"{"a,[": "\"[,{", "b\\": [1, 2]}"#), 1 + 2 + 2);
        assert_eq!(nodes(r#"{"prompt": [1, 2]}"#), 4, "no field is of tokens here");
        let Weight { values, quoted, .. } = weight(r#"{"a,[": "\"[,{", "b\\": [1, 2]}"#);
        assert_eq!((values, quoted), (5, 5));
    }

    #[test]
    fn no_text_has_more_values_than_are_counted() {
        fn count(value: &Value) -> usize {
            1 + match value {
                Value::Array(items) => items.iter().map(count).sum(),
                Value::Object(fields) => fields.values().map(count).sum(),
                _ => 0,
            }
        }
        for text in ["[]", "{}", "[[],[[]],{}]", r#"{"a":[1,{"b":null}],"c":"[,"}"#, r#"["\\",",","\"",[","]]"#] {
            let value: Value = serde_json::from_str(text).unwrap();
            assert!(count(&value) <= nodes(text), "{text}");
        }
        // A reader makes values of a broken text, too, up to where it is broken.
        assert!(nodes("[{},{},{}::::::") >= 4);
    }

    #[test]
    fn texts_are_counted_as_they_are_read() {
        let json = r#"{"a\"\\": "\u0001\u00e9\u20ac\ud83d\ude00", "é": "\n"}"#;
        let value: serde_json::Map<String, Value> = serde_json::from_str(json).unwrap();
        let read: usize = value.iter().map(|(name, text)| name.len() + text.as_str().map_or(0, str::len)).sum();
        // Two halves of a pair count as three bytes each.
        assert_eq!(weight(json).text, read + 2);
        assert_eq!(weight(r#"{"a": "\u00"#).text, 1 + 3 + 2, "broken");
    }

    #[test]
    fn token_ids_are_no_values_but_bounded() {
        let Weight { values, token_ids, .. } = weight(r#"{"model": "m", "prompt": [[1, 2], [3]], "n": 1}"#);
        assert_eq!((values, token_ids), (4, 5));
        assert_eq!(weight(r#"{"prompt": {"a": 1}}"#).values, 3, "no ids");
        assert_eq!(weight(r#"{"tools": [1, 2, 3], "x": {"prompt": [1]}}"#).token_ids, 0);
        let body = format!(r#"{{"n": 1, "prompt": [1{}]}}"#, ",1".repeat(MAX_TOKEN_IDS));
        let error = Weight::of_body(body.as_bytes()).unwrap_err();
        assert_eq!((&*error.param, &*error.problem), ("prompt", "more than 4194304 token ids"));
    }

    #[test]
    fn body_of_too_many_values_is_refused_by_field() {
        let body = |values: usize| format!(r#"{{"n": 1, "documents": [0{}]}}"#, ",0".repeat(values - 1));
        assert!(Weight::of_body(body(MAX_VALUES - 4).as_bytes()).is_ok());
        let error = Weight::of_body(body(MAX_VALUES).as_bytes()).unwrap_err();
        assert_eq!(error.param, "documents");
        assert!(error.problem.contains("more than 262144 values"), "{}", error.problem);
        let error = Weight::of_body("[".repeat(MAX_VALUES + 1).as_bytes()).unwrap_err();
        assert_eq!(error.param, "body");
        let unfinished = format!(r#"{{"{}"#, "x".repeat(99));
        assert!(Weight::of_body(unfinished.as_bytes()).is_ok(), "what reads it refuses it");
    }

    #[test]
    fn memory_grows_with_values_rather_than_bytes() {
        let documents = |n: usize| format!(r#"{{"documents": [{{}}{}]}}"#, r#",{"":0}"#.repeat(n));
        assert!(weight(&documents(10_000)).memory() > 10_000 * 700);
        let text = format!(r#"{{"prompt": "{}"}}"#, "x".repeat(1 << 20));
        assert!(weight(&text).memory() < (1 << 20) * 8 + 4096);
        // JSON as a text takes as much once it is read.
        let quoted = format!(r#"{{"arguments": "{}"}}"#, r#",{\"\":0}"#.repeat(10_000));
        assert!(weight(&quoted).memory() > 10_000 * 700);
        assert_eq!(Weight::of_message(quoted.as_bytes(), 7).quoted, 20_001);
    }
}
