//! The way of a prompt to its decode node.

use std::time::Duration;

use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_types::{DecodeEvent, ErrorKind, PrefillEvent, PrefillJob, Reselect};
use baton_worker::config::Settings;
use baton_worker::testing::{World, counted, decode_events, job, key, prefill_event, prompt, settings, until};

use super::{job_for, names};
use crate::start;

pub(super) async fn a_job_runs_to_its_last_token() {
    let world = World::default();
    let prefill = start(&world, settings("p0")).await;
    let decode = baton_decode_node::start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    at_prefill.submit(&job_for(1, &prompt(1, 40), 6, &decode)).await;
    let events = at_prefill.prefill_to_end(key(1)).await;
    assert_eq!(names(&events), ["started", "first token", "handed off"]);
    let Some(PrefillEvent::HandedOff(transfer)) = events.last() else { panic!("{events:?}") };
    let blocks = 3 * decode.info().layout.block_bytes_all_layers() as u64;
    assert_eq!((transfer.bytes, transfer.transport.as_str()), (blocks, "tcp"));
    assert_eq!(at_decode.tokens(key(1)).await.len(), 5, "the first one came from the prefill node");
    // The same prompt again: both nodes have its full blocks.
    at_prefill.submit(&job_for(2, &prompt(1, 40), 6, &decode)).await;
    let events = at_prefill.prefill_to_end(key(2)).await;
    assert!(matches!(events[0], PrefillEvent::Started { cached_tokens: 32, .. }), "{events:?}");
    assert_eq!(at_decode.tokens(key(2)).await.len(), 5);
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn prefill_job_is_handed_off_and_repeated_prompt_hits_the_cache() {
    a_job_runs_to_its_last_token().await;
}

pub(super) async fn a_partial_prefill_is_computed_at_the_decode_node() {
    let world = World::default();
    let prefill = start(&world, settings("p0")).await;
    let decode = baton_decode_node::start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    at_prefill.submit(&job_for(1, &prompt(1, 50), 4, &decode)).await;
    let first = at_prefill.prefill_to_end(key(1)).await.into_iter().find_map(|event| match event {
        PrefillEvent::FirstToken { token, .. } => Some(token),
        _ => None,
    });
    let mut whole = at_decode.tokens(key(1)).await;
    whole.insert(0, first.expect("a first token"));

    // Nothing of it is cached if the salt is another.
    let job =
        PrefillJob { partial_prefill_tokens: 18, salt: b"tail"[..].into(), ..job_for(2, &prompt(1, 50), 4, &decode) };
    at_prefill.submit(&job).await;
    let events = at_prefill.prefill_to_end(key(2)).await;
    assert_eq!(names(&events), ["started", "handed off"], "the decode node draws the first token");
    let mut sliced_rows = 0;
    let mut tokens = Vec::new();
    at_decode
        .find(|event| {
            if let Event::Step(step) = &event {
                sliced_rows = sliced_rows.max(step.slice.map_or(0, |slice| slice.rows));
            }
            let mut is_over = None;
            for (of, event) in decode_events(event)? {
                let DecodeEvent::Token { token, finish, .. } = event else { panic!("{of:?} failed") };
                tokens.push(token);
                is_over = finish;
            }
            is_over
        })
        .await;
    assert_eq!((sliced_rows, tokens), (18, whole));
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn partial_prefill_at_decode_node_gives_same_tokens() {
    a_partial_prefill_is_computed_at_the_decode_node().await;
}

pub(super) async fn a_refused_grant_is_asked_again_after_its_delay() {
    let world = World::default();
    let small = Settings { cache_blocks: 8, ..settings("d0") };
    let prefill = start(&world, settings("p0")).await;
    let decode = baton_decode_node::start(&world, small).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    // The first one takes the decode node's room for as long as its engine stands still.
    decode.hold.hold_after(0);
    at_prefill.submit(&job_for(1, &prompt(1, 64), 40, &decode)).await;
    assert_eq!(names(&at_prefill.prefill_to_end(key(1)).await), ["started", "first token", "handed off"]);
    at_prefill.submit(&job_for(2, &prompt(2, 64), 3, &decode)).await;
    decode.load_is("one that waits for room", |load| load.waiting == 1).await;
    world.clock.pass(Duration::from_secs(4)).await;
    let refused = loop {
        if let PrefillEvent::GrantRefused(refused) = at_prefill.prefill(key(2)).await {
            break refused;
        }
    };
    assert_eq!(refused.kind, ErrorKind::Overloaded, "{refused}");
    let reselect = Reselect { key: key(2), decode: decode.target() };
    at_prefill.send(Command::Reselect((&reselect).into())).await;
    // The delay is waited for, on the nodes' clock.
    world.clock.pass(Duration::from_millis(100)).await;
    decode.hold.release();
    assert_eq!(names(&at_prefill.prefill_to_end(key(2)).await).last(), Some(&"handed off"));
    assert_eq!(at_decode.tokens(key(2)).await.len(), 2);
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn refused_grant_is_requested_again_after_its_delay() {
    a_refused_grant_is_asked_again_after_its_delay().await;
}

pub(super) async fn a_push_that_fails_ends_its_request_once() {
    let world = World::faulty();
    let prefill = start(&world, settings("p0")).await;
    let decode = baton_decode_node::start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    let network = world.network.clone().expect("a faulty one");
    network.set_faults(|faults| faults.fail_after_bytes = Some(64));
    // Several chunks, so that more pushes are out when the first one fails.
    at_prefill.submit(&job_for(1, &prompt(1, 600), 4, &decode)).await;
    let events = at_prefill.prefill_to_end(key(1)).await;
    assert_eq!(names(&events).last(), Some(&"decode failed"), "{events:?}");
    decode.load_is("a grant that is given back", |load| load.waiting == 0 && load.running == 0).await;
    let after = at_prefill.told().await.into_iter().filter_map(prefill_event).count();
    assert_eq!(after, 0, "a request fails once");
    assert!(!at_decode.told().await.iter().any(|event| matches!(event, Event::Prefill(_))));
    // The next attempt is a request like any other.
    at_prefill.submit(&job_for(2, &prompt(1, 600), 4, &decode)).await;
    assert_eq!(names(&at_prefill.prefill_to_end(key(2)).await).last(), Some(&"handed off"));
    assert_eq!(at_decode.tokens(key(2)).await.len(), 3);
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn failed_push_fails_request_once_and_releases_its_grant() {
    a_push_that_fails_ends_its_request_once().await;
}

pub(super) async fn a_decode_node_dies_between_grant_and_handoff() {
    let world = World::faulty();
    let chunks = Settings { chunk_tokens: 16, ..settings("p0") };
    let prefill = start(&world, chunks).await;
    let decode = baton_decode_node::start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let received = || counted("baton_decode_received_bytes_total");
    let before = received();
    prefill.hold.hold_after(1);
    at_prefill.submit(&job_for(1, &prompt(1, 48), 4, &decode)).await;
    prefill.hold.is_held().await;
    // The first chunk has been pushed, so there is a grant; the last one is to come.
    until("a push", async || (received() > before).then_some(())).await;
    decode.dies().await;
    prefill.hold.release();
    let events = at_prefill.prefill_to_end(key(1)).await;
    assert_eq!(names(&events).last(), Some(&"decode failed"), "{events:?}");
    assert_eq!(at_prefill.told().await.into_iter().filter_map(prefill_event).count(), 0);
    prefill.ends().await;
}

#[tokio::test]
async fn decode_node_death_between_grant_and_handoff_fails_request() {
    a_decode_node_dies_between_grant_and_handoff().await;
}

pub(super) async fn a_job_is_aborted_at_each_stage() {
    let stages = ["queued", "computing", "pushing", "handing_off"];
    let aborted = || stages.map(|stage| counted(&format!("baton_prefill_aborts_total{{stage=\"{stage}\"}}")));
    let before = aborted();
    let world = World::faulty();
    let chunks = Settings { chunk_tokens: 16, ..settings("p0") };
    let prefill = start(&world, chunks).await;
    let decode = baton_decode_node::start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let _at_decode = decode.session(7).await;
    prefill.hold.hold_after(0);
    // It needs no decode node.
    at_prefill.submit(&job(1, &prompt(1, 40), 1)).await;
    at_prefill.submit(&job_for(2, &prompt(2, 40), 4, &decode)).await;
    prefill.hold.is_held().await;
    prefill.load_is("one that waits", |load| load.waiting == 1).await;
    at_prefill.abort(key(2)).await;
    at_prefill.abort(key(1)).await;
    at_prefill.told().await;
    assert_eq!(prefill.load().await.running, 0);
    // A grant is given back, whether or not its answer has come.
    at_prefill.submit(&job_for(3, &prompt(3, 40), 4, &decode)).await;
    // The step that is held, and the first one of this request.
    prefill.hold.hold_after(2);
    decode.load_is("a grant", |load| load.waiting == 1).await;
    at_prefill.abort(key(3)).await;
    decode.load_is("a grant that is given back", |load| load.waiting == 0).await;
    prefill.hold.release();
    prefill.load_is("no step", |load| load.blocks_used == 0).await;
    // Its first chunk never arrives, and the second one stands still.
    world.lose_batches();
    prefill.hold.hold_after(1);
    at_prefill.submit(&job_for(4, &prompt(4, 40), 4, &decode)).await;
    prefill.hold.is_held().await;
    world.lost(1).await;
    at_prefill.abort(key(4)).await;
    at_prefill.told().await;
    prefill.hold.release();
    world.lose_batches();
    at_prefill.submit(&job_for(5, &prompt(5, 40), 4, &decode)).await;
    while !matches!(at_prefill.prefill(key(5)).await, PrefillEvent::FirstToken { .. }) {}
    world.lost(1).await;
    at_prefill.abort(key(5)).await;
    decode.load_is("grants that are given back", |load| load.waiting == 0).await;
    let grown: Vec<_> = aborted().iter().zip(before).map(|(after, before)| after - before).collect();
    assert!(grown.iter().all(|aborts| *aborts >= 1), "{stages:?}: {grown:?}");
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn aborted_prefill_job_releases_blocks_and_grant_at_each_stage() {
    a_job_is_aborted_at_each_stage().await;
}
