//! What conductors and nodes tell each other, as plain data. `baton-proto` holds the conversions to
//! and from the wire.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    Attempt, BlockHash, BlockId, ConductorId, ErrorKind, FinishReason, Generation, GrantId, KvLayout, KvTransfer,
    NodeId, NodeRole, NodeStart, QueueOrdering, RequestId, SamplingParams, TokenId, TokenLogprobs,
};

/// One placement of one request. Messages of an older attempt are dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey {
    /// The request.
    pub request: RequestId,
    /// Which placement of it.
    pub attempt: Attempt,
}

/// Conductor to prefill node: compute this prompt, and what there is of its output.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefillJob {
    /// The request and attempt.
    pub key: RequestKey,
    /// Whose request it is; events go there.
    pub conductor: ConductorId,
    /// The prompt, and what there is of the output; never empty.
    pub tokens: Arc<[TokenId]>,
    /// How many of `tokens` are output that the client has: the next token drawn is the one after
    /// them.
    pub output_tokens: u32,
    /// Whether another decode node has the sequence until this one says that it has it. Such a
    /// sequence does not wait for room.
    pub is_migration: bool,
    /// How to draw.
    pub sampling: Arc<SamplingParams>,
    /// Where the KV goes; `None` if one token or only scoring is asked.
    pub decode: Option<DecodeTarget>,
    /// Last tokens of the prompt that the decode node is to compute itself, layer by layer behind
    /// this node; 0 for none. What comes before them is whole blocks.
    pub partial_prefill_tokens: u32,
    /// Who holds more of the prompt than this node, if fetching it takes less time than computing
    /// it.
    pub fetch: Option<FetchSource>,
    /// Separates the caches of tenants: part of every block hash's key.
    pub salt: Arc<[u8]>,
    /// How it waits in the queue.
    pub terms: QueueOrdering,
}

impl PrefillJob {
    /// Whether more than the next token is wanted, so that a decode node is needed.
    pub fn wants_decode(&self) -> bool {
        self.sampling.max_tokens > self.output_tokens.saturating_add(1)
    }
}

/// The decode node chosen for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeTarget {
    /// Its name.
    pub node: NodeId,
    /// The start of it that the conductor knows; a later start refuses.
    pub generation: Generation,
    /// Its gRPC address, `http://host:port`.
    pub address: String,
    /// Between two tokens of the sequence: it refuses a grant while its steps take longer. `None`:
    /// it grants whatever they take.
    pub tbt: Option<Duration>,
}

/// Conductor to prefill node: the answer to [`PrefillEvent::GrantRefused`], who is asked for room
/// next. It may be the one that refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reselect {
    /// The request and attempt.
    pub key: RequestKey,
    /// Where the KV goes.
    pub decode: DecodeTarget,
}

/// A node that holds a longer prefix of a prompt than its prefill node does, as far as the
/// conductor knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchSource {
    /// Its name.
    pub node: NodeId,
    /// The start of it that the conductor knows; a later start refuses.
    pub generation: Generation,
    /// Its gRPC address, `http://host:port`.
    pub address: String,
    /// Leading tokens of the prompt that it holds, in whole blocks.
    pub tokens: u32,
}

/// To any node: let me read these blocks of your cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseRequest {
    /// The request and attempt that they are for.
    pub key: RequestKey,
    /// Who will read.
    pub reader: NodeId,
    /// The reader's start.
    pub reader_generation: Generation,
    /// Hashes of consecutive blocks of a prompt.
    pub block_hashes: Arc<[BlockHash]>,
}

/// The holder's answer: read here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseReply {
    /// The right to read.
    pub lease: GrantId,
    /// Where the first so many of the blocks asked for are; the rest is not cached any more. Never
    /// empty.
    pub blocks: Vec<BlockId>,
}

/// To the holder: a lease is not needed any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseRelease {
    /// The lease.
    pub lease: GrantId,
    /// Whose it must be; `None` if the holder itself ends it.
    pub reader: Option<NodeStart>,
}

impl From<GrantId> for LeaseRelease {
    fn from(lease: GrantId) -> Self {
        Self { lease, reader: None }
    }
}

/// Prefill node to decode node: reserve room for this sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantRequest {
    /// The request and attempt.
    pub key: RequestKey,
    /// Who will write.
    pub prefill: NodeId,
    /// The writer's start.
    pub prefill_generation: Generation,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// As in [`PrefillJob::output_tokens`]: they come with the prompt.
    pub output_tokens: u32,
    /// Chained hashes of the full blocks of prompt and output.
    pub block_hashes: Arc<[BlockHash]>,
    /// Most tokens of the output, those that there are included: room for the next ones is
    /// promised.
    pub max_tokens: u32,
    /// As in [`DecodeTarget::tbt`].
    pub tbt: Option<Duration>,
    /// As in [`PrefillJob::partial_prefill_tokens`].
    pub partial_prefill_tokens: u32,
    /// Whether a node of another KV compatibility class computes the prompt. Then nothing of it is
    /// taken from the cache, nor does it stay there.
    pub is_other_class: bool,
}

