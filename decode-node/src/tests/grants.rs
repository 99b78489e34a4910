//! What a prefill node asks of a decode node.

use std::time::Duration;

use baton_proto::v1::node_event::Event;
use baton_types::{ErrorKind, PrefillEvent};
use baton_worker::config::Settings;
use baton_worker::testing::{World, job, key, prompt, settings};

use super::job_for;
use crate::start;

pub(super) async fn a_grant_is_refused_where_room_never_comes() {
    let world = World::default();
    let small = Settings { cache_blocks: 4, ..settings("d0") };
    let prefill = baton_prefill_node::start(&world, settings("p0")).await;
    let decode = start(&world, small).await;
    let mut session = prefill.session(7).await;
    session.submit(&job_for(1, &prompt(1, 100), 4, &decode)).await;
    let events = session.prefill_to_end(key(1)).await;
    // What can never fit is not waited for.
    let Some(PrefillEvent::DecodeFailed(refused)) = events.last() else { panic!("{events:?}") };
    assert_eq!(refused.kind, ErrorKind::Invalid, "{refused}");
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn grant_that_can_never_fit_is_refused_at_once() {
    a_grant_is_refused_where_room_never_comes().await;
}

pub(super) async fn a_grant_whose_bytes_do_not_come_ends_by_itself() {
    let world = World::faulty();
    let hasty = Settings { grant_ttl_s: 20.0, ..settings("d0") };
    let prefill = baton_prefill_node::start(&world, settings("p0")).await;
    let decode = start(&world, hasty).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    world.lose_batches();
    at_prefill.submit(&job_for(1, &prompt(1, 40), 4, &decode)).await;
    while !matches!(at_prefill.prefill(key(1)).await, PrefillEvent::FirstToken { .. }) {}
    decode.load_is("a grant", |load| load.waiting == 1).await;
    // The last that came for it was the handoff, and nothing moves the clock but this.
    world.clock.pass(Duration::from_secs(20)).await;
    let ended = at_decode
        .find(|event| match event {
            Event::Decode(events) => Some(events.events.len()),
            _ => None,
        })
        .await;
    assert_eq!(ended, 1);
    decode.load_is("no grant", |load| load.waiting == 0 && load.blocks_used == 0).await;
    at_prefill.abort(key(1)).await;
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn grant_whose_kv_never_comes_expires() {
    a_grant_whose_bytes_do_not_come_ends_by_itself().await;
}

pub(super) async fn a_session_that_breaks_frees_its_sequences() {
    let world = World::default();
    let decode = start(&world, settings("d0")).await;
    let one = decode.session(7).await;
    let mut other = decode.session(8).await;
    decode.hold.hold_after(0);
    one.submit(&job(1, &prompt(1, 40), 9)).await;
    decode.hold.is_held().await;
    other.submit(&job(2, &prompt(2, 40), 3)).await;
    decode.load_is("both", |load| load.running + load.waiting == 2).await;
    drop(one);
    decode.load_is("one that is left", |load| load.running + load.waiting == 1).await;
    decode.hold.release();
    other.prefill_to_end(key(2)).await;
    assert_eq!(other.tokens(key(2)).await.len(), 2);
    decode.ends().await;
}

#[tokio::test]
async fn broken_session_releases_only_its_own_sequences() {
    a_session_that_breaks_frees_its_sequences().await;
}
