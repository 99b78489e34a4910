//! Which prefixes prompts begin with most of late.
//!
//! Counting every prefix of every prompt would take memory without bound. These are two bounds on
//! top of each other. Of a prompt's blocks, prefixes that end at each of the first eight are
//! counted, and beyond that four per doubling. So a length is known to a quarter of itself at the
//! price of a few dozen counters. The counters are those of Space-Saving (Metwally, Agrawal, El
//! Abbadi, 2005). If all are taken, the least one is given to the newcomer, who starts with its
//! count and remembers how much of it is not its own. What makes up more than 1 / [`COUNTERS`] of
//! all counts is never missed. A count less what is not its own is never too high. Old requests
//! count less by forward decay (Cormode et al., 2009): new ones weigh more and more, and nothing
//! has to be gone through as time passes.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use baton_types::BlockHash;

/// Prefixes that are counted.
const COUNTERS: usize = 4096;
/// After this long a request counts half.
const HALF_LIFE: Duration = Duration::from_secs(300);
/// Weights are scaled back to 1 after so many half-lives: before they lose digits.
const MAX_HALF_LIVES: f64 = 64.0;
/// A prefix says nothing beside a longer one that has this part of its requests.
const ABSORBED: f64 = 0.75;

/// A prefix that several requests began with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HotPrefix {
    /// Of its last block.
    pub hash: BlockHash,
    /// Its length; requests may share up to a quarter more.
    pub blocks: u32,
    /// Requests that began with it, older ones counting less.
    pub requests: f64,
}

#[derive(Debug, Clone, Copy)]
struct Counter {
    weight: f64,
    /// What of it another prefix may have left.
    error: f64,
    blocks: u32,
    /// The next shorter prefix that is counted.
    parent: Option<BlockHash>,
}

/// See the module's text.
#[derive(Debug)]
pub struct HotPrefixes {
    counters: HashMap<BlockHash, Counter>,
    /// The same by weight. Positive numbers are in the order of their bits.
    by_weight: BTreeSet<(u64, BlockHash)>,
    /// When a request weighs 1.
    landmark: Instant,
    most: usize,
}

impl HotPrefixes {
    /// Nothing counted yet.
    pub fn new(now: Instant) -> Self {
        Self::with_counters(now, COUNTERS)
    }

    fn with_counters(now: Instant, most: usize) -> Self {
        let counters = HashMap::new();
        let by_weight = BTreeSet::new();
        Self { counters, by_weight, landmark: now, most }
    }

    /// A request is placed whose prompt has these blocks.
    pub fn observe(&mut self, now: Instant, chain: &[BlockHash]) {
        let weight = self.weight(now);
        let mut parent = None;
        for blocks in lengths(chain.len()) {
            let hash = chain[blocks - 1];
            self.count(hash, weight, blocks as u32, parent);
            parent = Some(hash);
        }
    }

    /// What a request weighs now.
    fn weight(&mut self, now: Instant) -> f64 {
        let half_lives = self.half_lives(now);
        if half_lives <= MAX_HALF_LIVES {
            return half_lives.exp2();
        }
        let scale = (-half_lives).exp2();
        for counter in self.counters.values_mut() {
            // What has become nothing stays more than nothing, so that the order is kept.
            counter.weight = (counter.weight * scale).max(f64::MIN_POSITIVE);
            counter.error *= scale;
        }
        self.by_weight = self.counters.iter().map(|(hash, counter)| (counter.weight.to_bits(), *hash)).collect();
        self.landmark = now;
        1.0
    }

    fn half_lives(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.landmark).as_secs_f64() / HALF_LIFE.as_secs_f64()
    }

    fn count(&mut self, hash: BlockHash, weight: f64, blocks: u32, parent: Option<BlockHash>) {
        let counter = match self.counters.get(&hash).copied() {
            Some(known) => {
                self.by_weight.remove(&(known.weight.to_bits(), hash));
                Counter { weight: known.weight + weight, ..known }
            }
            None => {
                let error = self.make_room();
                Counter { weight: error + weight, error, blocks, parent }
            }
        };
        self.by_weight.insert((counter.weight.to_bits(), hash));
        self.counters.insert(hash, counter);
    }

    /// If all counters are taken, gives up the least one; what it had counted.
    fn make_room(&mut self) -> f64 {
        if self.counters.len() < self.most {
            return 0.0;
        }
        let Some((weight, least)) = self.by_weight.pop_first() else { return 0.0 };
        self.counters.remove(&least);
        f64::from_bits(weight)
    }

    /// The prefixes that more than one request began with of late, those with the most requests
    /// first, of as many the longer. If nearly all went on alike, the longer one is told alone.
    pub fn hottest(&self, now: Instant, most: usize) -> Vec<HotPrefix> {
        let mut hot = self.hot(now);
        hot.sort_by(|a, b| b.requests.total_cmp(&a.requests).then(b.blocks.cmp(&a.blocks)).then(a.hash.cmp(&b.hash)));
        hot.truncate(most);
        hot
    }

    /// The prefixes that more than one request began with.
    fn hot(&self, now: Instant) -> Vec<HotPrefix> {
        let scale = (-self.half_lives(now)).exp2();
        let own = |counter: &Counter| (counter.weight - counter.error) * scale;
        let mut longer: HashMap<BlockHash, f64> = HashMap::new();
        for counter in self.counters.values() {
            if let Some(parent) = counter.parent {
                let most = longer.entry(parent).or_default();
                *most = most.max(own(counter));
            }
        }
        let absorbed = |hash: &BlockHash, requests: f64| {
            longer.get(hash).is_some_and(|longer| *longer > 1.0 && *longer >= ABSORBED * requests)
        };
        let hot = self.counters.iter().map(|(hash, counter)| (hash, counter, own(counter)));
        let hot = hot.filter(|(hash, _, requests)| *requests > 1.0 && !absorbed(hash, *requests));
        hot.map(|(hash, counter, requests)| HotPrefix { hash: *hash, blocks: counter.blocks, requests }).collect()
    }
}