impl GrantRequest {
    /// Tokens of prompt and output that are computed before the next one is drawn.
    pub fn tokens(&self) -> usize {
        self.prompt_tokens as usize + self.output_tokens as usize
    }
}

/// Decode node to prefill node: write here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantReply {
    /// The right to write.
    pub grant: GrantId,
    /// Leading full blocks of prompt and output that the decode node already holds; they are not
    /// pushed.
    pub cached_blocks: u32,
    /// Destinations of the blocks from `cached_blocks` on, with the last partial one; without the
    /// partial prefill's part, if the decode node computes one.
    pub blocks: Vec<BlockId>,
    /// Of the tokens that it was asked to compute, those that it will: all or none.
    pub partial_prefill_tokens: u32,
}

/// A node said no to a message of another node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    /// What to do about it.
    pub kind: ErrorKind,
    /// Why, with the numbers.
    pub message: String,
}

/// Prefill node to decode node: the sequence is yours.
#[derive(Debug, Clone, PartialEq)]
pub struct Handoff {
    /// The request and attempt.
    pub key: RequestKey,
    /// Where the tokens go.
    pub conductor: ConductorId,
    /// The grant that its KV was written under.
    pub grant: GrantId,
    /// The prompt, and the output that came with it.
    pub tokens: Arc<[TokenId]>,
    /// The first token drawn after those; `None` if the decode node computes the prompt's last
    /// part, and draws it.
    pub first_token: Option<TokenId>,
    /// How to draw the rest.
    pub sampling: Arc<SamplingParams>,
    /// Bytes that arrive under the grant in all.
    pub expected_bytes: u64,
    /// As in [`PrefillJob::salt`]: generated blocks are hashed with it.
    pub salt: Arc<[u8]>,
}

/// Prefill node to conductor.
#[derive(Debug, Clone, PartialEq)]
pub enum PrefillEvent {
    /// Compute begins.
    Started {
        /// Wait in the node's queue.
        queue: Duration,
        /// Tokens whose KV the node already had cached.
        cached_tokens: u32,
    },
    /// So many tokens of it are computed, and more are to come. Every few seconds: a long prompt on
    /// a slow machine is no stalled one.
    Progress {
        /// Of the prompt; after a loss, of the output so far, too.
        tokens: u32,
    },
    /// The prefix to be fetched from another node is here, or will not come. Before the first
    /// token, of a request that had a [`FetchSource`] only.
    Fetched(FetchReport),
    /// The first token drawn: token 0 of the output, or the one after those of the job.
    FirstToken {
        /// The token.
        token: TokenId,
        /// Its log-probabilities, if asked for.
        logprobs: Option<TokenLogprobs>,
        /// One entry per prompt position, if asked for.
        prompt_logprobs: Vec<TokenLogprobs>,
        /// Set if it is also the last token: no handoff follows.
        finish: Option<FinishReason>,
        /// From the first chunk's start to this token.
        compute: Duration,
    },
    /// Every byte is acknowledged and the handoff is complete: this node is done with the request.
    HandedOff(KvTransfer),
    /// This node is done with the request and could not do it.
    Failed(Refused),
    /// This node did its part, and the decode node, or the way to it, did not: another decode node
    /// may.
    DecodeFailed(Refused),
    /// The decode node has no room, or its steps take longer than the sequence can bear. The prompt
    /// is computed all the same; a [`Reselect`] says who is asked next.
    GrantRefused(Refused),
}

/// What became of fetching a prefix from another node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FetchReport {
    /// Prompt tokens that did not have to be computed because of it.
    pub tokens: u32,
    /// Bytes that came.
    pub bytes: u64,
    /// What carried them; empty if none came.
    pub transport: String,
    /// From the question to the holder to the last byte.
    pub elapsed: Duration,
    /// Why the prefix is computed after all.
    pub failure: Option<Refused>,
}

impl FetchReport {
    /// `transport` of what a node found on its own SSD.
    pub const SSD: &'static str = "ssd";
}

/// Decode node to conductor, about one request.
#[derive(Debug, Clone, PartialEq)]
pub enum DecodeEvent {
    /// One more token.
    Token {
        /// Index in the output. The first one drawn is the prefill node's, or this node's if it
        /// computes the prompt's last part.
        index: u32,
        /// The token.
        token: TokenId,
        /// Its log-probabilities, if asked for.
        logprobs: Option<TokenLogprobs>,
        /// Set on the last token.
        finish: Option<FinishReason>,
        /// With the first token of this node: wait from the handoff to the first step.
        queue: Option<Duration>,
    },
    /// This node is done with the request and could not do it.
    Failed(Refused),
}

