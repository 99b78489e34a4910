//! Bounds of a node's core.

use std::time::Duration;

use baton_kv_cache::EvictionKind;
use baton_types::{ErrorKind, Generation, KvLayout, NodeId};

/// A bound makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, but must be {expected}")]
pub struct InvalidConfig {
    /// Name of the field.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// What is taken.
    pub expected: &'static str,
}

impl InvalidConfig {
    /// Always [`ErrorKind::Invalid`].
    pub const fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// How often a node reports its load, at least.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(200);
/// How often a conductor hears of a prompt that is being computed.
pub(crate) const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// How often a conductor looks who has reported.
pub const TICK_INTERVAL: Duration = Duration::from_millis(500);
/// Requests that wait at a node at once; one more is refused.
pub const MAX_WAITING: u32 = 256;
/// Changes of a node's prefix cache in one message.
pub const KV_EVENTS_PER_MESSAGE: usize = 4096;
/// Blocks that a node with an SSD writes to it at once.
pub const MAX_STORES: usize = 8;
/// A holder says within this time whether it gives a lease, or it stands still.
pub const LEASE_DEADLINE: Duration = Duration::from_secs(2);
/// One layer of a prefix takes no longer than this once it is its turn. The request waits for it,
/// and the engine for a part of this time.
pub const LAYER_DEADLINE: Duration = Duration::from_secs(2);
/// Readers of a node's cache at once.
const MAX_LEASES: usize = 256;
/// A reader gives up before that, so that a lease is not ended under it.
const LEASE_TTL: Duration = Duration::from_secs(40);

fn at_least_one(field: &'static str, value: usize) -> Result<(), InvalidConfig> {
    if value > 0 { Ok(()) } else { Err(InvalidConfig { field, value: "0".into(), expected: "at least 1" }) }
}

/// What both kinds of node have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// The arena.
    pub layout: KvLayout,
    /// Most tokens of prompt and output together.
    pub context_length: u32,
    /// Token ids are below it.
    pub vocab_size: u32,
}

impl ModelConfig {
    pub(crate) fn block_tokens(&self) -> usize {
        self.layout.block_tokens as usize
    }

    /// Bytes of all layers of `blocks` blocks.
    pub(crate) fn bytes(&self, blocks: usize) -> u64 {
        (self.layout.block_bytes_all_layers() * blocks) as u64
    }

    fn validate(&self) -> Result<(), InvalidConfig> {
        at_least_one("block_tokens", self.block_tokens())?;
        at_least_one("num_blocks", self.layout.num_blocks as usize)?;
        at_least_one("num_layers", self.layout.num_layers as usize)?;
        at_least_one("vocab_size", self.vocab_size as usize)?;
        if self.context_length < 2 {
            let value = self.context_length.to_string();
            return Err(InvalidConfig { field: "context_length", value, expected: "at least 2" });
        }
        Ok(())
    }
}

/// How long a prefill step waits for all of its prefixes together. All of the step waits with it.
pub const MAX_PREFIX_WAIT_PER_STEP: Duration = Duration::from_millis(500);
/// How long it waits for one layer at least: its fetch may be late on a busy machine.
const MIN_PREFIX_PATIENCE: Duration = Duration::from_millis(100);
/// How many times as long as its layers took so far the next one may take.
const PREFIX_PATIENCE: u32 = 8;

/// How long a step waits for the next layer of a prefix whose layers took so long each.
pub fn prefix_patience(per_layer: Duration) -> Duration {
    (per_layer * PREFIX_PATIENCE).max(MIN_PREFIX_PATIENCE)
}

/// A chunk that ends a prompt is filled up with parts of others to this part of the largest one.
pub(crate) const MIN_CHUNK_PART: usize = 4;

/// Bounds of a prefill node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillConfig {
    /// This node: the writer that grants name.
    pub node: NodeId,
    /// This start of it.
    pub generation: Generation,
    /// Model and arena.
    pub model: ModelConfig,
    /// Most tokens of one chunk, a multiple of the block's tokens.
    pub token_budget: usize,
    /// A chunk that ends a prompt takes in others until it has so many tokens. More would delay the
    /// first token, and fewer are not worth the fixed cost of a chunk.
    pub min_chunk_tokens: usize,
    /// Most sequences of one chunk.
    pub max_sequences_per_chunk: usize,
    /// Most requests that wait; one more is refused.
    pub max_waiting: usize,
    /// Most requests whose blocks are in use here, from the first chunk to the end of their
    /// handoff.
    pub max_active: usize,
    /// Most batches of one request in the transfer engine.
    pub max_inflight_pushes: usize,
    /// Most spans of one batch.
    pub max_spans_per_push: usize,
    /// Longest wait for the decode node's grant.
    pub grant_timeout: Duration,
    /// Longest wait for the decode node's answer to the handoff.
    pub handoff_timeout: Duration,
    /// Most leases of other nodes at once.
    pub max_leases: usize,
    /// Longest that a lease lasts.
    pub lease_ttl: Duration,
    /// Most blocks that are being written to the SSD at once; 0 if there is none.
    pub max_stores: usize,
    /// The order in which cached blocks are evicted.
    pub eviction: EvictionKind,
    /// Prefix events kept until they are drained.
    pub max_kv_events: usize,
}

