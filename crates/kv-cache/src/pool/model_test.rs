//! Unit tests of the pool, and a property test against a naive model of it.

use std::collections::BTreeSet;

use baton_types::{BlockHash, BlockId, GrantId, KvEvent};
use proptest::prelude::*;

use super::*;

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

/// A pool that holds the chain 1, 2, 3 as cached blocks.
fn cached_chain(num_blocks: u32) -> (BlockPool, Vec<BlockId>) {
    let mut pool = BlockPool::new(num_blocks, 64);
    let blocks = pool.allocate(3).unwrap();
    let mut parent = None;
    for (n, block) in (1..).zip(&blocks) {
        assert!(pool.complete(*block, hash(n), parent.replace(hash(n))));
    }
    pool.release(&blocks);
    (pool, blocks)
}

#[test]
fn pool_allocates_free_blocks_first_then_evicts_children_before_parents() {
    let (mut pool, blocks) = cached_chain(4);
    assert_eq!(pool.allocate(1).unwrap(), [BlockId(3)]);
    assert_eq!(pool.allocate(2).unwrap(), [blocks[2], blocks[1]]);
    assert_eq!(pool.match_prefix(&[hash(1), hash(2), hash(3)]), blocks[..1]);
    let error = pool.allocate(2).unwrap_err();
    assert_eq!(error.to_string(), "2 blocks wanted, 1 of 4 available");
    pool.check_integrity().unwrap();
}

#[test]
fn kv_events_include_blocks_of_the_ssd_tier_unless_kept_private() {
    for told in [true, false] {
        let mut pool = BlockPool::new(1, 64);
        if !told {
            pool.keep_below_to_itself();
        }
        let drain = |pool: &mut BlockPool| pool.drain_events(9).map_or_else(Vec::new, |batch| batch.events);
        let stored = KvEvent::Stored { hash: hash(1), parent: None };
        let removed = KvEvent::Removed { hash: hash(1) };
        let lost = vec![removed];
        let blocks = pool.allocate(1).unwrap();
        assert!(pool.complete(blocks[0], hash(1), None));
        pool.stored_below(hash(1), None);
        pool.release(&blocks);
        assert_eq!(drain(&mut pool), [stored]);
        // The arena loses it, and then the tier does.
        let other = pool.allocate(1).unwrap();
        assert_eq!(drain(&mut pool), if told { Vec::new() } else { lost.clone() });
        assert_eq!((pool.snapshot().events.len(), pool.is_below(hash(1))), (usize::from(told), true));
        pool.removed_below(hash(1));
        assert_eq!(drain(&mut pool), if told { lost } else { Vec::new() });
        // What the arena gets back while the tier has it is told if it was not known.
        pool.stored_below(hash(1), None);
        assert!(pool.complete(other[0], hash(1), None));
        assert_eq!(drain(&mut pool), [stored]);
        pool.release(&other);
    }
}

#[test]
fn second_block_of_a_cached_hash_is_freed_on_release() {
    let mut pool = BlockPool::new(2, 64);
    let blocks = pool.allocate(2).unwrap();
    assert!(pool.complete(blocks[0], hash(1), None));
    assert!(!pool.complete(blocks[1], hash(1), None));
    assert_eq!(pool.state(blocks[1]), BlockState::Mutable);
    pool.release(&blocks);
    assert_eq!(pool.counts(), PoolCounts { total: 2, free: 1, cached: 1, used: 0, reserved: 0 });
}

#[test]
fn reserved_blocks_are_refused_to_other_requests() {
    let (mut pool, blocks) = cached_chain(4);
    let mut room = pool.reserve(3).unwrap();
    assert!(pool.allocate(2).is_err());
    assert!(pool.check_fits(&blocks[..1], 0).is_ok());
    assert!(pool.check_fits(&blocks[..2], 0).is_err());
    assert!(pool.check_fits(&blocks[..1], 1).is_err());
    pool.acquire(&blocks[..1]);
    assert!(pool.reserve(1).is_err());
    for _ in 0..3 {
        pool.allocate_reserved(&mut room);
    }
    pool.cancel_reservation(room);
    assert_eq!(pool.counts(), PoolCounts { total: 4, free: 0, cached: 0, used: 4, reserved: 0 });
    pool.check_integrity().unwrap();
}

