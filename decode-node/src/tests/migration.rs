//! Sequences that migrate from one decode node to another.

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_types::{Attempt, ErrorKind, PrefillEvent, PrefillJob, RequestKey, TokenId};
use baton_worker::config::Settings;
use baton_worker::testing::{Conductor, TestNode, World, job, key, prompt, settings};

use crate::start;

/// The attempt that migrated.
fn migrated(request: u128) -> RequestKey {
    RequestKey { attempt: Attempt(1), ..key(request) }
}

/// The job that takes a sequence off a node that has so many tokens of it.
fn taking(from: &TestNode, tokens: &[TokenId], output_tokens: u32, there: u32) -> PrefillJob {
    let fetch = Some(from.source(there));
    PrefillJob { key: migrated(1), is_migration: true, output_tokens, fetch, ..job(1, tokens, 30) }
}

/// A node that drains, and the tokens of the sequence on it: 60 of the prompt and the first of the
/// output.
async fn leaving(world: &World) -> (TestNode, Conductor, Vec<TokenId>) {
    let node = start(world, settings("d0")).await;
    let mut session = node.session(7).await;
    node.hold.hold_after(1);
    session.submit(&job(1, &prompt(1, 60), 30)).await;
    let mut tokens = prompt(1, 60);
    loop {
        if let PrefillEvent::FirstToken { token, .. } = session.prefill(key(1)).await {
            tokens.push(token);
            break;
        }
    }
    node.hold.is_held().await;
    session.send(Command::Drain(v1::DrainCommand { draining: true })).await;
    let offer = session.find(|event| if let Event::MigrationRequest(offer) = event { Some(offer) } else { None }).await;
    assert_eq!(offer.output_tokens, 1);
    (node, session, tokens)
}

/// What the node says of the sequence that it is to take.
async fn answer(session: &mut Conductor) -> PrefillEvent {
    session.prefill(migrated(1)).await
}

/// What all of it gives if it does not migrate.
async fn unmoved() -> Vec<TokenId> {
    let world = World::default();
    let node = start(&world, settings("d9")).await;
    let mut session = node.session(7).await;
    session.submit(&job(1, &prompt(1, 60), 30)).await;
    session.prefill_to_end(key(1)).await;
    let tokens = session.tokens(key(1)).await;
    node.ends().await;
    tokens
}

pub(super) async fn sequence_migrates_to_another_node() {
    let world = World::default();
    let (from, mut at_from, tokens) = leaving(&world).await;
    let to = start(&world, settings("d1")).await;
    let mut at_to = to.session(7).await;
    at_to.submit(&taking(&from, &tokens, 1, 60)).await;
    let PrefillEvent::Fetched(report) = answer(&mut at_to).await else { panic!("not taken") };
    assert_eq!((report.tokens, report.transport.as_str(), report.failure), (48, "tcp", None));
    at_from.abort(key(1)).await;
    at_from.told().await;
    from.hold.release();
    from.ends().await;
    assert_eq!(at_to.tokens(migrated(1)).await, unmoved().await, "the tokens are the same");
    to.ends().await;
}

#[tokio::test]
async fn sequence_of_draining_node_migrates_with_same_tokens() {
    sequence_migrates_to_another_node().await;
}

pub(super) async fn migration_without_its_blocks_is_computed() {
    let world = World::default();
    let (from, mut at_from, tokens) = leaving(&world).await;
    let to = start(&world, settings("d1")).await;
    let other = start(&world, settings("d2")).await;
    let mut at_to = to.session(7).await;
    // The other one has nothing of it.
    at_to.submit(&taking(&other, &tokens, 1, 60)).await;
    let PrefillEvent::Fetched(report) = answer(&mut at_to).await else { panic!("not taken") };
    assert_eq!((report.tokens, report.failure.map(|refused| refused.kind)), (0, Some(ErrorKind::NotFound)));
    at_from.abort(key(1)).await;
    at_from.told().await;
    from.hold.release();
    from.ends().await;
    assert_eq!(at_to.tokens(migrated(1)).await, unmoved().await, "the tokens are the same");
    to.ends().await;
    other.ends().await;
}

#[tokio::test]
async fn migrated_sequence_without_blocks_is_computed_at_target() {
    migration_without_its_blocks_is_computed().await;
}

pub(super) async fn migration_is_cancelled() {
    let world = World::faulty();
    let (from, mut at_from, tokens) = leaving(&world).await;
    let to = start(&world, settings("d1")).await;
    let mut at_to = to.session(7).await;
    world.lose_batches();
    at_to.submit(&taking(&from, &tokens, 1, 60)).await;
    world.lost(1).await;
    at_to.abort(migrated(1)).await;
    at_to.told().await;
    to.ends().await;
    // It stays where it is.
    from.hold.release();
    assert_eq!(at_from.tokens(key(1)).await, unmoved().await);
    from.ends().await;
}

#[tokio::test]
async fn aborted_migration_leaves_sequence_at_source() {
    migration_is_cancelled().await;
}

pub(super) async fn migration_without_room_is_refused() {
    let world = World::default();
    let (from, mut at_from, tokens) = leaving(&world).await;
    let full = Settings { cache_blocks: 6, ..settings("d1") };
    let to = start(&world, full).await;
    let mut at_to = to.session(7).await;
    to.hold.hold_after(0);
    at_to.submit(&job(2, &prompt(2, 60), 9)).await;
    to.hold.is_held().await;
    at_to.submit(&taking(&from, &tokens, 1, 60)).await;
    let PrefillEvent::Failed(refused) = answer(&mut at_to).await else { panic!("taken") };
    assert_eq!(refused.kind, ErrorKind::Overloaded, "{refused}");
    to.hold.release();
    from.hold.release();
    assert_eq!(at_from.tokens(key(1)).await, unmoved().await);
    at_to.prefill_to_end(key(2)).await;
    to.ends().await;
    from.ends().await;
}

#[tokio::test]
async fn migration_to_node_without_room_is_refused() {
    migration_without_room_is_refused().await;
}
