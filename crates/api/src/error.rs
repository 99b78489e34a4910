//! Errors, and the forms that the APIs give them.

use std::fmt;

use serde::Serialize;
use serde_json::{Value, json};

use crate::answer::Chunk;
use crate::field::{Stray, cut};
use crate::warnings::warn_field;

/// A body that is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRequest {
    /// The field, as a path: `messages[0].content`; `body` for the whole.
    pub param: String,
    /// What is wrong with it.
    pub problem: String,
}

impl BadRequest {
    pub(crate) fn new(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { param: param.into(), problem: problem.into() }
    }

    /// A value of a field that says which kind something is.
    pub(crate) fn kind(param: impl Into<String>, kind: &str, served: &str) -> Self {
        Self::new(param, format!("'{}', but only {served} is served here", cut(kind)))
    }

    pub(crate) fn missing(param: impl Into<String>) -> Self {
        Self::new(param, "is missing")
    }

    /// Refuses fields that other kinds of an object have; `given` says of each whether it is there.
    pub(crate) fn of_other_kinds(kind: &str, given: &[(&str, bool)], own: &[&str]) -> Result<(), Self> {
        match given.iter().find(|(field, is_given)| *is_given && !own.contains(field)) {
            None => Ok(()),
            Some((field, _)) => Err(Self::new(*field, format!("is no field of {kind}"))),
        }
    }

    /// Warns of such fields instead.
    pub(crate) fn warn_of_other_kinds(kind: &str, given: &[(&str, bool)], own: &[&str]) {
        for (field, _) in given.iter().filter(|(field, is_given)| *is_given && !own.contains(field)) {
            warn_field(field, &format!("is no field of {}, and was left out", cut(kind)));
        }
    }

    /// Refuses a field that is not known, in an object whose kind is known.
    pub(crate) fn stray(Stray(stray): &Stray) -> Result<(), Self> {
        match stray {
            None => Ok(()),
            Some(name) => Err(Self::new(name, "this field is not known")),
        }
    }

    /// The same, of a field inside of what is at `path`.
    pub(crate) fn inside(mut self, path: &str) -> Self {
        if !path.is_empty() {
            self.param = format!("{path}.{}", self.param);
        }
        self
    }
}

/// What is wrong with an object that is being read: the reading ends there, and its path is added.
#[derive(Debug)]
pub(crate) struct Inside(BadRequest);

/// Begins the text of such an error.
const INSIDE: char = '\u{1}';

impl From<BadRequest> for Inside {
    fn from(bad: BadRequest) -> Self {
        Self(bad)
    }
}

impl fmt::Display for Inside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadRequest { param, problem } = &self.0;
        write!(f, "{INSIDE}{param}{INSIDE}{problem}")
    }
}

impl Inside {
    /// Out of the text of an error, which may say where it stands.
    pub(crate) fn parse(text: &str) -> Option<BadRequest> {
        let (param, problem) = text.strip_prefix(INSIDE)?.split_once(INSIDE)?;
        let problem = problem.rsplit_once(" at line ").map_or(problem, |(problem, _)| problem);
        Some(BadRequest::new(param, problem))
    }
}

/// What went wrong, before an API gives it its form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Of HTTP.
    pub status: u16,
    /// For people.
    pub message: String,
    /// The field that is wrong, as a path.
    pub param: Option<String>,
    /// What programs look for: `model_not_found`.
    pub code: Option<&'static str>,
}

impl Failure {
    /// One that no field is to blame for.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }
}

impl From<BadRequest> for Failure {
    fn from(BadRequest { param, problem }: BadRequest) -> Self {
        Self { param: Some(param.clone()), ..Self::new(400, format!("{param}: {problem}")) }
    }
}

/// How an API tells errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorForm {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`.
    Anthropic,
}

impl ErrorForm {
    /// The body of an answer that is an error.
    pub fn body(self, failure: &Failure, request_id: &str) -> String {
        let mut body = self.json(failure);
        if self == Self::Anthropic {
            body["request_id"] = request_id.into();
        }
        body.to_string()
    }

