//! Prefixes that another node holds, at the prefill core by itself. Blocks have 4 tokens, the model
//! has 3 layers.

use std::time::{Duration, Instant};

use baton_types::{
    BlockHash, BlockId, ErrorKind, FetchReport, FetchSource, Generation, LeaseReply, LeaseRequest, PrefillEvent,
    PrefillJob, QueueOrdering, RequestKey,
};

use super::engine::{key, target};
use super::prefill::{MS, Node, config, job, refused, shares};
use crate::{FetchedBytes, LeaseEffect, PrefillEffect};

/// A job whose first `tokens` tokens another node holds, and whose compute should take `compute`.
fn fetching(n: u64, prompt: std::ops::Range<u32>, max_tokens: u32, tokens: u32, compute: Duration) -> PrefillJob {
    let source = FetchSource { node: target().node, generation: Generation(1), address: String::new(), tokens };
    let terms = QueueOrdering { compute, ..QueueOrdering::default() };
    PrefillJob { fetch: Some(source), terms, ..job(n, prompt, max_tokens) }
}

fn done() -> FetchedBytes {
    FetchedBytes { bytes: 7, transport: "tcp".into() }
}

impl Node {
    fn take_fetch(&mut self) -> (LeaseRequest, Vec<BlockId>) {
        self.take(|effect| match effect {
            PrefillEffect::Fetch { lease, destinations, .. } => Some((lease.clone(), destinations.clone())),
            _ => None,
        })
    }

    fn begin(&mut self, of: u64, blocks: usize) {
        self.after(MS, |core, now| core.on_fetch_begun(now, key(of), blocks));
    }

    fn fetched(&mut self, of: u64, layer: u32) {
        self.after(MS, |core, now| core.on_fetched(now, key(of), layer));
    }

    fn has_step(&self) -> bool {
        self.effects.iter().any(|effect| matches!(effect, PrefillEffect::RunStep(_)))
    }

    fn report(&mut self, of: u64) -> FetchReport {
        self.take(|effect| match effect {
            PrefillEffect::Emit { key: whose, event: PrefillEvent::Fetched(report), .. } if *whose == key(of) => {
                Some(report.clone())
            }
            _ => None,
        })
    }
}

#[test]
fn prefill_begins_once_fetched_layers_keep_ahead_of_it() {
    let mut node = Node::new(config());
    // At 1 ms a layer, the last of 3 layers is needed 6 ms into a compute of 9.
    node.submit(fetching(0, 0..20, 1, 16, 9 * MS));
    let (lease, destinations) = node.take_fetch();
    assert_eq!((lease.block_hashes.len(), destinations.len()), (4, 4));
    node.begin(0, 4);
    assert!(!node.has_step(), "no layer is here");
    node.fetched(0, 0);
    let step = node.take_step();
    assert_eq!(shares(&step), [(key(0), 16..20)]);
    assert!(step.sequences[0].awaits_prefix);
    node.fetched(0, 1);
    node.fetched(0, 2);
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Ok(done())));
    let report = node.report(0);
    assert_eq!((report.tokens, report.bytes, report.elapsed, report.failure), (16, 7, 5 * MS, None));
    node.finish_step(MS, &step, 1);
    assert!(node.core.is_idle());

    // The prefix is in the cache like any other; one that computes faster than its layers come
    // waits for them.
    node.effects.clear();
    node.submit(fetching(1, 0..20, 1, 16, MS));
    assert!(!node.take_step().sequences[0].awaits_prefix);
    let mut fast = Node::new(config());
    fast.submit(fetching(0, 0..20, 1, 16, MS));
    fast.begin(0, 4);
    fast.fetched(0, 0);
    fast.fetched(0, 1);
    assert!(!fast.has_step());
    fast.fetched(0, 2);
    assert!(fast.has_step());
}

#[test]
fn other_prompts_compute_while_a_prefix_is_fetched() {
    let mut node = Node::new(config());
    node.submit(fetching(0, 0..20, 1, 16, MS));
    node.submit(job(1, 40..48, 1));
    let step = node.take_step();
    assert_eq!(shares(&step), [(key(1), 0..8)]);
    node.finish_step(MS, &step, 1);
    assert!(!node.has_step());
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Err(refused(ErrorKind::NotFound))));
    assert_eq!(shares(&node.take_step()), [(key(0), 0..16)], "computed after all");
    let report = node.report(0);
    assert_eq!((report.tokens, report.failure.unwrap().kind), (0, ErrorKind::NotFound));
}

