//! Prefixes that come from elsewhere: another node, the SSD.

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_scheduler::LAYER_DEADLINE;
use baton_types::{ErrorKind, FetchReport, PrefillEvent, PrefillJob, TokenId};
use baton_worker::config::Settings;
use baton_worker::testing::{Conductor, TestNode, World, job, key, prompt, settings};

use super::names;
use crate::start;

/// What was told of the fetch, and the first token.
async fn fetched(session: &mut Conductor, request: u128) -> (FetchReport, TokenId) {
    let mut report = None;
    for event in session.prefill_to_end(key(request)).await {
        match event {
            PrefillEvent::Fetched(told) => assert!(report.replace(told).is_none(), "told once"),
            PrefillEvent::FirstToken { token, .. } => return (report.expect("a fetch"), token),
            PrefillEvent::Started { .. } => {}
            event => panic!("{event:?}"),
        }
    }
    panic!("no first token")
}

/// A node that has a prompt of 60 tokens, and the token that follows.
async fn holder(world: &World) -> (TestNode, Conductor, TokenId) {
    let holder = start(world, settings("p0")).await;
    let mut session = holder.session(7).await;
    session.submit(&job(1, &prompt(1, 60), 1)).await;
    let events = session.prefill_to_end(key(1)).await;
    let Some(PrefillEvent::FirstToken { token, .. }) = events.last() else { panic!("{events:?}") };
    (holder, session, *token)
}

fn fetching(request: u128, from: &TestNode, number: u32) -> PrefillJob {
    PrefillJob { fetch: Some(from.source(48)), ..job(request, &prompt(number, 60), 1) }
}

pub(super) async fn a_prefix_is_fetched_from_another_node() {
    let world = World::default();
    let (holder, _at_holder, expected) = holder(&world).await;
    let reader = start(&world, settings("p1")).await;
    let mut session = reader.session(7).await;
    session.submit(&fetching(2, &holder, 1)).await;
    let (report, token) = fetched(&mut session, 2).await;
    assert_eq!((report.tokens, report.transport.as_str(), report.failure), (48, "tcp", None));
    assert_eq!(token, expected, "the bytes are the holder's");
    reader.ends().await;
    holder.ends().await;
}

#[tokio::test]
async fn prefix_is_fetched_from_holder_and_its_lease_released() {
    a_prefix_is_fetched_from_another_node().await;
}

/// The hash of a prompt's first block, from a snapshot.
fn first_block(event: &Event) -> Option<Vec<u8>> {
    let Event::Kv(v1::KvEvents { snapshot: true, events, .. }) = event else { return None };
    events.iter().find_map(|event| match &event.event {
        Some(v1::kv_event::Event::Stored(stored)) if stored.parent.is_empty() => Some(stored.hash.clone()),
        _ => None,
    })
}

pub(super) async fn a_prefix_that_is_gone_is_computed() {
    let world = World::default();
    let (holder, mut at_holder, expected) = holder(&world).await;
    let reader = start(&world, settings("p1")).await;
    let mut session = reader.session(7).await;
    at_holder.send(Command::KvSnapshot(v1::KvSnapshotRequest {})).await;
    let block_hashes = at_holder.find(|event| first_block(&event)).await;
    at_holder.send(Command::ForgetPrefix(v1::ForgetPrefixCommand { block_hashes })).await;
    holder.load_is("an empty cache", |load| load.blocks_cached == 0).await;
    session.submit(&fetching(2, &holder, 1)).await;
    let (report, token) = fetched(&mut session, 2).await;
    assert_eq!(report.failure.map(|refused| refused.kind), Some(ErrorKind::NotFound));
    assert_eq!((report.tokens, token), (0, expected));
    reader.ends().await;
    holder.ends().await;
}

#[tokio::test]
async fn prefix_evicted_at_holder_is_computed_by_reader() {
    a_prefix_that_is_gone_is_computed().await;
}

pub(super) async fn a_fetch_is_cancelled_with_its_request() {
    let world = World::faulty();
    let (holder, _at_holder, _) = holder(&world).await;
    let reader = start(&world, settings("p1")).await;
    let session = reader.session(7).await;
    world.lose_batches();
    session.submit(&fetching(2, &holder, 1)).await;
    world.lost(1).await;
    session.abort(key(2)).await;
    reader.ends().await;
    holder.ends().await;
}

#[tokio::test]
async fn aborted_request_cancels_its_fetch_and_releases_the_lease() {
    a_fetch_is_cancelled_with_its_request().await;
}