#[test]
fn quarantined_blocks_are_unusable_until_fenced() {
    let mut pool = BlockPool::new(2, 64);
    let blocks = pool.allocate_receiving(2, GrantId(1)).unwrap();
    pool.received(&blocks[..1]);
    pool.quarantine(&blocks[1..]);
    pool.release(&blocks[..1]);
    assert_eq!(pool.allocate(2).unwrap_err().available, 1);
    pool.check_integrity_with(blocks[1..].iter().copied(), 0).unwrap();
    pool.unquarantine(&blocks[1..]);
    assert_eq!(pool.available(), 2);
}

#[test]
fn pool_integrity_check_names_leaked_block() {
    let mut pool = BlockPool::new(2, 64);
    let blocks = pool.allocate(1).unwrap();
    let error = pool.check_integrity_with([], 0).unwrap_err();
    assert_eq!(error.to_string(), "block 0 is Mutable, but 0 hold it");
    pool.check_integrity_with(blocks, 0).unwrap();
    let _leaked = pool.reserve(1).unwrap();
    assert!(pool.check_integrity_with([BlockId(0)], 0).is_err());
}

#[test]
fn kv_event_log_overflow_is_followed_by_a_snapshot() {
    let mut pool = BlockPool::new(8, 2);
    for (n, block) in (1..).zip(pool.allocate(4).unwrap()) {
        pool.complete(block, hash(n), None);
    }
    let batch = pool.drain_events(100).unwrap();
    assert!(batch.snapshot);
    assert_eq!((batch.sequence, batch.events.len()), (4, 4));
    assert_eq!(pool.drain_events(100), None);
}

#[test]
#[should_panic(expected = "cannot be released")]
fn releasing_a_block_twice_panics() {
    let (mut pool, blocks) = cached_chain(4);
    pool.release(&blocks);
}

/// What a sequence of the naive model holds.
#[derive(Default)]
struct Naive {
    sequences: Vec<Vec<BlockId>>,
    reservations: Vec<Reservation>,
    quarantined: Vec<BlockId>,
    /// Replayed from the events.
    told: BTreeSet<BlockHash>,
}

impl Naive {
    fn holders(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.sequences.iter().flatten().chain(&self.quarantined).copied()
    }

    fn replay(&mut self, pool: &mut BlockPool) {
        while let Some(batch) = pool.drain_events(3) {
            if batch.snapshot {
                self.told.clear();
            }
            for event in batch.events {
                match event {
                    KvEvent::Stored { hash, .. } => assert!(self.told.insert(hash), "stored twice"),
                    KvEvent::Removed { hash } => assert!(self.told.remove(&hash), "removed what was not stored"),
                    KvEvent::Cleared => self.told.clear(),
                }
            }
        }
    }
}

