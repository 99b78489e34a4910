//! HTTP APIs as thin translations. A body becomes requests of the one type that the conductor
//! serves, and their outputs become the API's own JSON.
//!
//! A [`Call`] is what one body asks for. Every field of the official API is declared: it is
//! honoured, ignored on purpose because it says nothing here, or refused by name. A field of a body
//! that is not declared is refused by name, too: one that does nothing would be a lie. Inside of
//! messages, their parts, tools and calls, it is left out with a warning.
//!
//! **Invariant**: a body is never buffered as a tree of values: a field that is wrong, or one too
//! many, ends the reading there. How many values it has is bounded before it is read.
//!
//! No clock, no network, no tokenizer.

mod answer;
mod chat;
mod common;
mod completions;
mod error;
mod field;
mod format;
mod logprobs;
mod messages;
mod object;
mod openapi;
mod parts;
mod responses;
mod tokens;
mod tools;
mod warnings;
mod weight;

use std::sync::Arc;

use baton_types::SamplingDefaults;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use error::Inside;

pub use answer::{Answer, Call, Chunk};
pub use chat::ChatRequest;
pub use common::Objectives;
pub use completions::CompletionRequest;
pub use error::{BadRequest, ErrorForm, Failure, FieldNames, TooLong};
pub use messages::{MessagesRequest, counted};
pub use openapi::{OPENAPI, openapi};
pub use responses::{ResponseStore, ResponsesRequest};
pub use tokens::{DetokenizeRequest, TokenizeRequest, tokenized};
pub use warnings::Warnings;
pub use weight::{MAX_NODES, MAX_TOKEN_IDS, MAX_VALUES, Weight, nodes};

/// Makes the bytes of a text of tokens. They are no UTF-8 if a character is not whole.
pub type Decode = dyn Fn(&[u32]) -> Vec<u8> + Send + Sync;

/// What the translations know of the conductor.
#[derive(Clone)]
pub struct Context {
    /// Seconds since 1970.
    pub created: u64,
    /// The bytes of tokens, special ones included.
    pub decode: Arc<Decode>,
    /// Responses that are kept.
    pub responses: Arc<ResponseStore>,
    /// Sampling that the model's authors advise.
    pub defaults: SamplingDefaults,
}

/// Reads a body; says what of it was left out.
///
/// # Errors
/// The body is not JSON, or not of that form, or has too many values. The error names the field, or
/// the line and the column.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<(T, Warnings), BadRequest> {
    Weight::of_body(body)?;
    let mut json = serde_json::Deserializer::from_slice(body);
    let (read, warnings) = warnings::collect(|| serde_path_to_error::deserialize(&mut json));
    let read = read.map_err(|error| {
        let path = error.path().to_string();
        bad_field(path, error.inner())
    })?;
    json.end().map_err(|error| BadRequest::new("body", error.to_string()))?;
    Ok((read, warnings))
}

fn bad_field(path: String, error: &serde_json::Error) -> BadRequest {
    let text = error.to_string();
    // A number of any size is JSON, but no number here has so many digits before its point.
    let is_number = text.starts_with("number out of range");
    if matches!(error.classify(), Category::Syntax | Category::Eof) && !is_number {
        return BadRequest::new("body", format!("is no JSON: {text}"));
    }
    let path = cut_path(path);
    if let Some(bad) = Inside::parse(&text) {
        return bad.inside(if path == "." { "" } else { &path });
    }
    if let Some((name, rest)) = text.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
        let param = if path == "." { name.to_owned() } else { format!("{path}.{name}") };
        // A name may have any character in it.
        let rest = if rest.starts_with("; ") { rest } else { "" };
        let meant = rest.split_once(" at line ").map_or(rest, |(meant, _)| meant);
        return BadRequest::new(param, format!("this field is not known{meant}"));
    }
    let param = if path == "." || path == "?" { "body".to_owned() } else { path };
    if let Some(name) = text.strip_prefix("missing field `").and_then(|rest| rest.split_once('`')).map(|(name, _)| name)
    {
        let param = if param == "body" { name.to_owned() } else { format!("{param}.{name}") };
        return BadRequest::new(param, "is missing");
    }
    // Where it stands says less than its name.
    let problem = match text.split_once(" at line ") {
        Some((problem, _)) if param != "body" => problem,
        _ => &text,
    };
    BadRequest::new(param, plain(&shortened(problem)))
}

/// Without this language's names of numbers.
fn plain(problem: &str) -> String {
    const NUMBERS: [(&str, &str); 6] = [
        ("u32", "an integer from 0 to 4294967295"),
        ("u64", "an integer from 0 on"),
        ("i32", "an integer of 32 bits"),
        ("i64", "an integer of 64 bits"),
        ("f32", "a number"),
        ("f64", "a number"),
    ];
    let found = NUMBERS.iter().find_map(|(name, said)| Some((problem.strip_suffix(name)?, said)));
    match found.filter(|(rest, _)| rest.ends_with("expected ")) {
        Some((rest, said)) => format!("{rest}{said}"),
        None => problem.to_owned(),
    }
}

