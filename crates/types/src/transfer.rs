//! What a node says of its transfers.

use crate::{Generation, NodeId};

/// How a node can be reached by transfers, and whom it has reached.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TransferReport {
    /// Ways to this node's memory, best first.
    pub addresses: Vec<TransferAddress>,
    /// The nodes that it has moved bytes to, those with the most bytes first; at most
    /// [`TransferReport::MAX_PATHS`].
    pub paths: Vec<TransferPath>,
}

impl TransferReport {
    /// Most paths of one report.
    pub const MAX_PATHS: usize = 64;
}

/// One way to a node's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferAddress {
    /// `rdma`, `shm` or `tcp`.
    pub transport: String,
    /// Where, in the transport's own form.
    pub address: String,
}

/// How one node moves bytes to another, counted since the first of them.
#[derive(Debug, Clone, PartialEq)]
pub struct TransferPath {
    /// The node that they go to.
    pub node: NodeId,
    /// The start of it.
    pub generation: Generation,
    /// What carries bytes now.
    pub transport: String,
    /// Open connections.
    pub lanes: u32,
    /// Bytes acknowledged.
    pub bytes: u64,
    /// Batches completed.
    pub batches: u64,
    /// Parts of batches sent again after their connection failed.
    pub retries: u64,
    /// Changes to a worse transport.
    pub fallbacks: u64,
    /// Bytes on their way.
    pub in_flight_bytes: u64,
    /// While any are on their way, a moving average; `None` before the first.
    pub bytes_per_second: Option<f64>,
}
