//! Replications of hot prefixes at the prefill core by itself. Blocks have 4 tokens, the model has
//! 3 layers, the arena 64 blocks or as many as said.

use baton_kv_cache::BlockHasher;
use baton_types::{
    BlockHash, BlockId, ConductorId, ErrorKind, FetchReport, FetchSource, Generation, KvEvent, LeaseRequest,
    ModelFingerprint, PrefillEvent, PrefixReplication,
};

use super::engine::{key, target};
use super::prefill::{MS, Node, config, job, refused, shares};
use crate::{FetchedBytes, PrefillEffect};

fn hashes(prompt: std::ops::Range<u32>) -> Vec<BlockHash> {
    BlockHasher::new(ModelFingerprint(7), b"").chain(&prompt.collect::<Vec<_>>(), 4)
}

fn order(n: u64, prompt: std::ops::Range<u32>) -> PrefixReplication {
    let tokens = prompt.end - prompt.start;
    let source = FetchSource { node: target().node, generation: Generation(1), address: String::new(), tokens };
    PrefixReplication { key: key(n), conductor: ConductorId(1), source, block_hashes: hashes(prompt).into() }
}

fn done() -> FetchedBytes {
    FetchedBytes { bytes: 7, transport: "tcp".into() }
}

impl Node {
    fn order(&mut self, order: PrefixReplication) {
        self.after(MS, |core, now| core.on_replicate(now, order));
    }

    fn take_replication(&mut self) -> (LeaseRequest, Vec<BlockId>) {
        self.take(|effect| match effect {
            PrefillEffect::Fetch { lease, destinations, is_replication: true, .. } => {
                Some((lease.clone(), destinations.clone()))
            }
            _ => None,
        })
    }

    /// The holder has so many of the blocks, and all layers of them come.
    fn bring(&mut self, of: u64, blocks: usize) -> FetchReport {
        self.after(MS, |core, now| core.on_fetch_begun(now, key(of), blocks));
        (0..3).for_each(|layer| self.after(MS, |core, now| core.on_fetched(now, key(of), layer)));
        self.after(MS, |core, now| core.on_fetch_done(now, key(of), Ok(done())));
        self.copied(of)
    }

    fn copied(&mut self, of: u64) -> FetchReport {
        self.take(|effect| match effect {
            PrefillEffect::Emit { key: whose, event: PrefillEvent::Replicated(report), .. } if *whose == key(of) => {
                Some(report.clone())
            }
            _ => None,
        })
    }

    fn refusal(&mut self, of: u64) -> ErrorKind {
        self.copied(of).failure.unwrap().kind
    }
}

#[test]
fn replicated_prefix_is_cached_for_the_next_request() {
    let mut node = Node::new(config());
    node.order(order(9, 0..16));
    let (lease, destinations) = node.take_replication();
    assert_eq!((lease.key, lease.block_hashes.to_vec(), destinations.len()), (key(9), hashes(0..16), 4));
    assert!(!node.core.is_idle());
    let report = node.bring(9, 3);
    assert_eq!((report.tokens, report.bytes, report.failure), (12, 7, None), "as many as the holder has");
    assert!(
        node.core.is_idle() && node.core.load(node.now).blocks_used == 0 && node.core.load(node.now).blocks_cached == 3
    );
    let told: Vec<_> = node.core.drain_kv_events(99).unwrap().events;
    let parents = [None, Some(hashes(0..16)[0]), Some(hashes(0..16)[1])];
    let stored = hashes(0..12).into_iter().zip(parents).map(|(hash, parent)| KvEvent::Stored { hash, parent });
    assert!(told.into_iter().eq(stored));
    node.submit(job(0, 0..20, 1));
    let step = node.take_step();
    assert_eq!(shares(&step), [(key(0), 12..20)]);
    node.finish_step(MS, &step, 1);

    // The rest of it, beside what is here; and nothing if all is.
    node.order(order(10, 0..16));
    node.effects.retain(|effect| !matches!(effect, PrefillEffect::Emit { event: PrefillEvent::FirstToken { .. }, .. }));
    assert_eq!(node.copied(10), FetchReport::default());
    node.order(order(11, 0..24));
    let (lease, destinations) = node.take_replication();
    assert_eq!((lease.block_hashes.to_vec(), destinations.len()), (hashes(0..24)[5..].to_vec(), 1));
    assert_eq!(node.core.load(node.now).blocks_used, 6, "what it follows on stays meanwhile");
    assert_eq!(node.bring(11, 1).tokens, 4);
    assert!(node.core.is_idle() && node.core.load(node.now).blocks_used == 0);
}

