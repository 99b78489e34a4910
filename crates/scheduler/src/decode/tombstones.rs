//! Requests that ended, remembered for a while: messages about them may still be on their way.

use std::collections::{BTreeMap, VecDeque};

use baton_types::RequestKey;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Finished,
    Failed,
    Aborted,
}

/// The last requests that ended.
#[derive(Debug)]
pub(super) struct Tombstones {
    outcomes: BTreeMap<RequestKey, Outcome>,
    oldest_first: VecDeque<RequestKey>,
    max: usize,
}

impl Tombstones {
    pub(super) fn new(max: usize) -> Self {
        Self { outcomes: BTreeMap::new(), oldest_first: VecDeque::new(), max }
    }

    /// Remembers an outcome; the first one of a request stays.
    pub(super) fn put(&mut self, key: RequestKey, outcome: Outcome) {
        if self.outcomes.contains_key(&key) {
            return;
        }
        if self.oldest_first.len() == self.max
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.outcomes.remove(&oldest);
        }
        self.oldest_first.push_back(key);
        self.outcomes.insert(key, outcome);
    }

    pub(super) fn of(&self, key: RequestKey) -> Option<Outcome> {
        self.outcomes.get(&key).copied()
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Attempt, RequestId};

    use super::*;

    #[test]
    fn tombstones_keep_only_the_last_ended_requests() {
        let key = |n| RequestKey { request: RequestId(n), attempt: Attempt(0) };
        let mut tombstones = Tombstones::new(2);
        tombstones.put(key(1), Outcome::Finished);
        tombstones.put(key(1), Outcome::Aborted);
        tombstones.put(key(2), Outcome::Aborted);
        assert_eq!(tombstones.of(key(1)), Some(Outcome::Finished));
        tombstones.put(key(3), Outcome::Failed);
        assert_eq!(tombstones.of(key(1)), None);
        assert_eq!((tombstones.outcomes.len(), tombstones.oldest_first.len()), (2, 2));
    }
}