/// Lengths that are counted of a chain: each up to eight blocks, then four per doubling.
fn lengths(blocks: usize) -> impl Iterator<Item = usize> {
    let next = |length: &usize| Some(length + (1 << length.ilog2() >> 2).max(1));
    std::iter::successors(Some(1), next).take_while(move |length| *length <= blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain whose first `shared` blocks are those of every other chain of the same `family`.
    fn chain(family: u8, shared: usize, own: u32, blocks: usize) -> Vec<BlockHash> {
        let hash = |n: usize| {
            let mut bytes = [family; 16];
            bytes[..4].copy_from_slice(&(n as u32).to_le_bytes());
            bytes[4..8].copy_from_slice(&(if n < shared { 0 } else { own + 1 }).to_le_bytes());
            BlockHash(bytes)
        };
        (0..blocks).map(hash).collect()
    }

    #[test]
    fn hot_prefix_lengths_are_known_to_a_quarter() {
        assert_eq!(lengths(30).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28]);
        assert_eq!(lengths(0).count(), 0);
        assert!(lengths(65_536).count() < 64);
        let all: Vec<_> = lengths(100_000).collect();
        assert!(all.windows(2).all(|pair| pair[1] - pair[0] <= pair[0].div_ceil(4)), "{all:?}");
    }

    #[test]
    fn hot_prefix_of_many_requests_is_listed_once_with_its_length() {
        let now = Instant::now();
        let mut hot = HotPrefixes::new(now);
        for own in 0..10 {
            hot.observe(now, &chain(1, 20, own, 40));
            hot.observe(now, &chain(2, 5, own % 2, 12));
            hot.observe(now, &chain(3, 0, own, 12));
        }
        let found: Vec<_> = hot.hottest(now, 10).iter().map(|hot| (hot.hash.0[15], hot.blocks, hot.requests)).collect();
        assert_eq!(found, [(1, 20, 10.0), (2, 5, 10.0), (2, 12, 5.0), (2, 12, 5.0)]);
        assert_eq!(hot.hottest(now, 1).len(), 1);
    }

    #[test]
    fn hot_prefix_counts_decay_and_are_forgotten() {
        let start = Instant::now();
        let mut hot = HotPrefixes::new(start);
        (0..8).for_each(|own| hot.observe(start, &chain(1, 4, own, 4)));
        let requests = |hot: &HotPrefixes, half_lives: u32| {
            hot.hottest(start + HALF_LIFE * half_lives, 1).first().map(|hot| hot.requests)
        };
        assert_eq!((requests(&hot, 0), requests(&hot, 2), requests(&hot, 3)), (Some(8.0), Some(2.0), None));
        // Beyond the point at which weights are scaled back.
        let later = start + HALF_LIFE * 100;
        (0..3).for_each(|own| hot.observe(later, &chain(2, 4, own, 4)));
        let found = hot.hottest(later, 5);
        assert_eq!((found.len(), found[0].hash.0[15], found[0].requests), (1, 2, 3.0));
        hot.observe(later, &chain(1, 4, 0, 4));
        assert_eq!(hot.hottest(later, 5).len(), 1, "eight requests of 100 half-lives ago are nothing");
    }

    #[test]
    fn hot_prefix_is_found_among_many_others_with_bounded_counters() {
        let now = Instant::now();
        let mut hot = HotPrefixes::with_counters(now, 256);
        let mut true_requests = 0.0;
        for own in 0..20_000_u32 {
            hot.observe(now, &chain(3, 0, own, 6));
            if own % 20 == 0 {
                hot.observe(now, &chain(1, 3, own, 3));
                true_requests += 1.0;
            }
            assert!(hot.counters.len() <= 256 && hot.by_weight.len() == hot.counters.len());
        }
        let found = hot.hottest(now, 3);
        assert_eq!(found.first().map(|hot| (hot.hash.0[15], hot.blocks)), Some((1, 3)));
        assert!(found[0].requests <= true_requests && found[0].requests > 0.5 * true_requests, "{found:?}");
        assert!(found.iter().all(|hot| hot.hash.0[15] == 1), "what came once is not hot: {found:?}");
    }
}
