//! What conductors tell each other: one of them, the leader, places the requests of all.

use std::sync::Arc;
use std::time::Duration;

use crate::{
    BlockHash, ConductorId, DecodeTarget, ErrorKind, FetchReport, FetchSource, KvTransfer, NodeId, NodeStart,
    Objective, QueueOrdering, RequestKey, Slo, Tbt, Ttft, named,
};

/// A prefix that the prefill node fetches before it computes the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixFetch {
    /// Who holds it.
    pub from: NodeId,
    /// Leading tokens of the prompt that the prefill node has afterwards, a multiple of the block's
    /// tokens.
    pub tokens: u32,
    /// Bytes to fetch: those of the blocks that it does not hold yet.
    pub bytes: u64,
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Computes the prompt.
    pub prefill: NodeId,
    /// Last tokens of the prompt that the decode node computes, layer by layer behind the prefill
    /// node; 0 for none.
    pub partial_prefill_tokens: u32,
    /// What it gets from another node first.
    pub fetch: Option<PrefixFetch>,
    /// Streams the answer; `None` if one token is wanted.
    pub decode: Option<NodeId>,
    /// The terms on which it waits at the prefill node.
    pub terms: QueueOrdering,
    /// How long the frontend keeps the first token back, so that the second does not come late
    /// after it.
    pub first_token_delay: Duration,
    /// Predicted time to first token, from the placement on.
    pub predicted_ttft: Ttft,
    /// Predicted time between tokens: a high quantile of the steps with all sequences placed there.
    pub predicted_tbt: Option<Tbt>,
    /// Tokens of the prompt that the prefill node should not have to compute.
    pub matched_tokens: u32,
    /// Predicted part of the push to the decode node that compute does not hide.
    pub predicted_exposed: Option<Duration>,
    /// Tokens that the answer is expected to have.
    pub predicted_output_tokens: f64,
}

impl Placement {
    /// The nodes in it, the prefill node first.
    pub fn nodes(&self) -> Vec<NodeId> {
        let decode = self.decode.iter().filter(|decode| **decode != self.prefill);
        std::iter::once(&self.prefill).chain(decode).cloned().collect()
    }

    /// Whether the decode node computes the prompt, too.
    pub fn is_at_decode(&self) -> bool {
        self.decode.as_ref() == Some(&self.prefill)
    }
}

/// No node can take the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// `Overloaded`, `Unavailable` or `Invalid`.
    pub kind: ErrorKind,
    /// Why, with the numbers.
    pub message: String,
    /// When a retry may succeed.
    pub retry_after: Option<Duration>,
    /// The request need not be turned away yet: its objective leaves time to ask again after this
    /// long.
    pub hold: Option<Duration>,
    /// The request's own objective that would be missed, if it is that.
    pub objective: Option<Objective>,
}

impl Refusal {
    /// Whether even idle nodes would miss an objective: a retry finds the same.
    pub fn is_out_of_reach(&self) -> bool {
        self.objective.is_some() && self.retry_after.is_none()
    }
}

/// A placement, and what its nodes must be told of each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// The choice.
    pub placement: Placement,
    /// To whom the prefill node hands off; `None` if one token is wanted, or a decode node computes
    /// the prompt.
    pub target: Option<DecodeTarget>,
    /// Where it gets a prefix from.
    pub source: Option<FetchSource>,
    /// The starts of the nodes that it is on.
    pub starts: Vec<NodeStart>,
}

/// Another decode node that is asked to go on with a request.
#[derive(Debug, Clone, PartialEq)]
pub struct MigrationAssignment {
    /// The node.
    pub to: NodeStart,
    /// Where it gets the blocks from.
    pub source: Option<FetchSource>,
}

/// An attempt that runs, as its conductor declares it to the one that places.
#[derive(Debug, Clone, PartialEq)]
pub struct Declared {
    /// The attempt.
    pub key: RequestKey,
    /// How long ago it was placed.
    pub placed_ago: Duration,
    /// Predicted time to first token, from the placement on.
    pub ttft: Duration,
    /// Where its prompt is computed, until its first token is out.
    pub prefill: Option<DeclaredPrefill>,
    /// Where it decodes, or will.
    pub decode: Option<NodeStart>,
    /// Tokens of the prompt, the output that an earlier attempt gave included.
    pub prompt_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Its objective of the time between tokens.
    pub tbt: Option<Duration>,
    /// How long ago its first token went out.
    pub first_token_ago: Option<Duration>,
}

/// A prompt that is not computed.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredPrefill {
    /// The node.
    pub node: NodeStart,
    /// The terms on which it waits there.
    pub terms: QueueOrdering,
    /// Tokens to compute.
    pub tokens: u32,
}

