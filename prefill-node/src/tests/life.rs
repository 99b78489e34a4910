//! Sessions, drain, and what conductors are told of the cache.

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_types::PrefillEvent;
use baton_worker::config::Settings;
use baton_worker::testing::{World, job, key, prompt, settings};

use super::{job_for, names};
use crate::start;

pub(super) async fn a_session_that_breaks_takes_its_requests_along() {
    let world = World::default();
    let prefill = start(&world, settings("p0")).await;
    let decode = baton_decode_node::start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    let mut other = prefill.session(8).await;
    decode.hold.hold_after(0);
    at_prefill.submit(&job_for(1, &prompt(1, 40), 9, &decode)).await;
    at_prefill.prefill_to_end(key(1)).await;
    prefill.hold.hold_after(0);
    at_prefill.submit(&job_for(2, &prompt(2, 40), 9, &decode)).await;
    prefill.hold.is_held().await;
    other.submit(&job(3, &prompt(3, 40), 1)).await;
    prefill.load_is("both", |load| load.running + load.waiting == 2).await;
    at_decode.told().await;
    drop((at_prefill, at_decode));
    prefill.load_is("one that is left", |load| load.running + load.waiting == 1).await;
    decode.load_is("none that is left", |load| load.running + load.waiting == 0).await;
    prefill.hold.release();
    decode.hold.release();
    // The other conductor's request is not touched.
    assert_eq!(names(&other.prefill_to_end(key(3)).await).last(), Some(&"first token"));
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn broken_session_aborts_only_its_own_requests() {
    a_session_that_breaks_takes_its_requests_along().await;
}

pub(super) async fn a_drain_ends_after_the_work() {
    let world = World::default();
    let idle = start(&world, settings("p0")).await;
    let mut session = idle.session(7).await;
    idle.ends().await;
    while session.event().await.expect("a session that ends well").is_some() {}

    let prefill = start(&world, settings("p1")).await;
    let mut session = prefill.session(7).await;
    prefill.hold.hold_after(0);
    session.submit(&job(1, &prompt(1, 40), 1)).await;
    prefill.hold.is_held().await;
    prefill.drain();
    session.find(|event| matches!(event, Event::Load(load) if load.draining).then_some(())).await;
    assert!(prefill.http("/ready").await.contains("503"), "it takes no requests");
    session.submit(&job(2, &prompt(2, 40), 1)).await;
    assert_eq!(names(&session.prefill_to_end(key(2)).await), ["failed"], "nothing new");
    prefill.hold.release();
    assert_eq!(names(&session.prefill_to_end(key(1)).await).last(), Some(&"first token"));
    while session.event().await.expect("a session that ends well").is_some() {}
    prefill.ended().await;
}

#[tokio::test]
async fn drain_of_prefill_node_ends_after_its_last_request() {
    a_drain_ends_after_the_work().await;
}

pub(super) async fn an_operator_drains_and_undrains() {
    let world = World::default();
    let prefill = start(&world, settings("p0")).await;
    let mut session = prefill.session(7).await;
    for (request, draining) in [(1, true), (2, false)] {
        session.send(Command::Drain(v1::DrainCommand { draining })).await;
        session.find(|event| matches!(event, Event::Load(load) if load.draining == draining).then_some(())).await;
        session.submit(&job(request, &prompt(1, 40), 1)).await;
        let failed =
            session.prefill_to_end(key(request)).await.iter().any(|event| matches!(event, PrefillEvent::Failed(_)));
        assert_eq!(failed, draining);
    }
    prefill.ends().await;
}

#[tokio::test]
async fn operator_drains_and_undrains_prefill_node() {
    an_operator_drains_and_undrains().await;
}

pub(super) async fn a_snapshot_comes_in_parts() {
    let world = World::default();
    let many = Settings { block_tokens: 1, cache_blocks: 6000, ..settings("p0") };
    let prefill = start(&world, many).await;
    let mut session = prefill.session(7).await;
    session.submit(&job(1, &prompt(1, 5000), 1)).await;
    session.prefill_to_end(key(1)).await;
    session.told().await;
    let mut late = prefill.new_session(8).await;
    let mut parts = Vec::new();
    while parts.iter().sum::<usize>() < 5000 {
        let kv = late.find(|event| if let Event::Kv(kv) = event { Some(kv) } else { None }).await;
        assert_eq!((kv.snapshot, kv.goes_on), (parts.is_empty(), !parts.is_empty()));
        parts.push(kv.events.len());
    }
    assert_eq!(parts, [4096, 904]);
    // A cache that is cleared is told, and empty.
    session.send(Command::ClearCache(v1::ClearCacheCommand {})).await;
    session.find(|event| matches!(event, Event::Kv(_)).then_some(())).await;
    assert_eq!(prefill.load().await.blocks_cached, 0);
    prefill.ends().await;
}

#[tokio::test]
async fn kv_snapshot_of_large_cache_is_sent_in_parts() {
    a_snapshot_comes_in_parts().await;
}
