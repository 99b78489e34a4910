//! Why an engine cannot load or run.

use baton_types::ErrorKind;

/// Why an engine cannot load or run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model file cannot be read.
    #[error(transparent)]
    Format(#[from] baton_formats::FormatError),
    /// The model is of a kind that this engine does not run, or its parts do not fit together.
    #[error("{0}")]
    Model(String),
    /// A setting of the engine is out of range.
    #[error("{field}: {problem}")]
    Options {
        /// The setting.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// No memory for weights or arena.
    #[error(transparent)]
    Memory(#[from] baton_memory::MemoryError),
    /// The step's input is wrong: a bug of the caller.
    #[error("step: {0}")]
    Invalid(String),
    /// The model computed something that is no number.
    #[error("the model computed {value} for token {token}")]
    NotFinite {
        /// The token whose logit it is.
        token: u32,
        /// NaN or infinity.
        value: f32,
    },
}

impl EngineError {
    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Format(error) => error.kind(),
            Self::Model(_) | Self::Options { .. } => ErrorKind::Invalid,
            Self::Memory(_) => ErrorKind::Unavailable,
            Self::Invalid(_) => ErrorKind::Internal,
            // What it attended to is no good: it may be, if it is computed anew.
            Self::NotFinite { .. } => ErrorKind::DataLoss,
        }
    }
}
