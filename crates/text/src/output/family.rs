//! How families of models write tool calls, but for the calls' JSON.

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// Llama 3: the answer is `{"name": "f", "parameters": {...}}`, perhaps after `<|python_tag|>`,
    /// and perhaps several with `;` between.
    Llama3,
    /// Hermes, Qwen 2.5 and 3: any number of `<tool_call>{"name": "f", "arguments":
    /// {...}}</tool_call>` after or between text.
    Hermes,
    /// Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, or any number of
    /// `[TOOL_CALLS]f[ARGS]{...}`, which older models write without `[ARGS]` and some with
    /// `[CALL_ID]...` before it.
    Mistral,
}

/// Where in an answer the text between calls is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Position {
    /// After the mark that opens calls, or where the answer begins if there is no such mark.
    BeforeCall,
    /// After a call.
    AfterCall,
    /// After a call of a list.
    InList,
}

/// What the text between calls leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Not decided yet.
    More,
    /// It ends with the opening brace of a call.
    Object,
    /// The same, in a list.
    ListObject,
    /// It ends with the opening brace of the arguments of this tool.
    Arguments(String),
    /// It closes the calls.
    End,
    /// It is text.
    Text,
}

const PYTHON_TAG: &str = "<|python_tag|>";
const CLOSING: &str = "</tool_call>";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

impl ToolCallFormat {
    /// Marks that may be special tokens.
    pub(crate) fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Llama3 => &[PYTHON_TAG],
            Self::Hermes => &["<tool_call>", CLOSING],
            Self::Mistral => &["[TOOL_CALLS]", ARGS, CALL_ID],
        }
    }

    /// The mark before calls. `None`: an answer that has calls begins with one.
    pub fn opening_mark(self) -> Option<&'static str> {
        match self {
            Self::Llama3 => None,
            Self::Hermes => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
        }
    }

    /// What the text at this position is, asked after each of its characters.
    pub(crate) fn next(self, position: Position, text: &str) -> Next {
        let text = text.trim_ascii_start();
        match (self, position) {
            (Self::Llama3, Position::BeforeCall) => after_python_tag(text),
            (Self::Llama3, _) => after_python_tag(text.strip_prefix(';').unwrap_or(text).trim_ascii_start()),
            (Self::Hermes, Position::BeforeCall) => opening_brace(text, Next::Object),
            (Self::Hermes, _) => match text {
                CLOSING => Next::End,
                _ if CLOSING.starts_with(text) => Next::More,
                _ => Next::Text,
            },
            (Self::Mistral, Position::BeforeCall) => list_or_name(text),
            (Self::Mistral, Position::AfterCall) => Next::Text,
            (Self::Mistral, Position::InList) => match text.strip_prefix(',') {
                Some(text) => opening_brace(text.trim_ascii_start(), Next::ListObject),
                None if text == "]" => Next::End,
                None if text.is_empty() => Next::More,
                None => Next::Text,
            },
        }
    }
}

fn opening_brace(text: &str, next: Next) -> Next {
    match text {
        "" => Next::More,
        "{" => next,
        _ => Next::Text,
    }
}

fn after_python_tag(text: &str) -> Next {
    match text.strip_prefix(PYTHON_TAG) {
        Some(text) => opening_brace(text.trim_ascii_start(), Next::Object),
        None if PYTHON_TAG.starts_with(text) => Next::More,
        None => opening_brace(text, Next::Object),
    }
}

fn list_or_name(text: &str) -> Next {
    if let Some(text) = text.strip_prefix('[') {
        return opening_brace(text.trim_ascii_start(), Next::ListObject);
    }
    let Some((name, marks)) = text.find(['[', '{']).map(|at| text.split_at(at)) else {
        let is_name = !text.trim_ascii_end().contains(|character: char| character.is_ascii_whitespace());
        return if is_name { Next::More } else { Next::Text };
    };
    let arguments = match name.trim_ascii_end() {
        "" => Next::Object,
        name => Next::Arguments(name.to_owned()),
    };
    let marks = match marks.strip_prefix(CALL_ID) {
        Some(marks) => match marks.find(['[', '{']) {
            Some(at) => &marks[at..],
            None => return Next::More,
        },
        None if CALL_ID.starts_with(marks) => return Next::More,
        None => marks,
    };
    match marks.strip_prefix(ARGS) {
        Some(text) => opening_brace(text.trim_ascii_start(), arguments),
        None if ARGS.starts_with(marks) => Next::More,
        None => opening_brace(marks, arguments),
    }
}
