//! Cached prefixes: fetched, and counted.

use baton_proto::v1;
use baton_proto::v1::node_command::Command;
use baton_proto::v1::node_event::Event;
use baton_types::{ErrorKind, FetchReport, FinishReason, KvEvent, PrefillEvent, Refused};

use super::client::request;
use super::world::{World, soon, until};

/// Ten blocks.
fn prompt() -> String {
    "0123456789abcdef".repeat(10)
}

/// A node says that it holds the prompt's blocks.
async fn holds(w: &mut World, node: &str) {
    let (_, hashes) = w.frontend.prompt_hashes(request(&prompt(), 1)).await.unwrap();
    let stored = |(index, hash): (usize, &baton_types::BlockHash)| {
        (&KvEvent::Stored { hash: *hash, parent: index.checked_sub(1).map(|before| hashes[before]) }).into()
    };
    let events = hashes.iter().enumerate().map(stored).collect();
    w.node(node).say(Event::Kv(v1::KvEvents { sequence: 10, snapshot: true, events, goes_on: false }));
    let id = w.node(node).info.node.clone();
    let index = &w.frontend.index;
    until("its blocks are known", || (index.entries(&id) == hashes.len()).then_some(())).await;
}

fn failure() -> FetchReport {
    let refused = Refused { kind: ErrorKind::Unavailable, message: "out of reach".into() };
    FetchReport { failure: Some(refused), ..FetchReport::default() }
}

pub async fn prefix_is_fetched_from_holder_or_computed_if_the_fetch_fails() {
    let mut w = World::with(&["p1", "d0"]).await;
    w.join("p0", |info| info.profile.max_waiting = 1).await;
    holds(&mut w, "p0").await;
    // The one that holds it is full.
    let mut busy = w.generate(request(&prompt(), 1)).await;
    let busy_job = w.job().await;
    assert_eq!(busy_job.node, "p0");
    let brought = FetchReport { tokens: 160, bytes: 1 << 14, transport: "tcp".into(), ..FetchReport::default() };
    for report in [brought, failure()] {
        let mut answer = w.generate(request(&prompt(), 2)).await;
        let job = w.job().await;
        let source = job.wire.fetch.clone().unwrap();
        assert_eq!((job.node.as_str(), source.node.as_str(), source.tokens), ("p1", "p0", 160));
        let cached = report.tokens;
        w.node("p1").prefill(job.key, &PrefillEvent::Fetched(report));
        w.node("p1").computes(job.key, 'a');
        w.node("d0").last_token(job.key, 1, 'b');
        let finished = answer.end().await.unwrap();
        assert_eq!(finished.usage.unwrap().cached_tokens, cached);
        assert_eq!(finished.timeline.unwrap().prefix_fetch.is_some(), cached > 0);
    }
    // The holder is left alone for a while.
    let mut answer = w.generate(request(&prompt(), 1)).await;
    let job = w.job().await;
    assert!(job.wire.fetch.is_none());
    for (key, answer) in [(busy_job.key, &mut busy), (job.key, &mut answer)] {
        let node = if key == busy_job.key { "p0" } else { "p1" };
        w.node(node).first_token(key, 'a', Some(FinishReason::Length));
        answer.end().await.unwrap();
    }
    w.ends().await;
}

pub async fn gap_in_kv_events_requests_a_new_snapshot() {
    let mut w = World::with(&["p0", "d0"]).await;
    holds(&mut w, "p0").await;
    let hash = w.frontend.prompt_hashes(request(&prompt(), 1)).await.unwrap().1[0];
    let removed = (&KvEvent::Removed { hash }).into();
    let kv = |sequence, snapshot, events| Event::Kv(v1::KvEvents { sequence, snapshot, events, goes_on: false });
    w.node("p0").say(kv(12, false, vec![removed]));
    let snapshot = |command: &Command| matches!(command, Command::KvSnapshot(_)).then_some(());
    w.node("p0").hears("a question", snapshot).await;
    let status = soon(w.operator().cache_status(v1::CacheStatusRequest { top: 0 })).await.unwrap().into_inner();
    assert_eq!(status.nodes[0].indexed_blocks, 0);
    holds(&mut w, "p0").await;
    w.ends().await;
}
