//! The conductor in one process: its server on loopback ports, fake nodes, clients, and a clock
//! that the tests move.
//!
//! Each story is a test of its own, and all of them together reach every effect that the shell
//! carries out.

mod admission;
mod client;
mod clients;
mod failures;
mod keyed;
mod leading;
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
        async fn the_stories_reach_every_effect() {
            $($( Box::pin($module::$story()).await; )+)+
            seen::check_all();
        }
    };
}

stories! {
    serving:
        request_streams_to_its_end_over_grpc,
        first_token_is_kept_back_to_even_the_gaps_out,
        decode_node_computes_the_last_part_of_a_long_prompt,
        completion_streams_and_is_given_whole_over_http,
        one_token_needs_no_decode_node,
        stop_string_ends_the_answer_and_both_nodes_forget_it,
        several_answers_begin_once_the_first_decodes,
        log_probabilities_of_the_prompt_come_once,
        answer_ends_though_the_report_of_the_handoff_never_comes,
        prompt_goes_to_a_decode_node_while_no_prefill_node_is_there,
        reports_of_steps_and_transfers_are_taken_in;
    recovery:
        decode_node_dies_and_each_token_comes_once,
        prefill_node_dies_and_another_computes_the_prompt,
        silent_node_is_suspected_after_two_seconds_and_lost_after_ten,
        silent_node_gives_its_request_up_once_another_node_is_there,
        silent_node_without_a_replacement_keeps_its_request_until_it_is_lost,
        request_ends_if_two_nodes_die_with_it,
        stalled_engine_gives_its_request_up_once_another_node_is_there,
        node_that_starts_again_takes_over_from_its_earlier_start,
        report_of_an_earlier_start_says_nothing_of_the_later_one,
        node_that_cannot_keep_up_with_its_commands_is_lost,
        node_that_does_not_greet_is_dialled_again_after_five_seconds,
        request_without_a_decode_node_waits_ten_seconds,
        request_goes_on_if_a_decode_node_comes_in_time,
        many_requests_of_a_lost_node_go_on_elsewhere,
        drained_node_that_leaves_fails_no_request;
    failures:
        job_that_a_node_refuses_is_placed_again,
        job_that_finds_no_room_in_a_session_goes_to_another_node,
        failure_in_mid_stream_is_told_over_http,
        internal_failure_of_a_node_ends_the_request,
        decode_node_that_fails_is_replaced,
        contradicted_token_ends_the_request,
        request_without_progress_is_ended,
        request_that_takes_too_long_is_ended,
        message_that_cannot_be_read_is_skipped,
        events_of_other_nodes_and_requests_are_ignored,
        node_that_answers_as_another_one_gets_no_session;
    admission:
        request_without_a_ready_node_is_refused_at_once,
        full_cluster_refuses_what_has_no_objective,
        queued_request_is_placed_once_there_is_room,
        queued_request_is_refused_at_its_deadline,
        conductor_takes_so_many_requests_at_once;
    keyed:
        request_that_is_asked_for_again_gets_the_same_answer,
        request_goes_on_for_a_client_that_waits_longer_than_the_first,
        key_of_another_request_is_refused,
        answer_is_kept_for_a_while_after_its_reader_left,
        request_that_no_client_reads_is_ended,
        request_whose_first_try_failed_is_served_anew,
        request_over_http_is_asked_for_again,
        seed_follows_from_the_key;
    clients:
        client_that_leaves_while_queued_is_forgotten,
        client_that_leaves_has_both_nodes_forget_its_request,
        client_that_leaves_over_http_has_both_nodes_forget_its_request,
        client_that_leaves_during_recovery_is_forgotten,
        abort_ends_the_request_of_another_stream,
        client_that_leaves_too_much_unread_is_ended,
        client_that_reads_nothing_for_long_is_ended;
    migration:
        offered_sequence_goes_on_at_another_node,
        node_that_refuses_a_sequence_leaves_it_where_it_is,
        sequence_goes_on_at_the_asked_node_if_its_own_dies,
        refused_grant_is_reselected;
    prefixes:
        prefix_is_fetched_and_a_failed_fetch_is_computed,
        hot_prefix_is_replicated_and_an_overdue_replication_given_up,
        missed_prefix_events_are_asked_for_again;
    leading:
        request_of_a_follower_is_placed_by_the_leader,
        refusal_of_the_leader_is_the_clients,
        follower_explains_by_the_books_of_the_leader,
        grants_and_migrations_of_a_follower_are_the_leaders,
        node_that_left_since_it_was_chosen_is_replaced,
        request_outlives_its_leader,
        new_leader_knows_what_others_have,
        request_is_refused_after_ten_seconds_without_a_leader,
        what_a_conductor_had_is_given_back_if_it_stays_away,
        conductor_that_does_not_lead_says_so,
        conductor_that_has_long_had_no_leader_is_not_ready,
        leader_that_another_has_followed_steps_down,
        conductor_that_is_alone_goes_on_in_the_term_that_nodes_have_heard_of,
        later_stream_of_a_follower_ends_the_earlier_one;
    operators:
        operators_drain_and_undrain_a_node,
        operators_see_nodes_loads_and_caches,
        operators_are_told_why_and_what_became_of_a_request,
        settings_change_while_it_serves,
        health_and_metrics_are_told;
    shutdown:
        conductor_is_not_ready_then_drains_then_is_down,
        queued_request_is_sent_away_when_the_drain_begins,
        failed_task_takes_the_conductor_down,
        second_signal_ends_what_is_left,
        grace_period_ends_what_is_left;
}
