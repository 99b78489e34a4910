//! Why a simulation could not be made.

use std::io;

use baton_types::ErrorKind;

use baton_profile::ProfileError;

/// Why a simulation could not be made: one line that names the option.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// An option is wrong, or does not go with another one.
    #[error("{field}: {problem}")]
    Invalid {
        /// The option.
        field: &'static str,
        /// What is wrong with the value, and what is taken.
        problem: String,
    },
    /// The trace cannot be had.
    #[error("--trace {path}: {problem}")]
    Trace {
        /// The file.
        path: String,
        /// Why.
        problem: String,
    },
    /// The profile cannot be had.
    #[error("--model-profile: {0}")]
    Profile(#[from] ProfileError),
    /// The report cannot be written.
    #[error("output: {0}")]
    Output(#[from] io::Error),
}

impl SimulateError {
    pub(crate) fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::Trace { .. } | Self::Profile(_) => ErrorKind::Invalid,
            Self::Output(_) => ErrorKind::Internal,
        }
    }
}
