//! What the loop and the shell ask of a core of either role.

use std::time::Instant;

use baton_scheduler::{DecodeCore, IntegrityError, KvEventBatch, PrefillCore, StepId, StepOutput, TieredCore};
use baton_types::{
    BlockHash, ConductorId, LeaseRelease, LeaseRequest, NodeStart, PrefillJob, Refused, RequestKey, TokenId,
};

/// Declares the trait, and implements it by the methods of the same names that both cores have.
macro_rules! node_core {
    ($($method:ident($($argument:ident: $type:ty),*) $(-> $output:ty)?;)*) => {
        /// A core of either role. Each method is the core's own of that name.
        pub trait NodeCore: TieredCore + Send + 'static {
            /// As `output` of [`PrefillCore`] and [`DecodeCore`].
            fn output(&self, key: RequestKey) -> Option<&[TokenId]>;
            $(#[doc = concat!("As `", stringify!($method), "` of [`PrefillCore`] and [`DecodeCore`].")]
            fn $method(&mut self, $($argument: $type),*) $(-> $output)?;)*
        }

        impl NodeCore for PrefillCore {
            fn output(&self, key: RequestKey) -> Option<&[TokenId]> { PrefillCore::output(self, key) }
            $(fn $method(&mut self, $($argument: $type),*) $(-> $output)? { PrefillCore::$method(self, $($argument),*) })*
        }

        impl NodeCore for DecodeCore {
            fn output(&self, key: RequestKey) -> Option<&[TokenId]> { DecodeCore::output(self, key) }
            $(fn $method(&mut self, $($argument: $type),*) $(-> $output)? { DecodeCore::$method(self, $($argument),*) })*
        }
    };
}

node_core! {
    on_submit(now: Instant, job: PrefillJob);
    on_conductor_lost(now: Instant, conductor: ConductorId);
    on_node_lost(now: Instant, lost: &NodeStart);
    on_drain(now: Instant);
    on_undrain(now: Instant);
    clear_cache();
    forget_blocks(hashes: &[BlockHash]);
    on_lease_request(now: Instant, request: LeaseRequest);
    on_release_lease(now: Instant, release: LeaseRelease);
    on_step_done(now: Instant, step: StepId, result: Result<Vec<StepOutput>, Refused>);
    on_mask_ready(now: Instant, key: RequestKey);
    on_wakeup(now: Instant);
    next_wakeup() -> Option<Instant>;
    drain_kv_events(max: usize) -> Option<KvEventBatch>;
    kv_snapshot() -> KvEventBatch;
    check_integrity() -> Result<(), IntegrityError>;
    is_idle() -> bool;
}
