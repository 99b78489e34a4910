//! Unit tests of the orders, and property tests of every policy against naive models.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BLOCKS: u32 = 8;

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 16])
}

fn chain(of: impl IntoIterator<Item = u8>) -> Vec<BlockHash> {
    of.into_iter().map(hash).collect()
}

/// What goes for prompt 90, 91, .. of as many blocks as the cache has, after `prompts`.
fn order(kind: EvictionKind, prompts: &[&[u8]]) -> Vec<u8> {
    let mut cache = TierCache::new(BLOCKS, kind);
    for prompt in prompts {
        assert_eq!(cache.insert_prompt(&chain(prompt.iter().copied())), []);
    }
    let evicted = cache.insert_prompt(&chain(90..90 + BLOCKS as u8));
    evicted.into_iter().map(|hash| hash.0[0]).collect()
}

#[test]
fn lru_evicts_least_recently_used_block_first() {
    assert_eq!(order(EvictionKind::Lru, &[&[1, 2, 3], &[4, 5], &[1, 2]]), [3, 5, 4, 2, 1]);
}

#[test]
fn lfu_evicts_least_used_block_first_then_least_recently_used() {
    assert_eq!(order(EvictionKind::Lfu, &[&[1, 2], &[1, 2], &[3, 4, 5], &[6]]), [5, 4, 3, 6, 2, 1]);
}

#[test]
fn length_aware_evicts_least_used_block_first_then_deepest_in_prompt() {
    assert_eq!(order(EvictionKind::LengthAware, &[&[1, 2], &[1, 2], &[6], &[3, 4, 5]]), [5, 4, 6, 3, 2, 1]);
}

#[test]
fn lhd_without_history_evicts_in_lru_order() {
    assert_eq!(order(EvictionKind::Lhd, &[&[1, 2, 3], &[4, 5], &[1, 2]]), [3, 5, 4, 2, 1]);
}

/// How often a conversation of 8 blocks is whole when it goes on, in a cache of 64. Between its
/// turns come 1 to 6 prompts of 24 blocks that never come again.
fn times_kept(kind: EvictionKind) -> usize {
    let mut cache = TierCache::new(64, kind);
    let conversation = chain(1..9);
    let mut strangers = (1000u128..).map(|n| BlockHash(n.to_be_bytes()));
    let kept = [1, 5, 2, 6, 3].into_iter().cycle().take(100).filter(|prompts| {
        for _ in 0..*prompts {
            cache.insert_prompt(&strangers.by_ref().take(24).collect::<Vec<_>>());
        }
        let whole = cache.match_prefix(&conversation) == conversation.len();
        cache.insert_prompt(&conversation);
        whole
    });
    kept.count()
}

#[test]
fn lhd_keeps_often_used_prompt_that_lru_evicts() {
    assert_eq!(times_kept(EvictionKind::Lru), 39);
    assert!(times_kept(EvictionKind::Lhd) > 80, "{}", times_kept(EvictionKind::Lhd));
}

#[test]
fn eviction_policy_names_parse_and_error_lists_them() {
    for kind in EvictionKind::ALL {
        assert_eq!(kind.as_str().parse(), Ok(kind));
    }
    let error = "fifo".parse::<EvictionKind>().unwrap_err().to_string();
    assert!(EvictionKind::ALL.iter().all(|kind| error.contains(kind.as_str())), "{error}");
}

#[test]
fn tier_cache_of_zero_capacity_stores_nothing() {
    let mut cache = TierCache::new(0, EvictionKind::default());
    assert_eq!(cache.insert(hash(1), Position { depth: 0, length: 1 }), Some(hash(1)));
    assert_eq!(cache.insert_prompt(&chain(1..4)), []);
    assert!(cache.is_empty());
}

/// What is known of a block, kept the slow way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Naive {
    uses: u32,
    depth: u32,
    released: usize,
}

/// The block that goes next, by looking at all; `None` if what was learned decides.
fn naive_victim(kind: EvictionKind, order: &BTreeMap<u32, Naive>) -> Option<u32> {
    let least = |rank: fn(&Naive) -> (u32, Reverse<u32>, usize)| {
        order.iter().min_by_key(|(_, block)| rank(block)).map(|(block, _)| *block)
    };
    match kind {
        EvictionKind::Lru => least(|block| (0, Reverse(0), block.released)),
        EvictionKind::Lfu => least(|block| (block.uses, Reverse(0), block.released)),
        EvictionKind::LengthAware => least(|block| (block.uses, Reverse(block.depth), block.released)),
        EvictionKind::Lhd => None,
    }
}