/// A question for nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct PlaceQuestion {
    /// The attempt.
    pub key: RequestKey,
    /// Tokens of the prompt, the output of earlier attempts included.
    pub prompt_tokens: u32,
    /// Chained hashes of the prompt's full blocks.
    pub block_hashes: Arc<[BlockHash]>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Whether more than one token is wanted.
    pub wants_decode: bool,
    /// Its objectives, from its arrival on.
    pub slo: Slo,
    /// Since its arrival.
    pub waited: Duration,
    /// Larger goes first.
    pub priority: i32,
    /// Whether the prompt is computed whole, whatever is cached.
    pub bypass_cache: bool,
    /// Nodes that are not to be taken.
    pub exclude: Vec<NodeId>,
    /// Of an answer after a request's first one: the nodes of that one.
    pub first_completion_nodes: Vec<NodeId>,
    /// Of the prompt's tokens, the last so many are output.
    pub output_tokens: u32,
    /// Whether it was taken in already.
    pub is_admitted: bool,
}

/// A question for another decode node that goes on with an attempt.
#[derive(Debug, Clone, PartialEq)]
pub struct MigrationQuestion {
    /// The attempt that runs.
    pub key: RequestKey,
    /// What it would go on as.
    pub migrated: RequestKey,
    /// Of prompt and output.
    pub tokens: u32,
    /// Who is not asked.
    pub exclude: Vec<NodeId>,
}

/// What is asked of the leader.
#[derive(Debug, Clone, PartialEq)]
pub enum Question {
    /// Which nodes serve an attempt.
    Place(PlaceQuestion),
    /// Which other decode node grants what this one refused.
    Reselect {
        /// The attempt.
        key: RequestKey,
        /// Who refused.
        from: NodeId,
    },
    /// Which other decode node goes on with an attempt.
    Migrate(MigrationQuestion),
    /// What would be decided now. Nothing is charged.
    Explain(PlaceQuestion),
}

impl Question {
    /// The attempt that the answer names.
    pub fn key(&self) -> RequestKey {
        match self {
            Self::Place(question) | Self::Explain(question) => question.key,
            Self::Reselect { key, .. } => *key,
            Self::Migrate(question) => question.migrated,
        }
    }
}

impl Question {
    /// Attempts that it names.
    pub fn names(&self) -> Vec<RequestKey> {
        match self {
            Self::Migrate(MigrationQuestion { key, migrated, .. }) => vec![*key, *migrated],
            Self::Place(_) | Self::Reselect { .. } | Self::Explain(_) => vec![self.key()],
        }
    }
}

/// What a conductor tells the leader.
#[derive(Debug, Clone, PartialEq)]
pub enum ToLeader {
    /// It follows from now on, and all of this is charged for its requests.
    Greet {
        /// Who it is.
        conductor: ConductorId,
        /// What is charged.
        attempts: Vec<Declared>,
    },
    /// It asks.
    Ask(Question),
    /// Something happened to an attempt.
    LedgerUpdate(RequestKey, LedgerEntry),
}

/// What the leader tells a conductor that follows. `E` is how it explains what it decides.
#[derive(Debug, Clone, PartialEq)]
pub enum FromLeader<E> {
    /// It leads in this term.
    Greeted {
        /// The one of its key in etcd.
        term: u64,
    },
    /// Where an attempt goes, or why nowhere.
    Placed {
        /// The attempt.
        key: RequestKey,
        /// Where.
        placed: Box<Result<Assignment, Refusal>>,
        /// Why.
        why: Option<E>,
    },
    /// Who grants instead; `None` if its decode node is gone.
    Reselected(RequestKey, Option<DecodeTarget>),
    /// Who goes on; `None` if no node has room.
    Migrated(RequestKey, Option<MigrationAssignment>),
    /// What would be decided.
    Explained(RequestKey, Option<E>),
}

/// What the cluster's ledger is told of an attempt.
#[derive(Debug, Clone, PartialEq)]
pub enum LedgerEntry {
    /// A prefix was fetched from another node, or was not.
    Fetched {
        /// From where to where; `None` if it did not come over the network.
        way: Option<(NodeId, NodeId)>,
        /// What came.
        report: FetchReport,
    },
    /// Its KV is at the decode node.
    Pushed {
        /// The decode node.
        to: NodeId,
        /// What it took.
        transfer: KvTransfer,
    },
    /// Its first token is out.
    FirstToken,
    /// Its decode node has given its first one.
    Decodes,
    /// The answer is complete.
    Finished {
        /// Its tokens.
        output_tokens: u32,
    },
    /// The attempt is over.
    Ended,
}

named!(LedgerEntry: Fetched, Pushed, FirstToken, Decodes, Finished, Ended);
