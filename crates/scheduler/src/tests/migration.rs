//! The decode core by itself: sequences that go on at another decode node.

use std::time::Duration;

use baton_types::{
    Attempt, BlockId, DecodeEvent, ErrorKind, FetchReport, FetchSource, FinishReason, Generation, LeaseRequest, NodeId,
    PrefillJob, Refused, RequestKey,
};

use super::decode::{MS, Node, config, grant_request, ranges, submitted, tokens};
use super::engine::{key, target};
use super::room::prompt;
use crate::{DecodeConfig, DecodeEffect, FetchedBytes, LeaseEffect};

impl Node {
    fn offers(&mut self) -> Vec<(RequestKey, u32)> {
        let offer = |effect: &DecodeEffect| match effect {
            DecodeEffect::RequestMigration { key, output_tokens, .. } => Some((*key, *output_tokens)),
            _ => None,
        };
        let found = self.effects.iter().filter_map(offer).collect();
        self.effects.retain(|effect| offer(effect).is_none());
        found
    }

    fn answer(&mut self) -> Result<FetchReport, Refused> {
        self.take(|effect| match effect {
            DecodeEffect::AnswerMigration { result, .. } => Some(result.clone()),
            _ => None,
        })
    }

    fn fetch(&mut self) -> (usize, Vec<BlockId>) {
        self.take(|effect| match effect {
            DecodeEffect::Fetch { block_hashes, destinations, .. } => Some((block_hashes.len(), destinations.clone())),
            _ => None,
        })
    }
}

#[test]
fn preempted_sequence_asks_for_migration_until_it_has_left() {
    let mut node = Node::new(DecodeConfig { growth_blocks: 0, ..config(5) });
    node.admit(0, &prompt(0, 7), 10);
    node.admit(1, &prompt(1, 7), 6);
    let mut plan = node.take_step();
    while node.core.load().preemptions == 0 {
        assert_eq!(node.offers(), []);
        node.finish(&plan, 41);
        plan = node.take_step();
    }
    let offered = node.offers();
    assert_eq!((offered.len(), offered[0].0), (1, key(1)));
    assert!(!node.core.load().accepts_migrations);
    node.after(MS, |core, now| core.on_wakeup(now));
    assert_eq!(node.offers(), []);
    node.wake();
    assert_eq!(node.offers(), offered, "it waits still");
    node.after(MS, |core, now| core.on_abort(now, key(1)));
    node.finish(&plan, 41);
    assert_eq!((node.core.load().waiting, node.core.load().accepts_migrations), (0, true));
    let _ = node.run();
    assert!(node.core.is_idle() && node.core.next_wakeup().is_none());
}

#[test]
fn draining_node_offers_sequences_for_migration_and_leases_their_blocks() {
    let mut node = Node::new(config(20));
    node.admit(0, &prompt(0, 8), 10);
    let plan = node.take_step();
    node.after(MS, |core, now| core.on_drain(now));
    assert_eq!(node.offers(), [(key(0), 1)]);
    node.finish(&plan, 41);
    let mut lease = |n: u64| {
        let reader = NodeId::new("d1").unwrap();
        let block_hashes = grant_request(n, &prompt(0, 8), 2).block_hashes;
        let key = RequestKey { attempt: Attempt(1), ..key(n) };
        let request = LeaseRequest { key, reader, reader_generation: Generation(1), block_hashes };
        node.after(MS, |core, now| core.on_lease_request(now, request));
        node.take(|effect| match effect {
            DecodeEffect::Lease(LeaseEffect::Open { reply, .. }) => Some(Ok(reply.clone())),
            DecodeEffect::Lease(LeaseEffect::Refuse { refused, .. }) => Some(Err(refused.kind)),
            _ => None,
        })
    };
    assert_eq!(lease(7), Err(ErrorKind::Unavailable));
    let lent = lease(0).unwrap();
    assert_eq!(lent.blocks.len(), 2);
    node.after(MS, |core, now| core.on_release_lease(now, lent.lease));
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    let running = node.take_step();
    node.finish(&running, 41);
    assert!(node.core.is_idle());
}

/// A prompt of 10 tokens with 4 of its output, of which the other node has the first `there`.
fn resumed(n: u64, there: u32) -> PrefillJob {
    let mut tokens = prompt(n, 10);
    tokens.extend([40, 41, 42, 43]);
    let fetch = FetchSource { node: target().node, generation: Generation(1), address: String::new(), tokens: there };
    PrefillJob { is_migration: true, output_tokens: 4, fetch: Some(fetch), ..submitted(n, &tokens, 8) }
}

