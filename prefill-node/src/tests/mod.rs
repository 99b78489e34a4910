//! A prefill node among others within one process.
//!
//! Each story is a function, so that one test can run them all and list what they reached.

mod faults;
mod handoff;
mod life;
mod order;
mod prefixes;

use baton_scheduler::{LeaseEffect, PrefillEffect, TierEffect};
use baton_types::{PrefillEvent, PrefillJob};
use baton_worker::Input;
use baton_worker::testing::{TestNode, job, missing};

use crate::role::PrefillInput;

/// A job whose output is decoded there.
fn job_for(request: u128, tokens: &[u32], max_tokens: u32, decode: &TestNode) -> PrefillJob {
    PrefillJob { decode: Some(decode.target()), ..job(request, tokens, max_tokens) }
}

/// The events' names, in order.
fn names(events: &[PrefillEvent]) -> Vec<&'static str> {
    let name = |event: &PrefillEvent| match event {
        PrefillEvent::Started { .. } => "started",
        PrefillEvent::Progress { .. } => "progress",
        PrefillEvent::Fetched(_) => "fetched",
        PrefillEvent::FirstToken { .. } => "first token",
        PrefillEvent::HandedOff(_) => "handed off",
        PrefillEvent::Failed(_) => "failed",
        PrefillEvent::DecodeFailed(_) => "decode failed",
        PrefillEvent::GrantRefused(_) => "grant refused",
    };
    events.iter().map(name).collect()
}

#[tokio::test]
async fn all_scenarios_together_reach_every_effect_and_input() {
    handoff::a_job_runs_to_its_last_token().await;
    handoff::a_partial_prefill_is_computed_at_the_decode_node().await;
    handoff::a_refused_grant_is_asked_again_after_its_delay().await;
    handoff::a_push_that_fails_ends_its_request_once().await;
    handoff::a_decode_node_dies_between_grant_and_handoff().await;
    handoff::a_job_is_aborted_at_each_stage().await;
    life::a_session_that_breaks_takes_its_requests_along().await;
    life::a_drain_ends_after_the_work().await;
    life::an_operator_drains_and_undrains().await;
    life::a_snapshot_comes_in_parts().await;
    faults::a_dead_engine_thread_ends_the_node().await;
    faults::an_engine_that_stalls_is_not_ready_and_ends_the_node_if_it_stays_so().await;
    prefixes::a_prefix_is_fetched_from_another_node().await;
    prefixes::a_prefix_that_is_gone_is_computed().await;
    prefixes::a_fetch_is_cancelled_with_its_request().await;
    prefixes::a_revoked_lease_frees_its_holder_and_the_reader_computes().await;
    prefixes::blocks_go_to_the_ssd_and_come_back().await;
    prefixes::a_prefix_that_gives_no_number_is_forgotten().await;

    let effects = PrefillEffect::ALL.iter().chain(LeaseEffect::ALL).chain(TierEffect::ALL).copied();
    assert_eq!(missing("prefill", effects), [""; 0], "effects that no story reaches");
    let inputs = Input::<PrefillInput>::ALL.iter().copied();
    assert_eq!(missing("loop", inputs), [""; 0], "inputs that no story sends");
}