/// How far a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepProgress {
    /// Since it began.
    pub elapsed: Duration,
    /// Until it will be over, if its layers go on as they did so far.
    pub left: Duration,
}

/// What a node is doing now.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Load {
    /// Requests being computed, or sequences in the running batch.
    pub running: u32,
    /// Requests waiting in the queue, or for bytes or room.
    pub waiting: u32,
    /// Prompt tokens not yet computed, queued and running. Of the step under way, the part of the
    /// tokens that its layers leave to do.
    pub queued_tokens: u64,
    /// The step that a prefill node works on, if it has one and can tell.
    pub step: Option<StepProgress>,
    /// Tokens of KV that running sequences attend to.
    pub kv_tokens: u64,
    /// Blocks of the arena.
    pub blocks_total: u32,
    /// Blocks that requests hold, incl. granted and quarantined ones.
    pub blocks_used: u32,
    /// Blocks kept as prefix cache, evictable.
    pub blocks_cached: u32,
    /// Blocks promised but not yet allocated.
    pub blocks_reserved: u32,
    /// Prompt tokens looked up in the prefix cache so far.
    pub prefix_queries: u64,
    /// Prompt tokens found there so far.
    pub prefix_hits: u64,
    /// Of those, tokens that the node's own SSD had.
    pub prefix_hits_ssd: u64,
    /// Of those, tokens that came from other nodes.
    pub prefix_hits_fetched: u64,
    /// Blocks on the node's SSD, whether or not they are in the arena too.
    pub blocks_ssd: u32,
    /// Writes in a row that failed, if the node's SSD takes no blocks since; else 0.
    pub ssd_write_failures: u32,
    /// How often a running sequence was preempted so far.
    pub preemptions: u64,
    /// Whether a sequence of another decode node would get a slot now, if there are blocks for it:
    /// no sequence waits here.
    pub accepts_migrations: bool,
    /// The node finishes what it has and takes nothing new.
    pub draining: bool,
    /// Its engine makes no progress in its step.
    pub stalled: bool,
}

/// A node, as it introduces itself.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeInfo {
    /// Name, unique in the cluster.
    pub node: NodeId,
    /// What it does.
    pub role: NodeRole,
    /// This start of it.
    pub generation: Generation,
    /// Where its gRPC service listens, `http://host:port`.
    pub address: String,
    /// Name of the model it serves.
    pub model: String,
    /// Size of the vocabulary: token ids are below it.
    pub vocab_size: u32,
    /// Most tokens of prompt and output together.
    pub context_length: u32,
    /// Results are bitwise the same on nodes of one class.
    pub kv_class: String,
    /// Its arena.
    pub layout: KvLayout,
    /// What it can do, measured at start.
    pub profile: NodeProfile,
    /// Digest of the vocabulary that it compiles grammars against; empty: it takes none.
    pub vocabulary: String,
}

impl NodeInfo {
    /// This start of it.
    pub fn start(&self) -> NodeStart {
        NodeStart { node: self.node.clone(), generation: self.generation }
    }

    /// Most tokens of one sequence, prompt and output together, that its context and its arena
    /// hold.
    pub fn max_sequence_tokens(&self) -> u32 {
        self.layout.max_sequence_tokens(self.context_length)
    }

    /// Most tokens of a prompt that its context and its arena hold.
    pub fn max_prompt_tokens(&self) -> u32 {
        self.layout.max_prompt_tokens(self.context_length)
    }
}

/// Seed of the cost models, measured by the node at start; seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct NodeProfile {
    /// Fixed cost of a prefill step.
    pub prefill_base: f64,
    /// Per uncached prompt token.
    pub prefill_per_token: f64,
    /// Per (uncached token x attended token).
    pub prefill_per_token_pair: f64,
    /// Fixed cost of a decode step.
    pub decode_base: f64,
    /// Per sequence of a decode step.
    pub decode_per_sequence: f64,
    /// Per token of KV attended to in a decode step.
    pub decode_per_kv_token: f64,
    /// Most requests that wait in the queue.
    pub max_waiting: u32,
    /// Most sequences of one step.
    pub max_running: u32,
    /// Most tokens of one chunk of a prompt; 0 is unknown.
    pub chunk_tokens: u32,
    /// Bytes of KV per second to or from another node, if the node knows; 0 is unknown.
    pub transfer_bytes_per_s: f64,
}

/// A change of a node's prefix cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvEvent {
    /// A full block can be reused.
    Stored {
        /// Its hash.
        hash: BlockHash,
        /// The block before it; `None` for a first block.
        parent: Option<BlockHash>,
    },
    /// It no longer can.
    Removed {
        /// Its hash.
        hash: BlockHash,
    },
    /// None can.
    Cleared,
}
