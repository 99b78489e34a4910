//! Prompts that a decode node computes itself, and its SSD.

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_types::{ErrorKind, PrefillEvent};
use baton_worker::config::Settings;
use baton_worker::testing::{World, counted, job, key, prompt, settings};

use super::job_for;
use crate::start;

pub(super) async fn a_prompt_is_computed_and_answered() {
    let world = World::default();
    let decode = start(&world, settings("d0")).await;
    let mut session = decode.session(7).await;
    session.submit(&job(1, &prompt(1, 200), 6)).await;
    let events = session.prefill_to_end(key(1)).await;
    assert!(matches!(events[0], PrefillEvent::Started { cached_tokens: 0, .. }), "{events:?}");
    assert_eq!(session.tokens(key(1)).await.len(), 5);
    // What cannot be taken fails at once.
    session.submit(&job(2, &[600], 6)).await;
    let failed = session.prefill_to_end(key(2)).await;
    assert!(matches!(failed[..], [PrefillEvent::Failed(_)]), "{failed:?}");
    decode.ends().await;
}

#[tokio::test]
async fn decode_node_computes_prompt_and_generates_by_itself() {
    a_prompt_is_computed_and_answered().await;
}

pub(super) async fn a_sequence_is_aborted_at_each_stage() {
    let stages = ["granted", "waiting", "running"];
    let aborted = || stages.map(|stage| counted(&format!("baton_decode_aborts_total{{stage=\"{stage}\"}}")));
    let before = aborted();
    let world = World::faulty();
    let prefill = baton_prefill_node::start(&world, settings("p0")).await;
    let decode = start(&world, settings("d0")).await;
    let mut at_prefill = prefill.session(7).await;
    let mut at_decode = decode.session(7).await;
    decode.hold.hold_after(0);
    at_prefill.submit(&job_for(1, &prompt(1, 40), 9, &decode)).await;
    at_prefill.prefill_to_end(key(1)).await;
    decode.hold.is_held().await;
    // Behind the step in flight.
    at_prefill.submit(&job_for(2, &prompt(2, 40), 9, &decode)).await;
    at_prefill.prefill_to_end(key(2)).await;
    world.lose_batches();
    at_prefill.submit(&job_for(3, &prompt(3, 40), 9, &decode)).await;
    world.lost(1).await;
    decode.load_is("all three", |load| load.running + load.waiting == 3).await;
    for request in 1..=3 {
        at_decode.abort(key(request)).await;
        at_prefill.abort(key(request)).await;
    }
    at_decode.told().await;
    let grown: Vec<_> = aborted().iter().zip(before).map(|(after, before)| after - before).collect();
    // Counters are the process's, and another test of it may add to them.
    assert!(grown.iter().all(|aborts| *aborts >= 1), "{stages:?}: {grown:?}");
    decode.hold.release();
    prefill.ends().await;
    decode.ends().await;
}

#[tokio::test]
async fn aborted_sequence_is_released_at_each_stage() {
    a_sequence_is_aborted_at_each_stage().await;
}

pub(super) async fn blocks_go_to_the_ssd_and_come_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let with_ssd = || Settings { ssd_folder: Some(folder.path().to_owned()), ssd_bytes: 1 << 20, ..settings("d0") };
    let world = World::default();
    let first = start(&world, with_ssd()).await;
    let mut session = first.session(7).await;
    session.submit(&job(1, &prompt(1, 60), 4)).await;
    session.prefill_to_end(key(1)).await;
    let expected = session.tokens(key(1)).await;
    first.load_is("blocks on the SSD", |load| load.blocks_ssd == 3).await;
    first.ends().await;

    // A later start finds them.
    let second = start(&world, with_ssd()).await;
    let mut session = second.session(7).await;
    session.submit(&job(2, &prompt(1, 60), 4)).await;
    let events = session.prefill_to_end(key(2)).await;
    assert!(matches!(events[0], PrefillEvent::Started { cached_tokens: 48, .. }), "{events:?}");
    assert_eq!(session.tokens(key(2)).await, expected);
    assert_eq!(second.load().await.prefix_hits_ssd, 48);
    session.send(Command::ClearCache(v1::ClearCacheCommand {})).await;
    second.load_is("an empty tier", |load| load.blocks_ssd == 0 && load.blocks_cached == 0).await;
    session.submit(&job(3, &prompt(1, 60), 4)).await;
    let events = session.prefill_to_end(key(3)).await;
    assert!(matches!(events[0], PrefillEvent::Started { cached_tokens: 0, .. }), "{events:?}");
    assert_eq!(session.tokens(key(3)).await, expected);
    second.load_is("blocks on the SSD", |load| load.blocks_ssd == 3).await;
    // Given up at once, before or while its blocks come.
    session.send(Command::ClearCache(v1::ClearCacheCommand {})).await;
    session.submit(&job(4, &prompt(4, 60), 4)).await;
    session.abort(key(4)).await;
    second.ends().await;
}

#[tokio::test]
async fn ssd_blocks_are_read_by_later_generation_until_cache_is_cleared() {
    blocks_go_to_the_ssd_and_come_back().await;
}

pub(super) async fn a_prefix_that_gives_no_number_is_forgotten() {
    let folder = tempfile::tempdir().expect("a folder");
    let with_ssd = || Settings { ssd_folder: Some(folder.path().to_owned()), ssd_bytes: 1 << 20, ..settings("d0") };
    let world = World::default();
    let node = start(&world, with_ssd()).await;
    let mut session = node.session(7).await;
    session.submit(&job(1, &prompt(1, 60), 1)).await;
    session.prefill_to_end(key(1)).await;
    node.load_is("blocks on the SSD", |load| load.blocks_ssd == 3 && load.blocks_cached == 3).await;
    node.hold.spoil(true);
    session.submit(&job(2, &prompt(1, 60), 4)).await;
    let events = session.prefill_to_end(key(2)).await;
    let Some(PrefillEvent::Failed(refused)) = events.last() else { panic!("{events:?}") };
    assert_eq!(refused.kind, ErrorKind::DataLoss);
    node.load_is("nothing", |load| load.blocks_ssd == 0 && load.blocks_cached == 0).await;
    node.hold.spoil(false);
    session.submit(&job(3, &prompt(1, 60), 4)).await;
    let events = session.prefill_to_end(key(3)).await;
    assert!(matches!(events[0], PrefillEvent::Started { cached_tokens: 0, .. }), "{events:?}");
    session.tokens(key(3)).await;
    node.ends().await;
}

#[tokio::test]
async fn spoiled_prefix_is_forgotten_in_arena_and_on_ssd() {
    a_prefix_that_gives_no_number_is_forgotten().await;
}

pub(super) async fn a_dead_engine_thread_ends_the_node() {
    let world = World::default();
    let decode = start(&world, settings("d0")).await;
    let mut session = decode.session(7).await;
    decode.hold.panic();
    session.submit(&job(1, &prompt(1, 40), 4)).await;
    while session.event().await.is_ok_and(|event| event.is_some()) {}
    let reason = decode.fails().await;
    assert!(reason.contains("the engine's thread is gone"), "{reason}");
}

#[tokio::test]
async fn dead_engine_thread_ends_decode_node_with_an_error() {
    a_dead_engine_thread_ends_the_node().await;
}