/// A problem may have a text of the client's in the middle.
fn shortened(problem: &str) -> String {
    const MOST: usize = 64;
    let head = problem.char_indices().nth(MOST).map(|(end, _)| end);
    let tail = problem.char_indices().nth_back(MOST).map(|(begin, _)| begin);
    match (head, tail) {
        (Some(head), Some(tail)) if head < tail => format!("{} ... {}", &problem[..head], &problem[tail..]),
        _ => problem.to_owned(),
    }
}

/// A path has names of the client's in it.
fn cut_path(path: String) -> String {
    const MOST: usize = 256;
    match path.char_indices().nth(MOST) {
        None => path,
        Some((end, _)) => path[..end].to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad<T: DeserializeOwned>(body: &str) -> (String, String) {
        let error = read::<T>(body.as_bytes()).err().unwrap_or_else(|| panic!("{body} was taken"));
        (error.param, error.problem)
    }

    #[test]
    fn invalid_body_is_refused_by_field() {
        let chat = bad::<ChatRequest>;
        assert_eq!(chat("{}").0, "messages");
        assert_eq!(chat(r#"{"messages": [], "colour": 1}"#), ("colour".into(), "this field is not known".into()));
        assert_eq!(
            chat(r#"{"messages": [], "max_token": 1}"#),
            ("max_token".into(), "this field is not known; did you mean max_tokens?".into())
        );
        assert_eq!(
            chat(r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}"#).0,
            "messages[0].content[0].text"
        );
        assert_eq!(
            chat(r#"{"messages": [{"role": "user", "tool_calls": [{"id": 1}]}]}"#).0,
            "messages[0].tool_calls[0].id"
        );
        assert_eq!(chat(r#"{"messages": [{"content": "x"}]}"#).0, "messages[0].role");
        assert_eq!(chat(r#"{"messages": [], "audio": {}}"#), ("audio".into(), "is not served here".into()));
        assert_eq!(chat(r#"{"messages": [], "chat_template_kwargs": {"a": x}}"#).0, "body");
        for (field, hint) in [
            ("n_predict", "did you mean max_tokens?"),
            ("repeat_penalty", "did you mean repetition_penalty?"),
            ("enable_thinking", "chat_template_kwargs may have it"),
        ] {
            let (_, problem) = chat(&format!(r#"{{"messages": [], "{field}": 1}}"#));
            assert_eq!(problem, format!("this field is not known; {hint}"));
        }
        let (param, problem) = chat(r#"{"messages": [], "max_tokens": 5.5}"#);
        assert_eq!((param.as_str(), problem.as_str()), ("max_tokens", "5.5, but must be an integer"));
        assert_eq!(chat(r#"{"messages": [], "max_tokens": 1e300}"#).1, "1e300, but must be an integer");
        assert_eq!(chat(r#"{"messages": [], "n": -1.0}"#).0, "n");
        assert_eq!(chat("[").0, "body");
        assert_eq!(chat("[[]]").0, "body");
        assert_eq!(chat(r#"{"messages": [["user", "x"]]}"#).0, "messages[0]");
        let long = format!(r#"{{"messages": [], "{}": 1}}"#, "x".repeat(9999));
        assert_eq!(chat(&long).0, "x".repeat(64));
        let long = format!(r#"{{"messages": [], "logit_bias": {{"{}": "x"}}}}"#, "x".repeat(9999));
        assert_eq!(chat(&long).0.len(), 256);
        assert_eq!(chat(r#"{"messages": []} x"#).0, "body");
        let (_, problem) = chat(&format!(r#"{{"messages": "{}"}}"#, "x".repeat(9999)));
        assert!(problem.len() < 150 && problem.ends_with("expected a list"), "{problem}");
        let completion = bad::<CompletionRequest>;
        assert_eq!(completion(r#"{"prompt": {"a": 1}}"#).0, "prompt");
        assert_eq!(completion(r#"{"prompt": "x", "temperature": "hot"}"#).0, "temperature");
        assert_eq!(completion(r#"{"prompt": "x", "temperature": 1e999}"#).0, "temperature", "it is JSON");
        assert_eq!(completion(r#"{"prompt": "x", "baton": {"ttft": 1}}"#).0, "baton.ttft");
        let (param, problem) = completion(r#"{"prompt": "x", "guided_json": {}}"#);
        assert_eq!((&*param, &*problem), ("guided_json", "is not served here: structured_outputs is"));
        let (_, problem) = completion(r#"{"prompt": "x", "max_tokens": "9"}"#);
        assert_eq!(problem, "invalid type: string \"9\", expected an integer");
        let (_, problem) = completion(r#"{"prompt": "x", "stop_token_ids": [-1]}"#);
        assert_eq!(problem, "invalid value: integer `-1`, expected an integer from 0 to 4294967295");
        assert_eq!(completion(r#"{"prompt": "x", "baton": [1, 2]}"#).0, "baton");
    }
}
