//! What can go wrong between text and tokens.

use baton_formats::FormatError;
use baton_types::ErrorKind;

/// Why text, tokens, a template or a tokenizer's file were refused. What a request is refused for
/// does not name its field: who took the request does.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The text is longer than the tokenizer takes.
    #[error("{bytes} bytes, but at most {limit} are taken")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// Longest text taken.
        limit: usize,
    },
    /// The text holds something that cannot be tokenized in bounded time.
    #[error("{0}")]
    Text(String),
    /// The stop strings of a request are refused.
    #[error("{0}")]
    Stop(String),
    /// The messages of a request are refused, by a limit or by the template.
    #[error("{0}")]
    Messages(String),
    /// The chat template is no template, or went over a limit.
    #[error("chat template: {0}")]
    Template(String),
    /// The tokenizer's data contradicts itself or is of a kind not known.
    #[error("tokenizer: {field}: {problem}")]
    Model {
        /// Metadata key, or field of `tokenizer.json`.
        field: String,
        /// What was found and what is allowed.
        problem: String,
    },
    /// A file of the tokenizer cannot be read.
    #[error("tokenizer: {path}: {problem}")]
    File {
        /// Which one.
        path: String,
        /// What happened.
        problem: String,
    },
    /// The model's file holds no such data as it should.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The tokenizer failed on text that it should take.
    #[error("tokenizer failed: {0}")]
    Internal(String),
}

impl TextError {
    /// What the caller should do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Internal(_) => ErrorKind::Internal,
            Self::Format(error) => error.kind(),
            _ => ErrorKind::Invalid,
        }
    }

    pub(crate) fn model(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Model { field: field.into(), problem: problem.into() }
    }
}
