//! What a request's core asks its shell to do.

use std::time::Duration;

use baton_types::{
    Attempt, ErrorKind, FetchReport, FinishReason, MigrationQuestion, NodeId, PrefillJob, Refused, RequestKey,
    Reselect, TokenLogprobs,
};

use super::{LedgerEntry, OutputToken};
use crate::named;
use crate::placement::Refusal;

/// What the shell carries out, in order. Every effect that names an answer gets it once, at any
/// later time. An answer that comes after its attempt is over changes nothing. What it was charged
/// was ended in the ledger before, by a [`LedgerEntry::Ended`] that follows the question.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestEffect {
    /// Ask the cluster for nodes, [`Cluster::place`](crate::Cluster::place) and
    /// [`Cluster::assign`](crate::Cluster::assign). Answer: `on_placed`.
    Place {
        /// Names the attempt.
        key: RequestKey,
        /// Nodes that failed it.
        exclude: Vec<NodeId>,
        /// Since the request's arrival.
        waited: Duration,
    },
    /// Ask the cluster for another decode node, [`Cluster::reselect`](crate::Cluster::reselect).
    /// Answer: `on_reselected`.
    AskReselect {
        /// The attempt.
        key: RequestKey,
        /// Who refused it a grant.
        from: NodeId,
        /// Why.
        refused: Refused,
    },
    /// Ask the cluster for a decode node that can go on with the request,
    /// [`Cluster::place_migration`](crate::Cluster::place_migration). Answer:
    /// `on_migration_placed`.
    PlaceMigration(MigrationQuestion),
    /// Send the job to a node. If that cannot be reached: `on_unreachable`.
    Submit {
        /// The node.
        node: NodeId,
        /// The job.
        job: PrefillJob,
    },
    /// Tell a prefill node which decode node is asked for room next. No answer.
    Reselect {
        /// The node.
        node: NodeId,
        /// What to tell.
        reselect: Reselect,
    },
    /// Tell a node to forget an attempt. No answer.
    Abort {
        /// The node.
        node: NodeId,
        /// The attempt.
        key: RequestKey,
    },
    /// Enter it into the cluster's ledger, without an answer:
    /// [`Cluster::update_ledger`](crate::Cluster::update_ledger).
    UpdateLedger {
        /// The attempt.
        key: RequestKey,
        /// What happened.
        entry: LedgerEntry,
    },
    /// Give the client the log-probabilities of the prompt.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// Give the client these tokens.
    Deliver {
        /// Index of the first one in the output.
        index: u32,
        /// Since the delivery before; `None` for the first one.
        gap: Option<Duration>,
        /// In order.
        tokens: Vec<OutputToken>,
    },
    /// For metrics, logs and records.
    Note(RequestNote),
    /// The request is over. Nothing follows.
    End(Result<FinishReason, RequestError>),
}

impl RequestEffect {
    /// Whether the cluster is asked for something.
    pub(super) fn is_question(&self) -> bool {
        matches!(self, Self::Place { .. } | Self::PlaceMigration(_) | Self::AskReselect { .. })
    }
}

/// Something that operators want to know.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestNote {
    /// It waits in the admission queue.
    Queued,
    /// An attempt failed, and is placed again.
    Retried {
        /// The attempt.
        attempt: Attempt,
        /// Why.
        why: RequestError,
    },
    /// Its decode node refused it a grant.
    GrantRefused {
        /// Who did.
        from: NodeId,
        /// The one that is asked next; `None` if it is the same one.
        to: Option<NodeId>,
        /// Why.
        refused: Refused,
    },
    /// It goes on at another decode node.
    WentOn {
        /// The node.
        node: NodeId,
        /// Tokens that the client had.
        output_tokens: u32,
    },
    /// So much of it was fetched there.
    Fetched(FetchReport),
    /// The other decode node did not take it.
    MigrationFailed {
        /// Why.
        reason: String,
    },
    /// A prefix could not be fetched, and is computed.
    FetchFailed(Refused),
}

/// Why a request did not get to its end.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// Placement or admission refused it.
    #[error("{}", .0.message)]
    Refused(Refusal),
    /// A node gave it up.
    #[error("{node}: {refused}")]
    Node {
        /// The node.
        node: NodeId,
        /// Its reason.
        refused: Refused,
    },
    /// So many nodes died or hung while they had it that it may be what they die of.
    #[error("{} died or hung while they had the request: it is not placed again", .0.iter().map(NodeId::as_str).collect::<Vec<_>>().join(" and "))]
    NodesDied(Vec<NodeId>),
    /// A node contradicted what the client has.
    #[error("{0}")]
    Contradicted(String),
    /// No node said anything for so long.
    #[error("no progress for {0:?}: the request was ended")]
    Stalled(Duration),
    /// The client left so many bytes of the answer unread that there is no room for more.
    #[error("{0} bytes of the answer were not read: the request was ended")]
    Unread(usize),
    /// It took longer than it may.
    #[error("not over within {0:?}: the request was ended")]
    TimedOut(Duration),
    /// The client went away, or the request was aborted.
    #[error("the request was aborted")]
    Aborted,
    /// The conductor is being stopped.
    #[error("this conductor is going down")]
    GoingDown,
}

impl RequestError {
    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(refusal) => refusal.kind,
            Self::Node { refused, .. } => refused.kind,
            Self::NodesDied(_) => ErrorKind::Internal,
            Self::Contradicted(_) => ErrorKind::DataLoss,
            Self::Stalled(_) | Self::TimedOut(_) => ErrorKind::DeadlineExceeded,
            Self::Unread(_) => ErrorKind::Overloaded,
            Self::Aborted => ErrorKind::Cancelled,
            Self::GoingDown => ErrorKind::Unavailable,
        }
    }
}

named!(RequestEffect: Place, AskReselect, PlaceMigration, Submit, Reselect, Abort, UpdateLedger, PromptLogprobs, Deliver, Note, End);
named!(RequestNote: Queued, Retried, GrantRefused, WentOn, Fetched, MigrationFailed, FetchFailed);
named!(RequestError: Refused, Node, NodesDied, Contradicted, Stalled, Unread, TimedOut, Aborted, GoingDown);
