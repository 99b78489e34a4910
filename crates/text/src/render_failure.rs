//! Why a chat template gives no text, and what is to blame.

use minijinja::{Error, ErrorKind};

use crate::chat_template::MAX_INSTRUCTIONS;
use crate::error::TextError;
use crate::jinja_functions::Raised;

/// Why there is no text.
#[derive(Debug)]
pub(crate) enum RenderFailure {
    /// The template engine's error.
    Engine(Error),
    /// Reached a limit of the output or of marks.
    Messages(String),
}

impl RenderFailure {
    /// Whether the template would fail on any conversation that takes it there.
    pub(crate) fn is_of_template(&self) -> bool {
        use ErrorKind::{BadEscape, BadInclude, SyntaxError, TemplateNotFound, UnknownBlock};
        use ErrorKind::{UnknownFilter, UnknownFunction, UnknownTest};
        let Self::Engine(error) = self else { return false };
        let kinds = [
            BadEscape,
            BadInclude,
            SyntaxError,
            TemplateNotFound,
            UnknownBlock,
            UnknownFilter,
            UnknownFunction,
            UnknownTest,
        ];
        kinds.contains(&error.kind())
    }

    pub(crate) fn is_limit(&self) -> bool {
        match self {
            Self::Engine(error) => error.kind() == ErrorKind::OutOfFuel,
            Self::Messages(_) => true,
        }
    }

    /// Whether the template says so itself, or asks for something that the conversation has not.
    fn is_of_messages(&self) -> bool {
        match self {
            Self::Engine(error) => {
                is_raised(error) || matches!(error.kind(), ErrorKind::OutOfFuel | ErrorKind::UndefinedError)
            }
            Self::Messages(_) => true,
        }
    }

    pub(crate) fn is_raised(&self) -> bool {
        matches!(self, Self::Engine(error) if is_raised(error))
    }

    pub(crate) fn problem(&self) -> String {
        match self {
            Self::Engine(error) if error.kind() == ErrorKind::OutOfFuel => {
                format!("takes more than {MAX_INSTRUCTIONS} instructions")
            }
            Self::Engine(error) => describe(error),
            Self::Messages(problem) => problem.clone(),
        }
    }

    /// `plain`: the conversation has nothing but texts, which every template takes.
    pub(crate) fn into_error(self, plain: bool) -> TextError {
        if self.is_of_template() || (plain && !self.is_of_messages()) {
            return TextError::Template(self.problem());
        }
        match self {
            Self::Engine(error) if error.kind() == ErrorKind::OutOfFuel => {
                TextError::Messages(format!("the chat template takes more than {MAX_INSTRUCTIONS} instructions"))
            }
            Self::Engine(error) if is_raised(&error) => {
                TextError::Messages(format!("the chat template refuses them: {}", describe(&error)))
            }
            Self::Engine(error) => {
                TextError::Messages(format!("the chat template fails on them: {}", describe(&error)))
            }
            Self::Messages(problem) => TextError::Messages(problem),
        }
    }
}

fn is_raised(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<Raised>())
}

/// The error on one line, without the excerpt of the source.
pub(crate) fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}