#[test]
fn blocks_the_prefix_holder_has_lost_are_computed() {
    let mut node = Node::new(config());
    node.submit(fetching(0, 0..18, 1, 16, MS));
    node.begin(0, 3);
    (0..3).for_each(|layer| node.fetched(0, layer));
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Ok(done())));
    assert_eq!(shares(&node.take_step()), [(key(0), 12..18)]);
    assert_eq!(node.report(0).tokens, 12);
}

#[test]
fn failed_fetch_during_a_step_invalidates_the_step() {
    let mut node = Node::new(config());
    node.submit(fetching(0, 0..10, 4, 8, Duration::from_secs(1)));
    let granted = 3;
    node.grant(0, 0, 0..granted);
    node.begin(0, 2);
    node.fetched(0, 0);
    let step = node.take_step();
    let (push, spans) = node.take_push();
    assert_eq!(spans.len(), 2, "the prefix is pushed on as it comes");
    node.after(MS, |core, now| core.on_kv_ready(now, step.id, 0));
    let second = node.take_push();
    assert_eq!(second.1.iter().map(|span| (span.layer, span.destination)).collect::<Vec<_>>(), [(0, BlockId(2))]);
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Err(refused(ErrorKind::Unavailable))));
    node.after(MS, |core, now| core.on_kv_ready(now, step.id, 1));
    assert!(node.effects.iter().all(|effect| !matches!(effect, PrefillEffect::Push { .. })), "it means nothing");
    node.finish_step(MS, &step, 1);
    node.acknowledge(0, &(push, spans));
    node.acknowledge(0, &second);

    let again = node.take_step();
    assert_eq!(shares(&again), [(key(0), 0..10)]);
    assert!(!again.sequences[0].awaits_prefix);
    node.finish_step(MS, &again, 1);
    let mut pushed: Vec<_> =
        (0..2).flat_map(|_| node.take_push().1).map(|span| (span.layer, span.destination.0)).collect();
    pushed.sort_unstable();
    assert_eq!(pushed, [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)], "layer 0 is there already");
}

#[test]
fn late_prefix_invalidates_its_part_of_step_and_pauses_its_holder() {
    let mut node = Node::new(config());
    let second = Duration::from_secs(1);
    node.submit(fetching(0, 0..12, 1, 8, second));
    node.submit(job(1, 40..44, 1));
    let first = node.take_step();
    node.begin(0, 2);
    node.fetched(0, 0);
    node.submit(job(2, 30..34, 1));
    node.finish_step(MS, &first, 1);
    let step = node.take_step();
    let mut members = shares(&step);
    members.sort_by_key(|(key, _)| *key);
    assert_eq!(members, [(key(0), 8..12), (key(2), 0..4)]);
    node.after(MS, |core, now| core.on_kv_ready(now, step.id, 0));
    node.effects.clear();
    node.after(MS, |core, now| core.on_prefix_late(now, step.id, key(0)));
    assert_eq!(node.effects, [PrefillEffect::CancelFetch { key: key(0) }]);
    // The step goes on for the other; the prompt waits for the end of its fetch: its blocks may
    // still be written.
    node.finish_step(MS, &step, 1);
    node.effects.clear();
    node.fetched(0, 1);
    node.submit(job(3, 44..48, 1));
    let other = node.take_step();
    assert_eq!(shares(&other), [(key(3), 0..4)]);
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Err(refused(ErrorKind::Cancelled))));
    let failure = node.report(0).failure.unwrap();
    assert_eq!(
        (failure.kind, failure.message.as_str()),
        (ErrorKind::DeadlineExceeded, "layer 2 of the prefix did not come in time")
    );
    node.finish_step(MS, &other, 1);
    let again = node.take_step();
    assert_eq!(shares(&again), [(key(0), 0..12)]);
    node.finish_step(MS, &again, 1);

    // A source that is late once is late again: others compute what it holds, for a while.
    let fetches = |node: &Node| node.effects.iter().any(|effect| matches!(effect, PrefillEffect::Fetch { .. }));
    node.submit(fetching(4, 20..32, 1, 8, second));
    assert!(!fetches(&node));
    let step = node.take_step();
    assert_eq!(shares(&step), [(key(4), 0..12)]);
    node.finish_step(MS, &step, 1);
    let mut restarted = fetching(5, 24..36, 1, 8, second);
    restarted.fetch.as_mut().unwrap().generation = Generation(2);
    node.submit(restarted);
    assert!(fetches(&node), "another start of it is another matter");
    node.take_fetch();
    node.after(6 * second, |core, now| core.on_wakeup(now));
    node.submit(fetching(6, 28..40, 1, 8, second));
    assert!(fetches(&node));
}

