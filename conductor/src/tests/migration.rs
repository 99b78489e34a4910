//! Sequences that go on at another decode node.

use baton_proto::v1::node_command::Command;
use baton_types::{ErrorKind, FetchReport, PrefillEvent, Refused};

use super::client::{Answer, request};
use super::node::Job;
use super::world::{World, soon, until};

/// A request that decodes at one of two decode nodes, with two tokens so far; and the other node.
async fn decoding() -> (World, Answer, Job, String) {
    let mut w = World::with(&["p0", "d0", "d1"]).await;
    w.report().await;
    let mut answer = w.generate(request("a prompt of more than one block of 16", 5)).await;
    let job = w.job().await;
    w.node("p0").computes(job.key, 'a');
    w.node(&job.decode()).token(job.key, 1, 'b');
    answer.reads("ab").await;
    // The handoff was reported before.
    w.report().await;
    let other = if job.decode() == "d0" { "d1" } else { "d0" };
    (w, answer, job, other.to_owned())
}

pub async fn sequence_migrates_to_another_decode_node() {
    let (mut w, mut answer, first, to) = decoding().await;
    w.node(&first.decode()).offer(first.key, 2);
    let migrated = w.job().await;
    assert!(migrated.node == to && migrated.wire.is_migration && migrated.wire.output_tokens == 2);
    let source = migrated.wire.fetch.clone().unwrap();
    assert_eq!((source.node, source.tokens), (first.decode(), 32), "whole blocks");
    // Until it has taken it, what the first one gives counts.
    w.node(&first.decode()).token(first.key, 2, 'c');
    answer.reads("abc").await;
    let report = FetchReport { tokens: 32, bytes: 8192, transport: "tcp".into(), ..FetchReport::default() };
    w.node(&to).prefill(migrated.key, &PrefillEvent::Fetched(report));
    w.node(&first.decode()).hears_abort(first.key).await;
    w.node(&to).token(migrated.key, 2, 'c');
    w.node(&to).token(migrated.key, 3, 'd');
    w.node(&to).last_token(migrated.key, 4, 'e');
    let finished = answer.end().await.unwrap();
    assert_eq!((answer.tokens.as_str(), finished.decode_node), ("abcde", to));
    let timeline = finished.timeline.unwrap();
    assert_eq!((timeline.migrations, timeline.migrated.unwrap().bytes), (1, 8192));
    w.ends().await;
}

pub async fn refused_migration_leaves_sequence_at_its_node() {
    let (mut w, mut answer, first, to) = decoding().await;
    w.node(&first.decode()).offer(first.key, 2);
    let migrated = w.job().await;
    w.node(&to).failed(migrated.key, ErrorKind::Overloaded);
    w.node(&to).hears_abort(migrated.key).await;
    for (index, token) in [(2, 'c'), (3, 'd')] {
        w.node(&first.decode()).token(first.key, index, token);
    }
    answer.reads("abcd").await;
    // No other node is there; what is offered too early or too late is not migrated either.
    w.node(&first.decode()).offer(first.key, 4);
    w.node(&first.decode()).offer(first.key, 3);
    w.report().await;
    assert!(!w.has_job().await);
    w.node(&first.decode()).last_token(first.key, 4, 'e');
    assert_eq!(answer.end().await.unwrap().timeline.unwrap().migrations, 0);
    w.ends().await;
}

pub async fn migrating_sequence_continues_at_target_if_source_dies() {
    let (mut w, mut answer, first, to) = decoding().await;
    w.node(&first.decode()).offer(first.key, 2);
    let migrated = w.job().await;
    w.node(&first.decode()).die();
    w.until_state(&first.decode(), "lost").await;
    for (index, token) in [(2, 'c'), (3, 'd')] {
        w.node(&to).token(migrated.key, index, token);
    }
    answer.reads("abcd").await;
    w.node(&to).last_token(migrated.key, 4, 'e');
    assert_eq!(answer.end().await.unwrap().decode_node, to);
    w.ends().await;
}

pub async fn refused_grant_reselects_another_decode_node() {
    let mut w = World::with(&["p0", "d0", "d1"]).await;
    w.report().await;
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    let refused = Refused { kind: ErrorKind::Overloaded, message: "no blocks".into() };
    let reselected = |command: &Command| match command {
        Command::Reselect(reselect) => Some(reselect.decode.clone().unwrap().node),
        _ => None,
    };
    w.node("p0").started(job.key);
    w.node("p0").prefill(job.key, &PrefillEvent::GrantRefused(refused.clone()));
    let second = w.node("p0").hears("a reselect", reselected).await;
    assert_ne!(second, job.decode());
    // The first one has no room any more: the second is asked again, whatever its steps take.
    w.node(&job.decode()).load.accepts_migrations = false;
    w.report().await;
    w.node("p0").prefill(job.key, &PrefillEvent::GrantRefused(refused.clone()));
    assert_eq!(w.node("p0").hears("a reselect", reselected).await, second);
    w.node("p0").first_token(job.key, 'a', None);
    w.node("p0").handed_off(job.key);
    w.node(&second).last_token(job.key, 1, 'b');
    assert_eq!(answer.end().await.unwrap().decode_node, second);

    // If the node that refused is gone meanwhile, and no other has room, the request is placed
    // again.
    let mut answer = w.generate(request("hi", 2)).await;
    let job = w.job().await;
    for node in ["d0", "d1"] {
        w.node(node).load.accepts_migrations = false;
        w.node(node).load.draining = node == job.decode();
    }
    w.report().await;
    w.node("p0").started(job.key);
    w.node("p0").prefill(job.key, &PrefillEvent::GrantRefused(refused));
    let again = w.job().await;
    assert_ne!(again.decode(), job.decode());
    w.node("p0").computes(again.key, 'a');
    w.node(&again.decode()).last_token(again.key, 1, 'b');
    soon(answer.end()).await.unwrap();
    until("no request", || w.frontend.live.is_empty().then_some(())).await;
    w.ends().await;
}