#[test]
fn failed_replication_leaves_no_blocks_in_use_or_cached() {
    let mut node = Node::new(config());
    node.order(order(9, 0..16));
    node.order(order(9, 0..16));
    assert_eq!(node.effects.len(), 1, "one that is under way is not begun again");
    node.take_replication();
    node.after(MS, |core, now| core.on_fetch_begun(now, key(9), 4));
    node.after(MS, |core, now| core.on_fetched(now, key(9), 0));
    node.after(MS, |core, now| core.on_fetch_done(now, key(9), Err(refused(ErrorKind::DeadlineExceeded))));
    assert_eq!(node.refusal(9), ErrorKind::DeadlineExceeded);
    // Some layers are not all.
    node.order(order(10, 0..16));
    node.take_replication();
    node.after(MS, |core, now| core.on_fetch_done(now, key(10), Ok(done())));
    assert_eq!(node.refusal(10), ErrorKind::Internal);
    assert!(
        node.core.is_idle() && node.core.load(node.now).blocks_used == 0 && node.core.load(node.now).blocks_cached == 0
    );
    assert!(node.core.drain_kv_events(9).is_none());
}

#[test]
fn request_without_room_cancels_replications() {
    let mut config = config();
    config.model.layout.num_blocks = 10;
    let mut node = Node::new(config);
    node.order(order(9, 100..124));
    node.take_replication();
    node.submit(job(0, 0..16, 1));
    let step = node.take_step();
    assert_eq!(shares(&step), [(key(0), 0..16)], "beside the replication");
    node.finish_step(MS, &step, 1);
    node.submit(job(1, 20..44, 1));
    assert!(node.effects.contains(&PrefillEffect::CancelFetch { key: key(9) }));
    assert_eq!(node.core.load(node.now).waiting, 1, "its blocks are written into until the fetch is over");
    node.order(order(10, 200..204));
    assert_eq!(node.refusal(10), ErrorKind::Overloaded);
    node.after(MS, |core, now| core.on_fetch_done(now, key(9), Err(refused(ErrorKind::Cancelled))));
    assert_eq!(node.refusal(9), ErrorKind::Overloaded);
    assert_eq!(shares(&node.take_step()), [(key(1), 0..16)]);
}

#[test]
fn replication_evicts_only_blocks_long_unused() {
    let mut config = config();
    config.model.layout.num_blocks = 8;
    let long = config.cold_after;
    let mut node = Node::new(config);
    node.run_alone(job(0, 0..28, 1));
    assert_eq!((node.core.load(node.now).blocks_cached, node.core.cold_blocks(node.now)), (7, 0));
    node.order(order(9, 100..108));
    let refusal = node.copied(9).failure.unwrap();
    assert_eq!(refusal.message, "no unneeded room: 2 blocks wanted, 1 of 8 available");
    assert_eq!((refusal.kind, node.core.load(node.now).blocks_cached), (ErrorKind::Overloaded, 7));
    node.now += long;
    assert_eq!(node.core.cold_blocks(node.now), 7);
    node.order(order(10, 100..108));
    node.take_replication();
    assert_eq!(node.core.load(node.now).blocks_cached, 6, "one was free, one is enough");
    assert_eq!(node.bring(10, 2).tokens, 8);
}

#[test]
fn replications_end_with_their_conductor_and_are_bounded_in_number() {
    let mut node = Node::new(config());
    for n in 0..3 {
        node.order(order(n, (n as u32) * 100..(n as u32) * 100 + 8));
    }
    assert_eq!(node.refusal(2), ErrorKind::Overloaded, "two at a time");
    node.after(MS, |core, now| core.on_abort(now, key(0)));
    node.after(MS, |core, now| core.on_conductor_lost(now, ConductorId(2)));
    assert!(!node.effects.contains(&PrefillEffect::CancelFetch { key: key(1) }));
    node.after(MS, |core, now| core.on_conductor_lost(now, ConductorId(1)));
    node.after(MS, |core, now| core.on_conductor_lost(now, ConductorId(1)));
    for n in 0..2 {
        let cancelled = node.effects.iter().filter(|effect| **effect == PrefillEffect::CancelFetch { key: key(n) });
        assert_eq!(cancelled.count(), 1);
        // It came before that was heard of.
        (0..3).for_each(|layer| node.after(MS, |core, now| core.on_fetched(now, key(n), layer)));
        node.after(MS, |core, now| core.on_fetch_done(now, key(n), Ok(done())));
        assert_eq!(node.refusal(n), ErrorKind::Cancelled);
    }
    let own = FetchSource { node: config().node, ..order(5, 0..8).source };
    node.order(PrefixReplication { source: own, ..order(5, 0..8) });
    assert_eq!(node.refusal(5), ErrorKind::Invalid);
    node.after(MS, |core, now| core.on_drain(now));
    node.order(order(6, 0..8));
    assert_eq!(node.refusal(6), ErrorKind::Unavailable);
    assert!(node.core.is_idle());
}
