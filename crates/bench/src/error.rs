//! Why a bench failed.

use std::io;

use baton_engine::EngineError;
use baton_memory::MemoryError;
use baton_runtime::error_chain;
use baton_transfer_engine::TransferError;
use baton_types::ErrorKind;

/// Why a bench failed: one line that names the field, or the end that failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A flag is wrong.
    #[error("{field}: {problem}")]
    Invalid {
        /// The flag.
        field: &'static str,
        /// What is wrong with the value, and what is taken.
        problem: String,
    },
    /// The engine refused or failed.
    #[error("transfer engine: {0}")]
    Transfer(#[from] TransferError),
    /// The CPU engine cannot load the model, or failed.
    #[error("engine: {0}")]
    Engine(EngineError),
    /// No memory for the working set.
    #[error("--working-set: {0}")]
    Memory(#[from] MemoryError),
    /// The two ends do not understand each other, or one went away.
    #[error("{end}: {problem}")]
    Control {
        /// The end that failed.
        end: &'static str,
        /// What it did or did not do.
        problem: String,
    },
    /// Bytes that arrived are not those that were sent.
    #[error("--verify: block {block}, at offset {offset} of the destination, is wrong")]
    Wrong {
        /// Number of the block, in the order of sending.
        block: u64,
        /// Its first byte in the destination.
        offset: u64,
    },
    /// Requests were sent, and none got its answer. The report is out.
    #[error("no request succeeded; the first one ended with: {0}")]
    NothingServed(String),
    /// The target failed, and has said why to the initiator and on stdout.
    #[error("failed")]
    Reported,
    /// Ctrl-C.
    #[error("interrupted by {0}")]
    Interrupted(&'static str),
    /// The operating system refused.
    #[error("operating system: {0}")]
    Io(#[from] io::Error),
    /// The report cannot be written.
    #[error("output: {0}")]
    Output(io::Error),
}

impl From<EngineError> for BenchError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Options { field: "threads", problem } => Self::invalid("--threads", problem),
            EngineError::Options { field: "BATON_ISA", problem } => Self::invalid("BATON_ISA", problem),
            EngineError::Format(_) | EngineError::Model(_) => Self::invalid("--model", error_chain(&error)),
            other => Self::Engine(other),
        }
    }
}

impl BenchError {
    pub(crate) fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }

    pub(crate) fn control(end: &'static str, problem: impl Into<String>) -> Self {
        Self::Control { end, problem: problem.into() }
    }

    /// An error if no request was `completed`, and one was sent: with the first `problem`.
    pub(crate) fn check_served(completed: usize, problem: Option<String>) -> Result<(), Self> {
        match problem.filter(|_| completed == 0) {
            Some(problem) => Err(Self::NothingServed(problem)),
            None => Ok(()),
        }
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } | Self::Memory(_) => ErrorKind::Invalid,
            Self::Transfer(error) => error.kind(),
            Self::Engine(error) => error.kind(),
            Self::Control { .. } | Self::NothingServed(_) => ErrorKind::Unavailable,
            Self::Interrupted(_) => ErrorKind::Cancelled,
            Self::Wrong { .. } | Self::Reported | Self::Io(_) | Self::Output(_) => ErrorKind::Internal,
        }
    }
}
