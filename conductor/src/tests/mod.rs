//! The conductor in one process: its server on loopback ports, fake nodes, clients, and a clock
//! that the tests move.
//!
//! Each story is a test of its own, and all of them together reach every effect that the shell
//! carries out.

mod admission;
mod client;
mod clients;
mod failures;
mod http;
mod keyed;
mod leading;
mod memory;
mod migration;
mod node;
mod operators;
mod prefixes;
mod recovery;
pub mod seen;
mod serving;
mod shutdown;
mod world;

macro_rules! stories {
    ($($module:ident: $($story:ident),+;)+) => {
        $($(
            #[tokio::test]
            async fn $story() {
                $module::$story().await;
            }
        )+)+

        #[tokio::test]
        async fn all_scenarios_together_reach_every_effect() {
            $($( Box::pin($module::$story()).await; )+)+
            seen::check_all();
        }
    };
}

stories! {
    serving:
        request_streams_to_its_end_over_grpc,
        first_token_smoothing_keeps_the_first_token_back,
        long_prompt_gets_partial_prefill_at_its_decode_node,
        http_completion_is_served_streamed_and_whole,
        single_token_request_gets_no_decode_node,
        stop_string_ends_request_and_aborts_it_at_both_nodes,
        request_with_n_answers_places_others_once_the_first_decodes,
        prompt_logprobs_are_sent_once,
        request_without_handoff_report_ends_after_two_seconds,
        prompt_without_prefill_node_is_computed_at_decode_node,
        step_and_transfer_reports_are_kept_for_operators;
    recovery:
        decode_node_death_neither_loses_nor_repeats_a_token,
        prompt_of_dead_prefill_node_is_computed_at_another,
        silent_node_is_suspected_after_two_seconds_and_lost_after_ten,
        request_of_silent_node_is_placed_again_once_another_joins,
        silent_node_without_replacement_keeps_its_request_until_lost,
        request_fails_after_two_nodes_died_with_it,
        request_outlives_sessions_that_were_replaced,
        request_of_stalled_engine_is_placed_again_once_another_node_joins,
        restarted_node_replaces_its_earlier_generation,
        report_of_earlier_generation_is_ignored,
        node_with_full_command_queue_is_lost,
        node_that_does_not_greet_is_dialled_again_after_five_seconds,
        request_without_decode_node_fails_after_ten_seconds,
        request_without_decode_node_continues_if_one_joins_in_time,
        requests_of_lost_node_are_placed_again_32_at_a_time,
        drained_node_that_leaves_fails_no_request;
    failures:
        job_that_a_node_refuses_is_placed_again,
        job_for_full_session_goes_to_another_node,
        failure_in_mid_stream_is_reported_over_http,
        internal_failure_of_a_node_ends_the_request,
        prefix_that_spoils_a_request_is_forgotten_at_every_node,
        decode_node_that_fails_is_replaced,
        contradicted_token_ends_the_request,
        request_without_progress_is_ended,
        request_past_its_timeout_is_ended,
        unreadable_node_message_is_skipped_or_fails_its_request,
        node_that_says_extreme_numbers_disturbs_no_other,
        events_of_other_nodes_and_requests_are_ignored,
        node_that_answers_by_another_name_gets_no_session;
    admission:
        request_without_a_ready_node_is_refused_at_once,
        full_cluster_refuses_request_without_objective,
        queued_request_is_placed_once_there_is_room,
        queued_request_is_refused_at_its_deadline,
        conductor_at_max_requests_refuses_another;
    keyed:
        repeated_idempotency_key_attaches_to_running_request,
        keyed_request_continues_for_client_with_longer_timeout,
        idempotency_key_of_another_request_is_refused,
        keyed_answer_is_kept_ten_seconds_after_its_client_left,
        keyed_request_is_ended_ten_seconds_after_its_client_left,
        keyed_request_is_served_anew_after_its_first_try_failed,
        repeated_http_idempotency_key_attaches_to_running_request,
        seed_is_derived_from_idempotency_key;
    clients:
        queued_request_is_dropped_when_its_client_leaves,
        request_is_aborted_at_both_nodes_when_its_client_leaves,
        http_request_is_aborted_at_both_nodes_when_its_client_leaves,
        recovering_request_is_dropped_when_its_client_leaves,
        abort_ends_the_request_of_another_stream,
        request_with_too_many_unread_bytes_is_ended,
        unread_request_is_ended_at_stall_timeout;
    http:
        http_errors_name_methods_places_and_sizes,
        prompt_beyond_the_context_is_refused_in_the_words_of_each_api,
        part_of_a_request_that_is_left_out_is_told_in_a_header,
        web_page_that_is_not_named_is_refused_before_anything_runs;
    migration:
        sequence_migrates_to_another_decode_node,
        refused_migration_leaves_sequence_at_its_node,
        migrating_sequence_continues_at_target_if_source_dies,
        refused_grant_reselects_another_decode_node;
    prefixes:
        prefix_is_fetched_from_holder_or_computed_if_the_fetch_fails,
        gap_in_kv_events_requests_a_new_snapshot;
    leading:
        request_of_a_follower_is_placed_by_the_leader,
        refusal_by_leader_reaches_client_of_follower,
        follower_explains_placement_by_state_of_leader,
        leader_reselects_and_migrates_for_requests_of_follower,
        follower_refuses_request_placed_at_a_node_it_has_lost,
        request_outlives_its_leader,
        new_leader_learns_running_requests_from_followers,
        request_is_refused_after_ten_seconds_without_a_leader,
        placements_of_lost_follower_are_released_after_ten_seconds,
        conductor_that_does_not_lead_refuses_followers,
        conductor_without_leader_is_not_ready_after_five_seconds,
        leader_places_again_once_etcd_denies_what_a_node_tells_of,
        leader_that_hears_of_a_later_leader_places_nothing_until_it_follows,
        term_that_a_node_told_of_ends_with_its_session,
        single_conductor_places_whatever_terms_nodes_tell_of,
        term_in_a_greeting_is_not_heard,
        leader_that_greets_with_another_term_than_its_key_has_is_not_followed,
        leader_that_does_not_greet_is_left_after_two_seconds,
        later_stream_of_a_follower_ends_the_earlier_one,
        attempts_that_a_stranger_declares_make_no_node_full;
    operators:
        operators_drain_and_undrain_a_node,
        operators_see_nodes_loads_and_caches,
        operators_see_nodes_that_cannot_join,
        explain_and_recall_report_placement_and_end_of_request,
        run_time_settings_change_while_conductor_serves,
        health_readiness_and_metrics_follow_the_nodes;
    shutdown:
        conductor_is_not_ready_then_drains_then_is_down,
        queued_request_is_refused_when_drain_begins,
        failed_task_takes_the_conductor_down,
        second_signal_ends_running_requests,
        end_of_grace_period_ends_running_requests;
}
