//! One cache, one trace: how many of the prompts' blocks it would have had.
//!
//! Each request hits the leading blocks that are there, up to the first that is not. Then all of
//! its blocks are there; time is the order of requests alone.

mod belady;

use std::collections::HashSet;

use baton_kv_cache::{EvictionKind, TierCache};

use baton_sim::Trace;
use baton_types::BlockHash;

/// Hits, of so many blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HitRate {
    /// Blocks that were there.
    pub hits: u64,
    /// Blocks asked for.
    pub blocks: u64,
}

impl HitRate {
    /// From 0 to 1; 0 if nothing was asked for.
    pub fn rate(self) -> f64 {
        if self.blocks == 0 { 0.0 } else { self.hits as f64 / self.blocks as f64 }
    }

    fn count(&mut self, hits: usize, blocks: usize) {
        self.hits += hits as u64;
        self.blocks += blocks as u64;
    }
}

/// What a cache did over a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheReplay {
    /// From its beginning, when the cache was empty.
    pub whole: HitRate,
    /// From the middle of its time, with the cache that the first half left.
    pub second_half: HitRate,
}

impl CacheReplay {
    /// A cache of `num_blocks` that evicts by this policy.
    pub fn with_policy(trace: &Trace, num_blocks: u32, eviction: EvictionKind) -> Self {
        let mut cache = TierCache::new(num_blocks, eviction);
        Self::count(trace, |ids| {
            let hashes: Vec<_> = ids.iter().map(|id| BlockHash(u128::from(*id).to_be_bytes())).collect();
            let hits = cache.match_prefix(&hashes);
            cache.insert_prompt(&hashes);
            hits
        })
    }

    /// A cache of `num_blocks` that knows what will be asked for, and evicts what is asked for
    /// last. No policy has more hits (Belady 1966). What is asked for with a block is asked for
    /// with its parent, so this order evicts children first, too.
    pub fn with_belady(trace: &Trace, num_blocks: u32) -> Self {
        let mut cache = belady::Belady::new(trace, num_blocks as usize);
        Self::count(trace, |ids| cache.request(ids))
    }

    /// A cache in which everything fits.
    pub fn without_bound(trace: &Trace) -> Self {
        let mut cache = HashSet::<u64>::new();
        Self::count(trace, |ids| {
            let hits = ids.iter().take_while(|id| cache.contains(*id)).count();
            cache.extend(ids);
            hits
        })
    }

    fn count(trace: &Trace, mut request: impl FnMut(&[u64]) -> usize) -> Self {
        let mut replay = Self::default();
        let half = trace.before(0.5);
        for (index, ids) in trace.requests.iter().map(|request| &request.hash_ids).enumerate() {
            let hits = request(ids);
            replay.whole.count(hits, ids.len());
            if index >= half {
                replay.second_half.count(hits, ids.len());
            }
        }
        replay
    }
}

/// One line of the comparison: every policy at one size of the cache.
#[derive(Debug, Clone)]
pub struct Row {
    /// Blocks of the cache.
    pub num_blocks: u32,
    /// Least recently used.
    pub lru: CacheReplay,
    /// Least frequently used.
    pub lfu: CacheReplay,
    /// Mooncake's LengthAwareCache.
    pub length_aware: CacheReplay,
    /// Least hit density.
    pub lhd: CacheReplay,
    /// Knows what will be asked for.
    pub belady: CacheReplay,
    /// Needs no room.
    pub infinite: CacheReplay,
}

impl Row {
    fn new(trace: &Trace, num_blocks: u32, infinite: CacheReplay) -> Self {
        let by = |kind| CacheReplay::with_policy(trace, num_blocks, kind);
        Self {
            num_blocks,
            lru: by(EvictionKind::Lru),
            lfu: by(EvictionKind::Lfu),
            length_aware: by(EvictionKind::LengthAware),
            lhd: by(EvictionKind::Lhd),
            belady: CacheReplay::with_belady(trace, num_blocks),
            infinite,
        }
    }

    /// Hit rate of the better of LRU and LFU in the second half.
    pub fn baseline(&self) -> f64 {
        self.lru.second_half.rate().max(self.lfu.second_half.rate())
    }

    /// How much of what lies between that and Belady hit density gains, in the second half; 0 if
    /// nothing does.
    pub fn gap_closed(&self) -> f64 {
        let gap = self.belady.second_half.rate() - self.baseline();
        if gap > 0.0 { (self.lhd.second_half.rate() - self.baseline()) / gap } else { 0.0 }
    }
}

