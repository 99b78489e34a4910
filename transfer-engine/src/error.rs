//! What can go wrong with a transfer, and what to do about it.

use std::fmt;

use baton_types::{ErrorKind, Generation, NodeId};

/// Why the owner of the memory turned a write away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalReason {
    /// No such grant was given in this generation, or it ended long ago.
    UnknownGrant,
    /// The grant was revoked.
    Revoked,
    /// The grant's time is over.
    Expired,
    /// The grant is another node's, or another generation's of this node.
    WrongWriter,
    /// The grant is for another segment.
    WrongSegment,
    /// A span lies outside the granted ranges.
    OutOfRange,
    /// More batches under one grant than the owner keeps account of.
    TooManyBatches,
    /// The writer itself cancelled the batch, on another connection.
    BatchCancelled,
    /// The grant is for writing, and this was a read; or the other way round.
    WrongAccess,
}

impl RefusalReason {
    pub(crate) const ALL: [Self; 9] = [
        Self::UnknownGrant,
        Self::Revoked,
        Self::Expired,
        Self::WrongWriter,
        Self::WrongSegment,
        Self::OutOfRange,
        Self::TooManyBatches,
        Self::BatchCancelled,
        Self::WrongAccess,
    ];

    /// Stable lower-case name, used in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownGrant => "unknown_grant",
            Self::Revoked => "revoked",
            Self::Expired => "expired",
            Self::WrongWriter => "wrong_writer",
            Self::WrongSegment => "wrong_segment",
            Self::OutOfRange => "out_of_range",
            Self::TooManyBatches => "too_many_batches",
            Self::BatchCancelled => "batch_cancelled",
            Self::WrongAccess => "wrong_access",
        }
    }

    const fn kind(self) -> ErrorKind {
        match self {
            Self::UnknownGrant => ErrorKind::NotFound,
            Self::Revoked | Self::Expired => ErrorKind::Unavailable,
            Self::WrongWriter | Self::WrongSegment | Self::OutOfRange | Self::WrongAccess => ErrorKind::Invalid,
            Self::TooManyBatches => ErrorKind::Overloaded,
            Self::BatchCancelled => ErrorKind::Cancelled,
        }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A refusal on its way to the writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: RefusalReason,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(reason: RefusalReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

impl From<Refusal> for TransferError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused { reason: refusal.reason, message: refusal.message }
    }
}

/// A transfer, or a call to the engine, failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// A setting is out of its range.
    #[error("transfer configuration: {field}: {problem}")]
    Config {
        /// Which.
        field: &'static str,
        /// What is wrong, with the value.
        problem: String,
    },
    /// The address to listen on could not be had.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's reason.
        reason: String,
    },
    /// An argument of the call is wrong.
    #[error("{what}: {problem}")]
    Invalid {
        /// Which argument.
        what: &'static str,
        /// What is wrong, with the value.
        problem: String,
    },
    /// A bound of the engine is reached.
    #[error("too many {what}: the limit is {limit}")]
    Overloaded {
        /// Of what.
        what: &'static str,
        /// The bound.
        limit: usize,
    },
    /// The owner of the memory refused the write. Part of the batch may have landed.
    #[error("refused by the owner ({reason}): {message}")]
    Refused {
        /// Why.
        reason: RefusalReason,
        /// With the numbers.
        message: String,
    },
    /// The descriptor is of a start of the node that is over, or this engine is older than what the
    /// peer already knows.
    #[error("generation {expected} of node {node} is over; {found} runs now")]
    StaleGeneration {
        /// Whose generation.
        node: NodeId,
        /// The one that is over.
        expected: Generation,
        /// The one that the peer knows.
        found: Generation,
    },
    /// The batch was not complete at its deadline.
    #[error("the deadline passed before the batch was complete")]
    Deadline,
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
    /// No connection to the peer could be had.
    #[error("cannot reach node {node} at {address}: {reason}")]
    PeerUnreachable {
        /// The peer.
        node: NodeId,
        /// Its address.
        address: String,
        /// Why.
        reason: String,
    },
    /// Connections broke in mid-transfer, more often than is retried.
    #[error("the connection to node {node} was lost: {reason}")]
    ConnectionLost {
        /// The peer.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// The peer speaks another protocol.
    #[error("node {node} speaks another protocol: {reason}")]
    Incompatible {
        /// The peer.
        node: NodeId,
        /// What differs.
        reason: String,
    },
    /// The peer broke the protocol, or says that this engine did: a bug.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The engine is shut down.
    #[error("the transfer engine is shut down")]
    Closed,
}

impl TransferError {
    /// What to do about it.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Config { .. } | Self::Listen { .. } | Self::Invalid { .. } => ErrorKind::Invalid,
            Self::Overloaded { .. } => ErrorKind::Overloaded,
            Self::Refused { reason, .. } => reason.kind(),
            Self::StaleGeneration { .. }
            | Self::PeerUnreachable { .. }
            | Self::ConnectionLost { .. }
            | Self::Incompatible { .. }
            | Self::Closed => ErrorKind::Unavailable,
            Self::Deadline => ErrorKind::DeadlineExceeded,
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Protocol(_) => ErrorKind::Internal,
        }
    }

    pub(crate) fn invalid(what: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { what, problem: problem.into() }
    }

    /// Stable lower-case name of the variant, a metric's label.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Config { .. } => "config",
            Self::Listen { .. } => "listen",
            Self::Invalid { .. } => "invalid",
            Self::Overloaded { .. } => "overloaded",
            Self::Refused { .. } => "refused",
            Self::StaleGeneration { .. } => "stale_generation",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::PeerUnreachable { .. } => "peer_unreachable",
            Self::ConnectionLost { .. } => "connection_lost",
            Self::Incompatible { .. } => "incompatible",
            Self::Protocol(_) => "protocol",
            Self::Closed => "closed",
        }
    }
}