/// Runs operations on a policy beside naive books, and returns what was evicted.
fn run(kind: EvictionKind, operations: &[(u8, u32, u8)]) -> Vec<BlockId> {
    let mut policy = kind.policy(BLOCKS);
    let mut held = BTreeMap::new();
    let mut order = BTreeMap::new();
    let mut evicted = Vec::new();
    for (now, (operation, block, depth)) in operations.iter().enumerate() {
        let id = BlockId(*block);
        let depth = u32::from(depth % 4);
        match operation {
            // Stored, used, or released, whichever the block can be.
            0..6 => match (held.remove(block), order.remove(block)) {
                (Some(uses), _) => {
                    policy.on_release(id, Position { depth, length: 4 });
                    order.insert(*block, Naive { uses, depth, released: now });
                }
                (None, Some(Naive { uses, .. })) => {
                    policy.on_use(id);
                    held.insert(*block, uses + 1);
                }
                (None, None) => {
                    policy.on_store(id, hash((now % 16) as u8));
                    held.insert(*block, 1);
                }
            },
            6 => {
                policy.on_forget(id);
                held.remove(block);
                order.remove(block);
            }
            _ => {
                let expected = naive_victim(kind, &order);
                let victim = policy.evict();
                assert!(expected.is_none() || expected == victim.map(|block| block.0));
                assert_eq!(victim.is_some(), !order.is_empty());
                assert!(victim.is_none_or(|block| order.remove(&block.0).is_some()), "evicts what is not in the order");
                evicted.extend(victim);
            }
        }
        let listed: BTreeSet<_> = policy.blocks().into_iter().map(|block| block.0).collect();
        assert!(listed.iter().eq(order.keys()) && policy.len() == order.len());
    }
    evicted
}

/// A prompt of a small tree: the path to a node, whose number in base 3 names its turns.
fn path(node: u32, length: usize) -> Vec<BlockHash> {
    let turns = (0..length as u32).scan(1u128, |path, depth| {
        *path = *path * 4 + u128::from(node / 3u32.pow(depth) % 3);
        Some(*path)
    });
    turns.map(|path| BlockHash(path.to_be_bytes())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn eviction_policies_match_model_and_are_deterministic(
        operations in prop::collection::vec((0u8..8, 0..BLOCKS, any::<u8>()), 0..300),
    ) {
        for kind in EvictionKind::ALL {
            prop_assert_eq!(run(kind, &operations), run(kind, &operations), "{}", kind);
        }
    }

    #[test]
    fn tier_cache_is_bounded_and_evicts_children_before_parents(
        capacity in 1u32..12,
        prompts in prop::collection::vec((0u32..81, 1usize..5), 1..150),
    ) {
        for kind in EvictionKind::ALL {
            let mut cache = TierCache::new(capacity, kind);
            let mut naive = BTreeSet::new();
            for (node, length) in &prompts {
                let prompt = path(*node, *length);
                for hash in cache.insert_prompt(&prompt) {
                    prop_assert!(naive.remove(&hash), "{} evicts what is not in it", kind);
                }
                naive.extend(prompt.iter().take(capacity as usize).copied());
                prop_assert!(cache.len() == naive.len() && cache.len() <= cache.capacity());
                for (node, length) in &prompts {
                    let prompt = path(*node, *length);
                    let held = prompt.iter().filter(|hash| naive.contains(*hash)).count();
                    prop_assert_eq!(held, cache.match_prefix(&prompt), "{} keeps a block without its parent", kind);
                }
            }
        }
    }

    #[test]
    fn tier_cache_filled_block_by_block_is_bounded(
        capacity in 0u32..6,
        operations in prop::collection::vec((0u8..3, 0u8..10), 0..200),
    ) {
        for kind in EvictionKind::ALL {
            let mut cache = TierCache::new(capacity, kind);
            let mut naive = BTreeSet::new();
            for (operation, n) in &operations {
                let hash = hash(*n);
                let position = Position { depth: u32::from(n % 3), length: 3 };
                match operation {
                    0 => {
                        naive.insert(hash);
                        if let Some(evicted) = cache.insert(hash, position) {
                            prop_assert!(naive.remove(&evicted));
                        }
                    }
                    1 => prop_assert_eq!(cache.remove(hash), naive.remove(&hash)),
                    _ => prop_assert_eq!(cache.touch(hash, position), naive.contains(&hash)),
                }
                prop_assert_eq!(cache.len(), naive.len());
                prop_assert!(cache.len() <= capacity as usize);
            }
        }
    }
}