#[test]
fn late_prefix_that_arrives_anyway_is_used_by_the_next_step() {
    let mut node = Node::new(config());
    node.submit(fetching(0, 0..12, 1, 8, Duration::from_secs(1)));
    node.begin(0, 2);
    node.fetched(0, 0);
    let step = node.take_step();
    node.fetched(0, 1);
    node.fetched(0, 2);
    // Told before the engine's word is taken in.
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Ok(done())));
    node.after(MS, |core, now| core.on_prefix_late(now, step.id, key(0)));
    node.finish_step(MS, &step, 1);
    assert_eq!(node.report(0).failure, None);
    let again = node.take_step();
    assert_eq!((shares(&again), again.sequences[0].awaits_prefix), (vec![(key(0), 8..12)], false));
}

#[test]
fn blocks_of_ended_request_wait_for_its_fetch() {
    let mut node = Node::new(config());
    node.submit(fetching(0, 0..20, 1, 16, MS));
    node.begin(0, 4);
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    assert!(node.effects.contains(&PrefillEffect::CancelFetch { key: key(0) }));
    assert_eq!(node.core.load(Instant::now()).blocks_used, 5);
    node.fetched(0, 0);
    assert!(!node.has_step());
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Err(refused(ErrorKind::Cancelled))));
    assert!(node.core.is_idle() && node.core.load(Instant::now()).blocks_used == 0);
}

fn lease_of(n: u64, block_hashes: Vec<BlockHash>) -> LeaseRequest {
    let reader = target().node;
    LeaseRequest { key: key(n), reader, reader_generation: Generation(1), block_hashes: block_hashes.into() }
}

fn opened(node: &mut Node) -> (RequestKey, LeaseReply) {
    node.take(|effect| match effect {
        PrefillEffect::Lease(LeaseEffect::Open { key, reply, .. }) => Some((*key, reply.clone())),
        _ => None,
    })
}

#[test]
fn prefill_node_leases_cached_blocks_to_readers() {
    let mut node = Node::new(config());
    node.submit(fetching(0, 0..16, 1, 16, MS));
    let hashes = node.take_fetch().0.block_hashes.to_vec();
    node.after(MS, |core, now| core.on_fetch_done(now, key(0), Err(refused(ErrorKind::NotFound))));
    let step = node.take_step();
    node.finish_step(MS, &step, 1);
    node.effects.clear();
    assert!(node.core.is_idle());

    node.after(MS, |core, now| core.on_lease_request(now, lease_of(7, hashes.clone())));
    let (of, reply) = opened(&mut node);
    assert_eq!((of, reply.blocks.len()), (key(7), 3));
    assert!(!node.core.is_idle() && node.core.load(Instant::now()).blocks_used == 3);
    node.after(MS, |core, now| core.on_release_lease(now, reply.lease));
    assert_eq!(node.effects, [PrefillEffect::Lease(LeaseEffect::End { lease: reply.lease })]);
    assert!(node.core.is_idle() && node.core.load(Instant::now()).blocks_used == 0);

    // One that is forgotten ends by itself; a node on its way out gives none.
    node.after(MS, |core, now| core.on_lease_request(now, lease_of(8, hashes.clone())));
    let due = node.core.next_wakeup().unwrap();
    node.after(due - node.now, |core, now| core.on_wakeup(now));
    assert!(node.core.is_idle());
    node.after(MS, |core, now| core.on_drain(now));
    node.effects.clear();
    node.after(MS, |core, now| core.on_lease_request(now, lease_of(9, hashes)));
    let refusal = PrefillEffect::Lease(LeaseEffect::Refuse {
        key: key(9),
        refused: baton_types::Refused { kind: ErrorKind::Unavailable, message: "the node is draining".into() },
    });
    assert_eq!(node.effects, [refusal]);
}