    fn json(self, failure: &Failure) -> Value {
        let Failure { status, message, param, code } = failure;
        match self {
            Self::OpenAi => {
                json!({ "error": { "message": message, "type": openai_type(*status), "param": param, "code": code } })
            }
            Self::Anthropic => {
                let mut error = json!({ "type": anthropic_type(*status), "message": message });
                if param.as_deref() == Some("thread") {
                    // The official client's tool runner goes on without when it reads this.
                    error["details"] = json!({ "error_code": "thread_unsupported_request" });
                }
                json!({ "type": "error", "error": error })
            }
        }
    }

    /// The last event of a stream that an error ends.
    pub fn event(self, failure: &Failure) -> Chunk {
        let event = match self {
            Self::OpenAi => None,
            Self::Anthropic => Some("error"),
        };
        Chunk { event, data: self.json(failure).to_string() }
    }
}

fn openai_type(status: u16) -> &'static str {
    match status {
        429 => "overloaded",
        499 => "cancelled",
        503 => "unavailable",
        504 => "deadline_exceeded",
        500.. => "internal",
        _ => "invalid_request_error",
    }
}

fn anthropic_type(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// A prompt that leaves no room for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Whether they were counted; else there are at least so many.
    pub is_exact: bool,
    /// Tokens of output that the client asks for, if it says that.
    pub completion_tokens: Option<u32>,
    /// Most tokens of both that the nodes hold.
    pub max_model_len: u32,
    /// Most tokens of both that the model takes.
    pub context_length: u32,
}

impl TooLong {
    /// Whether the model's context has room for the prompt: then the nodes are too small.
    pub fn fits_context(&self) -> bool {
        self.prompt_tokens < self.context_length as usize
    }

    /// Says whose limit it is if it is not the model's.
    fn holds(&self) -> String {
        let Self { max_model_len, context_length, .. } = self;
        if max_model_len < context_length {
            format!("the nodes hold {max_model_len} of the context's {context_length}")
        } else {
            format!("the context holds {context_length}")
        }
    }
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prompt_tokens, is_exact, .. } = self;
        let least = if *is_exact { "" } else { "at least " };
        write!(f, "{least}{prompt_tokens} tokens, but {}, the output included", self.holds())
    }
}

/// Words in which an API tells that a prompt is too long: clients look for them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wording {
    /// OpenAI's, with what it calls the prompt.
    OpenAi {
        prompt: &'static str,
    },
    Responses,
    Anthropic,
}

impl Wording {
    fn tell(self, too_long: &TooLong) -> String {
        let TooLong { prompt_tokens, is_exact, completion_tokens, max_model_len, context_length } = *too_long;
        let maximum = format!("This model's maximum context length is {max_model_len} tokens.");
        let mut told = match (self, completion_tokens) {
            (Self::Anthropic, _) => format!("prompt is too long: {prompt_tokens} tokens > {max_model_len} maximum"),
            (Self::Responses, _) => format!(
                "Your input exceeds the context window of this model. {maximum} However, your input resulted in {prompt_tokens} tokens. Please adjust your input and try again."
            ),
            (Self::OpenAi { prompt }, Some(completion)) => format!(
                "{maximum} However, you requested {} tokens ({prompt_tokens} in the {prompt}, {completion} in the completion). Please reduce the length of the {prompt} or completion.",
                prompt_tokens.saturating_add(completion as usize)
            ),
            (Self::OpenAi { prompt }, None) => format!(
                "{maximum} However, your {prompt} resulted in {prompt_tokens} tokens. Please reduce the length of the {prompt}."
            ),
        };
        if !is_exact {
            told.push_str(" (It has at least that many tokens: it was refused before they were counted.)");
        }
        if max_model_len < context_length {
            told.push_str(&format!(" ({}.)", too_long.holds()));
        }
        told
    }
}

/// A field of the wire, and what an API calls it.
type Name = (&'static str, &'static str);

/// What an API calls the fields that errors of the conductor name as gRPC does.
#[derive(Debug, Clone, Copy)]
pub struct FieldNames {
    wording: Wording,
    table: &'static [Name],
    /// Of fields that have several names: what this body has.
    sent: [Option<Name>; 2],
}