pub(super) async fn a_revoked_lease_frees_its_holder_and_the_reader_computes() {
    let world = World::faulty();
    let (holder, mut at_holder, expected) = holder(&world).await;
    let reader = start(&world, settings("p1")).await;
    let mut session = reader.session(7).await;
    world.lose_batches();
    session.submit(&fetching(2, &holder, 1)).await;
    world.lost(1).await;
    // The conductor takes the reader for lost, and the holder keeps nothing for it.
    let info = reader.info();
    at_holder.send(Command::NodeLost(v1::NodeLostCommand::new(&info.node, info.generation))).await;
    at_holder.told().await;
    holder.ends().await;
    world.clock.pass(LAYER_DEADLINE).await;
    let (report, token) = fetched(&mut session, 2).await;
    assert_eq!(report.failure.map(|refused| refused.kind), Some(ErrorKind::DeadlineExceeded));
    assert_eq!((report.tokens, token), (0, expected));
    reader.ends().await;
}

#[tokio::test]
async fn revoked_lease_frees_holder_and_reader_computes_prefix() {
    a_revoked_lease_frees_its_holder_and_the_reader_computes().await;
}

pub(super) async fn a_prefix_that_gives_no_number_is_forgotten() {
    let folder = tempfile::tempdir().expect("a folder");
    let with_ssd = || Settings { ssd_folder: Some(folder.path().to_owned()), ssd_bytes: 1 << 20, ..settings("p0") };
    let world = World::default();
    let node = start(&world, with_ssd()).await;
    let mut session = node.session(7).await;
    session.submit(&job(1, &prompt(1, 60), 1)).await;
    session.prefill_to_end(key(1)).await;
    session.submit(&job(2, &prompt(2, 60), 1)).await;
    session.prefill_to_end(key(2)).await;
    node.load_is("blocks on the SSD", |load| load.blocks_ssd == 6 && load.blocks_cached == 6).await;
    node.hold.spoil(true);
    session.submit(&job(3, &prompt(1, 60), 1)).await;
    let events = session.prefill_to_end(key(3)).await;
    let Some(PrefillEvent::Failed(refused)) = events.last() else { panic!("{events:?}") };
    assert_eq!(refused.kind, ErrorKind::DataLoss);
    node.load_is("what others have", |load| load.blocks_ssd == 3 && load.blocks_cached == 3).await;
    node.hold.spoil(false);
    for (n, cached) in [(1, 0), (2, 48)] {
        session.submit(&job(n + 10, &prompt(n as u32, 60), 1)).await;
        let events = session.prefill_to_end(key(n + 10)).await;
        assert!(matches!(events[0], PrefillEvent::Started { cached_tokens, .. } if cached_tokens == cached));
        assert!(matches!(events.last(), Some(PrefillEvent::FirstToken { .. })), "{events:?}");
    }
    node.load_is("blocks on the SSD", |load| load.blocks_ssd == 6).await;
    node.ends().await;
    // What is there later was computed anew.
    let later = start(&world, with_ssd()).await;
    later.load_is("blocks on the SSD", |load| load.blocks_ssd == 6).await;
    later.ends().await;
}

#[tokio::test]
async fn spoiled_prefix_is_forgotten_in_arena_and_on_ssd() {
    a_prefix_that_gives_no_number_is_forgotten().await;
}

pub(super) async fn blocks_go_to_the_ssd_and_come_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let with_ssd = || Settings { ssd_folder: Some(folder.path().to_owned()), ssd_bytes: 1 << 20, ..settings("p0") };
    let world = World::default();
    let first = start(&world, with_ssd()).await;
    let mut session = first.session(7).await;
    session.submit(&job(1, &prompt(1, 60), 1)).await;
    let events = session.prefill_to_end(key(1)).await;
    let Some(PrefillEvent::FirstToken { token: expected, .. }) = events.last() else { panic!("{events:?}") };
    first.load_is("blocks on the SSD", |load| load.blocks_ssd == 3).await;
    first.ends().await;

    // A later start finds them.
    let second = start(&world, with_ssd()).await;
    let mut session = second.session(7).await;
    session.submit(&job(2, &prompt(1, 60), 1)).await;
    let (report, token) = fetched(&mut session, 2).await;
    assert_eq!((report.tokens, report.transport.as_str(), report.failure), (48, FetchReport::SSD, None));
    assert_eq!(token, *expected);
    // A load ends with its request.
    let third = prompt(3, 60);
    session.submit(&job(3, &third, 1)).await;
    session.prefill_to_end(key(3)).await;
    second.load_is("blocks on the SSD", |load| load.blocks_ssd == 6).await;
    second.ends().await;
    let last = start(&world, with_ssd()).await;
    let mut session = last.session(7).await;
    session.submit(&job(4, &third, 1)).await;
    session.abort(key(4)).await;
    session.told().await;
    last.load_is("no request", |load| load.running + load.waiting == 0).await;
    session.send(Command::ClearCache(v1::ClearCacheCommand {})).await;
    last.load_is("an empty tier", |load| load.blocks_ssd == 0).await;
    session.submit(&job(5, &third, 1)).await;
    assert_eq!(names(&session.prefill_to_end(key(5)).await), ["started", "first token"], "computed");
    last.ends().await;
}

#[tokio::test]
async fn ssd_blocks_are_read_by_later_generation_until_cache_is_cleared() {
    blocks_go_to_the_ssd_and_come_back().await;
}
