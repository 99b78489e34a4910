//! Tools that a model may ask for, in the form of the wire.

use std::collections::HashSet;

use baton_proto::v1;
use baton_proto::v1::tool_choice::Choice as WireChoice;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::error::{BadRequest, to_json};
use crate::field::cut;
use crate::warnings::warn_object;

/// Most tools of a body.
pub(crate) const MAX_TOOLS: usize = 1024;

/// A tool, whatever its API calls its parts.
pub(crate) struct Tool<'a> {
    pub(crate) name: &'a str,
    pub(crate) description: Option<&'a str>,
    /// A JSON schema.
    pub(crate) parameters: Option<&'a RawValue>,
    /// Whether arguments must follow the schema.
    pub(crate) strict: Option<bool>,
}

#[derive(Serialize)]
struct WireTool<'a> {
    r#type: &'static str,
    function: WireFunction<'a>,
}

#[derive(Serialize)]
struct WireFunction<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

/// Which tools the answer asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// As the model likes.
    Auto,
    None,
    Required,
    Named(String),
    /// These alone, as the model likes or at least one; the prompt has the others, too.
    Allowed {
        names: Vec<String>,
        is_required: bool,
    },
}

impl ToolChoice {
    /// As OpenAI spells it.
    pub(crate) fn of_mode(mode: &str) -> Result<Self, BadRequest> {
        match mode {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "required" => Ok(Self::Required),
            other => Err(BadRequest::kind("tool_choice", other, "none, auto, required or a function")),
        }
    }

    /// An object of this type alone, as Anthropic spells a mode. Others are types of tools, and may
    /// be that of a tool which is left out.
    pub(crate) fn of_type(kind: &str) -> Self {
        match kind {
            "any" => Self::Required,
            kind => Self::of_mode(kind).unwrap_or_else(|_| Self::Named(kind.to_owned())),
        }
    }

    /// Some of the tools, by OpenAI's `mode`; `path` is where both are.
    pub(crate) fn allowed(path: &str, mode: &str, names: Vec<String>) -> Result<Self, BadRequest> {
        if names.is_empty() {
            return Err(BadRequest::new(format!("{path}.tools"), "empty: at least one tool is needed"));
        }
        match mode {
            "auto" | "required" => Ok(Self::Allowed { names, is_required: mode == "required" }),
            other => Err(BadRequest::kind(format!("{path}.mode"), other, "auto or required")),
        }
    }
}

/// Warns that the tool that is being read is left out: it runs at a provider's servers, or its
/// schema is known to a provider's models alone.
pub(crate) fn leave_out(kind: &str) {
    warn_object(&format!("the tool '{}' is left out: only tools that the client describes are served", cut(kind)));
}

/// The tools of a body.
#[derive(Default)]
pub(crate) struct Tools {
    texts: Vec<String>,
    names: HashSet<String>,
    has_left_out: bool,
}

impl Tools {
    /// Adds one; `param` is the path of its name, which has at most `most` characters.
    pub(crate) fn add(&mut self, param: &str, most: usize, tool: &Tool<'_>) -> Result<(), BadRequest> {
        let &Tool { name, description, parameters, strict } = tool;
        check_name(param, name, most)?;
        if !self.names.insert(name.to_owned()) {
            return Err(BadRequest::new(param, format!("'{name}' is the name of two tools")));
        }
        let function = WireFunction { name, description, parameters, strict };
        self.texts.push(to_json(&WireTool { r#type: "function", function }));
        Ok(())
    }

    /// Tells that the body has a tool that is left out: what is asked of it is left out, too.
    pub(crate) fn leave_out(&mut self) {
        self.has_left_out = true;
    }

    /// Puts them into a prompt; `param` is the path of the choice.
    pub(crate) fn put(
        self,
        prompt: &mut v1::MessagesPrompt,
        param: &str,
        choice: ToolChoice,
        one_call: bool,
    ) -> Result<(), BadRequest> {
        let unknown = |name: &str| BadRequest::new(param, format!("'{}' is none of the tools", cut(name)));
        let choice = match choice {
            ToolChoice::Auto => None,
            ToolChoice::None => Some(WireChoice::None(true)),
            ToolChoice::Required if self.names.is_empty() && self.has_left_out => None,
            ToolChoice::Required if self.names.is_empty() => {
                return Err(BadRequest::new(param, "asks for a tool, but there are none"));
            }
            ToolChoice::Required => Some(WireChoice::Required(true)),
            ToolChoice::Named(name) if self.names.contains(&name) => Some(WireChoice::Name(name)),
            ToolChoice::Named(_) if self.has_left_out => None,
            ToolChoice::Named(name) => return Err(unknown(&name)),
            ToolChoice::Allowed { names, is_required } => {
                let (known, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| self.names.contains(name));
                if let Some(name) = others.first()
                    && !self.has_left_out
                {
                    return Err(unknown(name));
                }
                let has_none = known.is_empty();
                prompt.allowed_tools = known;
                if has_none { Some(WireChoice::None(true)) } else { is_required.then_some(WireChoice::Required(true)) }
            }
        };
        prompt.tools = self.texts;
        prompt.tool_choice = choice.map(|choice| v1::ToolChoice { choice: Some(choice) });
        prompt.one_tool_call = one_call;
        Ok(())
    }
}

/// Names are of letters, digits, `_` and `-`.
pub(crate) fn check_name(param: &str, name: &str, most: usize) -> Result<(), BadRequest> {
    let is_known = |c: u8| c.is_ascii_alphanumeric() || c == b'_' || c == b'-';
    if (1..=most).contains(&name.len()) && name.bytes().all(is_known) {
        return Ok(());
    }
    Err(BadRequest::new(param, format!("'{}', but must be 1 to {most} of a-z, A-Z, 0-9, _ and -", cut(name))))
}