impl FieldNames {
    pub(crate) const fn new(wording: Wording, table: &'static [Name]) -> Self {
        Self { wording, table, sent: [None; 2] }
    }

    /// A prompt that is too long, in the API's own words.
    pub fn too_long(&self, too_long: &TooLong) -> Failure {
        let param = Some(self.of("prompt").to_owned());
        let code = Some("context_length_exceeded");
        Failure { param, code, ..Failure::new(400, self.wording.tell(too_long)) }
    }

    /// With a name that goes before that of the table, if the body has it.
    pub(crate) fn with(mut self, wire: &'static str, own: &'static str, is_sent: bool) -> Self {
        let free = self.sent.iter_mut().find(|name| name.is_none() && is_sent);
        if let Some(free) = free {
            *free = Some((wire, own));
        }
        self
    }

    /// The API's name; the wire's own if it is the same.
    pub fn of<'a>(&self, wire: &'a str) -> &'a str {
        self.sent.iter().flatten().chain(self.table).find(|(name, _)| *name == wire).map_or(wire, |(_, own)| own)
    }
}

/// JSON of an answer.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("answers have text for keys, and nothing in them can fail")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_body_has_the_form_of_each_api() {
        let failure: Failure = BadRequest::new("n", "0").into();
        assert_eq!(
            ErrorForm::OpenAi.body(&failure, "id"),
            r#"{"error":{"message":"n: 0","type":"invalid_request_error","param":"n","code":null}}"#
        );
        assert_eq!(
            ErrorForm::Anthropic.body(&failure, "id"),
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"n: 0"},"request_id":"id"}"#
        );
        let busy = ErrorForm::Anthropic.event(&Failure::new(429, "busy"));
        assert_eq!(busy.event, Some("error"));
        assert_eq!(busy.data, r#"{"type":"error","error":{"type":"rate_limit_error","message":"busy"}}"#);
        assert_eq!(ErrorForm::OpenAi.event(&Failure::new(503, "x")).event, None);
    }

    #[test]
    fn error_fields_have_the_names_of_the_api() {
        let names = FieldNames::new(Wording::Anthropic, &[("text", "prompt"), ("n", "n")])
            .with("n", "best_of", true)
            .with("text", "x", false);
        assert_eq!((names.of("text"), names.of("stop"), names.of("n")), ("prompt", "stop", "best_of"));
    }

    #[test]
    fn too_long_prompt_is_told_in_the_words_that_clients_look_for() {
        let told_of = |wording: Wording, completion_tokens, is_exact, context_length| {
            let too_long =
                TooLong { prompt_tokens: 150, is_exact, completion_tokens, max_model_len: 100, context_length };
            let failure = FieldNames::new(wording, &[("prompt", "p")]).too_long(&too_long);
            assert_eq!((failure.code, failure.param.as_deref()), (Some("context_length_exceeded"), Some("p")));
            failure.message
        };
        let told = |wording, completion_tokens, is_exact| told_of(wording, completion_tokens, is_exact, 100);
        let chat = Wording::OpenAi { prompt: "messages" };
        assert_eq!(
            told(chat, Some(20), true),
            "This model's maximum context length is 100 tokens. However, you requested 170 tokens (150 in the messages, 20 in the completion). Please reduce the length of the messages or completion."
        );
        assert_eq!(
            told(chat, None, true),
            "This model's maximum context length is 100 tokens. However, your messages resulted in 150 tokens. Please reduce the length of the messages."
        );
        assert_eq!(told(Wording::Anthropic, Some(20), true), "prompt is too long: 150 tokens > 100 maximum");
        assert!(
            told(Wording::Anthropic, None, false)
                .starts_with("prompt is too long: 150 tokens > 100 maximum (It has at least")
        );
        let small_nodes = told_of(Wording::Anthropic, None, true, 4096);
        assert!(small_nodes.ends_with("100 maximum (the nodes hold 100 of the context's 4096.)"), "{small_nodes}");
        let responses = told(Wording::Responses, None, true);
        assert!(
            responses.contains("exceeds the context window")
                && responses.contains("maximum context length is 100 tokens")
        );
    }
}
