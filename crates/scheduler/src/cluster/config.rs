//! How a cluster decides.

use std::time::Duration;

use baton_types::QueueOrdering;

use crate::admission::{AdmissionKind, AdmissionPolicy};
use crate::placement::{PlacementKind, PlacementPolicy};

/// [`ClusterConfig::max_wait`] if not set otherwise.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Bounds and settings of a [`Cluster`](super::Cluster).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterConfig {
    /// Whether prefixes may be fetched from node to node, if the placement policy wants to.
    pub fetches: bool,
    /// Longest that a prompt is put off for others in a prefill node's queue.
    pub max_overtaken: Duration,
    /// Longest that it waits there for room.
    pub queue_timeout: Duration,
    /// Refuses requests that would wait longer than this for others, or make admitted ones wait
    /// longer, by estimate. What they take themselves does not count, so a request that is alone is
    /// admitted whatever it takes. Placement plans with it as with an objective. Admission policies
    /// that take everything do not look at it.
    pub max_wait: Option<Duration>,
    /// Most requests that wait in the admission queue at once.
    pub max_queued: usize,
    /// Whether decode nodes compute prompts.
    pub prompts_at_decode: PromptsAtDecode,
    /// Whether decode nodes compute the last part of long prompts (partial prefill) behind the
    /// prefill nodes that compute what comes before.
    pub takes_partial_prefills: bool,
    /// High quantile of the predictions: of the time to first token for
    /// [`AdmissionKind::ValueDensity`], and of the steps. The latter is for it and for the choice
    /// of the decode node.
    pub admission_quantile: f64,
    /// [`Assessment::decode_then`](crate::Assessment::decode_then) takes an answer to go on for
    /// this many times the mean time of answers.
    pub answer_factor: f64,
    /// A node that joined takes its full share of the load after this long.
    pub slow_start: Duration,
    /// A node's own load report does not know yet what was placed this shortly before it.
    pub report_delay: Duration,
    /// A node that has not reported for this long takes requests only if no other can.
    pub suspect_after: Duration,
    /// Bytes per second from node to node, until it is measured.
    pub bandwidth: f64,
    /// What a node that has not reported for this long holds is forgotten: it is asked for a
    /// snapshot when it reports again.
    pub index_ttl: Duration,
    /// Blocks of one node in the prefix index.
    pub max_index_entries_per_node: usize,
    /// Nodes that left and are still shown.
    pub max_lost_nodes: usize,
}

/// Which prompts decode nodes compute themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromptsAtDecode {
    /// None: without a prefill node requests are refused.
    Never,
    /// All, if no prefill node takes requests.
    Fallback,
    /// Those too that are so short that they are answered as soon, and disturb no stream
    /// (conditional disaggregation).
    #[default]
    Short,
}

impl PromptsAtDecode {
    /// Its name in settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Fallback => "fallback",
            Self::Short => "short",
        }
    }
}

impl std::str::FromStr for PromptsAtDecode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "never" => Ok(Self::Never),
            "fallback" => Ok(Self::Fallback),
            "short" => Ok(Self::Short),
            _ => Err(format!("'{name}', but must be never, fallback or short")),
        }
    }
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            fetches: true,
            max_overtaken: QueueOrdering::MAX_OVERTAKEN,
            queue_timeout: QueueOrdering::TIMEOUT,
            max_wait: Some(MAX_WAIT),
            max_queued: 512,
            prompts_at_decode: PromptsAtDecode::default(),
            takes_partial_prefills: true,
            admission_quantile: 0.9,
            answer_factor: 4.0,
            slow_start: Duration::from_secs(10),
            report_delay: Duration::from_millis(100),
            suspect_after: Duration::from_secs(5),
            bandwidth: 1e9,
            index_ttl: Duration::from_secs(60),
            max_index_entries_per_node: 1 << 20,
            max_lost_nodes: 16,
        }
    }
}

/// Where requests go, and which are taken in.
#[derive(Debug)]
pub struct Policies {
    /// How nodes are chosen.
    pub placement: Box<dyn PlacementPolicy>,
    /// What is taken in.
    pub admission: Box<dyn AdmissionPolicy>,
}

impl Policies {
    /// Production's.
    pub fn new(placement: PlacementKind, admission: AdmissionKind) -> Self {
        Self { placement: placement.policy(), admission: admission.policy() }
    }
}

impl Default for Policies {
    fn default() -> Self {
        Self::new(PlacementKind::default(), AdmissionKind::default())
    }
}