#[test]
fn migrated_sequence_resumes_with_the_blocks_that_were_fetched() {
    // Whole, in part, and not at all.
    for (brought, computed) in [(Some(3), 12..14), (Some(1), 4..14), (None, 0..14)] {
        let mut node = Node::new(config(20));
        node.after(MS, |core, now| core.on_submit(now, resumed(0, 13)));
        let (asked, destinations) = node.fetch();
        assert_eq!((asked, destinations.len(), node.core.load().running), (3, 3, 0));
        if let Some(blocks) = brought {
            node.after(MS, |core, _| core.on_fetch_begun(key(0), blocks));
        }
        let result = match brought {
            Some(_) => Ok(FetchedBytes { bytes: 7, transport: "shm".into() }),
            None => Err(Refused { kind: ErrorKind::NotFound, message: "gone".into() }),
        };
        node.after(MS, |core, now| core.on_fetch_done(now, key(0), result));
        let report = node.answer().unwrap();
        assert_eq!((report.tokens as usize, report.failure.is_some()), (brought.unwrap_or(0) * 4, brought.is_none()));
        let plan = node.take_step();
        assert_eq!(ranges(&plan), [(0, computed)]);
        assert_eq!((plan.sequences[0].prompt_tokens, plan.sequences[0].is_last_chunk), (10, true));
        node.finish(&plan, 41);
        let index = |(_, event): &(RequestKey, DecodeEvent)| match event {
            DecodeEvent::Token { index, .. } => Some(*index),
            DecodeEvent::Failed(_) => None,
        };
        assert_eq!(node.run().iter().filter_map(index).collect::<Vec<_>>(), [4, 5, 6, 7]);
        assert!(node.core.is_idle());
    }
}

#[test]
fn migration_is_refused_if_the_sequence_would_have_to_wait() {
    let refusal = |node: &mut Node, job| {
        node.after(MS, |core, now| core.on_submit(now, job));
        let refused = node.answer().unwrap_err();
        (refused.kind, refused.message)
    };
    let mut node = Node::new(DecodeConfig { max_running: 1, ..config(5) });
    let whole = PrefillJob { is_migration: true, output_tokens: 8, ..submitted(0, &tokens(18), 8) };
    let (kind, message) = refusal(&mut node, whole);
    let expected = "10 prompt and 8 output tokens, of which 8 are given, and this node holds 21: nothing to decode";
    assert_eq!((kind, message.as_str()), (ErrorKind::Invalid, expected));
    node.admit(1, &prompt(1, 8), 4);
    assert_eq!(refusal(&mut node, resumed(0, 13)).1, "1 sequences come, wait or run, as many as run at once");
    node.after(MS, |core, now| core.on_drain(now));
    assert_eq!(refusal(&mut node, resumed(0, 13)).0, ErrorKind::Unavailable);
    let mut node = Node::new(config(5));
    node.admit(1, &prompt(1, 8), 4);
    let used = node.core.load().blocks_used;
    assert_eq!(refusal(&mut node, resumed(0, 13)), (ErrorKind::Overloaded, "no room for 14 tokens".into()));
    assert_eq!(node.core.load().blocks_used, used, "nothing was kept for it");
}

#[test]
fn incoming_migration_is_preempted_first_and_its_blocks_wait_for_fetch() {
    let mut node = Node::new(DecodeConfig { growth_blocks: 0, ..config(8) });
    node.admit(1, &prompt(1, 7), 20);
    node.after(MS, |core, now| core.on_submit(now, resumed(0, 13)));
    let (_, destinations) = node.fetch();
    assert_eq!(destinations.len(), 3);
    let mut plan = node.take_step();
    while !node.effects.iter().any(|effect| matches!(effect, DecodeEffect::CancelFetch { .. })) {
        node.finish(&plan, 41);
        // It sits out the step that it has no block for.
        if node.core.load().blocks_used < 8 || node.effects.iter().any(|it| matches!(it, DecodeEffect::RunStep(_))) {
            plan = node.take_step();
        }
    }
    assert_eq!(node.answer().unwrap_err().kind, ErrorKind::Overloaded);
    assert_eq!((node.core.load().preemptions, node.core.load().blocks_used), (0, 8));
    let cancelled = Refused { kind: ErrorKind::Cancelled, message: "the request ended".into() };
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Err(cancelled)));
    assert!(node.core.load().blocks_used <= 5);
    let _ = node.run();
    assert!(node.core.is_idle());
}

#[test]
fn sequence_that_outgrows_its_node_is_offered_and_then_ends_with_length() {
    // 20 blocks of 4 tokens hold 81 tokens of a sequence. It may have 118.
    let wait = Duration::from_secs(4);
    let mut config = DecodeConfig { grant_wait: wait, ..config(20) };
    config.model.context_length = 500;
    let mut node = Node::new(config);
    node.admit(0, &prompt(0, 8), 110);
    let mut offered = Vec::new();
    for _ in 0..71 {
        let plan = node.take_step();
        node.finish(&plan, 41);
        offered.extend(node.offers());
    }
    assert_eq!(offered.first(), Some(&(key(0), 9)), "64 tokens before its end");
    assert_eq!(node.take_events().len(), 71);
    let has_step = |node: &Node| node.effects.iter().any(|effect| matches!(effect, DecodeEffect::RunStep(_)));
    node.after(wait - 2 * MS, |core, now| core.on_wakeup(now));
    assert!(!has_step(&node) && node.core.load().running == 1, "a larger node may still take it");
    assert_eq!(node.offers(), [(key(0), 72)]);
    let due = node.core.next_wakeup().unwrap();
    assert!(due > node.now && due <= node.now + 2 * MS, "{:?}", due - node.now);
    node.after(2 * MS, |core, now| core.on_wakeup(now));
    let [(_, DecodeEvent::Token { index: 72, finish: Some(FinishReason::Length), .. })] = node.run()[..] else {
        panic!("it ends with the last token that this node can give");
    };
    assert!(node.core.is_idle() && node.core.next_wakeup().is_none());
}
