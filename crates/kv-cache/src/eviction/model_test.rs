//! What the policies keep, seen through a pool, and property tests against naive books.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::pool::BlockPool;

const BLOCKS: u32 = 8;
const KINDS: [EvictionKind; 2] = [EvictionKind::Lru, EvictionKind::Lhd];

fn hash(n: u128) -> BlockHash {
    BlockHash(n.to_be_bytes())
}

fn chain(of: impl IntoIterator<Item = u128>) -> Vec<BlockHash> {
    of.into_iter().map(hash).collect()
}

/// A sequence with this prompt comes and ends. The first blocks are kept of one that does not fit.
fn serve(pool: &mut BlockPool, prompt: &[BlockHash]) {
    let mut blocks = pool.match_prefix(prompt);
    pool.acquire(&blocks);
    let matched = blocks.len();
    let wanted = (prompt.len() - matched).min(pool.available());
    blocks.extend(pool.allocate(wanted).unwrap());
    for index in matched..blocks.len() {
        let parent = index.checked_sub(1).map(|before| prompt[before]);
        pool.complete(blocks[index], prompt[index], parent);
    }
    pool.release(&blocks);
}

#[test]
fn both_policies_evict_in_lru_order_without_history() {
    for kind in KINDS {
        let mut pool = BlockPool::with_eviction(5, 64, kind);
        for prompt in [chain([1, 2, 3]), chain([4, 5]), chain([1, 2])] {
            serve(&mut pool, &prompt);
        }
        let order = (90..95).map(|stranger| {
            let before: BTreeSet<_> = [1, 2, 3, 4, 5].map(hash).into_iter().filter(|hash| pool.has(*hash)).collect();
            serve(&mut pool, &[hash(stranger)]);
            before.into_iter().find(|hash| !pool.has(*hash)).map(|hash| u128::from_be_bytes(hash.0))
        });
        assert_eq!(order.collect::<Vec<_>>(), [Some(3), Some(5), Some(4), Some(2), Some(1)], "{kind:?}");
    }
}

/// How often a conversation of 8 blocks is whole when it goes on, in a cache of 64. Between its
/// turns come 1 to 6 prompts of 24 blocks that never come again.
fn times_kept(kind: EvictionKind) -> usize {
    let mut pool = BlockPool::with_eviction(64, 64, kind);
    let conversation = chain(1..9);
    let mut strangers = (1000u128..).map(hash);
    let kept = [1, 5, 2, 6, 3].into_iter().cycle().take(100).filter(|prompts| {
        for _ in 0..*prompts {
            serve(&mut pool, &strangers.by_ref().take(24).collect::<Vec<_>>());
        }
        let whole = pool.match_prefix(&conversation).len() == conversation.len();
        serve(&mut pool, &conversation);
        whole
    });
    kept.count()
}

#[test]
fn lhd_keeps_often_used_prompt_that_lru_evicts() {
    assert_eq!(times_kept(EvictionKind::Lru), 39);
    assert!(times_kept(EvictionKind::Lhd) > 80, "{}", times_kept(EvictionKind::Lhd));
}

/// Runs operations on a policy beside naive books, and returns what was evicted.
fn run(kind: EvictionKind, operations: &[(u8, u32, u8)]) -> Vec<BlockId> {
    let mut policy = kind.policy(BLOCKS);
    let mut held = BTreeSet::new();
    // When each block was released.
    let mut order = BTreeMap::new();
    let mut evicted = Vec::new();
    for (now, (operation, block, depth)) in operations.iter().enumerate() {
        let id = BlockId(*block);
        if *operation < 6 {
            // Released, used, or stored, whichever the block can be.
            if held.remove(block) {
                policy.on_release(id, Position { depth: u32::from(depth % 4), length: 4 });
                order.insert(*block, now);
            } else {
                match order.remove(block) {
                    Some(_) => policy.on_use(id),
                    None => policy.on_store(id, hash(now as u128 % 16)),
                }
                held.insert(*block);
            }
        } else {
            let oldest = order.iter().min_by_key(|(_, released)| **released).map(|(block, _)| *block);
            let victim = policy.evict();
            assert!(kind == EvictionKind::Lhd || oldest == victim.map(|block| block.0));
            assert_eq!(victim.is_some(), !order.is_empty());
            assert!(victim.is_none_or(|block| order.remove(&block.0).is_some()), "evicts what is not in the order");
            evicted.extend(victim);
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
    chain(turns)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn eviction_policies_match_model_and_are_deterministic(
        operations in prop::collection::vec((0u8..8, 0..BLOCKS, any::<u8>()), 0..300),
    ) {
        for kind in KINDS {
            prop_assert_eq!(run(kind, &operations), run(kind, &operations), "{:?}", kind);
        }
    }

    #[test]
    fn children_are_evicted_before_their_parents(
        capacity in 1u32..12,
        prompts in prop::collection::vec((0u32..81, 1usize..5), 1..150),
    ) {
        for kind in KINDS {
            let mut pool = BlockPool::with_eviction(capacity, 64, kind);
            for (node, length) in &prompts {
                serve(&mut pool, &path(*node, *length));
                pool.check_integrity().unwrap();
                for (node, length) in &prompts {
                    let prompt = path(*node, *length);
                    let here = prompt.iter().filter(|hash| pool.has(**hash)).count();
                    prop_assert_eq!(here, pool.match_prefix(&prompt).len(), "{:?} keeps a block without its parent", kind);
                }
            }
        }
    }
}
