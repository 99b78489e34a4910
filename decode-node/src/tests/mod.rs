//! A decode node among others within one process.
//!
//! Each story is a function, so that one test can run them all and list what they reached.

mod grants;
mod migration;
mod prompts;

use baton_scheduler::{DecodeEffect, LeaseEffect, TierEffect};
use baton_types::PrefillJob;
use baton_worker::testing::{TestNode, job, missing};

/// A job whose output is decoded there.
fn job_for(request: u128, tokens: &[u32], max_tokens: u32, decode: &TestNode) -> PrefillJob {
    PrefillJob { decode: Some(decode.target()), ..job(request, tokens, max_tokens) }
}

#[tokio::test]
async fn all_scenarios_together_reach_every_effect() {
    grants::a_grant_is_refused_where_room_never_comes().await;
    grants::a_grant_whose_bytes_do_not_come_ends_by_itself().await;
    grants::a_session_that_breaks_frees_its_sequences().await;
    prompts::a_prompt_is_computed_and_answered().await;
    prompts::a_sequence_is_aborted_at_each_stage().await;
    prompts::blocks_go_to_the_ssd_and_come_back().await;
    prompts::a_prefix_that_gives_no_number_is_forgotten().await;
    prompts::a_dead_engine_thread_ends_the_node().await;
    migration::sequence_migrates_to_another_node().await;
    migration::migration_without_its_blocks_is_computed().await;
    migration::migration_is_cancelled().await;
    migration::migration_without_room_is_refused().await;

    let effects = DecodeEffect::ALL.iter().chain(LeaseEffect::ALL).chain(TierEffect::ALL).copied();
    assert_eq!(missing("decode", effects), [""; 0], "effects that no story reaches");
}
