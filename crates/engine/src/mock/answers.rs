//! Answers that the mock engine gives instead of noise, so that clients of agents can be led
//! through a task without a model that could.
//!
//! Answer *i* is that of a conversation's *i*-th turn of the assistant. The turn is counted in the
//! prompt's tokens, so an answer is a function of the tokens, as a model's is: it may be recomputed
//! at another node, and conversations do not disturb each other.

use baton_types::TokenId;
use serde::Deserialize;
use serde_json::Value;

/// The token of `<|im_start|>`, and the text that follows it where an answer begins.
const TURN: TokenId = 258;
const ROLE: &[u8] = b"assistant\n";
/// Most bytes of all answers together.
const MAX_BYTES: usize = 16 << 20;

/// One answer in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    text: String,
    #[serde(default)]
    calls: Vec<Call>,
}

/// A call of a tool.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    name: String,
    arguments: serde_json::Map<String, Value>,
}

/// What the assistant says at each of its turns; at those after the last, the last once more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MockAnswers {
    answers: Vec<Vec<u8>>,
}

impl MockAnswers {
    /// Reads a JSON list of `{"text": "...", "calls": [{"name": "...", "arguments": {...}}]}`.
    /// Either key may be left out.
    ///
    /// # Errors
    /// It has another form, or no answer, or is too large.
    pub fn parse(json: &str) -> Result<Self, String> {
        if json.len() > MAX_BYTES {
            return Err(format!("{} bytes, but at most {MAX_BYTES} are taken", json.len()));
        }
        let entries: Vec<Entry> = serde_json::from_str(json).map_err(|error| error.to_string())?;
        if entries.is_empty() {
            return Err("an empty list, but at least one answer is needed".to_owned());
        }
        Ok(Self { answers: entries.iter().map(written).collect() })
    }

    /// The token after these, or `end` where an answer is over. Outside an answer there is nothing
    /// to say.
    pub(super) fn next_token(&self, tokens: impl Iterator<Item = TokenId>, end: TokenId) -> TokenId {
        let mut turns = 0;
        let mut said = 0;
        // Bytes of the role that have come since its mark; `None` if another role speaks.
        let mut role: Option<usize> = None;
        for token in tokens {
            said += 1;
            role = match role {
                _ if token == TURN => Some(0),
                Some(matched) if token == TokenId::from(ROLE[matched]) => Some(matched + 1),
                _ => None,
            };
            if role == Some(ROLE.len()) {
                turns += 1;
                said = 0;
                role = None;
            }
        }
        let Some(turn) = usize::checked_sub(turns, 1) else { return end };
        let answer = self.answers.get(turn).or(self.answers.last());
        answer.and_then(|answer| answer.get(said)).map_or(end, |byte| TokenId::from(*byte))
    }
}

/// Writes an answer as the grammar of tool calls spells it, to the last space: a strict tool leaves
/// no other way, and what a grammar forbids is not said.
fn written(entry: &Entry) -> Vec<u8> {
    let written = |Call { name, arguments }: &Call| {
        let name = Value::from(name.as_str());
        let arguments = Value::Object(arguments.clone());
        format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
    };
    let calls: Vec<_> = entry.calls.iter().map(written).collect();
    (entry.text.clone() + &calls.join("\n")).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: TokenId = 257;

    fn answers() -> MockAnswers {
        let file = r#"[{"calls": [{"name": "ls", "arguments": {"path": "."}}]}, {"text": "é."}]"#;
        MockAnswers::parse(file).unwrap()
    }

    fn turn(role: &str, text: &str) -> Vec<TokenId> {
        let bytes = format!("{role}\n{text}").into_bytes();
        [TURN].into_iter().chain(bytes.into_iter().map(TokenId::from)).collect()
    }

    fn answer_to(prompt: &[TokenId]) -> String {
        let mut tokens = prompt.to_vec();
        let mut answer = Vec::new();
        loop {
            match answers().next_token(tokens.iter().copied(), END) {
                END => return String::from_utf8(answer).unwrap(),
                token => {
                    answer.push(token as u8);
                    tokens.push(token);
                }
            }
        }
    }

    #[test]
    fn answer_is_that_of_the_assistants_turn() {
        let first = [turn("user", "assistant\n?"), turn("assistant", "")].concat();
        assert_eq!(answer_to(&first), "<tool_call>\n{\"name\": \"ls\", \"arguments\": {\"path\":\".\"}}\n</tool_call>");
        let second = [first, turn("tool", "a b"), turn("assistant", "")].concat();
        assert_eq!(answer_to(&second), "é.");
        let third = [second, turn("assistant", "")].concat();
        assert_eq!(answer_to(&third), "é.", "the last answer stays");
        assert_eq!(answer_to(&turn("user", "x")), "", "nothing is asked of the assistant");
    }

    #[test]
    fn file_of_another_form_is_refused() {
        for (file, said) in [
            ("[]", "at least one answer"),
            ("{}", "invalid type: map, expected a sequence"),
            (r#"[{"texts": "x"}]"#, "unknown field `texts`"),
            (r#"[{"calls": [{"name": "f", "arguments": "{}"}]}]"#, "invalid type: string"),
        ] {
            let problem = MockAnswers::parse(file).unwrap_err();
            assert!(problem.contains(said), "{problem}");
        }
    }
}
