//! Why a request was not served.

use std::time::Duration;

use baton_types::{ErrorKind, NodeId, Refused};

/// Why a request was not served, or not to its end.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// The request is wrong.
    #[error("{field}: {problem}")]
    Invalid {
        /// Field of the request.
        field: &'static str,
        /// What is wrong with it and what is taken.
        problem: String,
    },
    /// Something that the request names does not exist.
    #[error("{field}: {problem}")]
    NotFound {
        /// Field of the request.
        field: &'static str,
        /// What does not exist.
        problem: String,
    },
    /// The conductor itself has no room for it, or is going down.
    #[error("{message}")]
    FrontDoor {
        /// What to do about it.
        kind: ErrorKind,
        /// Why.
        message: String,
        /// When a retry may succeed.
        retry_after: Option<Duration>,
    },
    /// Placement or admission refused.
    #[error("{message}")]
    Refused {
        /// What to do about it.
        kind: ErrorKind,
        /// Which estimate or limit refused, with the numbers.
        message: String,
        /// When a retry may succeed.
        retry_after: Option<Duration>,
        /// It need not be refused yet: it may be placed after this long.
        hold: Option<Duration>,
    },
    /// A node gave the request up.
    #[error("{node}: {refused}")]
    Node {
        /// The node.
        node: NodeId,
        /// Its reason.
        refused: Refused,
    },
    /// No node reported any progress for too long.
    #[error("no progress for {0:?}: the request was ended")]
    Stalled(Duration),
    /// The client closed the stream, or somebody aborted the request.
    #[error("the request was aborted")]
    Aborted,
}

impl GenerateError {
    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } => ErrorKind::Invalid,
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::FrontDoor { kind, .. } | Self::Refused { kind, .. } => *kind,
            Self::Node { refused, .. } => refused.kind,
            Self::Stalled(_) => ErrorKind::DeadlineExceeded,
            Self::Aborted => ErrorKind::Cancelled,
        }
    }

    /// When a retry may succeed.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::FrontDoor { retry_after, .. } | Self::Refused { retry_after, .. } => *retry_after,
            Self::Node { refused, .. } if refused.kind == ErrorKind::Overloaded => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// This conductor is being stopped.
    pub fn going_down() -> Self {
        let message = "this conductor is going down".to_owned();
        Self::FrontDoor { kind: ErrorKind::Unavailable, message, retry_after: None }
    }

    /// A wrong field.
    pub fn invalid(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { field, problem: problem.into() }
    }
}

impl From<&GenerateError> for tonic::Status {
    fn from(error: &GenerateError) -> Self {
        baton_proto::status(error.kind(), error.to_string(), error.retry_after())
    }
}
