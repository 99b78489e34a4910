//! Everything that decides: the loops of the prefill and decode nodes, and the conductor's cost
//! models, ledger and placement.
//!
//! Cores are plain structs: `on_<event>(&mut self, now, ..)` takes in what happened,
//! `poll_effect()` gives what to do about it, `next_wakeup()` says when `on_wakeup(now)` is due. No
//! tokio, no clock, no randomness but what is passed in. The same core runs in unit tests, in
//! simulation and in production, and the same events give the same effects.
//!
//! **Invariants**: A request that a core accepted ends exactly once. Blocks are given back only
//! when neither the engine nor the transfer engine touches them. Every queue is bounded, and what
//! is beyond a bound is refused with the numbers.

// Tests read the clock and wait.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod admission;
mod backlog;
mod backoff;
mod cluster;
mod config;
mod cost;
mod deadlines;
mod decode;
mod hot_prefixes;
mod leader;
mod lease;
mod ledger;
mod load;
mod placement;
mod prefill;
mod queue;
mod request;
mod step;
#[cfg(test)]
mod tests;
mod tier;
mod turns;

pub use admission::{
    AdmissionKind, AdmissionPolicy, AdmitAll, Assessment, DecodeLoad, Early, Excess, Relief, UnknownAdmission,
    ValueDensity,
};
pub use cluster::{
    Cluster, ClusterConfig, ClusterNode, DecodeExplanation, Explanation, LeftOut, MigrationChoice, NodeForecast,
    NodeState, Policies, PrefillExplanation, PromptAtDecode, PromptsAtDecode, SequenceLimits, Verdict,
};
pub use config::{
    DecodeConfig, InvalidConfig, KV_EVENTS_PER_MESSAGE, LAYER_DEADLINE, LEASE_DEADLINE, MAX_PREFIX_WAIT_PER_STEP,
    MAX_STORES, MAX_WAITING, ModelConfig, PrefillConfig, REPORT_INTERVAL, TICK_INTERVAL, prefix_patience,
};
pub use cost::{ClassCost, DecodeCost, OutputLength, PrefillCost, Residuals, SpeedFactor, TransferCost};
pub use decode::{DecodeCore, DecodeEffect};
pub use hot_prefixes::{HotPrefix, HotPrefixes};
pub use leader::{
    Answer, Candidacy, Candidate, Decided, DecisionReasons, Desk, DeskEffect, Eligibility, Followers, Following,
    LeaderKey, LeaderKeyState, Leadership, LinkId, OtherTerm, Placed, StaleTerm, StreamId, TermFence,
};
pub use lease::LeaseEffect;
pub use ledger::NodeStart;
pub use placement::{
    CacheAware, Choice, DecodeCandidate, LoadBalance, MinTotalDelay, MinTotalDelayConfig, Placement, PlacementKind,
    PlacementPolicy, PlacementRequest, PrefillCandidate, PrefillPlan, PrefixFetch, Refusal, RoundRobin, UnknownPolicy,
    least, lightest_decode, predicted_ttft,
};
pub use prefill::{FetchedBytes, PrefillCore, PrefillEffect, PushId, PushReport, PushSpan};
pub use queue::{QueueItem, queue_order};
pub use request::{
    Assignment, Departure, LedgerEntry, MigrationAssignment, OutputToken, RequestCore, RequestEffect, RequestError,
    RequestEvent, RequestJob, RequestLimits, RequestNote,
};
pub use step::{LogitsWanted, StepId, StepOutput, StepPlan, StepSequence, StepSlice};
pub use tier::{TierEffect, TieredCore};
pub use turns::Turns;

pub use baton_kv_cache::{Applied, EvictionKind, IntegrityError, KvEventBatch, NodeSlot, PrefixIndex, PrefixMatches};
pub use baton_types::{Declared, DeclaredPrefill, RequestKey, named};
