//! Pauses after failures: each one longer than the last, up to a bound, and forgotten with the
//! first success.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
}

/// Who is not to be tried for a while.
#[derive(Debug)]
pub(crate) struct Backoff<K> {
    pauses: BTreeMap<K, Pause>,
    first: Duration,
    longest: Duration,
    most: usize,
}

impl<K: Ord + Clone> Backoff<K> {
    /// A first failure is a pause of `first`, each further one of twice the last, up to `longest`.
    /// Of more than `most` the one that ends first is forgotten.
    pub fn new(first: Duration, longest: Duration, most: usize) -> Self {
        Self { pauses: BTreeMap::new(), first, longest, most }
    }

    /// It failed. What fails during a pause was under way before, and does not make it longer.
    pub fn failed(&mut self, now: Instant, key: K) {
        let known = self.pauses.get(&key).copied();
        if known.is_some_and(|pause| now < pause.until) {
            return;
        }
        if known.is_none() && self.pauses.len() >= self.most {
            let first = self.pauses.iter().min_by_key(|(_, pause)| pause.until).map(|(key, _)| key.clone());
            first.map(|key| self.pauses.remove(&key));
        }
        let length = known.map_or(self.first, |pause| (pause.length * 2).min(self.longest));
        self.pauses.insert(key, Pause { until: now + length, length });
    }

    /// It worked.
    pub fn succeeded(&mut self, key: &K) {
        self.pauses.remove(key);
    }

    /// Whether it is not to be tried now.
    pub fn is_paused(&self, now: Instant, key: &K) -> bool {
        self.pauses.get(key).is_some_and(|pause| now < pause.until)
    }

    /// Those that are not to be tried now.
    pub fn paused(&self, now: Instant) -> impl Iterator<Item = &K> {
        self.pauses.iter().filter(move |(_, pause)| now < pause.until).map(|(key, _)| key)
    }

    /// Forgets all but those that `keep` is true of.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        self.pauses.retain(|key, _| keep(key));
    }

    /// Whether nothing failed of late.
    pub fn is_empty(&self) -> bool {
        self.pauses.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn backoff_pauses_grow_to_a_bound_and_reset_on_success() {
        let start = Instant::now();
        let mut backoff = Backoff::new(SECOND, 5 * SECOND, 8);
        let mut now = start;
        for length in [1, 2, 4, 5, 5] {
            backoff.failed(now, 7);
            backoff.failed(now + SECOND / 2, 7);
            assert!(backoff.is_paused(now + length * SECOND - SECOND / 100, &7), "{length}");
            now += length * SECOND;
            assert!(!backoff.is_paused(now, &7) && backoff.paused(now).next().is_none(), "{length}");
        }
        backoff.succeeded(&7);
        backoff.failed(now, 7);
        assert!(backoff.is_paused(now, &7) && !backoff.is_paused(now + SECOND, &7), "it begins anew");
    }

    #[test]
    fn backoff_keeps_a_bounded_number_of_pauses() {
        let now = Instant::now();
        let mut backoff = Backoff::new(SECOND, SECOND, 3);
        for key in 0..10_u32 {
            backoff.failed(now + key * SECOND / 100, key);
        }
        assert_eq!(backoff.paused(now).copied().collect::<Vec<_>>(), [7, 8, 9]);
        backoff.retain(|key| *key == 8);
        assert!(backoff.is_paused(now, &8) && !backoff.is_empty());
    }
}