impl PrefillConfig {
    /// Ordinary bounds: chunks of 512 tokens (or one block, if a block is larger).
    pub fn new(node: NodeId, generation: Generation, model: ModelConfig) -> Self {
        let config = Self {
            node,
            generation,
            model,
            token_budget: 0,
            min_chunk_tokens: 0,
            max_sequences_per_chunk: 64,
            max_waiting: MAX_WAITING as usize,
            max_active: 256,
            max_inflight_pushes: 4,
            max_spans_per_push: 4096,
            grant_timeout: Duration::from_secs(60),
            handoff_timeout: Duration::from_secs(15),
            max_leases: MAX_LEASES,
            lease_ttl: LEASE_TTL,
            max_stores: 0,
            eviction: EvictionKind::default(),
            max_kv_events: 65_536,
        };
        config.with_chunk_tokens(512)
    }

    /// The same with chunks of so many tokens, or the next whole block.
    #[must_use]
    pub fn with_chunk_tokens(mut self, tokens: u32) -> Self {
        self.token_budget = (tokens.max(1) as usize).next_multiple_of(self.model.block_tokens().max(1));
        self.min_chunk_tokens = self.token_budget / MIN_CHUNK_PART;
        self
    }

    /// Checks every bound.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        self.model.validate()?;
        if self.token_budget == 0 || !self.token_budget.is_multiple_of(self.model.block_tokens()) {
            let value = self.token_budget.to_string();
            return Err(InvalidConfig { field: "token_budget", value, expected: "a multiple of the block's tokens" });
        }
        at_least_one("max_sequences_per_chunk", self.max_sequences_per_chunk)?;
        at_least_one("max_waiting", self.max_waiting)?;
        at_least_one("max_active", self.max_active)?;
        at_least_one("max_inflight_pushes", self.max_inflight_pushes)?;
        at_least_one("max_spans_per_push", self.max_spans_per_push)
    }
}

/// Bounds of a decode node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeConfig {
    /// Model and arena.
    pub model: ModelConfig,
    /// Most sequences of one step.
    pub max_running: usize,
    /// Most sequences that have a grant or are handed off, but do not run yet.
    pub max_waiting: usize,
    /// Blocks of the answer that a grant promises room for, beside the prompt's; what grows beyond
    /// them may make the youngest sequences wait.
    pub growth_blocks: usize,
    /// How long a grant waits for room before it is refused.
    pub grant_wait: Duration,
    /// How often a sequence that waits for room is offered to other decode nodes; if the node is on
    /// its way out, all of them.
    pub migration_request_interval: Duration,
    /// Most tokens of prompts, and of sequences that were preempted, in one step of a mixed batch.
    pub prompt_budget: usize,
    /// A grant ends when neither bytes nor the handoff came for this long.
    pub grant_ttl: Duration,
    /// Most leases of other nodes at once.
    pub max_leases: usize,
    /// Longest that a lease lasts.
    pub lease_ttl: Duration,
    /// Most blocks that are being written to the SSD at once; 0 if there is none.
    pub max_stores: usize,
    /// Requests remembered after their end, so that what comes late for them is refused.
    pub max_tombstones: usize,
    /// The order in which cached blocks are evicted.
    pub eviction: EvictionKind,
    /// Prefix events kept until they are drained.
    pub max_kv_events: usize,
}

impl DecodeConfig {
    /// Ordinary bounds.
    pub fn new(model: ModelConfig) -> Self {
        Self {
            model,
            max_running: 64,
            max_waiting: MAX_WAITING as usize,
            growth_blocks: 4,
            grant_wait: Duration::from_secs(4),
            migration_request_interval: Duration::from_millis(500),
            prompt_budget: 64,
            grant_ttl: Duration::from_secs(60),
            max_leases: MAX_LEASES,
            lease_ttl: LEASE_TTL,
            max_stores: 0,
            max_tombstones: 4096,
            eviction: EvictionKind::default(),
            max_kv_events: 65_536,
        }
    }

    /// Checks every bound.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        self.model.validate()?;
        at_least_one("max_running", self.max_running)?;
        at_least_one("max_waiting", self.max_waiting)?;
        at_least_one("prompt_budget", self.prompt_budget)?;
        at_least_one("max_tombstones", self.max_tombstones)
    }
}
