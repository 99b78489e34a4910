//! Ids, units and plain data that every layer of Baton shares. No tokio, no IO, no clock.
//!
//! **Invariant**: a value of these types has been checked. [`SamplingParams::validate`] and
//! [`KvLayout::check_compatible`] are the only places where a request's parameters and two nodes'
//! layouts are judged.

mod error_chain;
mod error_kind;
mod id;
mod kv_layout;
mod leader;
mod message;
mod named;
mod quantile;
mod queue_ordering;
mod random;
mod report;
mod sampling;
mod slo;
mod transfer;

pub use error_chain::{error_chain, innermost, with_sources};
pub use error_kind::ErrorKind;
pub use id::{
    Attempt, BlockHash, BlockId, ConductorId, Generation, GrantId, ModelFingerprint, NodeId, NodeRole, NodeStart,
    ParseIdError, RequestId, RequestIdPrefix, TokenId,
};
pub use kv_layout::{KvDtype, KvLayout, LayoutMismatch, UnknownKvDtype};
pub use leader::{
    Assignment, Declared, DeclaredPrefill, FromLeader, LedgerEntry, MigrationAssignment, MigrationQuestion,
    PlaceQuestion, Placement, PrefixFetch, Question, Refusal, ToLeader,
};
pub use message::{
    DecodeEvent, DecodeTarget, FetchReport, FetchSource, GrantReply, GrantRequest, Handoff, KvEvent, LeaseRelease,
    LeaseReply, LeaseRequest, Load, NodeInfo, NodeProfile, PrefillEvent, PrefillJob, Refused, RequestKey, Reselect,
    StepProgress,
};
pub use quantile::quantile;
pub use queue_ordering::QueueOrdering;
pub use random::{Random, mix};
pub use report::{FinishReason, KvTransfer, Timeline, TokenLogprobs, TopLogprob, Usage};
pub use sampling::{
    InvalidSampling, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS,
    SamplingDefaults, SamplingParams,
};
pub use slo::{Objective, Slo, Tbt, Ttft};
pub use transfer::{TransferAddress, TransferPath, TransferReport};