/// Every policy at each of these sizes.
pub fn eviction_table(trace: &Trace, sizes: &[u32]) -> Vec<Row> {
    let infinite = CacheReplay::without_bound(trace);
    sizes.iter().map(|num_blocks| Row::new(trace, *num_blocks, infinite)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use baton_sim::{BLOCK_TOKENS, TraceRequest};

    /// One request per second.
    fn trace(prompts: impl IntoIterator<Item = Vec<u64>>) -> Trace {
        let request = |(second, hash_ids): (u64, Vec<u64>)| TraceRequest {
            timestamp: Duration::from_secs(second),
            input_length: hash_ids.len() as u32 * BLOCK_TOKENS,
            output_length: 1,
            hash_ids,
        };
        let requests = (0..).zip(prompts).map(request).collect();
        Trace { name: "test".to_owned(), requests, block_tokens: BLOCK_TOKENS }
    }

    /// A prompt of a small tree: the path to a node, whose number in base 2 names its turns.
    fn path(node: u64, length: usize) -> Vec<u64> {
        (1..=length).map(|depth| (1 << depth) | (node & ((1 << depth) - 1))).collect()
    }

    #[test]
    fn cache_replay_match_stops_at_first_miss_and_halves_are_of_time() {
        let replay = CacheReplay::with_policy(&trace([vec![1, 2], vec![1, 2, 3], vec![2, 3]]), 8, EvictionKind::Lru);
        assert_eq!(replay.whole, HitRate { hits: 4, blocks: 7 });
        assert_eq!(replay.second_half, HitRate { hits: 4, blocks: 5 });
        assert_eq!(CacheReplay::without_bound(&trace([])).whole.rate(), 0.0);
    }

    #[test]
    fn belady_keeps_the_blocks_used_next() {
        let prompts = [vec![1], vec![2], vec![3], vec![1], vec![2]];
        let hits = |replay: CacheReplay| replay.whole.hits;
        assert_eq!(hits(CacheReplay::with_belady(&trace(prompts.clone()), 2)), 1);
        assert_eq!(hits(CacheReplay::with_policy(&trace(prompts.clone()), 2, EvictionKind::Lru)), 0);
        assert_eq!(hits(CacheReplay::with_belady(&trace(prompts), 3)), 2);
    }

    #[test]
    fn gap_closed_to_belady_is_that_of_the_second_half() {
        let rate = |hits| CacheReplay { whole: HitRate::default(), second_half: HitRate { hits, blocks: 100 } };
        let row = |hits, belady| Row {
            num_blocks: 1,
            lru: rate(10),
            lfu: rate(20),
            length_aware: rate(0),
            lhd: rate(hits),
            belady: rate(belady),
            infinite: rate(100),
        };
        assert!((row(30, 60).gap_closed() - 0.25).abs() < 1e-9);
        assert_eq!(row(20, 20).gap_closed(), 0.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn belady_hits_are_never_below_a_policy_or_above_infinite_cache(
            prompts in prop::collection::vec((0u64..32, 1usize..6), 1..120),
            num_blocks in 0u32..16,
        ) {
            let trace = trace(prompts.into_iter().map(|(node, length)| path(node, length)));
            let belady = CacheReplay::with_belady(&trace, num_blocks).whole;
            prop_assert!(belady.hits <= CacheReplay::without_bound(&trace).whole.hits);
            for kind in EvictionKind::ALL {
                let hits = CacheReplay::with_policy(&trace, num_blocks, kind).whole.hits;
                prop_assert!(hits <= belady.hits, "{}: {} hits, belady {}", kind, hits, belady.hits);
            }
            prop_assert_eq!(belady, CacheReplay::with_belady(&trace, num_blocks).whole);
        }

        #[test]
        fn eviction_policies_are_equal_if_all_blocks_fit(prompts in prop::collection::vec((0u64..32, 1usize..6), 1..60)) {
            let trace = trace(prompts.into_iter().map(|(node, length)| path(node, length)));
            for row in eviction_table(&trace, &[64]) {
                let all = [row.lru, row.lfu, row.length_aware, row.lhd, row.belady];
                prop_assert!(all.iter().all(|replay| *replay == row.infinite));
            }
        }
    }
}
