//! What the caller of a failed operation should do about it.

use std::fmt;

/// The kind of an error tells the caller what to do. Every library error enum has a `kind()`; one
/// tested table in `baton-proto` maps kinds to gRPC and HTTP status codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong: fix it, do not retry.
    Invalid,
    /// No room now: retry later, with the hint given.
    Overloaded,
    /// This place cannot serve: retry elsewhere.
    Unavailable,
    /// The caller or the client gave up.
    Cancelled,
    /// A deadline passed.
    DeadlineExceeded,
    /// Something named by the caller does not exist.
    NotFound,
    /// It contradicts what was asked before.
    Conflict,
    /// Bytes were lost or damaged.
    DataLoss,
    /// A bug in Baton.
    Internal,
}

impl ErrorKind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Invalid,
        Self::Overloaded,
        Self::Unavailable,
        Self::Cancelled,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::Conflict,
        Self::DataLoss,
        Self::Internal,
    ];

    /// Stable lower-case name, used in logs, metrics and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "unavailable",
            Self::Cancelled => "cancelled",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::DataLoss => "data_loss",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