fn step(pool: &mut BlockPool, naive: &mut Naive, operation: u8, a: u8) {
    let pick = usize::from(a);
    match operation {
        0 => {
            let before = pool.available();
            match pool.allocate(pick % 4) {
                Ok(blocks) => naive.sequences.push(blocks),
                Err(_) => assert!(before < pick % 4),
            }
        }
        1 => {
            // Completes every block that is still private, under hashes that others may have taken.
            let Some(index) = pick.checked_rem(naive.sequences.len()) else { return };
            for (n, block) in (a % 6..).zip(naive.sequences[index].clone()) {
                if pool.state(block) == BlockState::Mutable {
                    let expected = !pool.match_prefix(&[hash(n)]).is_empty();
                    assert_ne!(pool.complete(block, hash(n), None), expected);
                }
            }
        }
        2 => {
            let Some(index) = pick.checked_rem(naive.sequences.len()) else { return };
            pool.release(&naive.sequences.swap_remove(index));
        }
        3 => {
            let chain: Vec<_> = (a % 6..a % 6 + 3).map(hash).collect();
            let matched = pool.match_prefix(&chain);
            if pool.check_fits(&matched, 0).is_ok() {
                pool.acquire(&matched);
                naive.sequences.push(matched);
            }
        }
        4 => naive.reservations.extend(pool.reserve(pick % 3).ok()),
        5 => {
            let Some(index) = pick.checked_rem(naive.reservations.len()) else { return };
            let mut room = naive.reservations.swap_remove(index);
            if room.blocks() > 0 {
                naive.sequences.push(vec![pool.allocate_reserved(&mut room)]);
            }
            pool.cancel_reservation(room);
        }
        6 => {
            if let Ok(blocks) = pool.allocate_receiving(pick % 3, GrantId(1)) {
                pool.quarantine(&blocks);
                naive.quarantined.extend(blocks);
            }
        }
        7 => pool.unquarantine(&std::mem::take(&mut naive.quarantined)),
        8 => {
            let bad = [hash(a % 8)];
            let held = pool.match_prefix(&bad);
            assert_eq!(pool.forget_with_successors(&bad).len(), held.len());
            assert!(pool.match_prefix(&bad).is_empty());
        }
        _ => pool.clear_cached(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn block_pool_matches_model_under_random_operations(
        capacity in 0usize..12,
        policy in prop::sample::select(&[EvictionKind::Lru, EvictionKind::Lhd][..]),
        operations in prop::collection::vec((0u8..10, any::<u8>()), 1..120),
    ) {
        let mut pool = BlockPool::with_eviction(12, capacity, policy);
        let mut naive = Naive::default();
        for (operation, a) in operations {
            step(&mut pool, &mut naive, operation, a);
            let reserved = naive.reservations.iter().map(Reservation::blocks).sum();
            pool.check_integrity_with(naive.holders().collect::<Vec<_>>(), reserved).unwrap();
            let counts = pool.counts();
            prop_assert_eq!(counts.free + counts.cached + counts.used, 12);
        }
        naive.replay(&mut pool);
        let stored: BTreeSet<_> = pool.snapshot().events.iter().map(|event| match event {
            KvEvent::Stored { hash, .. } => *hash,
            other => panic!("{other:?} in a snapshot"),
        }).collect();
        prop_assert_eq!(&naive.told, &stored);
        for sequence in std::mem::take(&mut naive.sequences) {
            pool.release(&sequence);
        }
        for reservation in std::mem::take(&mut naive.reservations) {
            pool.cancel_reservation(reservation);
        }
        pool.unquarantine(&naive.quarantined);
        pool.clear_cached();
        prop_assert_eq!(pool.counts().free, 12);
    }
}

#[test]
fn forgotten_prefix_goes_with_all_that_follows_it_in_both_tiers() {
    let mut pool = BlockPool::new(8, 100);
    let blocks = pool.allocate(4).unwrap();
    // 0 <- 1 <- 2, and 3 by itself.
    let parents = [None, Some(hash(0)), Some(hash(1)), None];
    for (n, parent) in parents.into_iter().enumerate() {
        pool.complete(blocks[n], hash(n as u8), parent);
    }
    pool.release(&[blocks[1], blocks[2], blocks[3]]);
    // The tier has one that the arena has not, after 2, and one of the others.
    pool.stored_below(hash(5), Some(hash(2)));
    pool.stored_below(hash(3), None);
    while pool.drain_events(100).is_some() {}
    let mut forgotten = pool.forget_with_successors(&[hash(0), hash(9)]);
    forgotten.sort();
    assert_eq!(forgotten, [hash(0), hash(1), hash(2), hash(5)]);
    let told = pool.drain_events(100).unwrap().events;
    assert_eq!(told.len(), 4);
    assert!(told.iter().all(|event| matches!(event, KvEvent::Removed { .. })), "{told:?}");
    assert!(pool.is_below(hash(3)) && !pool.is_below(hash(5)));
    // The one that a sequence holds is its own, and free after it.
    pool.check_integrity_with([blocks[0]], 0).unwrap();
    pool.release(&blocks[..1]);
    assert_eq!((pool.counts().free, pool.counts().cached), (7, 1));
    // It may be computed anew.
    let again = pool.allocate(1).unwrap();
    assert!(pool.complete(again[0], hash(0), None));
    pool.check_integrity_with(again, 0).unwrap();
}
